// The wire itself, against a gRPC server that fails on command.

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createServer } from "node:net";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageInitShape } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Metadata, Server, ServerCredentials, status as Code } from "@grpc/grpc-js";
import type { ServerUnaryCall, sendUnaryData } from "@grpc/grpc-js";

import * as rpc from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { GetRuleResponseSchema } from "../src/gen/gradrule/v1/rule_pb.js";
import { GetProgramResponseSchema } from "../src/gen/gradrule/v1/program_pb.js";
import {
  EvaluateHeaderSchema,
  EvaluateRequestSchema,
  EvaluateResponseSchema,
} from "../src/gen/gradrule/v1/evaluate_pb.js";
import { Graph, GradruleError, REASONS, connect, errors } from "../src/index.js";
import type { Client, ConnectOptions } from "../src/index.js";

type Handler = (call: ServerUnaryCall<Buffer, Buffer>, answer: sendUnaryData<Buffer>) => void;

const RULE = Buffer.from(toBinary(GetRuleResponseSchema, create(GetRuleResponseSchema, { rule: { name: "rules/r" } })));

async function against(
  handler: Handler,
  use: (client: Client, address: string) => Promise<void>,
  options: ConnectOptions = {},
  paths = ["/gradrule.v1.RuleService/GetRule"],
) {
  const server = new Server();
  const asIs = (bytes: Buffer): Buffer => bytes;
  const method = {
    requestStream: false,
    responseStream: false,
    requestSerialize: asIs,
    requestDeserialize: asIs,
    responseSerialize: asIs,
    responseDeserialize: asIs,
  } as const;
  server.addService(
    Object.fromEntries(paths.map((path) => [path, { ...method, path }])),
    Object.fromEntries(paths.map((path) => [path, handler])),
  );
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (failure, bound) =>
      failure ? reject(failure) : resolve(bound),
    );
  });
  const client = connect(`127.0.0.1:${port}`, options);
  try {
    await use(client, `127.0.0.1:${port}`);
  } finally {
    client.close();
    server.forceShutdown();
  }
}

function rejection(promise: Promise<unknown>): Promise<GradruleError> {
  return promise.then(
    () => assert.fail("it did not fail"),
    (failure: unknown) => {
      assert.ok(failure instanceof GradruleError, String(failure));
      return failure;
    },
  );
}

function trailer(...details: [DescMessage, MessageInitShape<DescMessage>][]): Metadata {
  const status = create(StatusSchema, {
    code: Code.NOT_FOUND,
    message: "There is no rule 'r'.",
    details: details.map(([schema, init]) => anyPack(schema, create(schema, init))),
  });
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
  return metadata;
}

test("calls take the servers of a target one after the other, and go on without one of them", async () => {
  const counts = [0, 0];
  const counted =
    (server: number): Handler =>
    (_, answer) => {
      counts[server]! += 1;
      answer(null, RULE);
    };
  await against(counted(0), async (_, first) => {
    let both: Client | undefined;
    await against(counted(1), async (_, second) => {
      both = connect(`ipv4:${first},${second}`);
      // Both are connected after a while.
      while (counts.includes(0)) await both.getRule("r");
      const [one, two] = counts as [number, number];
      for (let call = 0; call < 10; call++) await both.getRule("r");
      assert.deepEqual(counts, [one + 5, two + 5]);
    });
    for (let call = 0; call < 4; call++) assert.equal((await both!.getRule("r")).name, "r");
    both!.close();
  });
});

