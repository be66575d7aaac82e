// Calls over a stream and in chunks, against a gRPC server whose answers each test sets.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as delay } from "node:timers/promises";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Server, ServerCredentials, status as Code } from "@grpc/grpc-js";
import type { ServerDuplexStream, ServerUnaryCall, sendUnaryData } from "@grpc/grpc-js";

import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import {
  EvaluateHeaderSchema,
  EvaluateRequestSchema,
  EvaluateResponseSchema,
  StreamEvaluateRequestSchema,
  StreamEvaluateResponseSchema,
} from "../src/gen/gradrule/v1/evaluate_pb.js";
import type { EvaluateRequest } from "../src/gen/gradrule/v1/evaluate_pb.js";
import { GetProgramResponseSchema } from "../src/gen/gradrule/v1/program_pb.js";
import { Dt, TensorSchema } from "../src/gen/gradrule/v1/tensor_pb.js";
import { GradruleError, connect } from "../src/index.js";
import type { ConnectOptions, Program } from "../src/index.js";

const SIZE = 400_000;

type Duplex = ServerDuplexStream<Buffer, Buffer>;
/** What becomes of a request on a stream: its answer, a status, nothing, or the end of the stream. */
type Decide = (stream: number) => "answer" | "silence" | "end" | Uint8Array;

const counts = { alone: 0, streams: 0, chunks: 0 };

function bufferOf(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** The feed as gradient; the device tells how the request came. */
function answerTo(request: EvaluateRequest, device: string): Uint8Array {
  const { dtype, shape } = fromBinary(EvaluateHeaderSchema, request.header).feeds[0]!;
  const dense = create(TensorSchema, {
    dtype,
    tensorShape: { dim: shape.map((size) => ({ size })) },
    tensorContent: request.contents[0]!,
  });
  const gradients = [{ x: "x", value: { case: "dense" as const, value: dense } }];
  return toBinary(EvaluateResponseSchema, create(EvaluateResponseSchema, { gradients, device }));
}

function parseStatus(reason: string, code: Code): Uint8Array {
  const info = create(ErrorInfoSchema, { reason, domain: "gradrule" });
  const status = create(StatusSchema, { code, message: `it is ${reason}`, details: [anyPack(ErrorInfoSchema, info)] });
  return toBinary(StatusSchema, status);
}

function serveStream(call: Duplex, decide: Decide): void {
  const stream = ++counts.streams;
  const pieces = new Map<bigint, Uint8Array[]>();
  call.on("end", () => call.end());
  call.on("data", (raw: Buffer) => {
    const { requestId, request, answerChunkBytes } = fromBinary(StreamEvaluateRequestSchema, raw);
    const write = (response: Parameters<typeof create<typeof StreamEvaluateResponseSchema>>[1]): void => {
      call.write(bufferOf(toBinary(StreamEvaluateResponseSchema, create(StreamEvaluateResponseSchema, response))));
    };
    if (request.case === "chunk") {
      counts.chunks += 1;
      pieces.set(requestId, [...(pieces.get(requestId) ?? []), request.value]);
    } else if (request.case === "evaluate") {
      const before = pieces.get(requestId);
      const whole = before ? fromBinary(EvaluateRequestSchema, Buffer.concat(before)) : request.value;
      const decision = decide(stream);
      if (decision === "end") {
        call.emit("error", { code: Code.UNIMPLEMENTED, details: "no streams" });
      } else if (decision === "answer") {
        const bytes = answerTo(whole, "stream");
        for (let start = 0; before && start < bytes.length; start += answerChunkBytes) {
          write({ requestId, response: { case: "chunk", value: bytes.subarray(start, start + answerChunkBytes) } });
        }
        const value = before ? create(EvaluateResponseSchema) : fromBinary(EvaluateResponseSchema, bytes);
        write({ requestId, response: { case: "evaluate", value } });
      } else if (decision !== "silence") {
        write({ requestId, response: { case: "status", value: fromBinary(StatusSchema, decision) } });
      }
    }
  });
}

async function against(
  decide: Decide,
  use: (program: Program) => Promise<void>,
  options: ConnectOptions = {},
  limits: Record<string, number> = {},
): Promise<void> {
  Object.assign(counts, { alone: 0, streams: 0, chunks: 0 });
  const server = new Server({ "grpc.max_receive_message_length": -1, ...limits });
  const asIs = (bytes: Buffer): Buffer => bytes;
  const method = (path: string, isStream: boolean) => ({
    path,
    requestStream: isStream,
    responseStream: isStream,
    requestSerialize: asIs,
    requestDeserialize: asIs,
    responseSerialize: asIs,
    responseDeserialize: asIs,
  });
  const service = {
    GetProgram: method("/gradrule.v1.ProgramService/GetProgram", false),
    Evaluate: method("/gradrule.v1.GradientService/Evaluate", false),
    StreamEvaluate: method("/gradrule.v1.GradientService/StreamEvaluate", true),
  };
  const spec = { name: "x", dtype: Dt.FLOAT };
  const program = { name: "programs/p", inputs: [spec], xs: [spec] };
  server.addService(service, {
    GetProgram: (_: unknown, answer: sendUnaryData<Buffer>) =>
      answer(null, bufferOf(toBinary(GetProgramResponseSchema, create(GetProgramResponseSchema, { program })))),
    Evaluate: (call: ServerUnaryCall<Buffer, Buffer>, answer: sendUnaryData<Buffer>) => {
      counts.alone += 1;
      answer(null, bufferOf(answerTo(fromBinary(EvaluateRequestSchema, call.request), "alone")));
    },
    StreamEvaluate: (call: Duplex) => serveStream(call, decide),
  });
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (failure, bound) =>
      failure ? reject(failure) : resolve(bound),
    );
  });
  const client = connect(`127.0.0.1:${port}`, options);
  try {
    await use(await client.program("p"));
  } finally {
    client.close();
    server.forceShutdown();
  }
}

