// The README's quick start is examples/quickstart.mjs, and it does what it says.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { target } from "./server.js";

const home = new URL("../../", import.meta.url);
const example = new URL("examples/quickstart.mjs", home);

test("the quick start trains its neuron", async () => {
  const env = { ...process.env, GRADRULE_TARGET: target() };
  const { stdout } = await promisify(execFile)(process.execPath, [fileURLToPath(example)], { env, timeout: 120_000 });
  const last = JSON.parse(stdout.trimEnd().split("\n").at(-1)!) as {
    gradient: number[];
    loss: number;
  };
  assert.deepEqual(last.gradient, [0, 1, 0]);
  assert.ok(last.loss <= 0.1, stdout);
});

test("the quick start compiles under strict TypeScript", async () => {
  const tsc = fileURLToPath(new URL("node_modules/.bin/tsc", home));
  await promisify(execFile)(tsc, ["-p", fileURLToPath(new URL("examples/tsconfig.json", home))], { timeout: 120_000 });
});

test("the README shows the very file", async () => {
  const readme = await readFile(new URL("README.md", home), "utf8");
  assert.ok(readme.includes(await readFile(example, "utf8")));
});