test("an error brings its reason, findings, resource and delay", async () => {
  const metadata = trailer(
    [rpc.ErrorInfoSchema, { reason: "UNKNOWN_RULE", domain: "gradrule", metadata: { findings_total: "3" } }],
    [
      rpc.BadRequestSchema,
      {
        fieldViolations: [{ field: "name", description: "no such rule", reason: "UNKNOWN_RULE" }, { field: "node:n" }],
      },
    ],
    [rpc.RetryInfoSchema, { retryDelay: { seconds: 1n, nanos: 500_000_000 } }],
    [rpc.ResourceInfoSchema, { resourceType: "rule", resourceName: "r" }],
  );
  await against(
    (_, answer) => answer({ code: Code.NOT_FOUND, details: "plain", metadata }),
    async (client) => {
      const failure = await rejection(client.getRule("r"));
      assert.ok(failure instanceof errors.UnknownRuleError);
      assert.equal(failure.name, "UnknownRuleError");
      assert.equal(failure.reason, "UNKNOWN_RULE");
      assert.equal(failure.code, Code.NOT_FOUND);
      assert.equal(failure.message, "There is no rule 'r'.");
      assert.equal(failure.retryDelay, 1.5);
      assert.deepEqual(failure.resource, { type: "rule", name: "r" });
      assert.equal(failure.findingsTotal, 3);
      assert.deepEqual(failure.details, [
        { reason: "UNKNOWN_RULE", message: "no such rule", node: "", field: "name" },
        { reason: "UNKNOWN_RULE", message: "", node: "n", field: "" },
      ]);
    },
  );
});

test("a reason that only a newer server knows is kept as it is", async () => {
  const metadata = trailer([rpc.ErrorInfoSchema, { reason: "NEWER", domain: "gradrule" }]);
  await against(
    (_, answer) => answer({ code: Code.ABORTED, details: "", metadata }),
    async (client) => {
      const failure = await rejection(client.getRule("r"));
      assert.equal(failure.reason, "NEWER");
      assert.equal(failure.name, "GradruleError");
    },
  );
});

