// Tensors: an element type, a shape, and the elements in row-major order.

import { DTYPES, LAYOUTS, dtypeFromArray, isDType } from "./dtypes.js";
import type { DataOf, DType, NumericDType, TypedArray } from "./dtypes.js";
import { invalidTensor } from "./errors.js";
import { bfloat16Bits, bfloat16Value, float16Bits, float16Value } from "./float16.js";

/** A complex number in nested arrays. */
export interface Complex {
  readonly re: number;
  readonly im: number;
}

/** One element in nested arrays. */
export type Scalar = number | bigint | boolean | string | Complex | Uint8Array;

/** Elements in nested plain arrays of equal lengths. */
export type Nested = Scalar | readonly Nested[];

/** Values that can be converted to a tensor. */
export type TensorLike = Tensor | TypedArray | Nested;

const utf8 = new TextDecoder("utf-8", { fatal: true });
const toUtf8 = new TextEncoder();

/** A dense tensor. `data` is row-major; complex elements are two entries each (real, imaginary). */
export class Tensor<D extends DType = DType> {
  /** Wraps `data` without a copy. Throws INVALID_TENSOR if its length does not match the shape. */
  constructor(
    readonly dtype: D,
    readonly shape: readonly number[],
    readonly data: DataOf<D>,
  ) {
    for (const size of shape) {
      if (!Number.isSafeInteger(size) || size < 0) {
        throw invalidTensor(`Shape [${shape.join(", ")}] has the dimension ${size}; dimensions are integers from 0.`);
      }
    }
    const wanted = this.size * (dtype === "string" ? 1 : LAYOUTS[dtype as NumericDType].parts);
    if (data.length !== wanted) {
      throw invalidTensor(
        `A ${dtype} tensor of shape [${shape.join(", ")}] takes ${wanted} entries, but its data has ${data.length}.`,
      );
    }
  }

  /** Number of elements. */
  get size(): number {
    return this.shape.reduce((product, size) => product * size, 1);
  }

  /**
   * Returns the elements as float32; for complex types real and imaginary parts alternate. Throws INVALID_TENSOR for
   * strings.
   */
  toFloat32(): Float32Array {
    if (this.data instanceof Float32Array) return this.data;
    const values = this.entries();
    const result = new Float32Array(values.length);
    for (let i = 0; i < result.length; i++) result[i] = Number(values[i]);
    return result;
  }

  /**
   * Returns the elements of a string tensor, decoded as UTF-8. Throws INVALID_TENSOR for other types and invalid
   * UTF-8.
   */
  strings(): string[] {
    if (this.dtype !== "string") throw invalidTensor(`strings() is for string tensors; this one is ${this.dtype}.`);
    return (this.data as Uint8Array[]).map((bytes, index) => {
      try {
        return utf8.decode(bytes);
      } catch {
        throw invalidTensor(`Element ${index} is not UTF-8; take its bytes from \`data\`.`);
      }
    });
  }

  /**
   * Returns the elements as nested arrays, or the element of a scalar. 16-bit floats are numbers, strings are bytes.
   */
  toArray(): Nested {
    const values = this.entries();
    if (this.dtype === "complex64" || this.dtype === "complex128") {
      const parts = values as number[];
      return nest(
        Array.from({ length: this.size }, (_, i) => ({ re: parts[2 * i]!, im: parts[2 * i + 1]! })),
        this.shape,
      );
    }
    return nest(values, this.shape);
  }

  private entries(): (number | bigint | boolean | Uint8Array)[] {
    const { dtype, data } = this as Tensor;
    if (dtype === "float16") return Array.from(data as Uint16Array, float16Value);
    if (dtype === "bfloat16") return Array.from(data as Uint16Array, bfloat16Value);
    if (dtype === "bool") return Array.from(data as Uint8Array, (entry) => entry !== 0);
    return Array.from<number | bigint | Uint8Array>(data);
  }
}

/**
 * Makes a tensor.
 *
 * A typed array keeps its element type and is not copied; with `dtype` it may be the storage of a type that has no
 * array of its own (Uint8Array for bool, Uint16Array bits for float16 and bfloat16, Float32Array pairs for complex64).
 * Numbers in nested arrays become float32, bigints int64, booleans bool, strings and Uint8Arrays string, unless `dtype`
 * gives another type. Throws INVALID_TENSOR for a value that the type cannot represent. `shape` defaults to that of the nesting.
 */
export function tensor<D extends DType>(data: TensorLike, options: { dtype: D; shape?: readonly number[] }): Tensor<D>;
export function tensor(data: TensorLike, options?: { dtype?: DType; shape?: readonly number[] }): Tensor;
export function tensor(data: TensorLike, options: { dtype?: DType; shape?: readonly number[] } = {}): Tensor {
  const { dtype, shape } = options;
  if (dtype !== undefined && !isDType(dtype)) {
    throw invalidTensor(`There is no element type ${JSON.stringify(dtype)}; there are ${DTYPES.join(", ")}.`);
  }
  if (data instanceof Tensor) {
    if (dtype !== undefined && dtype !== data.dtype) {
      throw invalidTensor(`The tensor is ${data.dtype}, but ${dtype} was requested; tensors are not converted.`);
    }
    return shape === undefined ? data : new Tensor(data.dtype, shape, data.data);
  }
  if (isTypedArray(data) && !(dtype === "string" && data instanceof Uint8Array)) return fromArray(data, dtype, shape);
  const scalars: Scalar[] = [];
  const nesting = flatten(data, dtype, scalars, []);
  const type = dtype ?? inferredDType(scalars);
  const values = type === "string" ? scalars.map(toBytes) : encode(scalars, type);
  return new Tensor(type, shape ?? nesting, values);
}

