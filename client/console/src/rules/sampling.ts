import { call } from "../api/client";
import { decodeNumber, encodeNumber } from "../api/numbers";
import type { NestedNumbers, RuleDefinition, SampleAnswer, Tensor } from "../api/types";
import type { Setup } from "./setups";

/** The rule to run: a registered one or a definition. */
export type RuleSource = { name: string } | { definition: RuleDefinition };

export interface Target {
  source: RuleSource;
  setup: Setup;
  params: Record<string, number>;
}

export type Dtype = "float32" | "float64";

/** Values for each x: the rule's gradient, and the op's output and own gradient if there is an op. */
export interface Samples {
  dx: number[];
  y?: number[];
  own?: number[];
}

/** Browsers queue calls, and a gallery must not fill the server's queue: at most so many calls run at once. */
const MAX_CALLS = 6;
let running = 0;
const waiting: (() => void)[] = [];

/** Runs the rule and its op on many numbers in one call each. Rows are inputs of their own only if the rule treats axis 0 as examples. */
export async function sampleRows(
  target: Target,
  x: Rows,
  dy: Rows,
  dtype: Dtype,
  signal: AbortSignal,
): Promise<Samples> {
  const { setup } = target;
  const [own, dx] = await Promise.all([
    setup.opType ? sampleOwn(target, x, dy, dtype, signal) : undefined,
    sampleGradient(target, x, dy, dtype, signal),
  ]);
  if (own) return { dx, ...own };
  return setup.isStep ? { dx, y: firsts(step(x)), own: dx.map(() => 0) } : { dx };
}

/** A vector of numbers, or rows of numbers of which the first one counts. */
export type Rows = number[] | number[][];

/** Returns the op's output and its own gradient; in one call, because the op's gradient needs the output. */
export async function sampleOwn(
  target: Target,
  x: Rows,
  dy: Rows,
  dtype: Dtype,
  signal: AbortSignal,
): Promise<{ y: number[]; own: number[] }> {
  const { opType } = target.setup;
  // An op may have further inputs; `first` gives them no gradient.
  const body = { definition: { expression: "first(default)" }, opType, values: values(target.setup, x, dy, dtype) };
  const answer = await sample(body, signal);
  return { y: numbers(answer.outputs?.["y"]), own: numbers(answer.gradients?.["dx"]) };
}

/** Runs the rule on many numbers in one call. */
export async function sampleGradient(
  target: Target,
  x: Rows,
  dy: Rows,
  dtype: Dtype,
  signal: AbortSignal,
): Promise<number[]> {
  const { source, setup, params } = target;
  const given = values(setup, x, dy, dtype);
  if (setup.isStep) given["y"] = tensor(step(x), dtype);
  const body = {
    ...source,
    values: given,
    params: Object.fromEntries(Object.entries(params).map(([name, value]) => [name, encodeNumber(value)])),
    ...(setup.opType ? { opType: setup.opType } : {}),
  };
  const answer = await sample(body, signal);
  const dx = answer.gradients?.["dx"];
  if (!dx) throw new Error("The rule gives no gradient to the first input.");
  return numbers(dx);
}

/**
 * Runs the rule on each number as an input of its own.
 *
 * A number v is the first element of a row [v, 0], whose second element has an upstream gradient of 0: rules that reduce over an
 * example need more than one element.
 */
export class PointSampler {
  /** Undefined until a first batch was compared with a part of it. The registry's "no" may be about further inputs only. */
  private independent: boolean | undefined;

  constructor(
    readonly target: Target,
    perSample: boolean | undefined,
  ) {
    this.independent = perSample || undefined;
  }

  /** True if all numbers fit in one call, because an example's gradient does not depend on the other examples. */
  async isBatchable(signal: AbortSignal): Promise<boolean> {
    if (this.independent === undefined) {
      const x = grid(this.target.setup.low, this.target.setup.high, 9);
      const [all, part] = await Promise.all([this.batch(x, signal), this.batch(x.slice(5), signal)]);
      this.independent = same(all.slice(5), part);
    }
    return this.independent;
  }

