// What overrides can say: conditions, patterns, regions, presets; and what stands beside them.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Graph, Tensor, connect, errors } from "../src/index.js";
import type { Evaluation, Output, Override, Overrides, SpecOptions } from "../src/index.js";
import { client as connected } from "./server.js";

const client = connected();

const X = [
  [1, -2, 3],
  [0.5, 0.25, -1],
];
const TEN = { expression: "10 * dy" };

/** x → relu a → tanh b → relu c → y, and beside it x → relu side → y. */
function tower(): Graph {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null, 3]);
  const a = g.op("Relu", [x], { name: "block1/a" });
  const b = g.op("Tanh", [a], { name: "block1/b" });
  const c = g.op("Relu", [b], { name: "block2/c" });
  g.op("AddV2", [c, g.op("Relu", [x], { name: "side" })], { name: "y" });
  return g;
}

/** y = relu(x · w + b). */
function layer(): Graph {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null, 2]);
  const product = g.op("MatMul", [x, g.constant([[3], [-4]], { name: "w" })], { name: "product" });
  g.op("Relu", [g.op("BiasAdd", [product, g.constant([1], { name: "b" })], { name: "sum" })], { name: "y" });
  return g;
}

function dense(result: Evaluation, x = "x"): Tensor {
  const gradient = result.gradients[x];
  assert.ok(gradient instanceof Tensor, `the gradient of ${x} is ${result.gradientKinds[x]}`);
  return gradient;
}

function near(actual: Tensor | undefined, wanted: readonly number[], tolerance = 1e-6): void {
  const values = Array.from(actual?.toFloat32() ?? []);
  assert.equal(values.length, wanted.length);
  for (const [i, value] of values.entries()) assert.ok(Math.abs(value - wanted[i]!) <= tolerance, `${values}`);
}

function rules({ overrides }: Evaluation): Record<string, string> {
  return Object.fromEntries(overrides.map(({ node, rule }) => [node, rule]));
}

test("each condition selects the nodes that it says", async () => {
  const g = tower();
  const a = g.get("block1/a");
  const rows: [Omit<Override, "rule">, string[]][] = [
    [{ nodes: ["block1/a", "block2/*"] }, ["block1/a", "block2/c"]],
    [{ nodeRegex: "block[0-9]+/[ac]" }, ["block1/a", "block2/c"]],
    [{ opType: "@activation" }, ["block1/a", "block1/b", "block2/c", "side"]],
    [{ opType: "@activation", scope: "block1" }, ["block1/a", "block1/b"]],
    [{ node: a }, ["block1/a"]],
    [{ opType: "Relu", position: "nearest_xs" }, ["block1/a", "side"]],
    [{ opType: "Relu", position: 0 }, ["block1/a", "side"]],
    [{ opType: "Relu", position: "nearest_ys" }, ["block2/c", "side"]],
    [{ opType: "Relu", position: -2 }, ["block1/a"]],
    [{ opType: "@activation", dependsOn: [a] }, ["block1/b", "block2/c"]],
    [{ opType: "Relu", dependsOn: "x" }, ["block1/a", "block2/c", "side"]],
    [{ opType: "Relu", dtype: "float32", rank: 2 }, ["block1/a", "block2/c", "side"]],
  ];
  for (const [conditions, nodes] of rows) {
    const overrides = [{ rule: TEN, ...conditions }];
    const result = await client.evaluate(g, { feeds: { x: X }, ys: "y", xs: "x", overrides });
    assert.deepEqual(Object.keys(rules(result)).sort(), nodes, Object.keys(conditions).join());
  }
});

test("conditions on attributes know defaults, and mean what some op says where a group is named", async () => {
  const g = new Graph();
  const one = g.op("LeakyRelu", [g.placeholder("x", "float32", [null])], { name: "one" });
  g.op("LeakyRelu", [one], { name: "y", attrs: { alpha: 1 } });
  const ask = { feeds: { x: [-1] }, ys: "y", xs: "x" };
  const taken = async (conditions: Omit<Override, "rule">) =>
    Object.keys(rules(await client.evaluate(g, { ...ask, overrides: [{ rule: TEN, ...conditions }] })));
  assert.deepEqual(await taken({ opType: "LeakyRelu", attrs: { alpha: 0.2 } }), ["one"]);
  assert.deepEqual(await taken({ opType: "@activation", attrs: { alpha: 1 } }), ["y"]);
  assert.deepEqual(await taken({ attrs: { alpha: 1 } }), ["y"]);
});

