import { grid, same, sampleGradient, sampleOwn, sampleRows, type Target } from "./sampling";

const POINTS = 241;
/** Points within an interval around a break, and how often the interval is narrowed: to 1e-6 of a step of the grid. */
const INNER = 65;
const ROUNDS = 4;
const MOST = 16;
const STEP = 1e-4;

type Sampled = (positions: number[]) => Promise<number[]>;

/** Kinks, jumps and poles of the op, and of the rule for dy = 1, within the range of the curve. */
export interface Breaks {
  op: number[];
  rule: number[];
}

/** Finds the kinks, jumps and poles of an op and a rule, which treat each element on its own. Samples in float64. */
export async function sampleBreaks(target: Target, signal: AbortSignal): Promise<Breaks> {
  const { low, high, opType, isStep, overDy } = target.setup;
  const ones = (list: number[]) => list.map(() => 1);
  const rule: Sampled = (at) =>
    overDy
      ? sampleGradient(target, ones(at), at, "float64", signal)
      : sampleGradient(target, at, ones(at), "float64", signal);
  const hasOp = (opType || isStep) && !overDy;
  const [inOp, inRule] = await Promise.all([
    hasOp ? findBreaks((at) => sampleForward(target, at, signal), low, high) : [],
    findBreaks(rule, low, high),
  ]);
  return { op: inOp, rule: inRule };
}

/** Returns the output of the op in float64. */
export async function sampleForward(target: Target, x: number[], signal: AbortSignal): Promise<number[]> {
  if (target.setup.isStep) return x.map((value) => (value > 0 ? 1 : 0));
  const dy = x.map(() => 1);
  return (await sampleOwn(target, x, dy, "float64", signal)).y;
}

/** Tells whether the rule and the op treat each element on its own: other elements change nothing. */
export async function isElementwise(target: Target, signal: AbortSignal): Promise<boolean> {
  const { low, high } = target.setup;
  const x = grid(low, high, 8).slice(1, 7);
  const changed = (value: number) => x.map((own, index) => (index % 2 ? value : own));
  const ones = x.map(() => 1);
  const [first, second] = await Promise.all([
    sampleRows(target, x, ones, "float32", signal),
    sampleRows(
      target,
      changed(low + 0.37 * (high - low)),
      ones.map((_, index) => (index % 2 ? 2.5 : 1)),
      "float32",
      signal,
    ),
  ]);
  const even = (list: number[] | undefined) => (list ?? []).filter((_, index) => index % 2 === 0);
  return same(even(first.dx), even(second.dx)) && same(even(first.y), even(second.y));
}

/**
 * Finds where a function of one number is not smooth: at a kink, a jump or a pole.
 *
 * A grid shows candidates, where the function bends much more than beside. Each is narrowed to its largest bend, and counts if
 * the bend does not fade when the step shrinks. Features that are narrower than a step of the grid may be missed.
 */
export async function findBreaks(sampled: Sampled, low: number, high: number): Promise<number[]> {
  const x = grid(low, high, POINTS);
  const bends = bendsOf(await sampled(x));
  let intervals = x
    .map((_, index) => index)
    .filter((index) => isPeak(bends, index))
    .slice(0, MOST)
    .map((index) => ({ from: x[index - 1]!, to: x[index + 1]! }));
  for (let round = 0; round < ROUNDS && intervals.length; round++) {
    const inner = intervals.map(({ from, to }) => spaced(from, to, INNER));
    const values = await sampled(inner.flat());
    intervals = inner.map((points, index) => {
      const own = bendsOf(values.slice(index * INNER, (index + 1) * INNER));
      const peak = own.indexOf(Math.max(...own));
      return { from: points[Math.max(0, peak - 1)]!, to: points[Math.min(INNER - 1, peak + 1)]! };
    });
  }
  if (!intervals.length) return [];
  const places = intervals.map(({ from, to }) => rounded((from + to) / 2, to - from));
  // A jump with a value of its own in the middle, as of Sign at 0, has a bend on both sides.
  const found = places.filter((at, index) => !(Math.abs(at - places[index - 1]!) <= STEP * size(at)));
  const offsets = [-2, -1, -0.5, 0.5, 1, 2];
  const values = await sampled(found.flatMap((at) => offsets.map((offset) => at + offset * STEP * size(at))));
  return found.filter((at, index) => isBreak(values.slice(index * offsets.length, (index + 1) * offsets.length), at));
}

/** Returns the size of the second differences; infinite where a value is not finite but another is. */
function bendsOf(values: number[]): number[] {
  return values.map((value, index) => {
    const around = [values[index - 1] ?? NaN, value, values[index + 1] ?? NaN];
    if (index === 0 || index === values.length - 1) return 0;
    if (around.every(Number.isFinite)) return Math.abs(around[0]! - 2 * around[1]! + around[2]!);
    return around.some(Number.isFinite) ? Infinity : 0;
  });
}

function isPeak(bends: number[], index: number): boolean {
  const bend = bends[index]!;
  const beside = Math.min(bends[index - 2] ?? 0, bends[index + 2] ?? 0);
  return bend > 1e-9 && bend > (bends[index - 1] ?? 0) && bend >= (bends[index + 1] ?? 0) && bend > 3 * beside;
}

/** Tells from the values at -2, -1, -1/2, 1/2, 1 and 2 steps whether a function has a break in the middle. */
function isBreak(values: number[], at: number): boolean {
  if (!values.every(Number.isFinite)) return true;
  const [v0, v1, v2, v3, v4, v5] = values as [number, number, number, number, number, number];
  const step = STEP * size(at);
  const [wideJump, jump] = [Math.abs(v4 - v1), Math.abs(v3 - v2)];
  // Between the two sides, a smooth function's values and slopes differ half as much when the step halves.
  if (jump > 1e-9 && jump > 0.75 * wideJump) return true;
  const wideKink = Math.abs((v5 - v4 - (v1 - v0)) / step);
  const kink = Math.abs((v4 - v3 - (v2 - v1)) / (step / 2));
  return kink > 1e-6 && kink > 0.75 * wideKink;
}

function size(value: number): number {
  return Math.max(1, Math.abs(value));
}

/** Returns a number with few digits if there is one within the interval: kinks are mostly at such numbers. */
function rounded(value: number, width: number): number {
  const short = Math.round(value * 1e5) / 1e5;
  return Math.abs(short - value) <= width ? short : value;
}

function spaced(from: number, to: number, count: number): number[] {
  return Array.from({ length: count }, (_, index) => from + ((to - from) * index) / (count - 1));
}
