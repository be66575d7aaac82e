// Samples a Bayesian logistic regression by Hamiltonian Monte Carlo (Neal 2011, arXiv:1206.1901): the sampler is
// JavaScript, the density and its gradient run on a gradrule server. Four chains are one batch, so that each leapfrog
// step is one call.
//
// Prints mean, 95 % interval, true value, effective sample size and R-hat of each coefficient; ends with exit code 1
// if fewer than 200 samples are effective, or R-hat is above 1.05.
// Run: GRADRULE_TARGET=localhost:8470 node examples/sampler.mjs

import { Graph, Tensor, connect } from "gradrule";

const [CHAINS, WARM_UP, DRAWS, STEPS, STEP_SIZE] = [4, 50, 150, 8, 0.12];
const TRUTH = [1.0, -2.0, 0.5];
const client = connect(process.env.GRADRULE_TARGET ?? "localhost:8470");

// Random numbers with a seed (mulberry32), and normal ones (Box and Muller).
let state = 7;
function uniform() {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
}
const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());

// Data: points with a constant 1, and labels that are 1 with the probability sigmoid(point · TRUTH).
const points = Array.from({ length: 200 }, () => [1, normal(), normal()]);
const labels = points.map((point) => [uniform() < 1 / (1 + Math.exp(-dot(point, TRUTH))) ? 1 : 0]);

/** @param {number[]} a @param {number[]} b */
function dot(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}

// The log density of coefficients with shape (chains, 3), one number for each chain.
const g = new Graph();
const w = g.placeholder("w", "float64", [null, TRUTH.length]);
const logits = g.op("MatMul", [g.constant(points, { dtype: "float64" }), w], { attrs: { transpose_b: true } });
const ones = g.op("Softplus", [logits]); // log(1 + exp(logit)), for each point and chain
const likelihood = g.op("Sub", [g.op("Mul", [logits, g.constant(labels, { dtype: "float64" })]), ones]);
const prior = g.op("Mul", [g.op("Square", [w]), g.constant(-0.5 / 25, { dtype: "float64" })]); // normal, deviation 5
/** @param {any} tensor @param {number} axis */
const sum = (tensor, axis) => g.op("Sum", [tensor, g.constant([axis], { dtype: "int32" })]);
const density = g.op("AddV2", [sum(likelihood, 0), sum(prior, 1)], { name: "density" });
const program = await client.compile(g, { fetches: [density], ys: [density], xs: [w] });

/** Returns the log density of each chain, and its gradient. @param {number[][]} at */
async function evaluate(at) {
  const { outputs, gradients } = await program.evaluate({ w: at });
  if (!(gradients.w instanceof Tensor)) throw new Error("the density does not depend on w");
  return {
    density: /** @type {number[]} */ (outputs.density.toArray()),
    slope: /** @type {number[][]} */ (gradients.w.toArray()),
  };
}

/** Returns a + factor · b. @param {number[][]} a @param {number} factor @param {number[][]} b */
const add = (a, factor, b) => a.map((row, i) => row.map((value, j) => value + factor * b[i][j]));

// Hamiltonian Monte Carlo: a random momentum, STEPS leapfrog steps, and acceptance by the change of the energy.
let position = Array.from({ length: CHAINS }, () => TRUTH.map(() => normal()));
let current = await evaluate(position);
/** @type {number[][][]} */
const draws = [];
let accepted = 0;
for (let draw = 0; draw < WARM_UP + DRAWS; draw++) {
  const momentum = position.map((row) => row.map(() => normal()));
  let [q, p, now] = [position, momentum, current];
  // A random number of steps, so that no chain returns to its start each time.
  const steps = 1 + Math.floor(uniform() * STEPS);
  for (let step = 0; step < steps; step++) {
    p = add(p, STEP_SIZE / 2, now.slope);
    q = add(q, STEP_SIZE, p);
    now = await evaluate(q);
    p = add(p, STEP_SIZE / 2, now.slope);
  }
  const [before, after] = [current, now];
  const takes = position.map((_, i) => {
    const gain = after.density[i] - dot(p[i], p[i]) / 2 - before.density[i] + dot(momentum[i], momentum[i]) / 2;
    return Math.log(1 - uniform()) < gain;
  });
  position = position.map((row, i) => (takes[i] ? q[i] : row));
  current = {
    density: before.density.map((value, i) => (takes[i] ? after.density[i] : value)),
    slope: before.slope.map((row, i) => (takes[i] ? after.slope[i] : row)),
  };
  if (draw >= WARM_UP) {
    draws.push(position);
    accepted += takes.filter(Boolean).length;
  }
}

// Effective sample size and R-hat (Gelman et al., Bayesian Data Analysis, third edition, sections 11.4 and 11.5).
/** @param {number[]} values */
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;
/** @param {number[][]} chains the draws of one coefficient, by chain */
function diagnose(chains) {
  const means = chains.map(mean);
  const variance = chains.map((chain, i) => mean(chain.map((v) => (v - means[i]) ** 2)) * (DRAWS / (DRAWS - 1)));
  const within = mean(variance);
  const all = mean(means);
  const between = means.reduce((total, value) => total + (value - all) ** 2, 0) / (CHAINS - 1);
  const total = (within * (DRAWS - 1)) / DRAWS + between;
  let time = 1; // the integrated autocorrelation time
  for (let lag = 1; lag < DRAWS; lag++) {
    const differences = chains.flatMap((chain) => chain.slice(lag).map((value, i) => (value - chain[i]) ** 2));
    const correlation = 1 - mean(differences) / (2 * total);
    if (correlation < 0.05) break;
    time += 2 * correlation;
  }
  return { samples: (CHAINS * DRAWS) / time, rHat: Math.sqrt(total / within) };
}

const found = TRUTH.map((truth, k) => {
  const sorted = draws.flatMap((positions) => positions.map((row) => row[k])).sort((a, b) => a - b);
  const [low, high] = [0.025, 0.975].map((share) => sorted[Math.floor(share * sorted.length)]);
  const chains = position.map((_, chain) => draws.map((positions) => positions[chain][k]));
  return { truth, mean: mean(sorted), low, high, ...diagnose(chains) };
});
client.close();
console.log(`accepted: ${((100 * accepted) / (CHAINS * DRAWS)).toFixed(0)} %`);
for (const [k, { truth, mean: middle, low, high, samples, rHat }] of found.entries()) {
  const interval = `${middle.toFixed(2)}, 95 % in [${low.toFixed(2)}, ${high.toFixed(2)}], true value ${truth}`;
  console.log(`w${k}: ${interval}, effective sample size ${samples.toFixed(0)}, R-hat ${rHat.toFixed(3)}`);
}
console.log(JSON.stringify(found));
if (found.some(({ samples, rHat }) => samples < 200 || rHat > 1.05)) process.exitCode = 1;