test("a pattern is a chain that gets one rule", async () => {
  const ask = { feeds: { x: [[1, 2]] }, fetches: "y", ys: "y", xs: ["x", "b"] };
  const rule = { expression: "(ignore_dy(x * k), None, sum_to(3 * dy, x2))", params: { k: 5 } };
  const overrides = [{ pattern: ["MatMul", "@bias", "Relu"], rule }];
  const result = await client.evaluate(layer(), { ...ask, overrides });
  assert.deepEqual(dense(result).toArray(), [[5, 10]]);
  assert.deepEqual(dense(result, "b").toArray(), [3]);
  const [resolution] = result.overrides;
  assert.equal(resolution?.node, "y");
  assert.deepEqual(resolution?.nodes, ["product", "sum", "y"]);
  assert.equal(resolution?.label, "MatMul+@bias+Relu");
  assert.deepEqual(result.defaultGradientNodes, []);
  const once = await client.evaluate(layer(), { ...ask, overrides, params: { "MatMul+@bias+Relu": { k: 7 } } });
  assert.deepEqual(dense(once).toArray(), [[7, 14]]);
});

test("a step of Greater and Cast gets a surrogate gradient", async () => {
  const g = new Graph();
  const over = g.op("Greater", [g.placeholder("x", "float32", [null]), g.constant(0.5)]);
  g.op("Cast", [over], { name: "y", attrs: { DstT: "float32" } });
  const overrides: Overrides = { "@step": ["fast_sigmoid", { slope: 2 }] };
  const result = await client.evaluate(g, { feeds: { x: [0, 1.5] }, fetches: "y", ys: "y", xs: "x", overrides });
  assert.deepEqual(result.outputs["y"]?.toArray(), [0, 1]);
  near(dense(result), [1 / 4, 1 / 9]);
});

test("text that cannot be a rule's name is a formula", async () => {
  const g = tower();
  const feeds = { x: X };
  const found = async (overrides: Overrides) =>
    dense(await client.evaluate(g, { feeds, ys: ["y"], xs: ["x"], overrides }));
  const wanted = Array.from((await found({ Tanh: { expression: "10 * dy" } })).toFloat32());
  near(await found({ Tanh: "10 * dy" }), wanted);
  near(await found({ Tanh: ["slope * dy", { slope: 10 }] }), wanted);
  near(await found([{ rule: "10 * dy", opType: "Tanh" }]), wanted);
  await assert.rejects(
    found({ Tanh: "dy" }),
    (thrown) => thrown instanceof errors.UnknownRuleError && /Rule/.test(thrown.message),
  );
  const sample = await client.sampleRule("dy * x", { x: [3], dy: [2] });
  near(sample.gradients.dx as Tensor, [6]);
});

test("a region: log(1 + exp(x)) without overflow", async () => {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const sum = g.op("AddV2", [g.op("Exp", [x], { name: "e" }), g.constant(1)], { name: "sum" });
  const out = g.op("Log", [sum], { name: "out" });
  g.op("Mul", [out, g.constant(2)], { name: "y" });
  const ask = { feeds: { x: [100, 0] }, ys: "y", xs: [x] };
  const [plain] = dense(await client.evaluate(g, ask)).toFloat32();
  assert.ok(Number.isNaN(plain));
  for (const region of [
    { inputs: x, outputs: out },
    { inputs: ["x"], outputs: ["out:0"] },
  ]) {
    const result = await client.evaluate(g, { ...ask, overrides: [{ region, rule: "log1pexp" }] });
    near(dense(result), [2, 1]);
    assert.deepEqual(result.overrides[0]?.nodes, ["e", "sum", "out"]);
  }
  const wrong = [{ region: { inputs: sum, outputs: "e" }, rule: "log1pexp" }];
  await assert.rejects(client.evaluate(g, { ...ask, overrides: wrong }), errors.InvalidOverrideError);
});

