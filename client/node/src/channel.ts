// Sends calls over a gRPC channel with keepalive, retries and deadlines. No other module uses gRPC.

import { setTimeout as delay } from "node:timers/promises";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { Client, Metadata, compressionAlgorithms, credentials, status as Code } from "@grpc/grpc-js";
import type { ChannelCredentials, ServiceError } from "@grpc/grpc-js";

import { GradruleError, createError } from "./errors.js";
import { EvaluateRequestSchema, EvaluateResponseSchema, GradientService } from "./gen/gradrule/v1/evaluate_pb.js";
import type { EvaluateResponse } from "./gen/gradrule/v1/evaluate_pb.js";
import { ProgramService } from "./gen/gradrule/v1/program_pb.js";
import { checkTransfer, checkCallTransfer, packRequest, packsTensors, unpackResponse } from "./packing.js";
import type { Transfer } from "./packing.js";
import { Resends, lossOf } from "./resends.js";
import { checkToken } from "./security.js";
import { errorFromFailure, errorFromStatusBytes } from "./status.js";
import { EvaluateStream, CallRouting, STREAM_PATH } from "./stream.js";
import type { Outcome } from "./stream.js";
import { checkOptions } from "./values.js";
import type { OptionNames } from "./values.js";
import { withHeader } from "./wire.js";

export interface ConnectOptions {
  /** The result of `tls(…)`, or credentials of `@grpc/grpc-js`. Default: no TLS. */
  readonly credentials?: ChannelCredentials;
  /** Sent with every call as `authorization: Bearer …`. */
  readonly token?: string;
  /** Allows sending the token unencrypted to another machine. Default: false. */
  readonly insecureToken?: boolean;
  /** Default timeout of calls, in seconds. Default: 30. */
  readonly timeout?: number;
  /**
   * Additional seconds for compiling a program, in calls that have no timeout of their own. Only compiling may use them. Default: 300.
   */
  readonly compileTimeout?: number;
  /**
   * Whether repeated calls share one stream, which makes each of them faster. The stream goes to one server; another replaces it
   * if that server goes away. Must be false if the calls of this client should use several servers, or if a proxy distributes them.
   * Default: true.
   */
  readonly stream?: boolean;
  /** Compression of tensors. Default: none. */
  readonly transfer?: Transfer;
}

/** Options of a call that sends tensors. */
export interface TransferOptions {
  /** Compression of this call's tensors. Default: as given to `connect`. */
  readonly transfer?: Transfer;
}

export interface CallOptions {
  /** Timeout of this call, in seconds. Default: the client's. */
  readonly timeout?: number;
  /** Cancels the call. */
  readonly signal?: AbortSignal;
}

export const CALL_OPTIONS = {
  timeout: true,
  signal: true,
} as const satisfies OptionNames<CallOptions>;

const CONNECT_OPTIONS = {
  credentials: true,
  token: true,
  insecureToken: true,
  timeout: true,
  compileTimeout: true,
  stream: true,
  transfer: true,
} as const satisfies OptionNames<ConnectOptions>;

const MIB = 1024 * 1024;
// Attempts of a call in chunks if the stream breaks; the same as the maxAttempts of other calls.
const TRIES = 4;

// Only UNAVAILABLE is retried, because the server has not accepted the request. Throttling stops retries while most calls fail.
const SERVICE_CONFIG = {
  loadBalancingConfig: [{ round_robin: {} }],
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
    // The client sends the calls of a lost stream again itself.
    { name: [{ service: GradientService.typeName, method: GradientService.method.streamEvaluate.name }] },
  ],
  // A server that goes away fails all its calls at once, and each of them must be retried. 1,000 is the maximum of gRPC.
  retryThrottling: { maxTokens: 1000, tokenRatio: 1 },
};

const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": -1,
  "grpc.max_send_message_length": -1,
  // A server that hangs is noticed after at most 28 s, so that a call with a timeout of 30 s reaches another server.
  "grpc.keepalive_time_ms": 8_000,
  "grpc.keepalive_timeout_ms": 20_000,
  // gRPC's own limits are 120 s and 30 s: a client would find a server that returns, or has a new address, that late.
  "grpc.max_reconnect_backoff_ms": 2_000,
  "grpc.dns_min_time_between_resolutions_ms": 500,
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  "grpc.service_config_disable_resolution": 1,
  // Requests larger than the buffer are not retried.
  "grpc.per_rpc_retry_buffer_size": 256 * MIB,
  "grpc.retry_buffer_size": 1024 * MIB,
};

