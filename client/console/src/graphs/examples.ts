import type { Feed } from "./feeds";
import { random } from "./feeds";
import type { SpecForm } from "./spec";

export interface Example {
  name: string;
  title: string;
  text: string;
  /** Protobuf JSON of a GraphDef. */
  graph: () => unknown;
  form: SpecForm;
  /** Rules to compare with. */
  rules: string[];
  feeds: () => Record<string, Partial<Feed>>;
}

const FLOAT = { type: "DT_FLOAT" };

function placeholder(name: string, shape: (number | null)[]): object {
  const dim = shape.map((size) => ({ size: size ?? -1 }));
  return { name, op: "Placeholder", attr: { dtype: FLOAT, shape: { shape: { dim } } } };
}

function weights(name: string, shape: number[], seed: number): object {
  const next = random(seed);
  const size = shape.reduce((product, each) => product * each, 1);
  return constant(
    name,
    shape,
    Array.from({ length: size }, () => Number((next() * 2 - 1).toFixed(3))),
  );
}

function constant(name: string, shape: number[], floatVal: number[]): object {
  const tensor = { dtype: "DT_FLOAT", tensorShape: { dim: shape.map((size) => ({ size })) }, floatVal };
  return { name, op: "Const", attr: { dtype: FLOAT, value: { tensor } } };
}

function op(name: string, type: string, ...input: string[]): object {
  return { name, op: type, input };
}

function integers(name: string, values: number[]): object {
  const tensor = { dtype: "DT_INT32", tensorShape: { dim: [{ size: values.length }] }, intVal: values };
  return { name, op: "Const", attr: { dtype: { type: "DT_INT32" }, value: { tensor } } };
}

const binary: Example = {
  name: "binary",
  title: "Binary network",
  text: "Two layers with sign activations. Without a rule, all gradients are zero; the straight-through estimator lets them pass.",
  graph: () => ({
    node: [
      placeholder("x", [null, 4]),
      weights("dense_1/kernel", [4, 8], 3),
      op("dense_1/MatMul", "MatMul", "x", "dense_1/kernel"),
      op("dense_1/Sign", "Sign", "dense_1/MatMul"),
      weights("dense_2/kernel", [8, 6], 5),
      op("dense_2/MatMul", "MatMul", "dense_1/Sign", "dense_2/kernel"),
      op("dense_2/Sign", "Sign", "dense_2/MatMul"),
      weights("head/kernel", [6, 1], 7),
      op("head/MatMul", "MatMul", "dense_2/Sign", "head/kernel"),
      op("score", "Sigmoid", "head/MatMul"),
    ],
  }),
  form: {
    ys: "score",
    xs: "x",
    fetches: "score",
    overrides: [{ kind: "opType", value: "Sign", rule: "ste_sign", params: "clip=1" }],
  },
  rules: ["atan"],
  feeds: () => ({ x: { shape: "4, 4" } }),
};

// Four filters for edges in four directions, from one side to the other.
const EDGES = [-1, 0, 1].flatMap((y) => [-1, 0, 1].flatMap((x) => [x, y, -x, -y].map((each) => each / 3)));

/** Draws a digit four. */
function digit(): ImageBitmap {
  const canvas = new OffscreenCanvas(28, 28);
  const context = canvas.getContext("2d")!;
  context.fillRect(0, 0, 28, 28);
  context.strokeStyle = "white";
  context.lineWidth = 2.5;
  context.lineCap = context.lineJoin = "round";
  context.stroke(new Path2D("M17,4 L7,18 H22 M17,12 V24"));
  return canvas.transferToImageBitmap();
}

const convolution: Example = {
  name: "convolution",
  title: "Image network",
  text: "Two convolutions with ReLU, and the image of a digit. Guided backpropagation beside the network's own gradient.",
  graph: () => ({
    node: [
      placeholder("image", [null, 28, 28, 1]),
      ...[1, 2].flatMap((layer) => [
        layer === 1 ? constant("conv_1/kernel", [3, 3, 1, 4], EDGES) : weights("conv_2/kernel", [3, 3, 4, 4], 12),
        {
          name: `conv_${layer}/Conv2D`,
          op: "Conv2D",
          input: [layer === 1 ? "image" : "conv_1/Relu", `conv_${layer}/kernel`],
          attr: { strides: { list: { i: [1, 1, 1, 1] } }, padding: { s: btoa("SAME") } },
        },
        op(`conv_${layer}/Relu`, "Relu", `conv_${layer}/Conv2D`),
      ]),
      integers("pool/axes", [1, 2]),
      op("pool/Mean", "Mean", "conv_2/Relu", "pool/axes"),
      weights("head/kernel", [4, 3], 13),
      op("classes", "MatMul", "pool/Mean", "head/kernel"),
    ],
  }),
  form: {
    ys: "classes",
    xs: "image",
    fetches: "classes",
    overrides: [{ kind: "opType", value: "Relu", rule: "guided_relu", params: "" }],
  },
  rules: [],
  feeds: () => ({ image: { kind: "image", shape: "1, 28, 28, 1", image: digit() } }),
};

/** Graphs that a newcomer can start with. */
export const EXAMPLES: Example[] = [binary, convolution];