test("a preset, its params, and the overrides that come before it", async () => {
  const ask = { feeds: { x: [[1, -2]] }, fetches: "y", ys: "y", xs: "x" };
  // Relevance by the epsilon rule: each x · w, by their sum with the bias and eps.
  const told = await client.evaluate(layer(), { ...ask, overrides: [{ preset: "epsilon_plus" }] });
  assert.deepEqual(rules(told), { sum: "lrp_epsilon", y: "lrp_pass" });
  assert.deepEqual(new Set(told.overrides.map(({ label }) => label)), new Set(["epsilon_plus"]));
  near(dense(told), [3 / 12, 8 / 12]);
  const wide = { ...ask, overrides: [{ preset: "epsilon_plus", params: { eps: 4 } }] };
  near(dense(await client.evaluate(layer(), wide)), [3 / 16, 8 / 16]);
  const call = await client.evaluate(layer(), { ...wide, params: { epsilon_plus: { eps: 8 } } });
  near(dense(call), [3 / 20, 8 / 20]);
  const mixed: Overrides = [
    { preset: "epsilon_plus", label: "lrp" },
    { opType: "Relu", rule: TEN },
  ];
  const result = await client.evaluate(layer(), { ...ask, overrides: mixed });
  assert.deepEqual(rules(result), { sum: "lrp_epsilon", y: "inline" });
  near(dense(result), [30 / 12, 80 / 12]);

  const refused: [Overrides, typeof errors.InternalError, RegExp][] = [
    [[{ preset: "epsilon_pluss" }], errors.UnknownRuleError, /epsilon_plus'/],
    [[{ preset: "epsilon_plus", params: { epss: 1 } }], errors.UnknownParamError, /'eps'/],
    [[{ preset: "epsilon_plus", params: { eps: -1 } }], errors.InvalidParamError, /eps/],
  ];
  for (const [overrides, type, message] of refused) {
    await assert.rejects(
      client.evaluate(layer(), { ...ask, overrides }),
      (thrown) => thrown instanceof type && message.test(thrown.message),
    );
  }
  const idle = (optional: boolean): Overrides => [
    { preset: "guided_backprop", optional },
    { opType: "Relu", rule: TEN },
  ];
  await assert.rejects(client.evaluate(layer(), { ...ask, overrides: idle(false) }), errors.UnmatchedOverrideError);
  assert.deepEqual(rules(await client.evaluate(layer(), { ...ask, overrides: idle(true) })), { y: "inline" });
});

test("what an op without a gradient does is chosen", async () => {
  // y = 3 · shuffled(2 · x) + x, of one element.
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const inner = g.op("RandomShuffle", [g.op("Mul", [x, g.constant(2)], { name: "twice" })], { name: "inner" });
  g.op("AddV2", [g.op("Mul", [inner, g.constant(3)]), x], { name: "y" });
  const ask = { feeds: { x: [0.5] }, ys: "y", xs: ["x", "twice"] };
  const rows = [
    ["default", 1, "unconnected"],
    ["zero", 1, "dense"],
    ["pass", 7, "dense"],
  ] as const;
  for (const [noGradient, wanted, kind] of rows) {
    const result = await client.evaluate(g, { ...ask, noGradient });
    assert.deepEqual(dense(result).toArray(), [wanted]);
    assert.equal(result.gradientKinds["twice"], kind);
    assert.deepEqual(
      result.overrides.map(({ node, rule, label }) => [node, rule, label]),
      [["inner", noGradient, "no_gradient"]],
    );
  }
  await assert.rejects(client.evaluate(g, ask), errors.NoGradientError);
  await assert.rejects(client.evaluate(g, { ...ask, noGradient: "error" }), errors.NoGradientError);
});

/** relu of a convolution with a batch norm in inference mode. */
function normed(): Graph {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null, 2, 2, 1]);
  const h = g.op("Conv2D", [x, g.constant([[[[2, -1]]]])], {
    name: "conv",
    attrs: { strides: [1, 1, 1, 1], padding: "VALID" },
  });
  const parts: Output[] = [
    [1.5, -0.5],
    [0.25, 1],
    [0.5, 0],
    [1, 0.25],
  ].map((values) => g.constant(values));
  g.op("Relu", [g.op("FusedBatchNormV3", [h, ...parts], { name: "norm", attrs: { is_training: false } })], {
    name: "y",
  });
  return g;
}

test("batch norms are folded", async () => {
  const g = normed();
  const feeds = {
    x: [
      [
        [[1], [2]],
        [[-1], [0.5]],
      ],
    ],
  };
  const ask = { feeds, fetches: "y", ys: "y", xs: "x" };
  const plain = await client.evaluate(g, ask);
  assert.deepEqual(plain.rewritten, []);
  assert.deepEqual(plain.notes, []);
  const folded = await client.evaluate(g, { ...ask, rewrites: "fold_batch_norm" });
  assert.deepEqual(folded.rewritten, ["norm"]);
  near(folded.outputs["y"], Array.from(plain.outputs["y"]!.toFloat32()), 1e-5);
  near(dense(folded), Array.from(dense(plain).toFloat32()), 1e-5);
  const words: SpecOptions = {
    fetches: "y",
    ys: "y",
    xs: "x",
    rewrites: ["fold_batch_norm"],
    overrides: [{ preset: "epsilon_plus" }],
  };
  const told = await client.explain(g, words);
  assert.deepEqual(told.rewritten, ["norm"]);
  assert.deepEqual(told.overrides.find(({ rule }) => rule === "lrp_zplus")?.nodes, ["conv", "norm"]);
  const program = await client.compile(g, words);
  assert.deepEqual(program.rewritten, ["norm"]);
  assert.deepEqual((await client.program(program.name)).rewritten, ["norm"]);
  await program.delete();
  await assert.rejects(client.evaluate(g, { ...ask, rewrites: ["fold_batchnorm"] }), errors.UnsupportedError);
});

