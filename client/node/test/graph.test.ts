import assert from "node:assert/strict";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { fromBinary } from "@bufbuild/protobuf";

import { GraphSchema } from "../src/gen/gradrule/v1/graph_pb.js";
import type { Node } from "../src/gen/gradrule/v1/graph_pb.js";
import { Dt } from "../src/gen/gradrule/v1/tensor_pb.js";
import { Graph, attr, errors, load } from "../src/index.js";

const nodes = (graph: Graph): Node[] => fromBinary(GraphSchema, graph.toBytes()).node;
const text = (node: Node | undefined, name: string): string => {
  const value = node?.attr[name]?.value;
  assert.equal(value?.case, "s");
  return new TextDecoder().decode(value.value as Uint8Array);
};

test("nodes, inputs, control inputs and attributes", () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null, 3]);
  const [values, indices] = g.op("TopKV2", [x, g.constant(2, { dtype: "int32" })], { name: "top", outputs: 2 });
  assert.equal(values?.name, "top");
  assert.equal(indices?.name, "top:1");
  g.op("Cast", [indices!], { attrs: { DstT: "float64" }, control: [values!] });
  const [placeholder, constant, top, cast] = nodes(g);
  assert.deepEqual(placeholder?.attr["dtype"]?.value, { case: "type", value: Dt.FLOAT });
  const shape = placeholder?.attr["shape"]?.value;
  assert.ok(shape?.case === "shape");
  assert.deepEqual(
    shape.value.dim.map(({ size }) => size),
    [-1n, 3n],
  );
  assert.equal(constant?.name, "Const");
  assert.deepEqual(constant.attr["dtype"]?.value, { case: "type", value: Dt.INT32 });
  assert.deepEqual(top?.input, ["x", "Const"]);
  assert.deepEqual(cast?.input, ["top:1", "^top"]);
  assert.deepEqual(cast.attr["DstT"]?.value, { case: "type", value: Dt.DOUBLE });
});

test("an attribute means what its op says", () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", null);
  g.op("LeakyRelu", [x], { attrs: { alpha: 1 } });
  g.op("Sum", [x, g.constant([0], { dtype: "int32" })], { attrs: { keep_dims: true } });
  g.op("MaxPool", [x], { attrs: { ksize: [1, 2, 2, 1], strides: [1, 2, 2, 1], padding: "SAME" } });
  g.op("PartitionedCall", [x], { attrs: { f: "body", Tin: ["float32"], Tout: ["float32"] } });
  g.op("some_function", [x], { attrs: { half: attr("float", 1), many: 3, word: "w" } });
  const made = new Map(nodes(g).map((node) => [node.op, node.attr]));
  assert.deepEqual(made.get("LeakyRelu")?.["alpha"]?.value, { case: "f", value: 1 });
  assert.deepEqual(made.get("Sum")?.["keep_dims"]?.value, { case: "b", value: true });
  const ksize = made.get("MaxPool")?.["ksize"]?.value;
  assert.ok(ksize?.case === "list");
  assert.deepEqual(ksize.value.i, [1n, 2n, 2n, 1n]);
  const call = made.get("PartitionedCall");
  assert.equal(call?.["f"]?.value.case, "func");
  assert.ok(call["Tin"]?.value.case === "list");
  assert.deepEqual(call["Tin"].value.value.type, [Dt.FLOAT]);
  assert.deepEqual(made.get("some_function")?.["half"]?.value, { case: "f", value: 1 });
  assert.deepEqual(made.get("some_function")?.["many"]?.value, { case: "i", value: 3n });
  assert.equal(made.get("some_function")?.["word"]?.value.case, "s");
  assert.throws(
    () => g.op("Cast", [x], { attrs: { DstT: "double" } }),
    (thrown) =>
      thrown instanceof errors.InvalidAttrError &&
      /Attribute DstT of Cast: "double" is no value of type type/.test(thrown.message),
  );
  assert.throws(() => g.op("Sum", [x, x], { attrs: { keep_dims: 1 } }), errors.InvalidAttrError);
  assert.throws(() => attr("list(int)", 3), errors.InvalidAttrError);
  assert.throws(
    () => g.op("LeakyRelu", [x], { attrs: { aplha: 1 } }),
    (thrown) =>
      thrown instanceof errors.InvalidAttrError &&
      /aplha of LeakyRelu: .*the op has no attribute of this name; it has alpha, T\./.test(thrown.message),
  );
});

