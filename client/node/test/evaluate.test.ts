// Evaluation through a real server.

import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { test } from "node:test";

import { Graph, OnnxModel, Sparse, Tensor, connect, errors, load, loadOnnx, tensor } from "../src/index.js";
import type { DType, Evaluation, TensorLike } from "../src/index.js";
import { client as connected, freshName, target } from "./server.js";

const client = connected();

/** The gradient of one x, which must be dense. */
function dense(result: Evaluation, x: string): Tensor {
  const gradient = result.gradients[x];
  assert.ok(gradient instanceof Tensor, `the gradient of ${x} is ${result.gradientKinds[x]}`);
  return gradient;
}

/** `y = opType(x)` of one placeholder. */
function single(opType: string, dtype: DType = "float32"): Graph {
  const g = new Graph();
  g.op(opType, [g.placeholder("x", dtype, [null])], { name: "y" });
  return g;
}

test("Sign with a straight-through rule, by the builder's context", async () => {
  const rule = freshName("QuantizeGrad");
  await client.createRule(rule, "where(abs(x) <= 1, dy, 0)");
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const y = g.gradientOverrideMap({ Sign: rule }, () => g.op("Sign", [x], { name: "y" }));
  const result = await client.evaluate(g, { feeds: new Map([[x, [-2, 0.5, 3]]]), fetches: [y], ys: [y], xs: [x] });
  assert.deepEqual(result.outputs["y"]?.toArray(), [-1, 1, 1]);
  assert.deepEqual(dense(result, "x").toArray(), [0, 1, 0]);
  assert.ok(dense(result, "x").data instanceof Float32Array);
  assert.deepEqual(
    result.overrides.map(({ node, opType, rule: name, status }) => ({ node, opType, name, status })),
    [{ node: "y", opType: "Sign", name: rule, status: "active" }],
  );
  assert.match(result.digests.graph, /^[0-9a-f]{64}$/);
  assert.ok(result.timings.run > 0);
  assert.ok(result.device.length > 0);
});

test("an ONNX model, with the names of its values and operations", async () => {
  // /h = in · [[1, -1], [2, 0.5]], y:out = relu(/h).
  const model = await loadOnnx(fileURLToPath(new URL("../../test/data/relu.onnx", import.meta.url)));
  const ask = { fetches: ["y:out", "/h"], ys: ["y:out"], xs: ["in", "w"] };
  const result = await client.evaluate(model, {
    ...ask,
    feeds: { in: [[1, -2]] },
    overrides: { Relu: { expression: "3 * dy" } },
  });
  assert.deepEqual(result.outputs["y:out"]?.toArray(), [[0, 0]]);
  assert.deepEqual(result.outputs["/h"]?.toArray(), [[-3, -2]]);
  assert.deepEqual(dense(result, "in").toArray(), [[0, 7.5]]);
  assert.deepEqual(dense(result, "w").toArray(), [
    [3, 3],
    [-6, -6],
  ]);
  const program = await client.compile(model, ask);
  const called = await program.evaluate({ in: [[1, 0]] });
  assert.deepEqual(called.outputs["y:out"]?.toArray(), [[1, 0]]);
  await assert.rejects(client.evaluate(new OnnxModel(model.bytes.subarray(0, 20)), ask), errors.InvalidGraphError);
});

test("Floor with the gradient of Identity, as TensorFlow's documentation has it", async () => {
  const ask = { feeds: { x: [1.5, -0.5] }, fetches: ["y"], ys: ["y"], xs: ["x"] };
  const result = await client.evaluate(single("Floor"), { ...ask, overrides: { Floor: "Identity" } });
  assert.deepEqual(result.outputs["y"]?.toArray(), [1, -1]);
  assert.deepEqual(dense(result, "x").toArray(), [1, 1]);
});

test("an override inside a nested function of a graph that TensorFlow wrote", async () => {
  // y = sum(f(x)) with f(x) = sign(x) · x in a tf.function. TensorFlow itself ignores the override there.
  const g = await load(fileURLToPath(new URL("../../test/data/nested_function.pb", import.meta.url)));
  const ask = { feeds: { x: [-2, 0.5, 3] }, fetches: ["y"], ys: ["y"], xs: ["x"] };
  const result = await client.evaluate(g, { ...ask, overrides: { Sign: { expression: "5 * dy" } } });
  assert.equal(result.outputs["y"]?.toArray(), 5.5);
  assert.deepEqual(dense(result, "x").toArray(), [-11, 3.5, 16]);
  assert.deepEqual(
    result.overrides.map(({ node, rule }) => [node, rule]),
    [["PartitionedCall/Sign", "inline"]],
  );
});

