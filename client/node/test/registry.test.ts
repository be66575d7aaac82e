// Rules and programs of a real server.

import assert from "node:assert/strict";
import { test } from "node:test";

import { GradruleError, Graph, Tensor, connect, errors, tensor } from "../src/index.js";
import { client as connected, freshName } from "./server.js";

const client = connected();

/** `y = sign(x) · w`, and the loss `sum(y)`. */
function model(): Graph {
  const g = new Graph();
  const x = g.placeholder("x", "float32", [null]);
  const w = g.placeholder("w", "float32", []);
  const y = g.op("Mul", [g.op("Sign", [x], { name: "sign" }), w], { name: "y" });
  g.op("Sum", [y, g.constant([0], { dtype: "int32" })], { name: "loss" });
  return g;
}

test("a rule is created, read, listed, sampled and deleted", async () => {
  const name = freshName("window");
  const options = { params: { width: 1 }, description: "passes within the window" };
  const made = await client.createRule(name, "where(abs(x) <= width, dy, 0)", options);
  assert.equal(made.name, name);
  assert.equal(made.kind, "user");
  assert.equal(made.expression, "where(abs(x) <= width, dy, 0)");
  assert.deepEqual(made.params, { width: 1 });
  assert.equal(made.description, "passes within the window");
  assert.ok(made.createTime instanceof Date && Math.abs(made.createTime.getTime() - Date.now()) < 60_000);
  assert.deepEqual(await client.createRule(name, "where(abs(x) <= width, dy, 0)", options), made);
  await assert.rejects(client.createRule(name, "dy"), errors.RuleExistsError);
  assert.deepEqual(await client.getRule(name), made);
  assert.ok((await client.listRules({ kind: "user" })).some((rule) => rule.name === name));
  const values = { x: [-2, 0.5, 3], dy: [1, 2, 3] };
  assert.deepEqual((await client.sampleRule(name, values)).gradients["dx"]?.toArray(), [0, 2, 0]);
  const wide = await client.sampleRule(name, values, { params: { width: 2.5 } });
  assert.deepEqual(wide.gradients["dx"]?.toArray(), [1, 2, 0]);
  assert.equal((await client.createRule(name, "dy", { replace: true })).expression, "dy");
  await client.deleteRule(name);
  await assert.rejects(client.getRule(name), errors.UnknownRuleError);
});

test("the registry holds TensorFlow's gradients and the catalogue, over several pages", async () => {
  const rules = await client.listRules();
  const names = rules.map(({ kind, name }) => `${kind} ${name}`);
  assert.equal(new Set(names).size, names.length);
  assert.ok(rules.filter(({ kind }) => kind === "op").length > 300);
  assert.ok(rules.some(({ kind, name }) => kind === "builtin" && name.endsWith("ste_sign")));
  await assert.rejects(client.deleteRule("Identity"), errors.RuleReadOnlyError);
  await assert.rejects(client.getRule("QuantizeGrda"), errors.UnknownRuleError);
});

test("a rule of two inputs, an op's own gradient, and a rule that is a graph", async () => {
  const pair = await client.sampleRule({ expression: "(dy * x1, None)" }, { x: [2], x1: [3], dy: [5] });
  assert.deepEqual(pair.gradients["dx"]?.toArray(), [15]);
  assert.equal(pair.gradients["dx1"], null);
  const square = await client.sampleRule("Square", { x: [3], dy: [2] });
  assert.deepEqual(square.gradients["dx"]?.toArray(), [12]);
  assert.deepEqual(square.outputs["y"]?.toArray(), [9]);
  const g = new Graph();
  g.op("Neg", [g.placeholder("dy", "float32", null)], { name: "dx" });
  const name = freshName("reversal");
  const made = await client.createRule(name, { graph: g });
  assert.equal(made.expression, null);
  assert.deepEqual(made.graph?.toBytes(), g.toBytes());
  const reversed = await client.sampleRule(name, { x: [1, 1], dy: [2, 3] });
  assert.deepEqual(reversed.gradients["dx"]?.toArray(), [-2, -3]);
});