/** A connection to one server. Connects at the first call, and again after the connection breaks. */
export class Channel {
  private readonly client: Client;
  private readonly metadata = new Metadata();
  private readonly timeout: number;
  private readonly compileTimeout: number;
  private readonly transfer: Transfer;
  private readonly routing: CallRouting;
  private readonly stream: EvaluateStream;
  private closed = false;
  // In ms since 1970.
  private answeredAt = Number.NEGATIVE_INFINITY;

  constructor(
    readonly target: string,
    options: ConnectOptions,
  ) {
    checkOptions(options, CONNECT_OPTIONS, "connect");
    const { transfer = {} } = options;
    checkTransfer(transfer);
    this.transfer = transfer;
    this.timeout = checkedTimeout(options.timeout ?? 30);
    this.compileTimeout = options.compileTimeout === 0 ? 0 : checkedTimeout(options.compileTimeout ?? 300);
    checkToken(target, options.token, options.credentials !== undefined, options.insecureToken ?? false);
    if (options.token !== undefined) this.metadata.set("authorization", `Bearer ${options.token}`);
    const isGzip = transfer.compression === "gzip";
    if (isGzip) this.metadata.set("gradrule-answer-compression", "gzip");
    this.client = new Client(target, options.credentials ?? credentials.createInsecure(), {
      ...CHANNEL_OPTIONS,
      ...(isGzip ? { "grpc.default_compression_algorithm": compressionAlgorithms.gzip } : {}),
    });
    this.routing = new CallRouting(options.stream ?? true);
    const same = (bytes: Buffer): Buffer => bytes;
    this.stream = new EvaluateStream(() =>
      this.client.makeBidiStreamRequest(STREAM_PATH, same, same, this.metadata.clone()),
    );
  }

  /** Calls a unary method. Rejects with a GradruleError. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): Promise<MessageShape<O>> {
    const deadline = this.deadlineOf(options, method.name === ProgramService.method.compileProgram.name);
    if (this.closed) throw createError("UNAVAILABLE", "The client is closed.");
    if (options.signal?.aborted) throw createError("CANCELLED", "The signal is aborted.");
    return this.sendUnary(method, toBinary(method.input, create(method.input, request)), deadline, options.signal);
  }

  /** Returns the deadline of a call, in ms since 1970: its own timeout, or the default, with more time for compiling. */
  private deadlineOf(options: CallOptions, mayCompile: boolean): number {
    if (options.timeout !== undefined) return Date.now() + checkedTimeout(options.timeout) * 1000;
    return Date.now() + (this.timeout + (mayCompile ? this.compileTimeout : 0)) * 1000;
  }

  /** Calls `Evaluate` and packs tensors as requested. Rejects with a GradruleError. */
  evaluate(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions & TransferOptions = {},
  ): Promise<EvaluateResponse> {
    if (options.transfer === undefined && !packsTensors(this.transfer)) return this.evaluatePlain(request, options);
    return this.evaluatePacked(request, options, options.transfer);
  }

  private async evaluatePacked(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions,
    transfer: Transfer = this.transfer,
  ): Promise<EvaluateResponse> {
    if (transfer !== this.transfer) checkCallTransfer(transfer);
    if (!packsTensors(transfer)) return this.evaluatePlain(request, options);
    const message = create(EvaluateRequestSchema, request);
    await packRequest(message, transfer);
    const response = await this.evaluatePlain(message, options);
    await unpackResponse(response, transfer);
    return response;
  }

