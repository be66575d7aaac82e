// examples/sampler.mjs samples the coefficients from which its data were drawn.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { target } from "./server.js";

const example = new URL("../../examples/sampler.mjs", import.meta.url);

test("the sampler finds the coefficients", async () => {
  const env = { ...process.env, GRADRULE_TARGET: target() };
  const { stdout } = await promisify(execFile)(process.execPath, [fileURLToPath(example)], { env, timeout: 120_000 });
  const found = JSON.parse(stdout.trimEnd().split("\n").at(-1)!) as Record<string, number>[];
  assert.equal(found.length, 3);
  for (const { truth, low, high, samples, rHat } of found) {
    assert.ok(low! < truth! && truth! < high!, stdout);
    assert.ok(samples! >= 200 && rHat! <= 1.05, stdout);
  }
});
