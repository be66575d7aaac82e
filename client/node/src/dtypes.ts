// Element types: name, TensorFlow's number, and the typed array that holds the elements.

import { Dt } from "./gen/gradrule/v1/tensor_pb.js";

/** Constructor of a typed array. */
interface ArrayConstructor<A> {
  new (length: number): A;
  new (buffer: ArrayBufferLike, byteOffset: number, length: number): A;
  readonly BYTES_PER_ELEMENT: number;
}

interface Layout<A> {
  /** Number on the wire. */
  readonly dt: Dt;
  /** Class of the array that holds the elements. */
  readonly array: ArrayConstructor<A>;
  /** Array entries per element: 2 for complex (real, imaginary), else 1. */
  readonly parts: 1 | 2;
  /** How JavaScript values of this type are represented. */
  readonly kind: "float" | "int" | "bigint" | "bool" | "half" | "complex" | "bits";
  /** Minimum and maximum of an integer type. */
  readonly range?: readonly [bigint, bigint];
}

function layout<A>(dt: Dt, array: ArrayConstructor<A>, kind: Layout<A>["kind"], range?: [bigint, bigint]): Layout<A> {
  return { dt, array, parts: kind === "complex" ? 2 : 1, kind, ...(range ? { range } : {}) };
}

const signed = (bits: bigint): [bigint, bigint] => [-(1n << (bits - 1n)), (1n << (bits - 1n)) - 1n];
const unsigned = (bits: bigint): [bigint, bigint] => [0n, (1n << bits) - 1n];

/** Memory layout of each numeric type. Strings have no fixed size and are not included. */
export const LAYOUTS = {
  float32: layout(Dt.FLOAT, Float32Array, "float"),
  float64: layout(Dt.DOUBLE, Float64Array, "float"),
  float16: layout(Dt.HALF, Uint16Array, "half"),
  bfloat16: layout(Dt.BFLOAT16, Uint16Array, "half"),
  int8: layout(Dt.INT8, Int8Array, "int", signed(8n)),
  int16: layout(Dt.INT16, Int16Array, "int", signed(16n)),
  int32: layout(Dt.INT32, Int32Array, "int", signed(32n)),
  int64: layout(Dt.INT64, BigInt64Array, "bigint", signed(64n)),
  uint8: layout(Dt.UINT8, Uint8Array, "int", unsigned(8n)),
  uint16: layout(Dt.UINT16, Uint16Array, "int", unsigned(16n)),
  uint32: layout(Dt.UINT32, Uint32Array, "int", unsigned(32n)),
  uint64: layout(Dt.UINT64, BigUint64Array, "bigint", unsigned(64n)),
  bool: layout(Dt.BOOL, Uint8Array, "bool"),
  complex64: layout(Dt.COMPLEX64, Float32Array, "complex"),
  complex128: layout(Dt.COMPLEX128, Float64Array, "complex"),
  qint8: layout(Dt.QINT8, Int8Array, "int", signed(8n)),
  quint8: layout(Dt.QUINT8, Uint8Array, "int", unsigned(8n)),
  qint16: layout(Dt.QINT16, Int16Array, "int", signed(16n)),
  quint16: layout(Dt.QUINT16, Uint16Array, "int", unsigned(16n)),
  qint32: layout(Dt.QINT32, Int32Array, "int", signed(32n)),
  float8_e5m2: layout(Dt.FLOAT8_E5M2, Uint8Array, "bits"),
  float8_e4m3fn: layout(Dt.FLOAT8_E4M3FN, Uint8Array, "bits"),
} as const;

export type NumericDType = keyof typeof LAYOUTS;

/** Element type of a tensor, by its name. */
export type DType = NumericDType | "string";

/** Array that holds the elements of a tensor with element type `D`; for strings, one byte array per element. */
export type DataOf<D extends DType> = D extends NumericDType
  ? InstanceType<(typeof LAYOUTS)[D]["array"]>
  : Uint8Array[];

export type TypedArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Int16Array
  | Int32Array
  | BigInt64Array
  | Uint8Array
  | Uint8ClampedArray
  | Uint16Array
  | Uint32Array
  | BigUint64Array;

const BY_NUMBER = new Map<Dt, DType>([[Dt.STRING, "string"]]);
for (const [name, { dt }] of Object.entries(LAYOUTS)) {
  BY_NUMBER.set(dt, name as NumericDType);
}

/** All names of element types. */
export const DTYPES: readonly DType[] = [...BY_NUMBER.values()];

export function isDType(name: unknown): name is DType {
  return typeof name === "string" && (name === "string" || Object.hasOwn(LAYOUTS, name));
}

/** Returns TensorFlow's number of an element type. */
export function dtypeNumber(dtype: DType): Dt {
  return dtype === "string" ? Dt.STRING : LAYOUTS[dtype].dt;
}

/** Returns the name of an element type; undefined for types that this client does not support (resource, variant). */
export function dtypeFromNumber(dt: Dt): DType | undefined {
  return BY_NUMBER.get(dt);
}

/** Returns the default element type of a typed array, which is never bool, float16, bfloat16 or complex. */
export function dtypeFromArray(array: TypedArray): NumericDType {
  if (array instanceof Float32Array) return "float32";
  if (array instanceof Float64Array) return "float64";
  if (array instanceof Int8Array) return "int8";
  if (array instanceof Int16Array) return "int16";
  if (array instanceof Int32Array) return "int32";
  if (array instanceof BigInt64Array) return "int64";
  if (array instanceof Uint16Array) return "uint16";
  if (array instanceof Uint32Array) return "uint32";
  if (array instanceof BigUint64Array) return "uint64";
  return "uint8";
}