test("names are made unique as TensorFlow does it, in scopes too", () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", []);
  const inner = g.nameScope("outer", () => g.nameScope("inner", () => [g.op("Neg", [x]), g.op("Neg", [x])]));
  assert.deepEqual(inner.map(String), ["outer/inner/Neg", "outer/inner/Neg_1"]);
  assert.equal(g.nameScope("outer", () => g.op("Neg", [x], { name: "a" })).name, "outer_1/a");
  assert.equal(g.op("Neg", [x]).name, "Neg");
  assert.equal(g.placeholder("x", "float32", []).name, "x_1");
  assert.equal(g.op("Neg", [x], { name: "X_1" }).name, "X_1_1");
  assert.throws(() => new Graph().op("Neg", [x]), errors.DanglingInputError);
  assert.throws(() => g.nameScope("broken", () => g.op("Neg", [x], { name: "Neg", attrs: { T: 1 } })));
  assert.equal(g.op("Neg", [x]).name, "Neg_1", "a scope ends where its function throws");
});

test("gradient override maps mark the nodes made inside, the innermost map deciding", async () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", []);
  g.gradientOverrideMap({ Sign: "Outer", Floor: "Identity" }, () => {
    g.op("Sign", [x], { name: "a" });
    g.gradientOverrideMap({ Sign: "Inner" }, () => {
      g.op("Sign", [x], { name: "b" });
      g.op("Floor", [x], { name: "c" });
      g.op("Neg", [x], { name: "d" });
    });
  });
  g.op("Sign", [x], { name: "e" });
  const made = new Map(nodes(g).map((node) => [node.name, node]));
  assert.equal(text(made.get("a"), "_gradient_op_type"), "Outer");
  assert.equal(text(made.get("b"), "_gradient_op_type"), "Inner");
  assert.equal(text(made.get("c"), "_gradient_op_type"), "Identity");
  for (const name of ["d", "e"]) assert.equal(made.get(name)?.attr["_gradient_op_type"], undefined);
  assert.throws(() => g.gradientOverrideMap({ Sign: "Late" }, async () => g.op("Sign", [x])), TypeError);
});

test("a loaded graph keeps its bytes until it is extended", async () => {
  const g = new Graph();
  g.op("Sign", [g.placeholder("x", "bfloat16", [null])], { name: "y" });
  // An unknown field (number 1000, varint 7), as a newer TensorFlow may write it.
  const bytes = new Uint8Array([...g.toBytes(), 0xc0, 0x3e, 7]);
  const folder = await mkdtemp(join(tmpdir(), "gradrule-"));
  try {
    const path = join(folder, "graph.pb");
    await writeFile(path, bytes);
    const loaded = await load(path);
    assert.deepEqual(loaded.toBytes(), bytes);
    assert.deepEqual(loaded.nodeNames, ["x", "y"]);
    assert.deepEqual(loaded.inputs, { x: { name: "x", dtype: "bfloat16", shape: [null], optional: false } });
    assert.equal(loaded.dtypeOf("x:0"), "bfloat16");
    assert.equal(loaded.dtypeOf("y"), undefined);
    const z = loaded.op("Neg", [loaded.get("y:0")], { name: "z" });
    assert.equal(z.name, "z");
    const again = Graph.fromBytes(loaded.toBytes());
    assert.deepEqual(again.nodeNames, ["x", "y", "z"]);
    assert.ok(Buffer.from(loaded.toBytes()).includes(Buffer.from([0xc0, 0x3e, 7])));
    assert.throws(() => loaded.get("nowhere:1"), errors.UnknownTensorError);
    await writeFile(path, "not a graph");
    await assert.rejects(load(path), errors.InvalidGraphError);
  } finally {
    await rm(folder, { recursive: true });
  }
});
