// Tensors in fewer bytes: float32 rounded to bfloat16, bytes compressed with Zstandard.

import { promisify } from "node:util";
import * as zlib from "node:zlib";

import { create } from "@bufbuild/protobuf";

import { LAYOUTS, dtypeOfDt } from "./dtypes.js";
import type { NumericDType } from "./dtypes.js";
import { errorOf, invalidTensor } from "./errors.js";
import type { EvaluateRequest, EvaluateResponse } from "./gen/gradrule/v1/evaluate_pb.js";
import { Compression, Dt, PackedTensorSchema, PackingSchema, TensorSchema } from "./gen/gradrule/v1/tensor_pb.js";
import type { PackedTensor, Tensor as TensorMessage } from "./gen/gradrule/v1/tensor_pb.js";
import { Tensor } from "./tensor.js";
import { shown } from "./values.js";
import { tensorMessage, tensorOf } from "./wire.js";

/** How tensors travel: for all calls of a client (`connect`), or for one call. By default they travel as they are. */
export interface Transfer {
  /**
   * `zstd`: the contents of tensors of 1 KiB or more, in both directions, where that makes them smaller. It needs Node 22.15
   * or newer; UNSUPPORTED elsewhere. `gzip`: all requests, and answers of up to 256 KiB, by gRPC; it belongs to a connection,
   * so it is given to `connect`. It takes ten times the processor time.
   */
  readonly compression?: "gzip" | "zstd";
  /**
   * `bfloat16`: float32 tensors travel as bfloat16, in both directions, rounded to nearest, ties to even. That keeps 8 bits
   * of precision of 24 and halves the bytes. The program computes in float32. Other element types travel as they are.
   */
  readonly wireDtype?: "bfloat16";
  /** float32 results that travelled as bfloat16 are given as bfloat16 tensors, not widened. Default: false. */
  readonly keepWireDtype?: boolean;
}

type Code = (data: Uint8Array, options: object) => Promise<Buffer>;

const MIN_COMPRESSED_BYTES = 1024;

// Newer than the types of the oldest Node that this client runs on.
const { zstdCompress, zstdDecompress, constants } = zlib as unknown as {
  zstdCompress?: Parameters<typeof promisify>[0];
  zstdDecompress?: Parameters<typeof promisify>[0];
  constants: Record<string, number>;
};
const ZSTD =
  zstdCompress && zstdDecompress
    ? { compress: promisify(zstdCompress) as Code, decompress: promisify(zstdDecompress) as Code }
    : undefined;

/** Throws INVALID_PARAM for a transfer that there is not, and UNSUPPORTED where this Node lacks Zstandard. */
export function checkTransfer({ compression, wireDtype }: Transfer): void {
  if (compression !== undefined && compression !== "gzip" && compression !== "zstd") {
    throw errorOf("INVALID_PARAM", `compression is "gzip" or "zstd", not ${shown(compression)}.`);
  }
  if (wireDtype !== undefined && wireDtype !== "bfloat16") {
    throw errorOf("INVALID_PARAM", `wireDtype is "bfloat16", not ${shown(wireDtype)}.`);
  }
  if (compression === "zstd" && ZSTD === undefined) {
    throw errorOf("UNSUPPORTED", `zstd needs Node 22.15 or newer; this is ${process.version}.`);
  }
}

/** As `checkTransfer`, and INVALID_PARAM for what only a connection can have. */
export function checkTransferOfCall(transfer: Transfer): void {
  checkTransfer(transfer);
  if (transfer.compression === "gzip") {
    throw errorOf(
      "INVALID_PARAM",
      'gzip compresses a whole connection: give it to connect; one call can have compression: "zstd".',
    );
  }
}

/** Whether tensors are packed one by one. */
export function packs({ compression, wireDtype }: Transfer): boolean {
  return compression === "zstd" || wireDtype !== undefined;
}

/** Packs the tensors of a request, where they lie, and asks for an answer that is packed. */
export async function packRequest(request: EvaluateRequest, transfer: Transfer): Promise<void> {
  for (const { value } of [...request.feeds, ...request.gradYs]) {
    if (value?.source.case === "inlineTensor") value.source.value = await packed(value.source.value, transfer);
  }
  request.answerPacking = create(PackingSchema, {
    compression: transfer.compression === "zstd" ? Compression.ZSTD : Compression.UNSPECIFIED,
    float32AsBfloat16: transfer.wireDtype === "bfloat16",
  });
}

/** Unpacks the outputs and gradients of an answer, where they lie. Throws INVALID_TENSOR. */
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

/** The message in packed form; itself where that is not smaller. */
async function packed(message: TensorMessage, transfer: Transfer): Promise<TensorMessage> {
  // Strings and tensors without elements have none.
  if (message.tensorContent.length === 0) return message;
  const { dtype, tensorShape: shape } = message;
  let content = message.tensorContent;
  let contentDtype = Dt.UNSPECIFIED;
  if (transfer.wireDtype === "bfloat16" && dtype === Dt.FLOAT) {
    const value = tensorOf(message);
    content = tensorMessage(new Tensor("bfloat16", value.shape, roundedBits(value.data as Float32Array))).tensorContent;
    contentDtype = Dt.BFLOAT16;
  }
  let compression = Compression.UNSPECIFIED;
  if (transfer.compression === "zstd" && ZSTD !== undefined && content.length >= MIN_COMPRESSED_BYTES) {
    const smaller = await ZSTD.compress(content, {
      params: { [constants["ZSTD_c_compressionLevel"]!]: 1 },
      // The server takes only frames that tell their content size.
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
  const plain = create(TensorSchema, { dtype: stored, tensorShape, tensorContent: await contentOf(from, stored) });
  if (stored === dtype || keep) return plain;
  const { shape, data } = tensorOf(plain);
  return tensorMessage(new Tensor("float32", shape, widened(data as Uint16Array)));
}

async function contentOf({ compression, content, shape }: PackedTensor, stored: Dt): Promise<Uint8Array> {
  if (compression === Compression.UNSPECIFIED) return content;
  if (compression !== Compression.ZSTD || ZSTD === undefined) {
    throw invalidTensor(`The server compressed a tensor as ${Compression[compression]}, which was not asked for.`);
  }
  const { array, parts } = LAYOUTS[dtypeOfDt(stored) as NumericDType];
  const elements = (shape?.dim ?? []).reduce((product, { size }) => product * Number(size), 1);
  try {
    // What is longer than its shape tells is refused before it fills the memory.
    return await ZSTD.decompress(content, { maxOutputLength: elements * parts * array.BYTES_PER_ELEMENT });
  } catch (cause) {
    throw invalidTensor(`The server's answer has a tensor that cannot be unpacked: ${(cause as Error).message}`);
  }
}

/** The bits of the nearest bfloat16 (ties to even) of each element. */
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