test("overrides by node, scope and label, with params of the call", async () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const a = g.nameScope("first", () => g.op("Identity", [x], { name: "a" }));
  const b = g.nameScope("second", () => g.op("Identity", [a], { name: "b" }));
  const scale = { expression: "k * dy", params: { k: 2 } };
  const ask = {
    feeds: { x: [1, 1] },
    ys: [b],
    xs: [x],
    overrides: [
      { node: "first/*", opType: "Identity", rule: scale, label: "one" },
      { scope: "second", rule: scale, params: { k: 5 }, label: "two" },
    ],
  };
  assert.deepEqual(dense(await client.evaluate(g, ask), "x").toArray(), [10, 10]);
  const once = await client.evaluate(g, { ...ask, params: { one: { k: 3 }, two: { k: [10, 100] } } });
  assert.deepEqual(dense(once, "x").toArray(), [30, 300]);
});

test("a rule of the builder's context that is registered nowhere", async () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const y = g.gradientOverrideMap({ Sign: [{ expression: "k * dy" }, { k: 4 }], Neg: "gradient_zero" }, () =>
    g.op("Sign", [x], { name: "y" }),
  );
  const ask = { feeds: { x: [1] }, fetches: y };
  assert.deepEqual(dense(await client.evaluate(g, { ...ask, ys: y, xs: x }), "x").toArray(), [4]);
  const later = await client.evaluate(g, { ...ask, ys: y, xs: x, params: { Sign: { k: 6 } } });
  assert.deepEqual(dense(later, "x").toArray(), [6]);
  const mine = await client.evaluate(g, { ...ask, ys: y, xs: x, overrides: { Sign: { expression: "dy" } } });
  assert.deepEqual(dense(mine, "x").toArray(), [1]);
  assert.deepEqual((await client.evaluate(g, ask)).outputs["y"]?.toArray(), [1]);
});

test("a rule of the builder's context that no gradient reaches", async () => {
  for (const rule of ["gradient_zero", { expression: "2 * dy" }]) {
    for (const optional of [false, true]) {
      const g = new Graph();
      const x = g.placeholder("x", "float32", [null]);
      g.gradientOverrideMap({ Sign: rule }, () => g.op("Sign", [x], { name: "beside" }), { optional });
      const y = g.op("Neg", [x], { name: "y" });
      const result = client.evaluate(g, { feeds: { x: [1] }, ys: y, xs: x });
      if (optional) assert.equal((await result).overrides[0]?.status, "off_path");
      else await assert.rejects(result, errors.InactiveOverrideError);
    }
  }
});

test("a call says whether XLA computed it", async () => {
  const g = single("Identity", "int32");
  const program = await client.compile(g, { fetches: "y", jit: "on" });
  assert.equal((await program.evaluate({ x: [1] })).jit, true);
  assert.notEqual(program.name, (await client.compile(g, { fetches: "y" })).name);
});

test("what can be told without the server is refused before anything is sent", async () => {
  const g = single("Identity", "int32");
  const other = single("Neg").get("y");
  const nobody = connect("127.0.0.1:1");
  const rows: [object, typeof errors.InternalError, RegExp][] = [
    [{ feeds: { x: [1.5] } }, errors.InvalidTensorError, /^feeds\.x: Element 0 is 1\.5, which is no int32/],
    [{ fetches: other }, errors.UnknownTensorError, /handle y belongs to another graph/],
    [{ feeds: new Map([[other, [1]]]) }, errors.UnknownTensorError, /another graph/],
    [{ ys: "y", gradYs: { z: [1] } }, errors.InvalidDerivativeError, /gradYs has z, which is none of the ys: y/],
    [{ ys: "y", gradYs: [null, null] }, errors.InvalidDerivativeError, /2 entries for 1 ys/],
    [{ unconnectedGradients: "zeros" }, errors.InvalidDerivativeError, /"none" or "zero"/],
    [{ noGradient: "cut" }, errors.InvalidDerivativeError, /"error", "default", "pass" or "zero", not "cut"/],
    [{ jit: "always" }, errors.InvalidDerivativeError, /jit is "off" or "on", not "always"/],
    [{ rewrites: [3] }, errors.UnsupportedError, /"fold_batch_norm", not by 3/],
    [{ params: new Map([["k", {}]]) }, errors.InvalidParamError, /params is an object of values by label, .* not Map/],
    [{ params: { k: 2 } }, errors.InvalidParamError, /params\.k is an object of values .*, not 2/],
    [{ params: { Identity: { k: "2" } } }, errors.InvalidParamError, /Param k is a number or a tensor of numbers/],
    [{ params: { Identity: { k: null } } }, errors.InvalidParamError, /Param k: .*null/],
  ];
  for (const [options, type, message] of rows) {
    await assert.rejects(nobody.evaluate(g, options), (thrown) => {
      assert.ok(thrown instanceof type, String(thrown));
      assert.match(thrown.message, message);
      return true;
    });
  }
  nobody.close();
});

