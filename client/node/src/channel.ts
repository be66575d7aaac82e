// The one place that talks gRPC: a channel with keepalive, retries and deadlines, and unary calls over it.

import { setTimeout as delay } from "node:timers/promises";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { Client, Metadata, compressionAlgorithms, credentials, status as Code } from "@grpc/grpc-js";
import type { ChannelCredentials, ServiceError } from "@grpc/grpc-js";

import { GradruleError, errorOf } from "./errors.js";
import { EvaluateRequestSchema, EvaluateResponseSchema, GradientService } from "./gen/gradrule/v1/evaluate_pb.js";
import type { EvaluateResponse } from "./gen/gradrule/v1/evaluate_pb.js";
import { checkTransfer, checkTransferOfCall, packRequest, packs, unpackResponse } from "./packing.js";
import type { Transfer } from "./packing.js";
import { checkToken } from "./security.js";
import { errorOfFailure, errorOfStatusBytes } from "./status.js";
import { EvaluateStream, Routes, STREAM_PATH } from "./stream.js";
import type { Outcome } from "./stream.js";

export interface ConnectOptions {
  /** What `tls(…)` gives, or credentials of `@grpc/grpc-js`. Default: no TLS. */
  readonly credentials?: ChannelCredentials;
  /** Sent with every call as `authorization: Bearer …`. */
  readonly token?: string;
  /** Lets the token travel unencrypted to another machine, which is refused otherwise. */
  readonly insecureToken?: boolean;
  /** Deadline of a call that sets none of its own, in seconds. Default: 30. */
  readonly timeout?: number;
  /**
   * Calls that are repeated share one stream, which takes less time for each. False: each travels alone, as it must where a
   * proxy spreads calls over several servers. Default: true.
   */
  readonly stream?: boolean;
  /** How tensors travel. Default: as they are. */
  readonly transfer?: Transfer;
}

/** Options of a call that sends tensors. */
export interface TransferOptions {
  /** How the tensors of this call travel. Default: as `connect` says. */
  readonly transfer?: Transfer;
}

export interface CallOptions {
  /** Deadline of this call, in seconds. Default: the client's. */
  readonly timeout?: number;
  /** Cancels the call. */
  readonly signal?: AbortSignal;
}

const MIB = 1024 * 1024;
// How often a call in chunks is sent where streams are lost, as often as gRPC sends other calls.
const TRIES = 4;

// Only UNAVAILABLE is tried again: the server did not take the request. Throttling stops retries while most calls fail.
const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [{}],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.05s",
        maxBackoff: "1s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
  retryThrottling: { maxTokens: 10, tokenRatio: 0.1 },
};

const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": -1,
  "grpc.max_send_message_length": -1,
  "grpc.keepalive_time_ms": 60_000,
  "grpc.keepalive_timeout_ms": 20_000,
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  "grpc.service_config_disable_resolution": 1,
  // What is larger than the buffer is sent once and never again.
  "grpc.per_rpc_retry_buffer_size": 256 * MIB,
  "grpc.retry_buffer_size": 1024 * MIB,
};

/** A connection to one server. It is made at the first call and made again whenever it breaks. */
export class Channel {
  private readonly client: Client;
  private readonly metadata = new Metadata();
  private readonly timeout: number;
  private readonly transfer: Transfer;
  private readonly routes: Routes;
  private readonly stream: EvaluateStream;
  private closed = false;

  constructor(
    readonly target: string,
    options: ConnectOptions,
  ) {
    const { transfer = {} } = options;
    checkTransfer(transfer);
    this.transfer = transfer;
    this.timeout = checkedTimeout(options.timeout ?? 30);
    checkToken(target, options.token, options.credentials !== undefined, options.insecureToken ?? false);
    if (options.token !== undefined) this.metadata.set("authorization", `Bearer ${options.token}`);
    const isGzip = transfer.compression === "gzip";
    if (isGzip) this.metadata.set("gradrule-answer-compression", "gzip");
    this.client = new Client(target, options.credentials ?? credentials.createInsecure(), {
      ...CHANNEL_OPTIONS,
      ...(isGzip ? { "grpc.default_compression_algorithm": compressionAlgorithms.gzip } : {}),
    });
    this.routes = new Routes(options.stream ?? true);
    const same = (bytes: Buffer): Buffer => bytes;
    this.stream = new EvaluateStream(() =>
      this.client.makeBidiStreamRequest(STREAM_PATH, same, same, this.metadata.clone()),
    );
  }

  /** Calls a method. Rejects with a GradruleError. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): Promise<MessageShape<O>> {
    const deadline = Date.now() + checkedTimeout(options.timeout ?? this.timeout) * 1000;
    if (this.closed) throw errorOf("UNAVAILABLE", "The client is closed.");
    if (options.signal?.aborted) throw errorOf("CANCELLED", "The signal is aborted.");
    return this.alone(method, toBinary(method.input, create(method.input, request)), deadline, options.signal);
  }

  /** Calls `Evaluate`, with tensors packed as is asked. Rejects with a GradruleError. */
  evaluate(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions & TransferOptions = {},
  ): Promise<EvaluateResponse> {
    if (options.transfer === undefined && !packs(this.transfer)) return this.evaluatePlain(request, options);
    return this.evaluatePacked(request, options, options.transfer);
  }