test("overrides that cannot be meant are refused before anything is sent", async () => {
  const g = tower();
  const other = tower().get("block1/a");
  const nobody = connect("127.0.0.1:1");
  const rule = "ste";
  const rows: [unknown, RegExp][] = [
    ["ste", /overrides is an object of rules by op type, or a list, not "ste"/],
    [new Map([["Relu", rule]]), /overrides is an object of rules by op type, .*, not Map/],
    [{ preset: "epsilon_plus" }, /the key preset, .* a single override goes into a list/],
    [{ rule, opType: "Relu" }, /the key rule, .* a single override goes into a list/],
    [{ Relu: 3 }, /overrides\.Relu takes a rule's name, a formula, \{ expression \} or \{ graph \}, not 3/],
    [{ Relu: ["ste"] }, /overrides\.Relu is \[ 'ste' \]; a rule with its params is a pair of both/],
    [["ste"], /overrides\[0\] is "ste"; a list holds objects with a rule or a preset/],
    [[{ opType: "Relu" }], /overrides\[0\] takes a rule's name, .* not undefined/],
    [[{ rule }], /overrides\[0\] selects nothing/],
    [[{ rule, opType: "Relu", dependOn: "x" }], /overrides\[0\] has dependOn, which is none of rule, opType/],
    [[{ rule, opType: 3 }], /opType of overrides\[0\] is a string, not 3/],
    [[{ rule, node: 3 }], /node of overrides\[0\] is a string or a handle, not 3/],
    [[{ rule, opType: "Relu", label: 3 }], /label of overrides\[0\] is a string/],
    [[{ rule, opType: "Relu", position: "nearest_x" }], /"nearest_xs" or "nearest_ys", or an integer, not "nearest_x"/],
    [[{ rule, opType: "Relu", position: 0.5 }], /position of overrides\[0\] is .*, not 0\.5/],
    [[{ rule, pattern: "Relu" }], /pattern of overrides\[0\] is a list of op types/],
    [[{ rule, pattern: [] }], /pattern of overrides\[0\]/],
    [[{ rule, opType: "Relu", dtype: "float" }], /dtype of overrides\[0\] is "string", .*, not "float"/],
    [[{ rule, opType: "Relu", rank: -1 }], /rank of overrides\[0\] is an integer from 0, not -1/],
    [[{ rule, opType: "Relu", attrs: ["T"] }], /attrs of overrides\[0\] is an object/],
    [[{ rule, opType: "Relu", dependsOn: [] }], /dependsOn of overrides\[0\] names no tensor/],
    [[{ rule, region: "x" }], /region of overrides\[0\] is \{ inputs, outputs \}, not "x"/],
    [[{ rule, region: { inputs: "x" } }], /region\.outputs of overrides\[0\] names no tensor/],
    [[{ preset: "epsilon_plus", opType: "Relu" }], /overrides\[0\], a preset, has opType/],
    [[{ preset: 3 }], /overrides\[0\] chooses a preset by its name, not by 3/],
  ];
  const ask = async (overrides: unknown) =>
    nobody.evaluate(g, { ys: "y", xs: "x", overrides: overrides as Overrides, feeds: { x: X } });
  for (const [overrides, message] of rows) {
    await assert.rejects(ask(overrides), (thrown) => {
      assert.ok(thrown instanceof errors.InvalidOverrideError, String(thrown));
      assert.match(thrown.message, message);
      return true;
    });
  }
  await assert.rejects(ask([{ rule, node: other }]), errors.UnknownTensorError);
  await assert.rejects(ask([{ rule, region: { inputs: "x", outputs: other } }]), errors.UnknownTensorError);
  await assert.rejects(ask([{ rule, opType: "LeakyRelu", attrs: { aplha: 1 } }]), errors.InvalidAttrError);
  await assert.rejects(ask([{ rule, opType: "@activation", attrs: { aplha: 1 } }]), errors.InvalidAttrError);
  await assert.rejects(ask([{ rule, opType: "Relu", params: [1] }]), errors.InvalidParamError);
  await assert.rejects(ask([{ rule, opType: "Relu", params: new Map([["k", 1]]) }]), errors.InvalidParamError);
  await assert.rejects(ask({ Relu: { expression: 3 } }), errors.InvalidRuleError);
  await assert.rejects(ask({ Relu: { graph: "g" } }), errors.InvalidRuleError);
  nobody.close();
});
