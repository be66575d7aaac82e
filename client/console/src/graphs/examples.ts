import type { Feed } from "./feeds";
import { fill, random } from "./feeds";
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
  feeds: Record<string, Partial<Feed>>;
}

const FLOAT = { type: "DT_FLOAT" };

function placeholder(name: string, shape: (number | null)[]): object {
  const dim = shape.map((size) => ({ size: size ?? -1 }));
  return { name, op: "Placeholder", attr: { dtype: FLOAT, shape: { shape: { dim } } } };
}

function weights(name: string, shape: number[], seed: number): object {
  const next = random(seed);
  const floatVal =
    (fill([shape.reduce((a, b) => a * b, 1)], () => Number((next() * 2 - 1).toFixed(3))) as number[]) ?? [];
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
  feeds: { x: { kind: "random", shape: "4, 4", seed: 1, text: "" } },
};

const convolution: Example = {
  name: "convolution",
  title: "Image network",
  text: "Two convolutions with ReLU. Guided backpropagation and the network's own gradient, as images.",
  graph: () => ({
    node: [
      placeholder("image", [null, 28, 28, 1]),
      ...[1, 2].flatMap((layer) => [
        weights(`conv_${layer}/kernel`, [3, 3, layer === 1 ? 1 : 4, 4], 10 + layer),
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
  feeds: { image: { kind: "random", shape: "1, 28, 28, 1", seed: 1, text: "" } },
};

/** Graphs that a newcomer can start with. */
export const EXAMPLES: Example[] = [binary, convolution];
