// Converts tensors to and from protobuf messages.

import { create, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";

import { LAYOUTS, dtypeNumber, dtypeFromNumber } from "./dtypes.js";
import type { DType, DataOf, NumericDType } from "./dtypes.js";
import { invalidTensor } from "./errors.js";
import { EvaluateHeaderSchema, EvaluateRequestSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import type { EvaluateRequest, TensorHeaderSchema } from "./gen/gradrule/v1/evaluate_pb.js";
import { Dt, TensorSchema, TensorShapeSchema } from "./gen/gradrule/v1/tensor_pb.js";
import type {
  NamedTensor,
  NamedTensorSchema,
  SparseTensor,
  Tensor as TensorMessage,
  TensorShape,
  TensorSpec as SpecMessage,
} from "./gen/gradrule/v1/tensor_pb.js";
import { Tensor } from "./tensor.js";

/** Dimensions; null for an unknown dimension. The whole shape is null if the rank is unknown. */
export type Shape = readonly (number | null)[] | null;

/** Name, element type and shape of a tensor, without its value. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: DType;
  readonly shape: Shape;
  /** For inputs: true if calls need not feed it because the graph defines a default. */
  readonly optional: boolean;
}

/** A gradient that is zero except in some slices along axis 0. Slices with the same index are added. */
export class Sparse {
  constructor(
    /** The slices, stacked: shape (n, …). */
    readonly values: Tensor,
    /** Index of each slice along axis 0: int32 or int64, shape (n). */
    readonly indices: Tensor,
    /** Shape of the dense gradient. */
    readonly denseShape: readonly number[],
  ) {}
}

const LITTLE_ENDIAN_HOST = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

/** Returns a copy with the bytes of each entry of `width` bytes in reverse order. */
export function swapBytes(bytes: Uint8Array, width: number): Uint8Array {
  const result = Uint8Array.from(bytes);
  for (let start = 0; start < result.length; start += width) result.subarray(start, start + width).reverse();
  return result;
}

/** Converts a shape to a message. */
export function shapeMessage(shape: Shape): TensorShape {
  if (shape === null) return create(TensorShapeSchema, { unknownRank: true });
  const dim = shape.map((size) => {
    if (size !== null && (!Number.isSafeInteger(size) || size < 0)) {
      throw invalidTensor(`Shape [${shape.join(", ")}] has the dimension ${size}; it is an integer from 0, or null.`);
    }
    return { size: BigInt(size ?? -1) };
  });
  return create(TensorShapeSchema, { dim });
}

/** Reads a shape from a message. A missing message means unknown rank. */
export function readShape(message: TensorShape | undefined): Shape {
  if (message === undefined || message.unknownRank) return null;
  return message.dim.map(({ size }) => (size < 0n ? null : Number(size)));
}

/** Converts a tensor to a message that shares its memory. */
export function tensorMessage(value: Tensor): TensorMessage {
  const message = create(TensorSchema, { dtype: dtypeNumber(value.dtype), tensorShape: shapeMessage(value.shape) });
  if (value.dtype === "string") {
    message.stringVal = value.data as Uint8Array[];
  } else {
    const data = value.data as DataOf<NumericDType>;
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    message.tensorContent = LITTLE_ENDIAN_HOST ? bytes : swapBytes(bytes, data.BYTES_PER_ELEMENT);
  }
  return message;
}

/** Reads a tensor from a message. Shares the message's memory if it is aligned. Throws INVALID_TENSOR. */
export function readTensor(message: TensorMessage): Tensor {
  const dtype = dtypeFromNumber(message.dtype);
  if (dtype === undefined) {
    throw invalidTensor(`This client has no tensors of element type ${Dt[message.dtype] ?? message.dtype}.`);
  }
  const shape = (message.tensorShape?.dim ?? []).map(({ size }) => Number(size));
  if (dtype === "string")
    return new Tensor<DType>(dtype, shape, repeatLastValue(message.stringVal, shape, 1, new Uint8Array()));
  if (message.tensorContent.length > 0) return new Tensor<DType>(dtype, shape, view(message.tensorContent, dtype));
  const { array, parts } = LAYOUTS[dtype];
  const values: (number | bigint | boolean)[] = repeatLastValue(entries(message), shape, parts, 0);
  const out = new array(values.length);
  const big = LAYOUTS[dtype].kind === "bigint";
  for (const [index, value] of values.entries()) out[index] = big ? BigInt(value) : Number(value);
  return new Tensor<DType>(dtype, shape, out as DataOf<DType>);
}

function view(content: Uint8Array, dtype: NumericDType): DataOf<DType> {
  const { array } = LAYOUTS[dtype];
  const width = array.BYTES_PER_ELEMENT;
  if (content.length % width !== 0) {
    throw invalidTensor(`${content.length} bytes are no whole number of ${dtype} elements.`);
  }
  let bytes = LITTLE_ENDIAN_HOST ? content : swapBytes(content, width);
  // A typed array must start at a multiple of its entries' width, but a field can start anywhere in a message.
  if (bytes.byteOffset % width !== 0) bytes = Uint8Array.from(bytes);
  return new array(bytes.buffer, bytes.byteOffset, bytes.length / width);
}

/** Returns the values in the `*_val` field of the element type. */
function entries(message: TensorMessage): readonly (number | bigint | boolean)[] {
  switch (message.dtype) {
    case Dt.FLOAT:
      return message.floatVal;
    case Dt.DOUBLE:
      return message.doubleVal;
    case Dt.HALF:
    case Dt.BFLOAT16:
      return message.halfVal;
    case Dt.INT64:
      return message.int64Val;
    case Dt.UINT32:
      return message.uint32Val;
    case Dt.UINT64:
      return message.uint64Val;
    case Dt.BOOL:
      return message.boolVal;
    case Dt.COMPLEX64:
      return message.scomplexVal;
    case Dt.COMPLEX128:
      return message.dcomplexVal;
    case Dt.FLOAT8_E5M2:
    case Dt.FLOAT8_E4M3FN:
      return [...message.float8Val];
    default:
      return message.intVal;
  }
}

/** Extends `given` to the number of elements of `shape` by repeating its last element (`parts` entries), or `zero`. */
function repeatLastValue<T>(given: readonly T[], shape: readonly number[], parts: number, zero: T): T[] {
  const size = shape.reduce((product, dimension) => product * dimension, parts);
  const last = given.length - parts;
  return Array.from({ length: Math.max(size, given.length) }, (_, i) => given[i] ?? given[last + (i % parts)] ?? zero);
}

/** Converts a tensor and its name to a message. */
export function namedTensor(name: string, value: Tensor): MessageInitShape<typeof NamedTensorSchema> {
  return { name, value: { source: { case: "inlineTensor", value: tensorMessage(value) } } };
}

/** Returns a call of a compiled program as a header, which equal calls have in common, and the contents of its tensors. */
export function withHeader(request: EvaluateRequest): EvaluateRequest {
  if (request.target.case !== "program") return request;
  const contents: Uint8Array[] = [];
  const header = create(EvaluateHeaderSchema, {
    program: request.target.value,
    feeds: request.feeds.map((item) => tensorHeader(item, contents)),
    gradYs: request.gradYs.map((item) => tensorHeader(item, contents)),
    params: request.params,
    ...(request.answerPacking && { answerPacking: request.answerPacking }),
    ...(request.runTimeout && { runTimeout: request.runTimeout }),
  });
  return create(EvaluateRequestSchema, { header: toBinary(EvaluateHeaderSchema, header), contents });
}

/** Returns a tensor without its elements, which are added to `contents`. */
function tensorHeader(
  { name, value }: NamedTensor,
  contents: Uint8Array[],
): MessageInitShape<typeof TensorHeaderSchema> {
  const message = value!.source.value as TensorMessage;
  const { packed, dtype, tensorShape, tensorContent } = message;
  const shape = (packed ? packed.shape : tensorShape)!.dim.map(({ size }) => size);
  if (packed) {
    contents.push(packed.content);
    return { name, dtype: packed.dtype, shape, compression: packed.compression, contentDtype: packed.contentDtype };
  }
  const contentIsTensor = dtype === Dt.STRING;
  contents.push(contentIsTensor ? toBinary(TensorSchema, message) : tensorContent);
  return { name, dtype, shape, contentIsTensor };
}

/** Reads a named tensor; null if it has no value. */
export function readNamedTensor(message: NamedTensor): Tensor | null {
  return message.value?.source.case === "inlineTensor" ? readTensor(message.value.source.value) : null;
}

export function readSparse(message: SparseTensor): Sparse {
  const { values, indices, denseShape } = message;
  if (!values || !indices || !denseShape) throw invalidTensor("A sparse gradient lacks its values, indices or shape.");
  return new Sparse(
    readTensor(values),
    readTensor(indices),
    Array.from(readTensor(denseShape).data as Int32Array, Number),
  );
}

/** Reads tensor specs, by name. */
export function readSpecs(messages: readonly SpecMessage[]): Readonly<Record<string, TensorSpec>> {
  return Object.fromEntries(messages.map((message) => [message.name, readSpec(message)]));
}

function readSpec(message: SpecMessage): TensorSpec {
  const dtype = dtypeFromNumber(message.dtype);
  if (dtype === undefined) {
    throw invalidTensor(
      `${message.name} has element type ${Dt[message.dtype] ?? message.dtype}, which no tensor can have.`,
    );
  }
  return { name: message.name, dtype, shape: readShape(message.shape), optional: message.optional };
}
