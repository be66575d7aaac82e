// Trains one neuron with a binary activation: sign has no useful gradient of its own, a rule gives it one.
// Run: GRADRULE_TARGET=localhost:8470 node examples/quickstart.mjs

import { Graph, Tensor, connect } from "gradrule";

const client = connect(process.env.GRADRULE_TARGET ?? "localhost:8470");
await client.createRule("QuantizeGrad", "where(abs(x) <= 1, dy, 0)");

// Forward and gradient of one op, in one call.
const g = new Graph();
const x = g.placeholder("x", "float32", [null]);
const y = g.gradientOverrideMap({ Sign: "QuantizeGrad" }, () => g.op("Sign", [x], { name: "y" }));
const { outputs, gradients } = await client.evaluate(g, { feeds: { x: [-2, 0.5, 3] }, fetches: [y], ys: [y], xs: [x] });
// A gradient is null if no y depends on the x, and sparse if the x is gathered from.
const slope = gradients.x instanceof Tensor ? gradients.x.toArray() : null;
console.log("sign", outputs.y.toArray(), "gradient", slope);

// The neuron sign(points · w), and how far it is from the labels.
const net = new Graph();
const points = net.placeholder("points", "float32", [null, 2]);
const labels = net.placeholder("labels", "float32", [null, 1]);
const w = net.placeholder("w", "float32", [2, 1]);
const fired = net.op("Sign", [net.op("MatMul", [points, w])], { name: "fired" });
const errors = net.op("SquaredDifference", [fired, labels]);
const loss = net.op("Mean", [errors, net.constant([0, 1], { dtype: "int32" })], { name: "loss" });

// Compiled once; calls send only tensors.
const program = await client.compile(net, {
  fetches: [loss],
  ys: [loss],
  xs: [w],
  overrides: { Sign: "QuantizeGrad" },
});
const data = Array.from({ length: 64 }, (_, i) => [Math.sin(i), Math.cos(3 * i)]);
const truth = data.map(([a, b]) => [a - 2 * b > 0 ? 1 : -1]);
let weights = [0.1, 0.1];
let last = Number.POSITIVE_INFINITY;
for (let step = 0; step < 100 && last > 0; step++) {
  const result = await program.evaluate({ points: data, labels: truth, w: weights.map((value) => [value]) });
  last = result.outputs.loss.toFloat32()[0];
  if (!(result.gradients.w instanceof Tensor)) throw new Error("the loss does not depend on w");
  const slopes = result.gradients.w.toFloat32();
  weights = weights.map((value, i) => value - 0.1 * slopes[i]);
  if (step % 20 === 0) console.log("step", step, "loss", last.toFixed(3));
}
console.log(JSON.stringify({ gradient: slope, loss: last, weights }));
client.close();
