import type { Gradient, Nested, Tensor } from "./types";

/** Numbers of a tensor in row-major order, with its shape. */
export interface Numbers {
  dtype: string;
  shape: number[];
  values: Float64Array;
  /** Integers that no double is exactly, by their index, as text. */
  large?: Map<number, string>;
}

/** What is known of one tensor in one column: its numbers, or the reason why there are none. */
export type Value = Numbers | { missing: string };

/** Returns the numbers of a tensor or gradient. Complex numbers become their absolute values, and the dtype says so. */
export function toValue(gradient: Gradient | undefined): Value {
  if (!gradient) return { missing: "not in the answer" };
  if ("unconnected" in gradient) return { missing: "no gradient: not connected" };
  if ("notDifferentiable" in gradient) return { missing: "no gradient: not differentiable" };
  if ("sparse" in gradient) return sparseNumbers(gradient.sparse);
  if (gradient.dtype === "string") return { missing: "text" };
  return tensorNumbers(gradient);
}

function tensorNumbers(tensor: Tensor): Numbers {
  const size = tensor.shape.reduce((product, length) => product * length, 1);
  const values = new Float64Array(size);
  const large = new Map<number, string>();
  let index = 0;
  const isComplex = tensor.dtype.startsWith("complex");
  const walk = (nested: Nested, depth: number) => {
    if (depth === tensor.shape.length) {
      values[index] = isComplex && Array.isArray(nested) ? Math.hypot(...nested.map(Number)) : Number(nested);
      if (typeof nested === "string" && isInteger(tensor.dtype) && !Number.isSafeInteger(values[index])) {
        large.set(index, nested);
      }
      index += 1;
    } else for (const inner of nested as Nested[]) walk(inner, depth + 1);
  };
  walk(tensor.values, 0);
  const dtype = isComplex ? `${tensor.dtype}, absolute values` : tensor.dtype;
  return { dtype, shape: tensor.shape, values, ...(large.size ? { large } : {}) };
}

/** Tells whether a dtype is an integer type. */
export function isInteger(dtype: string | undefined): boolean {
  return /^u?int\d+$/.test(dtype ?? "");
}

function sparseNumbers({
  values,
  indices,
  denseShape,
}: {
  values: Tensor;
  indices: Tensor;
  denseShape: Tensor;
}): Numbers {
  const slices = tensorNumbers(values);
  const shape = [...tensorNumbers(denseShape).values];
  const width = shape.slice(1).reduce((product, length) => product * length, 1);
  const dense = new Float64Array(width * (shape[0] ?? 1));
  tensorNumbers(indices).values.forEach((row, slice) => {
    for (let at = 0; at < width; at += 1) dense[row * width + at]! += slices.values[slice * width + at]!;
  });
  return { dtype: slices.dtype, shape, values: dense };
}

export interface Summary {
  count: number;
  least: number;
  most: number;
  mean: number;
  /** Euclidean norm. */
  norm: number;
  zeros: number;
  notFinite: number;
}

/** Returns figures about the finite numbers of a tensor. */
export function summary(values: Float64Array): Summary {
  let [least, most, sum, squares, zeros, finite] = [Infinity, -Infinity, 0, 0, 0, 0];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    finite += 1;
    least = Math.min(least, value);
    most = Math.max(most, value);
    sum += value;
    squares += value * value;
    zeros += value === 0 ? 1 : 0;
  }
  const mean = finite ? sum / finite : NaN;
  const found = { least: finite ? least : NaN, most: finite ? most : NaN, mean, norm: Math.sqrt(squares), zeros };
  return { count: values.length, ...found, notFinite: values.length - finite };
}

/** Returns the least and the greatest of all finite numbers; NaN if there are none. */
export function commonRange(all: Numbers[]): Range {
  const known = all.map(({ values }) => summary(values)).filter(({ least }) => Number.isFinite(least));
  if (!known.length) return { least: NaN, most: NaN };
  return { least: Math.min(...known.map(({ least }) => least)), most: Math.max(...known.map(({ most }) => most)) };
}

export interface Range {
  least: number;
  most: number;
}

/** Formats a share of numbers; only none is 0 % and only all are 100 %. */
export function shareText(part: number, all: number): string {
  if (!all) return "–";
  const percent = Math.round((100 * part) / all);
  if (percent === 0 && part) return "< 1 %";
  if (percent === 100 && part < all) return "> 99 %";
  return `${percent} %`;
}