test("tensors of every type go through the server unchanged", async () => {
  const rows: [DType, TensorLike, typeof Float32Array | object][] = [
    ["float32", [1.5, -2], Float32Array],
    ["float64", [1e300], Float64Array],
    ["float16", [0.5, 65504], Uint16Array],
    ["bfloat16", [0.5, 2 ** 100], Uint16Array],
    ["int8", [-128, 127], Int8Array],
    ["int16", [-32768], Int16Array],
    ["int32", [2147483647], Int32Array],
    ["int64", [2n ** 62n + 1n, -1n], BigInt64Array],
    ["uint8", [255], Uint8Array],
    ["uint16", [65535], Uint16Array],
    ["uint32", [4294967295], Uint32Array],
    ["uint64", [2n ** 64n - 1n], BigUint64Array],
    ["bool", [true, false], Uint8Array],
    ["complex64", [{ re: 1, im: -2 }], Float32Array],
    ["complex128", [{ re: 1, im: -2 }], Float64Array],
    ["string", ["a", "ü", ""], Array],
  ];
  for (const [dtype, value, storage] of rows) {
    const result = await client.evaluate(single("Identity", dtype), { feeds: { x: value }, fetches: ["y"] });
    const y = result.outputs["y"];
    assert.equal(y?.dtype, dtype);
    assert.deepEqual(y.toArray(), tensor(value, { dtype }).toArray());
    assert.equal(y.data.constructor, storage, dtype);
    assert.deepEqual(y.shape, [(value as unknown[]).length]);
  }
});

test("gradients in half precision and of complex numbers", async () => {
  const ask = { fetches: ["y"], ys: ["y"], xs: ["x"] };
  for (const dtype of ["float16", "bfloat16"] as const) {
    const result = await client.evaluate(single("Square", dtype), { ...ask, feeds: { x: [3, -0.5] } });
    assert.deepEqual(dense(result, "x").toArray(), [6, -1]);
    assert.equal(dense(result, "x").dtype, dtype);
  }
  const gradYs = [tensor([{ re: 1, im: 0 }], { dtype: "complex64" })];
  const feeds = { x: [{ re: 1, im: 2 }] };
  const result = await client.evaluate(single("Square", "complex64"), { ...ask, feeds, gradYs });
  // TensorFlow's gradient of z² is conj(2z) · dy.
  assert.deepEqual(dense(result, "x").toArray(), [{ re: 2, im: -4 }]);
});

test("dense, sparse, unconnected and not differentiable are told apart", async () => {
  const g = new Graph();
  const table = g.placeholder("table", "float32", [4, 2]);
  const rows = g.placeholder("rows", "int32", [null]);
  const alone = g.placeholder("alone", "float32", [2]);
  const scale = g.placeholder("scale", "float32", []);
  const picked = g.op("GatherV2", [table, rows, g.constant(0, { dtype: "int32" })], { name: "picked" });
  g.op("Mul", [picked, scale], { name: "y" });
  const feeds = { table: new Float32Array(8), rows: [3, 1], alone: [0, 0], scale: 2 };
  const shaped = { ...feeds, table: tensor(new Float32Array(8), { shape: [4, 2] }) };
  const ask = { feeds: shaped, ys: ["y"], xs: ["table", "rows", "alone", "scale"] };
  const result = await client.evaluate(g, ask);
  assert.deepEqual(result.gradientKinds, {
    table: "sparse",
    rows: "not_differentiable",
    alone: "unconnected",
    scale: "dense",
  });
  const sparse = result.gradients["table"];
  assert.ok(sparse instanceof Sparse);
  assert.deepEqual(sparse.denseShape, [4, 2]);
  assert.deepEqual(Array.from(sparse.indices.data as Int32Array, Number), [3, 1]);
  assert.deepEqual(sparse.values.toArray(), [
    [2, 2],
    [2, 2],
  ]);
  assert.equal(result.gradients["rows"], null);
  assert.equal(result.gradients["alone"], null);
  assert.equal(dense(result, "scale").toArray(), 0);
  const zero = await client.evaluate(g, { ...ask, xs: [alone], unconnectedGradients: "zero" });
  assert.deepEqual(dense(zero, "alone").toArray(), [0, 0]);
  await assert.rejects(client.evaluate(g, { ...ask, feeds }), errors.FeedShapeError);
});