/** How a call was sent. */
async function way(program: Program, options: { timeout?: number; signal?: AbortSignal } = {}): Promise<string> {
  const { gradients, device } = await program.evaluate({ x: [1, 2] }, options);
  assert.ok(gradients["x"] && "data" in gradients["x"]);
  assert.deepEqual([...(gradients["x"].data as Float32Array)], [1, 2]);
  return device;
}

async function ways(program: Program, count: number): Promise<string[]> {
  const found: string[] = [];
  for (let call = 0; call < count; call++) found.push(await way(program));
  return found;
}

test("calls that are repeated go over one stream, side by side", async () => {
  await against(
    () => "answer",
    async (program) => {
      assert.deepEqual(await ways(program, 5), ["alone", "alone", "alone", "stream", "stream"]);
      assert.deepEqual([...new Set(await Promise.all(Array.from({ length: 20 }, () => way(program))))], ["stream"]);
      assert.deepEqual([counts.alone, counts.streams], [3, 1]);
    },
  );
});

test("without the stream each call is sent by itself", async () => {
  await against(
    () => "answer",
    async (program) => {
      assert.deepEqual([...new Set(await ways(program, 8))], ["alone"]);
      assert.equal(counts.streams, 0);
    },
    { stream: false },
  );
});

test("a failure on the stream is that of the call, and UNAVAILABLE is tried alone", async () => {
  let status = parseStatus("PROGRAM_NOT_FOUND", Code.NOT_FOUND);
  await against(
    () => status,
    async (program) => {
      await ways(program, 3);
      await assert.rejects(way(program), (failure: unknown) => {
        assert.ok(failure instanceof GradruleError);
        assert.deepEqual(
          [failure.reason, failure.code, failure.message],
          ["PROGRAM_NOT_FOUND", Code.NOT_FOUND, "it is PROGRAM_NOT_FOUND"],
        );
        return true;
      });
      status = parseStatus("ENGINE_UNAVAILABLE", Code.UNAVAILABLE);
      assert.equal(await way(program), "alone");
    },
  );
});

test("a call whose stream is lost is sent alone, and no stream is opened for a while", async () => {
  await against(
    () => "end",
    async (program) => {
      assert.deepEqual([...new Set(await ways(program, 8))], ["alone"]);
      assert.equal(counts.streams, 1);
    },
  );
});

test("a call on the stream can be given up, and has a deadline", async () => {
  await against(
    () => "silence",
    async (program) => {
      await ways(program, 3);
      const stop = new AbortController();
      const given = assert.rejects(way(program, { signal: stop.signal }), { reason: "CANCELLED" });
      stop.abort();
      await given;
      await assert.rejects(way(program, { timeout: 0.05 }), { reason: "DEADLINE_EXCEEDED" });
    },
  );
});

test("a stream that does not answer is left", async () => {
  await against(
    (stream) => (stream === 1 ? "silence" : "answer"),
    async (program) => {
      await ways(program, 3);
      await assert.rejects(way(program, { timeout: 0.05 }), { reason: "DEADLINE_EXCEEDED" });
      assert.equal(await way(program, { timeout: 5 }), "stream");
      assert.equal(counts.streams, 2);
    },
  );
});

test("a call in chunks on a stream that is left is sent again", async () => {
  await against(
    (stream) => (stream === 1 ? "silence" : "answer"),
    async (program) => {
      await ways(program, 3);
      const long = program.evaluate({ x: new Float32Array(SIZE) });
      while (counts.chunks < 2) await delay(10);
      await assert.rejects(way(program, { timeout: 0.05 }), { reason: "DEADLINE_EXCEEDED" });
      assert.equal((await long).device, "stream");
      assert.deepEqual([counts.streams, counts.chunks], [2, 4]);
    },
    {},
    { "grpc.max_receive_message_length": 1_200_000 },
  );
});

test("what is too long for the server goes in chunks, there and back", async () => {
  await against(
    () => "answer",
    async (program) => {
      const x = new Float32Array(SIZE).map((_, index) => index);
      for (let call = 0; call < 2; call++) {
        const { gradients, device } = await program.evaluate({ x });
        assert.ok(gradients["x"] && "data" in gradients["x"]);
        assert.equal(Buffer.compare(bufferOf(new Uint8Array(x.buffer)), toBytes(gradients["x"].data)), 0);
        assert.equal(device, "stream");
      }
      assert.deepEqual([counts.alone, counts.chunks], [0, 4]);
    },
    {},
    { "grpc.max_receive_message_length": 1_200_000 },
  );
});

function toBytes(data: unknown): Buffer {
  assert.ok(data instanceof Float32Array);
  return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
}