  /** Sends the request again if its answer is lost, because the call has no side effects. */
  private async evaluatePlain(
    request: MessageInitShape<typeof EvaluateRequestSchema>,
    options: CallOptions = {},
  ): Promise<EvaluateResponse> {
    const { signal } = options;
    const message = create(EvaluateRequestSchema, request);
    // The server may have to compile a program again, too.
    const deadline = this.deadlineOf(options, true);
    if (this.closed) throw createError("UNAVAILABLE", "The client is closed.");
    if (signal?.aborted) throw createError("CANCELLED", "The signal is aborted.");
    if (this.compileTimeout && options.timeout === undefined) message.runTimeout = durationFromMs(this.timeout * 1000);
    const bytes = toBinary(EvaluateRequestSchema, withHeader(message));
    if (this.routing.mustChunk(bytes.length)) return this.evaluateInChunks(bytes, deadline, signal);
    if (this.routing.mayStream(bytes.length, this.stream)) {
      const outcome = await this.stream.run(bytes, deadline, signal);
      if (outcome.kind === "lost") {
        this.checkOpen();
        this.routing.recordLostStream();
      } else {
        const failure = outcomeError(outcome, this.target);
        if (failure === undefined) {
          this.answeredAt = Date.now();
          this.routing.recordAnswer();
        }
        if (failure?.code !== Code.UNAVAILABLE) return outcomeResponse(outcome, failure);
      }
    }
    try {
      return await this.sendUnary(GradientService.method.evaluate, bytes, deadline, signal);
    } catch (failure) {
      const isTooLong = failure instanceof GradruleError && failure.reason === "MESSAGE_TOO_LARGE";
      if (!isTooLong || !this.routing.mayChunk(bytes.length)) throw failure;
    }
    const response = await this.evaluateInChunks(bytes, deadline, signal);
    this.routing.recordTooLong(bytes.length);
    return response;
  }

  private async evaluateInChunks(bytes: Uint8Array, deadline: number, signal?: AbortSignal): Promise<EvaluateResponse> {
    const resends = new Resends(this.answeredAt, deadline, TRIES);
    for (;;) {
      const outcome = await this.stream.run(bytes, deadline, signal);
      this.checkOpen();
      const failure = outcomeError(outcome, this.target);
      if (failure === undefined) this.answeredAt = Date.now();
      const loss = outcome.kind === "lost" ? lossOf(outcome.failure) : "refused";
      const pause = failure?.code === Code.UNAVAILABLE && loss ? resends.pauseAfter(loss) : undefined;
      if (pause === undefined) return outcomeResponse(outcome, failure);
      await this.waitFor(pause, signal);
    }
  }

  private checkOpen(): void {
    if (this.closed) throw createError("CANCELLED", "The client was closed before the call was answered.");
  }

  private async sendUnary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: Uint8Array,
    deadline: number,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<O>> {
    const resends = new Resends(this.answeredAt, deadline);
    for (;;) {
      const answer = await this.send(method, request, deadline, signal);
      if (!("failure" in answer)) {
        this.answeredAt = Date.now();
        return answer.response;
      }
      const loss = this.closed ? undefined : lossOf(answer.failure);
      const pause = loss && resends.pauseAfter(loss);
      // Create the error here and not in the callback, so that its stack trace includes the caller.
      if (pause === undefined) throw errorFromFailure(answer.failure, this.target);
      await this.waitFor(pause, signal);
    }
  }

  /** Waits before a call is sent again. Rejects with CANCELLED. */
  private async waitFor(pause: number, signal: AbortSignal | undefined): Promise<void> {
    try {
      await delay(pause, undefined, signal && { signal });
    } catch {
      throw createError("CANCELLED", "The signal is aborted.");
    }
    this.checkOpen();
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

  /** Closes the connection. Later calls fail with UNAVAILABLE. */
  close(): void {
    this.closed = true;
    this.stream.close();
    this.client.close();
  }
}

/** Returns why a call on a stream failed; undefined if it succeeded. */
function outcomeError(outcome: Outcome, target: string): GradruleError | undefined {
  switch (outcome.kind) {
    case "answer":
      return undefined;
    case "status":
      return errorFromStatusBytes(outcome.bytes);
    case "lost":
      return outcome.failure
        ? errorFromFailure(outcome.failure, target)
        : createError("UNAVAILABLE", "The server ended the stream.");
    case "expired":
      return createError("DEADLINE_EXCEEDED", "The server did not answer within the deadline.");
    case "cancelled":
      return createError("CANCELLED", "The signal is aborted.");
  }
}

function outcomeResponse(outcome: Outcome, failure: GradruleError | undefined): EvaluateResponse {
  if (outcome.kind === "answer") return fromBinary(EvaluateResponseSchema, outcome.bytes);
  throw failure ?? createError("INTERNAL", "The call has no answer.");
}

function checkedTimeout(seconds: number): number {
  if (!Number.isFinite(seconds) || seconds <= 0) {
    throw new RangeError(
      `timeout is ${seconds}; it must be a number of seconds above 0, because every call has a deadline.`,
    );
  }
  return seconds;
}

function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Converts a Buffer, so that the bytes of string tensors are plain Uint8Arrays too. */
function asPlain(bytes: Buffer): Uint8Array {
  return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
