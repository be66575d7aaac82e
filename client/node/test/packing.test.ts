// Packed tensors, against the answers of a client that packs nothing.

import assert from "node:assert/strict";
import { test } from "node:test";
import * as zlib from "node:zlib";

import { Graph, Sparse, Tensor, bfloat16Bits, bfloat16Value, connect, errors, tensor } from "../src/index.js";
import type { Evaluation, Transfer } from "../src/index.js";
import { client as connected, freshName, target } from "./server.js";

const client = connected();
const hasZstd = "zstdCompress" in zlib;
const WIDTH = 600;

/** tanh, whose results are no bfloat16 numbers, and a gather, whose gradient is sparse. */
function graph(): Graph {
  const g = new Graph();
  g.op("Tanh", [g.placeholder("x", "float32", [null, WIDTH])], { name: "y" });
  const rows = g.placeholder("rows", "int32", [null]);
  const table = g.placeholder("table", "float32", [null, WIDTH]);
  g.op("Tanh", [g.op("GatherV2", [table, rows, g.constant(0, { dtype: "int32" })])], { name: "found" });
  return g;
}

const ASK = { fetches: ["y", "found"], ys: ["y", "found"], xs: ["x", "table"] };

function values(rows: number): Float32Array {
  const special = [Number.NaN, Number.POSITIVE_INFINITY, -0, 1e-40, 3.4e38];
  return Float32Array.from({ length: rows * WIDTH }, (_, i) => special[i] ?? Math.sin(i % 37));
}

function rounded(data: Float32Array): Float32Array {
  return data.map((value) => bfloat16Value(bfloat16Bits(value)));
}

function feeds(change: (data: Float32Array) => Float32Array): Record<string, Tensor> {
  return {
    x: tensor(change(values(3)), { shape: [3, WIDTH] }),
    table: tensor(change(values(4)), { shape: [4, WIDTH] }),
    rows: tensor(Int32Array.of(2, 0, 2)),
  };
}

function tensors({ outputs, gradients }: Evaluation): Tensor[] {
  const { table, x } = gradients;
  assert.ok(x instanceof Tensor && table instanceof Sparse);
  return [outputs["y"]!, outputs["found"]!, x, table.values, table.indices];
}

const TRANSFERS: readonly (readonly [string, Transfer])[] = [
  ["gzip", { compression: "gzip" }],
  ["bfloat16", { wireDtype: "bfloat16" }],
  ["gzip and bfloat16", { compression: "gzip", wireDtype: "bfloat16" }],
  ...(hasZstd
    ? ([
        ["zstd", { compression: "zstd" }],
        ["zstd and bfloat16", { compression: "zstd", wireDtype: "bfloat16" }],
      ] as const)
    : []),
];

for (const [name, transfer] of TRANSFERS) {
  test(`answers are the same with ${name}`, async (t) => {
    const packing = connect(target(), { transfer });
    t.after(() => packing.close());
    const same = (data: Float32Array): Float32Array => data;
    const sent = transfer.wireDtype ? rounded : same;
    const expected = await client.evaluate(graph(), { ...ASK, feeds: feeds(sent) });
    const check = (found: Evaluation): void => {
      const wanted = tensors(expected);
      for (const [index, each] of tensors(found).entries()) {
        const data = wanted[index]!.data;
        assert.deepEqual(each.data, data instanceof Float32Array ? sent(data) : data);
        assert.deepEqual(each.shape, wanted[index]!.shape);
      }
    };
    check(await packing.evaluate(graph(), { ...ASK, feeds: feeds(same) }));
    const program = await packing.compile(graph(), ASK);
    // Alone, then over the stream.
    for (let i = 0; i < 6; i++) check(await program.evaluate(feeds(same)));
    const long = tensor(values(3_000), { shape: [3_000, WIDTH] });
    const found = await program.evaluate({ ...feeds(same), x: long });
    assert.equal(found.outputs["y"]!.data.length, 3_000 * WIDTH);
  });
}

test("one call has another transfer than its client", async () => {
  const program = await client.compile(graph(), { ...ASK, name: freshName("packed") });
  const same = (data: Float32Array): Float32Array => data;
  const wide = await program.evaluate(feeds(same), { transfer: { wireDtype: "bfloat16" } });
  const kept = await program.evaluate(feeds(same), { transfer: { wireDtype: "bfloat16", keepWireDtype: true } });
  assert.equal(kept.outputs["y"]!.dtype, "bfloat16");
  assert.deepEqual(kept.outputs["y"]!.toFloat32(), wide.outputs["y"]!.data);
  assert.equal(tensors(kept)[4]!.dtype, "int32");
  await assert.rejects(program.evaluate(feeds(same), { transfer: { compression: "gzip" } }), errors.InvalidParamError);
});

test("a transfer that there is not is refused", async () => {
  const program = await client.compile(graph(), { ...ASK, name: freshName("packed") });
  assert.throws(() => connect(target(), { transfer: { compression: "lz4" as "zstd" } }), errors.InvalidParamError);
  assert.throws(
    () => connect(target(), { transfer: { wireDtype: "float16" as "bfloat16" } }),
    errors.InvalidParamError,
  );
  if (!hasZstd) {
    assert.throws(() => connect(target(), { transfer: { compression: "zstd" } }), errors.UnsupportedError);
    const asked = program.evaluate({}, { transfer: { compression: "zstd" } });
    await assert.rejects(asked, (error: Error) => error.message.includes("Node 22.15"));
  }
});

test("calls run together if the program declares batching", async () => {
  const g = new Graph();
  g.op("Tanh", [g.placeholder("x", "float32", [null, 4])], { name: "y" });
  await assert.rejects(client.compile(g, { fetches: ["y"], batching: true as never }), errors.InvalidParamError);
  for (const isDeclared of [true, false]) {
    const program = await client.compile(g, { fetches: ["y"], ...(isDeclared ? { batching: { axis: 0 } } : {}) });
    const expected = isDeclared && !/all|batching/.test(process.env["GRADRULE_DISABLED_FAST_PATHS"] ?? "");
    let found = false;
    // On a busy machine each call may be done before the next one arrives.
    for (let round = 0; round < (expected ? 20 : 1) && !found; round++) {
      const answers = await Promise.all(Array.from({ length: 300 }, (_, i) => program.evaluate({ x: [[i, 1, 2, 3]] })));
      for (const [i, { outputs }] of answers.entries()) {
        assert.ok(Math.abs((outputs["y"]!.data as Float32Array)[0]! - Math.tanh(i)) < 1e-6);
      }
      found = answers.some(({ batchSize }) => batchSize > 1);
    }
    assert.equal(found, expected);
  }
});