test("upstream gradients by name, in order, and from the graph; stop_gradients", async () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const y = g.op("Square", [x], { name: "y" });
  const z = g.op("Neg", [x], { name: "z" });
  const seed = g.op("Abs", [x], { name: "seed" });
  const ask = { feeds: { x: [3, -1] }, xs: [x] };
  const of = async (more: object) => dense(await client.evaluate(g, { ...ask, ys: [y, z], ...more }), "x").toArray();
  assert.deepEqual(await of({}), [5, -3]);
  assert.deepEqual(await of({ gradYs: { y: [10, 1] } }), [59, -3]);
  assert.deepEqual(await of({ gradYs: [null, [7, 7]] }), [-1, -9]);
  assert.deepEqual(await of({ gradYs: [seed, null] }), [17, -3]);
  assert.deepEqual(await of({ gradYs: new Map([[y, "seed"]]) }), [17, -3]);
  const top = g.op("Mul", [y, x], { name: "top" });
  assert.deepEqual(await of({ ys: [top], stopGradients: [y] }), [9, 1]);
  await assert.rejects(of({ gradYs: [null] }), errors.InvalidDerivativeError);
});

test("16 MiB there and back", async () => {
  const x = Float32Array.from({ length: 4 * 1024 * 1024 }, (_, i) => i % 1000);
  const result = await client.evaluate(single("Neg"), { feeds: { x }, fetches: ["y"] });
  const y = result.outputs["y"]?.data as Float32Array;
  assert.equal(y.length, x.length);
  assert.ok(y.every((value, i) => value === -x[i]!));
});

test("what is wrong is an error by its reason", async () => {
  const g = single("Sign");
  const ask = { feeds: { x: [1] }, fetches: ["y"], ys: ["y"], xs: ["x"] };
  const rows: [() => Promise<unknown>, typeof errors.InternalError, RegExp][] = [
    [
      () => client.evaluate(g, { ...ask, overrides: { Sign: "ste_sgn" } }),
      errors.UnknownRuleError,
      /did you mean.*ste_sign/i,
    ],
    [
      () => client.evaluate(g, { ...ask, overrides: { Sing: "ste_sign" } }),
      errors.UnknownOpTypeError,
      /did you mean.*Sign/i,
    ],
    [() => client.evaluate(g, { ...ask, overrides: { Abs: "ste_sign" } }), errors.UnmatchedOverrideError, /Abs/],
    [
      () => client.evaluate(g, { ...ask, overrides: { Sign: { expression: "x +* 2" } } }),
      errors.InvalidExpressionError,
      /./,
    ],
    [() => client.evaluate(g, { ...ask, feeds: {} }), errors.MissingFeedError, /x/],
    [() => client.evaluate(g, { ...ask, feeds: { x: [1], w: [1] } }), errors.UnknownFeedError, /w/],
    [
      () => client.evaluate(g, { ...ask, feeds: { x: new Float64Array(1) } }),
      errors.FeedDtypeError,
      /float32|DT_FLOAT/,
    ],
    [() => client.evaluate(g, { ...ask, feeds: { x: [[1]] } }), errors.FeedShapeError, /x/],
    [() => client.evaluate(g, { ...ask, fetches: ["z"] }), errors.UnknownTensorError, /z/],
    [() => client.evaluate(single("Sgin"), { feeds: { x: [1] }, fetches: ["y"] }), errors.UnknownOpTypeError, /Sign/],
  ];
  for (const [call, type, message] of rows) {
    await assert.rejects(call(), (thrown) => {
      assert.ok(thrown instanceof type, `${thrown} is no ${type.name}`);
      assert.match(thrown.message, message);
      return true;
    });
  }
  assert.deepEqual((await client.evaluate(g, ask)).outputs["y"]?.toArray(), [1]);
});

test("a deadline that passes, and a server that is not there", async () => {
  const g = single("Neg");
  const x = new Float32Array(4 * 1024 * 1024);
  await assert.rejects(
    client.evaluate(g, { feeds: { x }, fetches: ["y"], timeout: 0.001 }),
    errors.DeadlineExceededError,
  );
  assert.deepEqual((await client.evaluate(g, { feeds: { x: [1] }, fetches: ["y"] })).outputs["y"]?.toArray(), [-1]);
  assert.notEqual(target(), "127.0.0.1:1");
  const nobody = connect("127.0.0.1:1", { timeout: 5 });
  await assert.rejects(nobody.listRules(), errors.UnavailableError);
  nobody.close();
});
