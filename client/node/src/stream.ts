// Sends many Evaluate calls over one StreamEvaluate stream, long ones in chunks.

import { toBinary } from "@bufbuild/protobuf";
import { BinaryReader, BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { DurationSchema, durationFromMs } from "@bufbuild/protobuf/wkt";
import type { ClientDuplexStream, ServiceError } from "@grpc/grpc-js";

export const STREAM_PATH = "/gradrule.v1.GradientService/StreamEvaluate";

const CHUNK_BYTES = 1 << 20;
// Longer requests are sent in chunks, because servers limit the size of a message (default: 64 MiB).
const MAX_WHOLE_BYTES = 64 << 20;
const MAX_STREAMED_BYTES = 512 << 10;
// A stream is opened after this number of calls, each within this time after the previous one.
const CALLS_BEFORE = 3;
const REPEATED_WITHIN_MS = 60_000;
// The server runs at most this number of requests of one stream concurrently.
const MAX_PENDING = 32;
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 60_000;
// An open stream keeps the Node process running, so it is closed soon after the last answer.
const IDLE_MS = 1_000;
// The server enforces the deadline. The client waits this much longer in case the server does not answer.
const GRACE_MS = 2_000;

const REQUEST = { id: 1, evaluate: 2, cancel: 6, timeout: 7, chunk: 8, answerChunkBytes: 9, totalBytes: 10 };
const RESPONSE = { id: 1, evaluate: 2, chunk: 6, status: 15 };

/** Result of a call on a stream. `lost`: the stream ended before the call was answered. */
export type Outcome =
  | { readonly kind: "answer"; readonly bytes: Uint8Array }
  | { readonly kind: "status"; readonly bytes: Uint8Array }
  | { readonly kind: "lost"; readonly failure: ServiceError | undefined }
  | { readonly kind: "expired" }
  | { readonly kind: "cancelled" };

export type Duplex = ClientDuplexStream<Buffer, Buffer>;

interface Pending {
  readonly pieces: Uint8Array[];
  readonly end: (outcome: Outcome) => void;
}

/** Decides whether an Evaluate call is sent alone, over the stream or in chunks, from the outcomes of earlier calls. */
export class CallRouting {
  private calls = 0;
  private calledAt = 0;
  private pauseMs = 0;
  private notBefore = 0;
  private maxWholeBytes = MAX_WHOLE_BYTES;

  constructor(private readonly useStream: boolean) {}

  /** Returns whether a request of this size, in bytes, is too long for one message. */
  mustChunk(size: number): boolean {
    return size > this.maxWholeBytes;
  }

  /** Returns whether a request of this size, in bytes, is sent over the stream. */
  mayStream(size: number, stream: EvaluateStream): boolean {
    if (!this.useStream || size > MAX_STREAMED_BYTES) return false;
    const now = Date.now();
    if (now - this.calledAt > REPEATED_WITHIN_MS) this.calls = 0;
    this.calledAt = now;
    this.calls += 1;
    if (this.calls <= CALLS_BEFORE || stream.pendingCount >= MAX_PENDING) return false;
    return stream.isOpen || now >= this.notBefore;
  }

  recordAnswer(): void {
    this.pauseMs = 0;
  }

  /** Delays opening another stream; the delay doubles each time. */
  recordLostStream(): void {
    this.pauseMs = Math.min(Math.max(2 * this.pauseMs, FIRST_PAUSE_MS), LONGEST_PAUSE_MS);
    this.notBefore = Date.now() + this.pauseMs;
  }

  /** Returns whether a request that was refused as too long can be sent in chunks. */
  mayChunk(size: number): boolean {
    return size > CHUNK_BYTES;
  }

  recordTooLong(size: number): void {
    this.maxWholeBytes = Math.min(this.maxWholeBytes, size - 1);
  }
}

/** A stream that is opened at the first call, and again after it ended. */
export class EvaluateStream {
  private connection: Connection | undefined;

  constructor(private readonly open: () => Duplex) {}

  get isOpen(): boolean {
    return this.connection !== undefined && !this.connection.ended;
  }

  get pendingCount(): number {
    return this.connection?.pending.size ?? 0;
  }

  /** Sends the bytes of an EvaluateRequest. `deadline`: in milliseconds since 1970. */
  run(request: Uint8Array, deadline: number, signal: AbortSignal | undefined): Promise<Outcome> {
    if (this.connection === undefined || this.connection.ended) this.connection = new Connection(this.open());
    return this.connection.run(request, deadline, signal);
  }

  close(): void {
    this.connection?.close();
  }
}

class Connection {
  readonly pending = new Map<bigint, Pending>();
  ended = false;
  private lastId = 0n;
  private idle: NodeJS.Timeout | undefined;

  constructor(private readonly call: Duplex) {
    call.on("data", (bytes: Buffer) => this.handleMessage(bytes));
    call.on("error", (failure: ServiceError) => this.handleEnd(failure));
    call.on("end", () => this.handleEnd(undefined));
  }

  run(request: Uint8Array, deadline: number, signal: AbortSignal | undefined): Promise<Outcome> {
    const id = ++this.lastId;
    clearTimeout(this.idle);
    return new Promise((resolve) => {
      const end = (outcome: Outcome): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", cancel);
        this.pending.delete(id);
        if (this.pending.size === 0 && !this.ended) this.idle = setTimeout(() => this.finish(), IDLE_MS);
        resolve(outcome);
      };
      const cancelRequest = (outcome: Outcome): void => {
        const cancelled = new BinaryWriter().tag(1, WireType.Varint).uint64(id).finish();
        if (!this.ended) this.write(new BinaryWriter().tag(REQUEST.cancel, WireType.LengthDelimited).bytes(cancelled));
        end(outcome);
      };
      const cancel = (): void => cancelRequest({ kind: "cancelled" });
      const expire = (): void => {
        end({ kind: "expired" });
        // Servers answer late requests themselves, so this one hangs: other calls must not wait for it.
        this.leave();
      };
      const timer = setTimeout(expire, Math.max(deadline - Date.now(), 0) + GRACE_MS);
      signal?.addEventListener("abort", cancel, { once: true });
      this.pending.set(id, { pieces: [], end });
      void this.send(id, request, deadline);
    });
  }

  close(): void {
    this.call.cancel();
  }

  private async send(id: bigint, request: Uint8Array, deadline: number): Promise<void> {
    const timeout = toBinary(DurationSchema, durationFromMs(Math.max(deadline - Date.now(), 1)));
    const head = (): BinaryWriter =>
      new BinaryWriter()
        .tag(REQUEST.id, WireType.Varint)
        .uint64(id)
        .tag(REQUEST.timeout, WireType.LengthDelimited)
        .bytes(timeout);
    const last = head().tag(REQUEST.answerChunkBytes, WireType.Varint).uint32(CHUNK_BYTES);
    if (request.length <= CHUNK_BYTES) {
      this.write(last.tag(REQUEST.evaluate, WireType.LengthDelimited).bytes(request));
      return;
    }
    for (let start = 0; start < request.length; start += CHUNK_BYTES) {
      const chunk = request.subarray(start, start + CHUNK_BYTES);
      const isTaken = this.write(head().tag(REQUEST.chunk, WireType.LengthDelimited).bytes(chunk));
      if (!isTaken) await new Promise<void>((resolve) => this.whenDrained(resolve));
      if (!this.pending.has(id)) return;
    }
    last.tag(REQUEST.totalBytes, WireType.Varint).uint64(BigInt(request.length));
    this.write(last.tag(REQUEST.evaluate, WireType.LengthDelimited).bytes(new Uint8Array()));
  }

  /** Writes a message. Returns whether more can be written without waiting. */
  private write(message: BinaryWriter): boolean {
    const bytes = message.finish();
    return this.call.write(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  }

  private whenDrained(resolve: () => void): void {
    const done = (): void => {
      this.call.off("drain", done);
      this.call.off("close", done);
      this.call.off("error", done);
      resolve();
    };
    for (const event of ["drain", "close", "error"]) this.call.on(event, done);
  }

  private handleMessage(bytes: Buffer): void {
    let message: Received;
    try {
      message = parseMessage(bytes);
    } catch {
      this.leave();
      return;
    }
    const { id, field, data } = message;
    const pending = this.pending.get(id);
    if (field === RESPONSE.chunk) pending?.pieces.push(data);
    else if (field === RESPONSE.status) pending?.end({ kind: "status", bytes: data });
    else if (field === RESPONSE.evaluate) {
      pending?.end({ kind: "answer", bytes: pending.pieces.length ? concatenate([...pending.pieces, data]) : data });
    }
  }

  private handleEnd(failure: ServiceError | undefined): void {
    this.ended = true;
    clearTimeout(this.idle);
    for (const { end } of [...this.pending.values()]) end({ kind: "lost", failure });
  }

  /** Ends the stream. Its unanswered calls are lost, and sent again. */
  private leave(): void {
    // Before the stream ends with CANCELLED, which would not be sent again.
    this.handleEnd(undefined);
    this.call.cancel();
  }

  private finish(): void {
    this.ended = true;
    this.call.end();
  }
}

interface Received {
  readonly id: bigint;
  readonly field: number;
  readonly data: Uint8Array;
}

/** Parses a message from the server, but not the answer in it. */
function parseMessage(bytes: Buffer): Received {
  const reader = new BinaryReader(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength));
  let id = 0n;
  let field = 0;
  let data: Uint8Array = new Uint8Array();
  while (reader.pos < reader.len) {
    const [number, type] = reader.tag();
    if (number === RESPONSE.id) {
      id = BigInt(reader.uint64());
    } else if (type === WireType.LengthDelimited) {
      field = number;
      data = reader.bytes();
    } else {
      reader.skip(type);
    }
  }
  return { id, field, data };
}

function concatenate(pieces: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let position = 0;
  for (const piece of pieces) {
    whole.set(piece, position);
    position += piece.length;
  }
  return whole;
}
