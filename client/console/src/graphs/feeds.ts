import { isInteger } from "./results";
import type { Nested, TensorSpec } from "./types";

export type FeedKind = "random" | "values" | "image";

/** Where the value of a placeholder comes from. */
export interface Feed {
  kind: FeedKind;
  /** Shape, with sizes separated by commas; unknown dimensions are filled in. */
  shape: string;
  seed: number;
  /** JSON of a number or nested lists. */
  text: string;
  image?: ImageBitmap | undefined;
  /** Why the chosen file is no image. */
  imageError?: string | undefined;
}

/** A string or a number of JSON. */
const JSON_TOKEN = /"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g;

/** A value that cannot be sent; the message says why. */
export class FeedError extends Error {}

/** Returns the feed to start with: random numbers, four examples. */
export function initialFeed(spec: TensorSpec): Feed {
  const shape = (spec.shape ?? []).map((size) => size ?? 4);
  return { kind: "random", shape: shape.join(", "), seed: 1, text: "" };
}

/** Reads a shape such as `4, 28, 28`. Throws FeedError. */
export function parseShape(text: string): number[] {
  const parts = text.split(/[\s,×x]+/).filter(Boolean);
  const sizes = parts.map(Number);
  if (sizes.some((size) => !Number.isInteger(size) || size < 0)) {
    throw new FeedError(`“${text}” is not a shape: write sizes separated by commas, for example 4, 28, 28.`);
  }
  if (sizes.reduce((product, size) => product * size, 1) > 4_000_000) {
    throw new FeedError("The page sends at most 4 million numbers per tensor; use a client for more.");
  }
  return sizes;
}

/** Returns a function that gives the same numbers in [0, 1) for the same seed (mulberry32). */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/**
 * Returns random values: standard normal for floats, pairs of those for complex numbers, true or false for bool, 0 to 9
 * for integers. Throws FeedError for text.
 */
export function randomValues(shape: number[], dtype: string, seed: number): Nested {
  const next = random(seed);
  // Box and Muller: two uniform numbers give a normal one.
  const normal = () => Number((Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next())).toFixed(4));
  const one = () => {
    if (dtype === "string") throw new FeedError("Random values are numbers: type the texts.");
    if (dtype === "bool") return next() < 0.5;
    if (/^u?int/.test(dtype)) return Math.floor(next() * 10);
    return dtype.startsWith("complex") ? [normal(), normal()] : normal();
  };
  return fill(shape, one);
}

/** Returns nested lists of a shape, filled in row-major order. */
export function fill(shape: number[], next: () => Nested): Nested {
  const [size, ...rest] = shape;
  if (size === undefined) return next();
  return Array.from({ length: size }, () => fill(rest, next));
}

/**
 * Returns the pixels of an image in the given shape: from 0 to 1 for floats, from 0 to 255 for integers.
 *
 * @param rgba Bytes of height × width pixels with four channels.
 */
export function imageValues(rgba: Uint8ClampedArray, shape: number[], dtype: string): Nested {
  const { batch, height, width, channels } = imageSize(shape);
  const isInteger = /^u?int(16|32|64)$|^uint8$/.test(dtype);
  if (!isInteger && !/^b?float/.test(dtype)) throw new FeedError(`An image cannot be a value of ${dtype}.`);
  const at = (row: number, column: number) => 4 * (row * width + column);
  const pixel = (index: number): number[] => {
    const [red, green, blue] = [rgba[index]!, rgba[index + 1]!, rgba[index + 2]!];
    // Rec. 601, as TensorFlow's rgb_to_grayscale.
    return channels === 1 ? [0.2989 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
  };
  const rounded = (values: number[]) =>
    values.map((value) => (isInteger ? Math.round(value) : Number((value / 255).toFixed(4))));
  const isFlat = shape.length === 2 || (shape.length === 3 && shape[2] !== 1 && shape[2] !== 3);
  const image = Array.from({ length: height }, (_, row) =>
    Array.from({ length: width }, (_, column) => {
      const values = rounded(pixel(at(row, column)));
      return isFlat ? values[0]! : values;
    }),
  );
  return shape.length === 4 || (isFlat && shape.length === 3) ? Array.from({ length: batch }, () => image) : image;
}

/** Returns how an image fills a shape: [batch, height, width, channels], [height, width, channels] or [height, width]. */
export function imageSize(shape: number[]): { batch: number; height: number; width: number; channels: number } {
  const channels = shape.at(-1);
  if (shape.length === 4 && (channels === 1 || channels === 3)) {
    return { batch: shape[0]!, height: shape[1]!, width: shape[2]!, channels };
  }
  if (shape.length === 3 && (channels === 1 || channels === 3)) {
    return { batch: 1, height: shape[0]!, width: shape[1]!, channels };
  }
  if (shape.length === 3) return { batch: shape[0]!, height: shape[1]!, width: shape[2]!, channels: 1 };
  if (shape.length === 2) return { batch: 1, height: shape[0]!, width: shape[1]!, channels: 1 };
  throw new FeedError(
    "An image needs a shape [batch, height, width, channels] with 1 or 3 channels, or [height, width].",
  );
}

/** Reads typed JSON. Integers of a tensor of integers that no double is exactly become text, which the gateway accepts. */
function parseValues(text: string, dtype: string | undefined): Nested {
  const found = JSON.parse(text) as Nested;
  if (!isInteger(dtype)) return found;
  const exact = text.replace(JSON_TOKEN, (token) =>
    /^-?\d+$/.test(token) && !Number.isSafeInteger(Number(token)) ? `"${token}"` : token,
  );
  return JSON.parse(exact) as Nested;
}

/** Returns the value to send for a placeholder. Throws FeedError. */
export function feedValue(spec: TensorSpec, feed: Feed): Nested {
  if (feed.kind === "values") {
    try {
      return parseValues(feed.text, spec.dtype);
    } catch {
      throw new FeedError(
        `The value of ${spec.name} is not JSON: write a number or nested lists, for example [[1, 2], [3, 4]].`,
      );
    }
  }
  const shape = parseShape(feed.shape);
  if (feed.kind === "random") return randomValues(shape, spec.dtype ?? "float32", feed.seed);
  if (!feed.image) throw new FeedError(`Choose an image for ${spec.name}.`);
  const { width, height } = imageSize(shape);
  if (!width || !height) throw new FeedError(`The image for ${spec.name} has no pixels in the shape ${feed.shape}.`);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true })!;
  context.drawImage(feed.image, 0, 0, width, height);
  return imageValues(context.getImageData(0, 0, width, height).data, shape, spec.dtype ?? "float32");
}
