// Packs and unpacks tensors: rounds float32 to bfloat16 and compresses bytes with Zstandard.

import { promisify } from "node:util";
import * as zlib from "node:zlib";

import { create } from "@bufbuild/protobuf";

import { LAYOUTS, dtypeFromNumber } from "./dtypes.js";
import type { NumericDType } from "./dtypes.js";
import { createError, invalidTensor } from "./errors.js";
import type { EvaluateRequest, EvaluateResponse } from "./gen/gradrule/v1/evaluate_pb.js";
import { Compression, Dt, PackedTensorSchema, PackingSchema, TensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import type { PackedTensor, Tensor as TensorMessage } from "./gen/gradrule/v1/tensor_pb.js";
import { Tensor } from "./tensor.js";
import { formatValue } from "./values.js";
import { tensorMessage, readTensor } from "./wire.js";

/** Compression of tensors for all calls of a client (`connect`) or for one call. Default: none. */
export interface Transfer {
  /**
   * `zstd`: compresses tensors of 1 KiB or more, in both directions, if that makes them smaller. Requires Node 22.15 or newer;
   * UNSUPPORTED otherwise. `gzip`: gRPC compresses all requests, and answers of up to 256 KiB. It applies to a connection, so
   * only `connect` accepts it, and takes ten times the processor time.
   */
  readonly compression?: "gzip" | "zstd";
  /**
   * `bfloat16`: float32 tensors are sent as bfloat16, in both directions, rounded to nearest, ties to even. This keeps 8 of 24
   * bits of precision and halves the size. The program still computes in float32. Other element types do not change.
   */
  readonly wireDtype?: "bfloat16";
  /** True: float32 results that were sent as bfloat16 are returned as bfloat16 tensors. Default: false. */
  readonly keepWireDtype?: boolean;
}

type Code = (data: Uint8Array, options: object) => Promise<Buffer>;

const MIN_COMPRESSED_BYTES = 1024;

// Not in the types of the oldest Node version that this client supports.
const { zstdCompress, zstdDecompress, constants } = zlib as unknown as {
  zstdCompress?: Parameters<typeof promisify>[0];
  zstdDecompress?: Parameters<typeof promisify>[0];
  constants: Record<string, number>;
};
const ZSTD =
  zstdCompress && zstdDecompress
    ? { compress: promisify(zstdCompress) as Code, decompress: promisify(zstdDecompress) as Code }
    : undefined;

/** Throws INVALID_PARAM for an unknown value, and UNSUPPORTED if this version of Node has no Zstandard. */
export function checkTransfer({ compression, wireDtype }: Transfer): void {
  if (compression !== undefined && compression !== "gzip" && compression !== "zstd") {
    throw createError("INVALID_PARAM", `compression is "gzip" or "zstd", not ${formatValue(compression)}.`);
  }
  if (wireDtype !== undefined && wireDtype !== "bfloat16") {
    throw createError("INVALID_PARAM", `wireDtype is "bfloat16", not ${formatValue(wireDtype)}.`);
  }
  if (compression === "zstd" && ZSTD === undefined) {
    throw createError("UNSUPPORTED", `zstd needs Node 22.15 or newer; this is ${process.version}.`);
  }
}

/** Checks like `checkTransfer`. Also throws INVALID_PARAM for values that only a connection can have. */
export function checkCallTransfer(transfer: Transfer): void {
  checkTransfer(transfer);
  if (transfer.compression === "gzip") {
    throw createError(
      "INVALID_PARAM",
      'gzip compresses a whole connection: give it to connect; one call can have compression: "zstd".',
    );
  }
}

/** Returns whether tensors are packed one by one. */
export function packsTensors({ compression, wireDtype }: Transfer): boolean {
  return compression === "zstd" || wireDtype !== undefined;
}

/** Packs the tensors of a request in place and requests a packed answer. */
export async function packRequest(request: EvaluateRequest, transfer: Transfer): Promise<void> {
  for (const { value } of [...request.feeds, ...request.gradYs]) {
    if (value?.source.case === "inlineTensor") value.source.value = await packed(value.source.value, transfer);
  }
  request.answerPacking = create(PackingSchema, {
    compression: transfer.compression === "zstd" ? Compression.ZSTD : Compression.UNSPECIFIED,
    float32AsBfloat16: transfer.wireDtype === "bfloat16",
  });
}

/** Unpacks the outputs and gradients of an answer in place. Throws INVALID_TENSOR. */
export async function unpackResponse(response: EvaluateResponse, { keepWireDtype = false }: Transfer): Promise<void> {
  const unpack = (message: TensorMessage): Promise<TensorMessage> => unpacked(message, keepWireDtype);
  for (const { value } of response.outputs) {
    if (value?.source.case === "inlineTensor") value.source.value = await unpack(value.source.value);
  }
  for (const { value } of response.gradients) {
    if (value.case === "dense") {
      value.value = await unpack(value.value);
    } else if (value.case === "sparse") {
      for (const part of ["values", "indices", "denseShape"] as const) {
        const message = value.value[part];
        if (message !== undefined) value.value[part] = await unpack(message);
      }
    }
  }
}

/** Returns the message in packed form, or the message itself if packing does not make it smaller. */
async function packed(message: TensorMessage, transfer: Transfer): Promise<TensorMessage> {
  // String tensors and empty tensors have no content to pack.
  if (message.tensorContent.length === 0) return message;
  const { dtype, tensorShape: shape } = message;
  let content = message.tensorContent;
  let contentDtype = Dt.UNSPECIFIED;
  if (transfer.wireDtype === "bfloat16" && dtype === Dt.FLOAT) {
    const value = readTensor(message);
    content = tensorMessage(new Tensor("bfloat16", value.shape, roundedBits(value.data as Float32Array))).tensorContent;
    contentDtype = Dt.BFLOAT16;
  }
  let compression = Compression.UNSPECIFIED;
  if (transfer.compression === "zstd" && ZSTD !== undefined && content.length >= MIN_COMPRESSED_BYTES) {
    const smaller = await ZSTD.compress(content, {
      params: { [constants["ZSTD_c_compressionLevel"]!]: 1 },
      // The server accepts only frames whose header holds the content size.
      pledgedSrcSize: content.length,
    });
    if (smaller.length < content.length) {
      content = smaller;
      compression = Compression.ZSTD;
    }
  }
  if (contentDtype === Dt.UNSPECIFIED && compression === Compression.UNSPECIFIED) return message;
  return create(TensorSchema, {
    packed: create(PackedTensorSchema, { dtype, shape, contentDtype, compression, content }),
  });
}

async function unpacked(message: TensorMessage, keep: boolean): Promise<TensorMessage> {
  const { packed: from } = message;
  if (from === undefined) return message;
  const { dtype, shape: tensorShape } = from;
  const stored = from.contentDtype === Dt.UNSPECIFIED ? dtype : from.contentDtype;
  if (stored !== dtype && (dtype !== Dt.FLOAT || stored !== Dt.BFLOAT16)) {
    throw invalidTensor(`The server packed ${Dt[dtype]} as ${Dt[stored]}; this client reads FLOAT packed as BFLOAT16.`);
  }
  const plain = create(TensorSchema, { dtype: stored, tensorShape, tensorContent: await unpackContent(from, stored) });
  if (stored === dtype || keep) return plain;
  const { shape, data } = readTensor(plain);
  return tensorMessage(new Tensor("float32", shape, widened(data as Uint16Array)));
}

async function unpackContent({ compression, content, shape }: PackedTensor, stored: Dt): Promise<Uint8Array> {
  if (compression === Compression.UNSPECIFIED) return content;
  if (compression !== Compression.ZSTD || ZSTD === undefined) {
    throw invalidTensor(
      `The server compressed a tensor as ${Compression[compression]}, which the client did not request.`,
    );
  }
  const { array, parts } = LAYOUTS[dtypeFromNumber(stored) as NumericDType];
  const elements = (shape?.dim ?? []).reduce((product, { size }) => product * Number(size), 1);
  try {
    // Limit the output to the size of the shape, so that malformed content cannot fill the memory.
    return await ZSTD.decompress(content, { maxOutputLength: elements * parts * array.BYTES_PER_ELEMENT });
  } catch (cause) {
    throw invalidTensor(`The server's answer has a tensor that cannot be unpacked: ${(cause as Error).message}`);
  }
}

/** Rounds each element to the nearest bfloat16 (ties to even) and returns its bits. */
function roundedBits(values: Float32Array): Uint16Array<ArrayBuffer> {
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  const rounded = new Uint16Array(values.length);
  for (let i = 0; i < rounded.length; i++) {
    const value = bits[i]!;
    rounded[i] =
      (value & 0x7fffffff) > 0x7f800000
        ? (value >>> 16) | 0x40 // NaN, which rounding could make infinite.
        : (value + 0x7fff + ((value >>> 16) & 1)) >>> 16;
  }
  return rounded;
}

function widened(bits: Uint16Array): Float32Array<ArrayBuffer> {
  const wide = new Uint32Array(bits.length);
  for (let i = 0; i < wide.length; i++) wide[i] = bits[i]! << 16;
  return new Float32Array(wide.buffer);
}