test("what a rule says of itself", async () => {
  const spike = await client.getRule("fast_sigmoid");
  assert.equal(spike.formula, spike.expression);
  assert.equal(spike.family, "surrogate");
  assert.equal(spike.trueGradient, false);
  assert.equal(spike.hidesBuiltin, false);
  assert.ok(spike.opTypes.includes("@step"));
  const [slope] = spike.paramInfos;
  assert.deepEqual([slope?.name, slope?.default, slope?.range], ["slope", spike.params["slope"], "> 0"]);
  assert.ok(slope?.description);
  assert.equal((await client.getRule("log1pexp")).trueGradient, true);
  const coded = await client.getRule("lrp_zplus");
  assert.equal(coded.expression, null);
  assert.ok(coded.formula);
  const name = freshName("plain");
  const { formula, family, paramInfos } = await client.createRule(name, "k * dy", { params: { k: 2 } });
  assert.deepEqual([formula, family], ["k * dy", ""]);
  assert.deepEqual(paramInfos, [{ name: "k", default: 2, description: "", range: "" }]);
  await assert.rejects(
    client.sampleRule("fast_sigmoid", { x: [1] }, { params: { slope: -1 } }),
    errors.InvalidParamError,
  );
});

test("presets are listed", async () => {
  const presets = await client.listPresets();
  const names = presets.map(({ name }) => name);
  assert.deepEqual(names, [...names].sort());
  const plus = presets.find(({ name }) => name === "epsilon_plus");
  assert.ok(plus?.description && plus.reference);
  assert.ok(plus.overrides.some((line) => line.includes("lrp_zplus")));
  assert.ok(plus.params.some(({ name, range }) => name === "eps" && range === "> 0"));
  const box = presets.find(({ name }) => name === "epsilon_gamma_box");
  assert.equal(box?.params.find(({ name }) => name === "low")?.default, null);
});

test("a sample's op has attributes", async () => {
  const values = { x: [-2, 3] };
  const leaky = await client.sampleRule("LeakyRelu", values, { attrs: { alpha: 0.5 } });
  assert.deepEqual(leaky.outputs["y"]?.toArray(), [-1, 3]);
  assert.deepEqual(leaky.gradients["dx"]?.toArray(), [0.5, 1]);
  const rule = { expression: "2 * default" };
  const twice = await client.sampleRule(rule, values, { opType: "LeakyRelu", attrs: { alpha: 1 } });
  assert.deepEqual(twice.gradients["dx"]?.toArray(), [2, 2]);
  await assert.rejects(
    client.sampleRule("LeakyRelu", values, { attrs: { aplha: 1 } }),
    (thrown) => thrown instanceof errors.InvalidAttrError && /aplha of LeakyRelu/.test(thrown.message),
  );
});

test("a param without a default must be given", async () => {
  const name = freshName("required");
  const made = await client.createRule(name, "k * dy", { params: ["k"] });
  assert.deepEqual(made.params, { k: null });
  await assert.rejects(client.sampleRule(name, { x: [1] }), errors.MissingParamError);
  const sampled = await client.sampleRule(name, { x: [1, 1] }, { params: { k: [2, 3] } });
  assert.deepEqual(sampled.gradients["dx"]?.toArray(), [2, 3]);
});

test("a program is compiled once, run, found again and deleted", async () => {
  const id = freshName("program");
  const spec = { fetches: ["loss"], ys: ["loss"], xs: ["x", "w"], overrides: { Sign: "ste_sign" } } as const;
  const program = await client.compile(model(), { ...spec, name: id });
  assert.equal(program.name, `programs/${id}`);
  assert.deepEqual(program.inputs, {
    x: { name: "x", dtype: "float32", shape: [null], optional: false },
    w: { name: "w", dtype: "float32", shape: [], optional: false },
  });
  assert.deepEqual(program.outputs, { loss: { name: "loss", dtype: "float32", shape: [], optional: false } });
  assert.deepEqual(Object.keys(program.xs), ["x", "w"]);
  assert.deepEqual(
    program.overrides.map(({ node, status }) => [node, status]),
    [["sign", "active"]],
  );
  assert.ok(program.defaultGradientNodes.includes("y"));
  for (const run of [program, await client.program(id)]) {
    const result = await run.evaluate({ x: [-2, 0.5, 3], w: 4 });
    assert.equal(result.outputs["loss"]?.toArray(), 4);
    assert.deepEqual((result.gradients["x"] as Tensor).toArray(), [0, 4, 0]);
    assert.equal((result.gradients["w"] as Tensor).toArray(), 1);
    const upstream = await run.evaluate({ x: [0.5], w: 1 }, { gradYs: { loss: 7 } });
    assert.deepEqual((upstream.gradients["x"] as Tensor).toArray(), [7]);
    assert.equal(result.digests.program, program.digests.program);
  }
  await assert.rejects(program.evaluate({ x: [1] }), errors.MissingFeedError);
  await assert.rejects(program.evaluate({ x: tensor([1], { dtype: "int32" }), w: 1 }), errors.FeedDtypeError);
  await assert.rejects(program.evaluate({ x: [1], w: 1 }, { gradYs: ["y"] }), errors.InvalidDerivativeError);
  assert.ok((await client.listPrograms()).some(({ name }) => name === program.name));
  await client.deleteProgram(id);
  await assert.rejects(client.program(id), errors.ProgramNotFoundError);
  await assert.rejects(program.delete(), errors.ProgramNotFoundError);
});