function isTypedArray(value: unknown): value is TypedArray {
  return ArrayBuffer.isView(value) && !(value instanceof DataView);
}

function fromArray(data: TypedArray, dtype: DType | undefined, shape: readonly number[] | undefined): Tensor {
  const type = dtype ?? dtypeFromArray(data);
  if (type === "string")
    throw invalidTensor(`A string tensor is made of strings or Uint8Arrays, not of a ${arrayTypeName(data)}.`);
  const { array, parts } = LAYOUTS[type];
  const own = data instanceof Uint8ClampedArray ? new Uint8Array(data.buffer, data.byteOffset, data.length) : data;
  if (!(own instanceof array)) {
    throw invalidTensor(`A ${type} tensor is held by a ${array.name}, not by a ${arrayTypeName(data)}.`);
  }
  return new Tensor<DType>(type, shape ?? [data.length / parts], own as DataOf<DType>);
}

function arrayTypeName(data: TypedArray): string {
  return data.constructor.name;
}

/** Appends the elements of `data` to `scalars` and returns the shape of the nesting. */
function flatten(data: Nested, dtype: DType | undefined, scalars: Scalar[], path: number[]): number[] {
  if (!Array.isArray(data)) {
    if (isTypedArray(data) && !(data instanceof Uint8Array && (dtype ?? "string") === "string")) {
      throw invalidTensor(
        `[${path.join("][")}] is a ${arrayTypeName(data)}; rows are plain arrays, or give all elements as one typed array ` +
          "and their `shape`.",
      );
    }
    scalars.push(data as Scalar);
    return [];
  }
  let shape: number[] | undefined;
  for (const [index, entry] of (data as readonly Nested[]).entries()) {
    const inner = flatten(entry, dtype, scalars, [...path, index]);
    if (shape && inner.join() !== shape.join()) {
      throw invalidTensor(
        `Nested arrays must be of equal shape: [${[...path, index].join("][")}] has shape [${inner.join(", ")}], ` +
          `but those before it have [${shape.join(", ")}].`,
      );
    }
    shape ??= inner;
  }
  return [data.length, ...(shape ?? [])];
}

function inferredDType(scalars: readonly Scalar[]): DType {
  const first = scalars[0];
  if (first === undefined || typeof first === "number") return "float32";
  if (typeof first === "bigint") return "int64";
  if (typeof first === "boolean") return "bool";
  if (typeof first === "string" || first instanceof Uint8Array) return "string";
  return "complex64";
}

function toBytes(value: Scalar, index: number): Uint8Array {
  if (typeof value === "string") return toUtf8.encode(value);
  if (value instanceof Uint8Array) return value;
  throw mismatch(value, index, "string");
}

function encode(scalars: readonly Scalar[], dtype: NumericDType): DataOf<DType> {
  const { array, parts, kind } = LAYOUTS[dtype];
  const out = new array(scalars.length * parts);
  if (kind === "bits") throw invalidTensor(`A ${dtype} tensor is made of a Uint8Array of its bits, not of numbers.`);
  for (const [index, value] of scalars.entries()) {
    if (kind === "complex") {
      const { re, im } = toComplex(value, index, dtype);
      out[2 * index] = re;
      out[2 * index + 1] = im;
    } else if (kind === "bool") {
      if (typeof value !== "boolean") throw mismatch(value, index, dtype);
      out[index] = Number(value);
    } else if (kind === "int" || kind === "bigint") {
      const whole = toInteger(value, index, dtype);
      out[index] = kind === "bigint" ? whole : Number(whole);
    } else {
      if (typeof value !== "number") throw mismatch(value, index, dtype);
      out[index] = dtype === "float16" ? float16Bits(value) : dtype === "bfloat16" ? bfloat16Bits(value) : value;
    }
  }
  return out;
}

function toInteger(value: Scalar, index: number, dtype: NumericDType): bigint {
  const range = LAYOUTS[dtype].range!;
  // Above 2^53 a number does not represent every integer.
  if (typeof value === "number" ? !Number.isSafeInteger(value) : typeof value !== "bigint") {
    throw mismatch(value, index, dtype);
  }
  const whole = BigInt(value as number | bigint);
  if (whole < range[0] || whole > range[1]) throw mismatch(value, index, dtype);
  return whole;
}

function toComplex(value: Scalar, index: number, dtype: NumericDType): Complex {
  if (typeof value === "number") return { re: value, im: 0 };
  if (typeof value === "object" && value !== null && "re" in value && "im" in value) return value;
  throw mismatch(value, index, dtype);
}

function mismatch(value: unknown, index: number, dtype: DType): Error {
  const formatValue =
    typeof value === "bigint" ? `${value}n` : typeof value === "string" ? JSON.stringify(value) : String(value);
  return invalidTensor(`Element ${index} is ${formatValue}, which is no ${dtype}.`);
}

function nest(values: readonly Nested[], shape: readonly number[]): Nested {
  if (shape.length === 0) return values[0]!;
  const [length, ...rest] = shape;
  const step = rest.reduce((product, size) => product * size, 1);
  return Array.from({ length: length! }, (_, i) => nest(values.slice(i * step, (i + 1) * step), rest));
}