  private async evaluatePacked(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions,
    transfer: Transfer = this.transfer,
  ): Promise<EvaluateResponse> {
    if (transfer !== this.transfer) checkTransferOfCall(transfer);
    if (!packs(transfer)) return this.evaluatePlain(request, options);
    const message = create(EvaluateRequestSchema, request);
    await packRequest(message, transfer);
    const response = await this.evaluatePlain(message, options);
    await unpackResponse(response, transfer);
    return response;
  }

  /** As it changes nothing, it is sent again where its answer is lost. */
  private async evaluatePlain(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions = {},
  ): Promise<EvaluateResponse> {
    const { signal } = options;
    const deadline = Date.now() + checkedTimeout(options.timeout ?? this.timeout) * 1000;
    if (this.closed) throw errorOf("UNAVAILABLE", "The client is closed.");
    if (signal?.aborted) throw errorOf("CANCELLED", "The signal is aborted.");
    const bytes = toBinary(EvaluateRequestSchema, create(EvaluateRequestSchema, request));
    if (this.routes.mustChunk(bytes.length)) return this.inChunks(bytes, deadline, signal);
    if (this.routes.mayStream(bytes.length, this.stream)) {
      const outcome = await this.stream.run(bytes, deadline, signal);
      if (outcome.kind === "lost") {
        this.checkOpen();
        this.routes.noteLost();
      } else {
        const failure = failureOf(outcome);
        if (failure === undefined) this.routes.noteAnswered();
        if (failure?.code !== Code.UNAVAILABLE) return answerOf(outcome, failure);
      }
    }
    try {
      return await this.alone(GradientService.method.evaluate, bytes, deadline, signal);
    } catch (failure) {
      const isTooLong = failure instanceof GradruleError && failure.reason === "MESSAGE_TOO_LARGE";
      if (!isTooLong || !this.routes.mayChunk(bytes.length)) throw failure;
    }
    const response = await this.inChunks(bytes, deadline, signal);
    this.routes.noteTooLong(bytes.length);
    return response;
  }

  private async inChunks(bytes: Uint8Array, deadline: number, signal?: AbortSignal): Promise<EvaluateResponse> {
    for (let attempt = 1; ; attempt++) {
      const outcome = await this.stream.run(bytes, deadline, signal);
      this.checkOpen();
      const failure = failureOf(outcome);
      if (failure?.code !== Code.UNAVAILABLE || attempt === TRIES) return answerOf(outcome, failure);
      await delay(50 * 2 ** (attempt - 1));
    }
  }

  private checkOpen(): void {
    if (this.closed) throw errorOf("CANCELLED", "The client was closed before the call was answered.");
  }

  private async alone<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: Uint8Array,
    deadline: number,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<O>> {
    const answer = await this.send(method, request, deadline, signal);
    // Made here and not in the callback, so that the error's stack leads to the caller.
    if ("failure" in answer) throw errorOfFailure(answer.failure);
    return answer.response;
  }

  private send<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: Uint8Array,
    deadline: number,
    signal: AbortSignal | undefined,
  ): Promise<{ failure: ServiceError } | { response: MessageShape<O> }> {
    return new Promise((resolve) => {
      const call = this.client.makeUnaryRequest(
        `/${method.parent.typeName}/${method.name}`,
        asBuffer,
        (bytes: Buffer) => fromBinary(method.output, asPlain(bytes)),
        request,
        this.metadata.clone(),
        { deadline },
        (failure: ServiceError | null, response?: MessageShape<O>) => {
          signal?.removeEventListener("abort", cancel);
          resolve(failure ? { failure } : { response: response! });
        },
      );
      const cancel = (): void => call.cancel();
      signal?.addEventListener("abort", cancel, { once: true });
    });
  }

  /** Ends the connection; later calls are UNAVAILABLE. */
  close(): void {
    this.closed = true;
    this.stream.close();
    this.client.close();
  }
}

/** Why a call on a stream failed; undefined where it did not. */
function failureOf(outcome: Outcome): GradruleError | undefined {
  switch (outcome.kind) {
    case "answer":
      return undefined;
    case "status":
      return errorOfStatusBytes(outcome.bytes);
    case "lost":
      return outcome.failure ? errorOfFailure(outcome.failure) : errorOf("UNAVAILABLE", "The server ended the stream.");
    case "expired":
      return errorOf("DEADLINE_EXCEEDED", "The server did not answer within the deadline.");
    case "cancelled":
      return errorOf("CANCELLED", "The signal is aborted.");
  }
}

function answerOf(outcome: Outcome, failure: GradruleError | undefined): EvaluateResponse {
  if (outcome.kind === "answer") return fromBinary(EvaluateResponseSchema, outcome.bytes);
  throw failure ?? errorOf("INTERNAL", "The call has no answer.");
}

function checkedTimeout(seconds: number): number {
  if (!Number.isFinite(seconds) || seconds <= 0) {
    throw new RangeError(`timeout is ${seconds}; it is a number of seconds above 0, for every call has a deadline.`);
  }
  return seconds;
}

function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Parts of a Buffer are Buffers, which no caller expects among the strings of a tensor. */
function asPlain(bytes: Buffer): Uint8Array {
  return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
