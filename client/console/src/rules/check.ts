import { sampleForward, type Breaks } from "./breaks";
import { PointSampler, sampleGradient, type Target } from "./sampling";
import { forwardText } from "./setups";

/** Comparison of a rule's gradient with finite differences of the forward function. */
export interface Check {
  of: string;
  /** Range of the points. */
  low: number;
  high: number;
  compared: number;
  different: number;
  /** Largest difference, relative to dy, and to the slope where that is larger than 1. */
  largest: number;
  /** x, the upstream gradient, the rule's gradient and the expected one at the largest difference. */
  worst: { x: number; dy: number; rule: number; expected: number };
  /** Kinks and jumps of the forward function, with the rule's gradient for dy = 1. */
  kinks: { x: number; rule: number }[];
}

const POINTS = 1000;
const STEP = 1e-4;
const TOLERANCE = 1e-5;

/**
 * Compares a rule with central differences in float64, extrapolated from two steps.
 *
 * Points and upstream gradients are spread unevenly, so that a rule which is wrong for some sizes of dy, or between the points of
 * a grid, differs at some of them. An error in an interval shorter than a thousandth of the range may be missed.
 *
 * @param target A rule and an op that treat each element on its own.
 * @returns undefined if there is no forward function.
 * @throws Error if the op does not support float64.
 */
export async function checkGradient(target: Target, breaks: Breaks, signal: AbortSignal): Promise<Check | undefined> {
  const { opType, isStep, low, high } = target.setup;
  if (!opType && !isStep) return undefined;
  const x = Array.from(
    { length: POINTS },
    (_, i) => low + ((high - low) * (i + 0.1 + 0.8 * spread(i, 0.7548776662))) / POINTS,
  );
  const dy = x.map((_, i) => (i % 2 ? -1 : 1) * 10 ** (6 * spread(i, 0.6180339887) - 3));
  const steps = x.map((value) => STEP * Math.max(1, Math.abs(value)));
  const offsets = [-1, -0.5, 0, 0.5, 1];
  const positions = offsets.flatMap((offset) => x.map((value, index) => value + offset * steps[index]!));
  const [values, dx, dxAtKinks] = await Promise.all([
    sampleForward(target, positions, signal),
    sampleGradient(target, x, dy, "float64", signal),
    breaks.op.length
      ? sampleGradient(
          target,
          breaks.op,
          breaks.op.map(() => 1),
          "float64",
          signal,
        )
      : [],
  ]);
  const found: Check = {
    of: forwardText(target.setup),
    low,
    high,
    compared: 0,
    different: 0,
    largest: 0,
    worst: { x: NaN, dy: NaN, rule: NaN, expected: NaN },
    kinks: breaks.op.map((at, index) => ({ x: at, rule: dxAtKinks[index]! })),
  };
  x.forEach((value, index) => {
    const slope = slopeOf(
      offsets.map((_, offset) => values[offset * POINTS + index]!),
      steps[index]!,
    );
    if (!slope) return;
    found.compared += 1;
    const size = Math.abs(dy[index]!);
    const rule = dx[index]!;
    const expected = dy[index]! * slope.value;
    const difference = Number.isFinite(rule)
      ? Math.abs(rule - expected) / (size * Math.max(1, Math.abs(slope.value)))
      : Infinity;
    if (difference > TOLERANCE + slope.error) found.different += 1;
    if (!(difference < found.largest)) {
      found.largest = difference;
      found.worst = { x: value, dy: dy[index]!, rule, expected };
    }
  });
  return found;
}

/** Returns the slope in the middle of five values; undefined at a kink or a jump, and where values are not finite. */
function slopeOf(values: number[], step: number): { value: number; error: number } | undefined {
  const [v0, v1, v2, v3, v4] = values as [number, number, number, number, number];
  const far = { left: (v2 - v0) / step, right: (v4 - v2) / step };
  const near = { left: (v2 - v1) / (step / 2), right: (v3 - v2) / (step / 2) };
  // The difference of the slopes on both sides halves with the step where the function is smooth, but not at a kink or a jump.
  const gap = Math.abs(near.right - near.left);
  if (gap > 1e-6 && gap > 0.75 * Math.abs(far.right - far.left)) return undefined;
  // At a jump through the middle, as of Sign at 0, both slopes are equal and double when the step halves.
  if (Math.abs(near.left) > 1 && Math.abs(near.left) > 1.5 * Math.abs(far.left)) return undefined;
  const wide = (far.left + far.right) / 2;
  const narrow = (near.left + near.right) / 2;
  const value = (4 * narrow - wide) / 3;
  return Number.isFinite(value) ? { value, error: Math.abs(narrow - wide) } : undefined;
}

/** Returns numbers between 0 and 1 that fill it evenly in no order: fractions of multiples of an irrational number. */
function spread(index: number, irrational: number): number {
  return (index * irrational) % 1;
}

/** Numbers at which rules often differ. */
const FINITE = [-1, 0, 1];
const NOT_FINITE = [Infinity, -Infinity, NaN];
/** Kinks that are shown; rounding has many. */
const MOST_KINKS = 12;

/** The rule's gradient, and the op's output and own gradient, at one special number, for dy = 1. */
export interface SpecialValue {
  x: number;
  dx: number;
  y?: number;
  own?: number;
}

/** Runs the rule at its kinks, at those of the op, and on special numbers. */
export async function sampleSpecial(
  sampler: PointSampler,
  breaks: Breaks,
  signal: AbortSignal,
): Promise<SpecialValue[]> {
  const overDy = sampler.target.setup.overDy;
  const kinks = [...breaks.op, ...breaks.rule].sort((a, b) => Math.abs(a) - Math.abs(b)).slice(0, MOST_KINKS);
  const numbers = [...[...new Set([...FINITE, ...kinks])].sort((a, b) => a - b), ...NOT_FINITE];
  const found = await sampler.at(
    numbers.map((value) => (overDy ? 1 : value)),
    numbers.map((value) => (overDy ? value : 1)),
    signal,
  );
  return numbers.map((x, index) => ({
    x,
    dx: found.dx[index]!,
    ...(found.y ? { y: found.y[index]!, own: found.own![index]! } : {}),
  }));
}