/** Returns counts of the finite numbers in equal intervals from `least` to `most`. */
export function histogram(values: Float64Array, least: number, most: number, bins: number): number[] {
  const counts = new Array<number>(bins).fill(0);
  const width = (most - least) / bins || 1;
  for (const value of values) {
    if (Number.isFinite(value)) counts[Math.max(0, Math.min(bins - 1, Math.floor((value - least) / width)))]! += 1;
  }
  return counts;
}

export interface Difference {
  /** Largest absolute difference. */
  most: number;
  /** Cosine of the angle between both; NaN if one is zero. */
  cosine: number;
}

/** Compares two tensors of equal shape; undefined if the shapes differ or the signs are lost (complex numbers). */
export function difference(one: Numbers, other: Numbers): Difference | undefined {
  if (one.dtype.startsWith("complex") || other.dtype.startsWith("complex")) return undefined;
  if (one.values.length !== other.values.length || one.shape.join() !== other.shape.join()) return undefined;
  let [most, product, first, second] = [0, 0, 0, 0];
  one.values.forEach((value, index) => {
    const to = other.values[index]!;
    // Equal infinities and equal NaNs do not differ.
    if (!Object.is(value, to) && value !== to)
      most = Math.max(most, Number.isNaN(value - to) ? Infinity : Math.abs(value - to));
    product += value * to;
    first += value * value;
    second += to * to;
  });
  return { most, cosine: product / (Math.sqrt(first) * Math.sqrt(second)) };
}

/** Returns height, width and channels if a tensor can be shown as images; undefined if not. */
export function imageShape(
  shape: number[],
): { count: number; height: number; width: number; channels: number } | undefined {
  const channels = shape.at(-1) === 1 || shape.at(-1) === 3 ? shape.at(-1)! : 0;
  const sizes = channels ? shape.slice(0, -1) : shape;
  if (sizes.length < 2 || sizes.length > 3) return undefined;
  const [height, width] = sizes.slice(-2) as [number, number];
  const count = sizes.length === 3 ? sizes[0]! : 1;
  return height >= 8 && width >= 8 && count ? { count, height, width, channels: channels || 1 } : undefined;
}

/** Tells whether a tensor is shown in its own colours: three channels, and all numbers of the range from 0 to 1. */
export function isColour(shape: number[], { least, most }: Range): boolean {
  return imageShape(shape)?.channels === 3 && least >= 0 && most <= 1;
}

/**
 * Returns the pixels of the first image of a tensor, four bytes each.
 *
 * Colours if `isColour`. Else, means over the channels: from the largest absolute value of the range, negative, to the
 * same, positive, they go from blue over white to orange.
 *
 * @param range Of all images that are shown side by side.
 */
export function pixels({ values, shape }: Numbers, range: Range): Uint8ClampedArray<ArrayBuffer> {
  const inColour = isColour(shape, range);
  const most = Math.max(Math.abs(range.least), Math.abs(range.most));
  const { height, width, channels } = imageShape(shape)!;
  const bytes = new Uint8ClampedArray(4 * height * width);
  for (let at = 0; at < height * width; at += 1) {
    const own = Array.from({ length: channels }, (_, channel) => values[at * channels + channel]!);
    const mean = own.reduce((sum, value) => sum + value, 0) / channels;
    bytes.set(inColour ? own.map((value) => 255 * value) : diverging(most ? mean / most : 0), 4 * at);
    bytes[4 * at + 3] = 255;
  }
  return bytes;
}

const BLUE = [0, 114, 178];
const ORANGE = [213, 94, 0];

/** Returns the colour of a number from −1 to 1: blue, white, orange. */
export function diverging(value: number): number[] {
  if (!Number.isFinite(value)) return [0, 0, 0];
  const end = value < 0 ? BLUE : ORANGE;
  const share = Math.min(1, Math.abs(value));
  return end.map((channel) => 255 + (channel - 255) * share);
}

/** Formats an element of a tensor; integers have all their digits. */
export function elementText({ values, dtype, large }: Numbers, index: number): string {
  return large?.get(index)?.replace("-", "−") ?? numberOf(dtype, values[index]!);
}

/** Formats a number of a tensor; integers that a double holds exactly have all their digits. */
export function numberOf(dtype: string, value: number): string {
  return isInteger(dtype) && Number.isSafeInteger(value) ? String(value).replace("-", "−") : numberText(value);
}

/** Formats a number for people, with four digits. */
export function numberText(value: number): string {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "−inf";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replaceAll("-", "−");
}