test("a code without details, or with a proxy's, is mapped to its reason", async () => {
  const rows: [Code, string][] = [
    [Code.CANCELLED, "CANCELLED"],
    [Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"],
    [Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"],
    [Code.UNIMPLEMENTED, "UNSUPPORTED"],
    [Code.PERMISSION_DENIED, "INTERNAL"],
    [Code.UNKNOWN, "INTERNAL"],
  ];
  for (const [code, reason] of rows) {
    for (const metadata of [new Metadata(), trailer([rpc.ErrorInfoSchema, { reason: "X", domain: "proxy" }])]) {
      await against(
        (_, answer) => answer({ code, details: "why", metadata }),
        async (client) => {
          const failure = await rejection(client.getRule("r"));
          assert.equal(failure.reason, reason);
          assert.equal(failure.code, code);
          assert.equal(failure.message, "why");
        },
      );
    }
  }
});

test("each of many calls that fail at once is tried again", async () => {
  let calls = 0;
  const count = 30;
  const failing: Handler = (_, answer) =>
    ++calls <= count ? answer({ code: Code.UNAVAILABLE, details: "stopping" }) : answer(null, RULE);
  await against(failing, async (client) => {
    await Promise.all(Array.from({ length: count }, () => client.getRule("r")));
    assert.equal(calls, 2 * count);
  });
});

test("all addresses of a target are named if no server can be reached", async () => {
  const unused = createServer().listen(0, "127.0.0.1");
  await once(unused, "listening");
  const { port } = unused.address() as AddressInfo;
  await new Promise((closed) => unused.close(closed));
  for (const target of [`ipv4:127.0.0.1:${port},127.0.0.2:${port}`, `127.0.0.1:${port}`]) {
    const client = connect(target);
    const graph = new Graph();
    graph.placeholder("x", "float32", []);
    for (const call of [() => client.getRule("r"), () => client.evaluate(graph, { feeds: { x: 1 }, fetches: ["x"] })]) {
      const failure = await rejection(call());
      const serve = `gradrule serve --port ${port}`;
      const says = `No server listens at ${target}; start one (${serve}), or connect to the address of another.`;
      assert.equal(failure.message, says);
      assert.equal(failure.reason, "UNAVAILABLE");
    }
    client.close();
  }
});

test("an error of a server is tried again if it is UNAVAILABLE, four times in all", async () => {
  let calls = 0;
  const metadata = new Metadata();
  metadata.set("x-request-id", "7f");
  const failing = (times: number, code: Code): Handler => {
    calls = 0;
    return (_, answer) => (++calls <= times ? answer({ code, details: "busy", metadata }) : answer(null, RULE));
  };
  await against(failing(3, Code.UNAVAILABLE), async (client) => {
    assert.equal((await client.getRule("r")).name, "r");
    assert.equal(calls, 4);
  });
  await against(failing(4, Code.UNAVAILABLE), async (client) => {
    assert.equal((await rejection(client.getRule("r"))).reason, "UNAVAILABLE");
    assert.equal(calls, 4);
  });
  await against(failing(1, Code.ABORTED), async (client) => {
    await rejection(client.getRule("r"));
    assert.equal(calls, 1);
  });
});

test("a call goes on until a proxy has another server", async () => {
  let calls = 0;
  const proxy: Handler = (_, answer) =>
    ++calls <= 18 ? answer({ code: Code.UNAVAILABLE, details: "no healthy upstream" }) : answer(null, RULE);
  await against(proxy, async (client) => {
    assert.equal((await client.getRule("r")).name, "r");
    assert.equal(calls, 19);
    calls = Number.NEGATIVE_INFINITY;
    const failure = await rejection(client.getRule("r", { timeout: 1 }));
    assert.ok(["UNAVAILABLE", "DEADLINE_EXCEEDED"].includes(failure.reason));
    const controller = new AbortController();
    const cancelled = rejection(client.getRule("r", { signal: controller.signal }));
    setTimeout(() => controller.abort(), 500);
    assert.equal((await cancelled).reason, "CANCELLED");
  });
});

test("a call goes on with the server that returns, if it answered before", async () => {
  const server = (port: number): Promise<[Server, number]> => {
    const made = new Server();
    const asIs = (bytes: Buffer): Buffer => bytes;
    const codecs = {
      requestSerialize: asIs,
      requestDeserialize: asIs,
      responseSerialize: asIs,
      responseDeserialize: asIs,
    };
    const path = "/gradrule.v1.RuleService/GetRule";
    made.addService(
      { getRule: { path, requestStream: false, responseStream: false, ...codecs } },
      { getRule: (_: unknown, answer: sendUnaryData<Buffer>) => answer(null, RULE) },
    );
    return new Promise((resolve, reject) => {
      made.bindAsync(`127.0.0.1:${port}`, ServerCredentials.createInsecure(), (failure, bound) =>
        failure ? reject(failure) : resolve([made, bound]),
      );
    });
  };
  const [first, port] = await server(0);
  const client = connect(`127.0.0.1:${port}`);
  assert.equal((await client.getRule("r")).name, "r");
  first.forceShutdown();
  const call = client.getRule("r");
  // gRPC's own attempts end after 0.4 s.
  await new Promise((resolve) => setTimeout(resolve, 1500));
  const [second] = await server(port);
  assert.equal((await call).name, "r");
  client.close();
  second.forceShutdown();
});

test("every call has a deadline: its own, or the client's", async () => {
  const never: Handler = () => undefined;
  await against(
    never,
    async (client) => {
      const started = Date.now();
      assert.ok((await rejection(client.getRule("r"))) instanceof errors.DeadlineExceededError);
      assert.ok((await rejection(client.getRule("r", { timeout: 0.1 }))) instanceof errors.DeadlineExceededError);
      assert.ok(Date.now() - started < 10_000);
    },
    { timeout: 0.2 },
  );
  assert.throws(() => connect("127.0.0.1:1", { timeout: 0 }), RangeError);
  assert.throws(() => connect("127.0.0.1:1", { timeout: Number.POSITIVE_INFINITY }), RangeError);
});

test("a signal cancels, and a closed client says so", async () => {
  let arrived: () => void;
  const reached = new Promise<void>((resolve) => (arrived = resolve));
  await against(
    () => arrived(),
    async (client) => {
      const controller = new AbortController();
      const failure = rejection(client.getRule("r", { signal: controller.signal }));
      await reached;
      controller.abort();
      assert.ok((await failure) instanceof errors.CancelledError);
      const aborted = await rejection(client.getRule("r", { signal: AbortSignal.abort() }));
      assert.equal(aborted.reason, "CANCELLED");
      client.close();
      assert.equal((await rejection(client.getRule("r"))).reason, "UNAVAILABLE");
    },
  );
});

test("the token is sent with every call", async () => {
  await against(
    (call, answer) => answer({ code: Code.ABORTED, details: String(call.metadata.get("authorization")) }),
    async (client) => assert.equal((await rejection(client.getRule("r"))).message, "Bearer secret"),
    { token: "secret" },
  );
});

test("every reason has a class, and the code that errors.proto gives it", async () => {
  const proto = await readFile(new URL("../../../../protos/gradrule/v1/errors.proto", import.meta.url), "utf8");
  const rows = [...proto.matchAll(/\[(\w+)\]\.\n  ERROR_REASON_(\w+) = /g)].map(([, code, reason]) => [reason, code]);
  assert.deepEqual(
    rows.map(([reason]) => reason),
    REASONS,
  );
  for (const [reason, code] of rows) assert.equal(Code[new GradruleError(reason!, "").code], code, reason);
  assert.ok(REASONS.length >= 45);
  for (const reason of REASONS) {
    const name = Object.keys(errors).find(
      (key) => key.replace(/Error$/, "").toUpperCase() === reason.replaceAll("_", ""),
    );
    assert.ok(name, reason);
  }
  assert.equal(Object.keys(errors).length, REASONS.length);
});

test("a trailer that is no status does not hide the code", async () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff, 0xff]));
  await against(
    (_, answer) => answer({ code: Code.ABORTED, details: "why", metadata }),
    async (client) => assert.equal((await rejection(client.getRule("r"))).code, Code.ABORTED),
  );
});