test("params of a program's call compile nothing again", async () => {
  const g = new Graph();
  g.op("Identity", [g.placeholder("x", "float64", [null])], { name: "y" });
  const rule = { expression: "lambda_ * dy", params: { lambda_: 1 } };
  const program = await client.compile(g, { ys: ["y"], xs: ["x"], overrides: { Identity: rule } });
  for (const value of [1, -2, 0.1]) {
    const result = await program.evaluate({ x: [1] }, { params: { Identity: { lambda_: value } } });
    assert.deepEqual((result.gradients["x"] as Tensor).toArray(), [value]);
  }
  await assert.rejects(
    program.evaluate({ x: [1] }, { params: { Identity: { mu: 1 } } }),
    (thrown) => thrown instanceof errors.UnknownParamError && /lambda_/.test(thrown.message),
  );
});

test("explain tells which node gets which rule, and all that is wrong, without keeping a program", async () => {
  const before = (await client.listPrograms()).length;
  const ask = { ys: "loss", xs: "x" };
  const told = await client.explain(model(), { ...ask, overrides: { Sign: ["ste_sign", {}] } });
  assert.deepEqual(
    told.overrides.map(({ node, opType, label, status }) => [node, opType, label, status]),
    [["sign", "Sign", "Sign", "active"]],
  );
  assert.deepEqual(told.inputs["x"]?.shape, [null]);
  told.throwFindings();
  const overrides = [
    { opType: "Sign", rule: "ste_sing" },
    { opType: "Flor", rule: "Identity" },
  ];
  const wrong = await client.explain(model(), { ...ask, overrides });
  assert.deepEqual(wrong.findings.map(({ reason }) => reason).sort(), ["UNKNOWN_OP_TYPE", "UNKNOWN_RULE"]);
  assert.throws(
    () => wrong.throwFindings(),
    (thrown) => thrown instanceof GradruleError && thrown.details.length === 2,
  );
  assert.equal((await client.listPrograms()).length, before);
});

test("unknown options are refused with a suggestion", async () => {
  const g = model();
  const wrong = (options: object): object => options;
  const rows: [Promise<unknown>, RegExp][] = [
    [client.evaluate(g, wrong({ ys: ["y"], override: {} })), /evaluate has no option override. Did you mean overrides/],
    [client.explain(g, wrong({ ys: ["y"], fetch: ["y"] })), /explain has no option fetch. Did you mean fetches/],
    [client.compile(g, wrong({ y: ["y"] })), /compile has no option y. Did you mean ys/],
    [
      client.createRule(freshName("r"), "dy", wrong({ param: {} })),
      /createRule has no option param. Did you mean params/,
    ],
    [client.listRules(wrong({ kinds: "user" })), /listRules has no option kinds. Did you mean kind/],
    [client.listRules(wrong({ kind: "users" })), /kind is "user", "builtin" or "op", not "users"/],
    [client.sampleRule("ste", { x: [1] }, wrong({ op: "Sign" })), /sampleRule has no option op. Did you mean opType/],
    [client.listPrograms(wrong({ time: 1 })), /listPrograms has no option time. Did you mean timeout/],
  ];
  for (const [call, says] of rows) {
    await assert.rejects(call, (error) => error instanceof errors.InvalidParamError && says.test(error.message));
  }
  assert.throws(
    () => connect("localhost:1", wrong({ tokens: "t" })),
    /connect has no option tokens. Did you mean token/,
  );
});
