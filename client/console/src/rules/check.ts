import { grid, PointSampler, same, sampleGradient, sampleOwn, sampleRows, type Target } from "./sampling";
import { forwardText } from "./setups";

/** A point where the slopes of the forward function on both sides differ. */
export interface Kink {
  x: number;
  left: number;
  right: number;
  rule: number;
}

/** Comparison of a rule's gradient with finite differences of the forward function. */
export interface Check {
  of: string;
  compared: number;
  different: number;
  largest: number;
  /** x, the upstream gradient, the rule's gradient and the expected one at the largest difference. */
  worst: { x: number; dy: number; rule: number; expected: number };
  kinks: Kink[];
}

const POINTS = 241;
const STEP = 1e-4;
const TOLERANCE = 1e-5;

/**
 * Compares a rule with central differences in float64, extrapolated from two steps.
 *
 * @returns undefined if there is no forward function.
 * @throws Error if the rule or the op uses several elements at once, or if the op does not support float64.
 */
export async function checkGradient(target: Target, signal: AbortSignal): Promise<Check | undefined> {
  const { setup } = target;
  if ((!setup.opType && !setup.isStep) || setup.overDy) return undefined;
  await requireElementwise(target, signal);
  const x = grid(setup.low, setup.high, POINTS);
  const steps = x.map((value) => STEP * Math.max(1, Math.abs(value)));
  const offsets = [-1, -0.5, 0, 0.5, 1];
  const positions = offsets.flatMap((offset) => x.map((value, index) => value + offset * steps[index]!));
  const ones = (list: number[]) => list.map(() => 1);
  // Both signs and many sizes: a rule may be right for dy = 1 only, as guided backpropagation is.
  const dy = x.map((_, index) => (index % 2 ? -1 : 1) * (0.5 + ((index * 0.618) % 1)));
  const [forward, dx, dxAtOne] = await Promise.all([
    setup.isStep
      ? positions.map((value) => (value > 0 ? 1 : 0))
      : sampleOwn(target, positions, ones(positions), "float64", signal).then(({ y }) => y),
    sampleGradient(target, x, dy, "float64", signal),
    sampleGradient(target, x, ones(x), "float64", signal),
  ]);
  const at = (offset: number, index: number) => forward[offsets.indexOf(offset) * POINTS + index]!;
  const found: Check = {
    of: forwardText(setup),
    compared: 0,
    different: 0,
    largest: 0,
    worst: { x: NaN, dy: NaN, rule: NaN, expected: NaN },
    kinks: [],
  };
  x.forEach((value, index) => {
    const h = steps[index]!;
    const [far, near] = [1, 0.5].map((share) => ({
      left: (at(0, index) - at(-share, index)) / (share * h),
      right: (at(share, index) - at(0, index)) / (share * h),
    })) as [Sides, Sides];
    // The difference of the slopes on both sides halves with the step where the function is smooth, but not at a kink or a jump.
    const gap = Math.abs(near.right - near.left);
    const isKink = gap > 1e-6 && gap > 0.75 * Math.abs(far.right - far.left);
    // At a jump through the middle, as of Sign at 0, both slopes are equal and double when the step halves.
    const isJump = Math.abs(near.left) > 1 && Math.abs(near.left) > 1.5 * Math.abs(far.left);
    if (isKink || isJump) {
      found.kinks.push({ x: value, ...near, rule: dxAtOne[index]! });
      return;
    }
    const wide = (far.left + far.right) / 2;
    const narrow = (near.left + near.right) / 2;
    const expected = (dy[index]! * (4 * narrow - wide)) / 3;
    if (!Number.isFinite(expected)) return;
    found.compared += 1;
    const rule = dx[index]!;
    const difference = Number.isFinite(rule) ? Math.abs(rule - expected) : Infinity;
    if (difference > TOLERANCE * Math.max(1, Math.abs(expected)) + Math.abs(dy[index]! * (narrow - wide)))
      found.different += 1;
    if (!(difference < found.largest)) {
      found.largest = difference;
      found.worst = { x: value, dy: dy[index]!, rule, expected };
    }
  });
  return found;
}

interface Sides {
  left: number;
  right: number;
}

async function requireElementwise(target: Target, signal: AbortSignal): Promise<void> {
  const x = grid(target.setup.low, target.setup.high, 8).slice(1, 7);
  const other = x.map((value, index) =>
    index % 2 ? target.setup.low + 0.37 * (target.setup.high - target.setup.low) : value,
  );
  const ones = x.map(() => 1);
  const [first, second] = await Promise.all(
    [x, other].map((values) => sampleRows(target, values, ones, "float32", signal)),
  );
  const even = (list: number[] | undefined) => (list ?? []).filter((_, index) => index % 2 === 0);
  if (!same(even(first!.dx), even(second!.dx)) || !same(even(first!.y), even(second!.y))) {
    throw new Error("The rule or the op uses several elements at once, so it cannot be compared number by number.");
  }
}

/** Numbers at which rules often differ, and numbers that are not finite. */
export const SPECIAL = [-1, 0, 1, Infinity, -Infinity, NaN];

/** The rule's gradient, and the op's output and own gradient, at one special number, for dy = 1. */
export interface SpecialValue {
  x: number;
  dx: number;
  y?: number;
  own?: number;
}

/** Runs the rule on special numbers. */
export async function sampleSpecial(sampler: PointSampler, signal: AbortSignal): Promise<SpecialValue[]> {
  const overDy = sampler.target.setup.overDy;
  const found = await sampler.at(
    SPECIAL.map((value) => (overDy ? 1 : value)),
    SPECIAL.map((value) => (overDy ? value : 1)),
    signal,
  );
  return SPECIAL.map((x, index) => ({
    x,
    dx: found.dx[index]!,
    ...(found.y ? { y: found.y[index]!, own: found.own![index]! } : {}),
  }));
}