  /** Returns the values for each x and dy; `onlyRule`: without those of the op. */
  async at(x: number[], dy: number[], signal: AbortSignal, { onlyRule = false } = {}): Promise<Samples> {
    const run = (xs: number[], dys: number[], cancel: AbortSignal): Promise<Samples> =>
      onlyRule
        ? sampleGradient(this.target, rows(xs), rows(dys), "float32", cancel).then((dx) => ({ dx }))
        : sampleRows(this.target, rows(xs), rows(dys), "float32", cancel);
    if (await this.isBatchable(signal)) return run(x, dy, signal);
    // One after the other: other rules need one call, and should not wait for the many calls of this one.
    const points: Samples[] = [];
    for (const [index, value] of x.entries()) points.push(await run([value], [dy[index]!], signal));
    const column = (name: keyof Samples) => points.map((point) => point[name]?.[0] ?? NaN);
    return points[0]?.y ? { dx: column("dx"), y: column("y"), own: column("own") } : { dx: column("dx") };
  }

  private batch(x: number[], signal: AbortSignal): Promise<number[]> {
    return sampleGradient(this.target, rows(x), rows(x.map(() => 1)), "float32", signal);
  }
}

export interface Curve {
  axis: "x" | "dy";
  x: number[];
  dx: number[];
  /** The op's output and own gradient. */
  y?: number[];
  own?: number[];
  /** The gradient for -dy, unless it is just the negative. */
  opposite?: number[];
  /** True if each number needed a call of its own. */
  isPointwise: boolean;
}

/** Computes the curve of a rule over x, or over dy if it depends on dy only. */
export async function sampleCurve(sampler: PointSampler, points: number, signal: AbortSignal): Promise<Curve> {
  const { low, high, overDy } = sampler.target.setup;
  const batchable = await sampler.isBatchable(signal);
  const x = grid(low, high, batchable ? points : Math.round(points / 4));
  if (overDy) {
    const { dx } = await sampler.at(x, x, signal);
    return { axis: "dy", x, dx, isPointwise: !batchable };
  }
  const [samples, opposite] = await Promise.all([
    sampler.at(
      x,
      x.map(() => 1),
      signal,
    ),
    sampler.at(
      x,
      x.map(() => -1),
      signal,
      { onlyRule: true },
    ),
  ]);
  const negative = opposite.dx.every((value, index) => close(value, -samples.dx[index]!));
  return { axis: "x", x, ...samples, ...(negative ? {} : { opposite: opposite.dx }), isPointwise: !batchable };
}

/** Returns `count` equally spaced numbers. */
export function grid(low: number, high: number, count: number): number[] {
  return Array.from({ length: count }, (_, index) =>
    Number((low + ((high - low) * index) / (count - 1)).toPrecision(12)),
  );
}

/** Tells whether two lists have equal numbers up to float32's rounding. */
export function same(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((value, index) => close(value, b[index]!));
}

function close(a: number, b: number): boolean {
  return Object.is(a, b) || a === b || Math.abs(a - b) <= 1e-6 + 1e-4 * Math.abs(b);
}

function rows(x: number[]): number[][] {
  return x.map((value) => [value, 0]);
}

function step(x: Rows): Rows {
  const at = (value: number) => (value > 0 ? 1 : 0);
  return x.map((item: number | number[]) => (Array.isArray(item) ? item.map(at) : at(item))) as Rows;
}

function firsts(x: Rows): number[] {
  return x.map((item) => (Array.isArray(item) ? item[0]! : item));
}

function values(setup: Setup, x: Rows, dy: Rows, dtype: Dtype): Record<string, unknown> {
  const alike = (value: number) =>
    tensor(x.map((item) => (Array.isArray(item) ? item.map(() => value) : value)) as Rows, dtype);
  const others = setup.others.map((value, index) => [
    `x${index + 1}`,
    setup.othersLikeX ? alike(value) : { dtype, values: encodeNumber(value) },
  ]);
  return { x: tensor(x, dtype), dy: tensor(dy, dtype), ...Object.fromEntries(others) };
}

function tensor(x: Rows, dtype: Dtype): unknown {
  return { dtype, values: x.map((item) => (Array.isArray(item) ? item.map(encodeNumber) : encodeNumber(item))) };
}

/** Returns the first element of each row. */
function numbers(found: Tensor | null | undefined): number[] {
  const first = (item: NestedNumbers): number => (Array.isArray(item) ? first(item[0] ?? NaN) : decodeNumber(item));
  return Array.isArray(found?.values) ? found.values.map(first) : [];
}

async function sample(body: unknown, signal: AbortSignal): Promise<SampleAnswer> {
  if (running >= MAX_CALLS) await new Promise<void>((resolve) => waiting.push(resolve));
  running += 1;
  try {
    signal.throwIfAborted();
    return await call<SampleAnswer>("POST", "v1/rules:sample", { body, signal });
  } finally {
    running -= 1;
    waiting.shift()?.();
  }
}