test("an error's stack leads to the caller", async () => {
  await against(
    (_, answer) => answer({ code: Code.ABORTED, details: "why" }),
    async (client) => {
      const thisCaller = async () => await client.getRule("r");
      assert.match((await rejection(thisCaller())).stack ?? "", /thisCaller/);
    },
  );
});

test("only compiling may use the time for compiling", async () => {
  const graph = new Graph();
  graph.placeholder("x", "float32", [2]);
  const options = { feeds: { x: [1, 2] }, fetches: ["x"] };
  const limits: number[][] = [];
  const get = "/gradrule.v1.ProgramService/GetProgram";
  const program = create(GetProgramResponseSchema, { program: { name: "programs/p" } });
  const answer: Handler = (call, respond) => {
    if (call.getPath() === get) return respond(null, Buffer.from(toBinary(GetProgramResponseSchema, program)));
    const request = fromBinary(EvaluateRequestSchema, call.request);
    const { runTimeout } = request.header.length ? fromBinary(EvaluateHeaderSchema, request.header) : request;
    limits.push([Math.ceil((Number(call.getDeadline()) - Date.now()) / 1000), Number(runTimeout?.seconds ?? 0)]);
    respond(null, Buffer.from(toBinary(EvaluateResponseSchema, create(EvaluateResponseSchema))));
  };
  await against(
    answer,
    async (client) => {
      await client.evaluate(graph, options);
      await client.evaluate(graph, { ...options, timeout: 500 });
      await (await client.program("p")).evaluate({});
    },
    { timeout: 40, compileTimeout: 400 },
    ["/gradrule.v1.GradientService/Evaluate", get],
  );
  assert.equal(limits.length, 3);
  for (const [index, [total, run]] of [
    [440, 40],
    [500, 0],
    [440, 40],
  ].entries()) {
    assert.ok(Math.abs(limits[index]![0]! - total!) <= 20, `${limits[index]}`);
    assert.equal(limits[index]![1], run);
  }
});
