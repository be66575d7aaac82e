import assert from "node:assert/strict";
import { test } from "node:test";

import { bfloat16Bits, bfloat16Value, float16Bits, float16Value } from "../src/index.js";

test("every float16 survives the way to its value and back", () => {
  for (let bits = 0; bits < 0x10000; bits++) {
    const value = float16Value(bits);
    if (Number.isNaN(value)) assert.ok((bits & 0x7c00) === 0x7c00 && (bits & 0x3ff) !== 0);
    else assert.equal(float16Bits(value), bits);
  }
  assert.equal(float16Value(float16Bits(Number.NaN)), Number.NaN);
});

test("what lies between two float16 goes to the nearer one, and halfway to the even one", () => {
  for (let bits = 0; bits < 0x7bff; bits++) {
    const [low, high] = [float16Value(bits), float16Value(bits + 1)];
    const middle = (low + high) / 2;
    assert.equal(float16Bits(middle), bits % 2 === 0 ? bits : bits + 1);
    assert.equal(float16Bits(middle - (high - low) / 4096), bits);
    assert.equal(float16Bits(-middle - (high - low) / 4096), (bits + 1) | 0x8000);
  }
});

test("float16 as NumPy rounds it", () => {
  const rows: [number, number][] = [
    [0.1, 0x2e66],
    [1 / 3, 0x3555],
    [65504, 0x7bff],
    [65519.99, 0x7bff],
    [65520, 0x7c00],
    [-1e9, 0xfc00],
    [2 ** -25, 0x0000],
    [2 ** -24, 0x0001],
    [-0, 0x8000],
  ];
  for (const [value, bits] of rows) assert.equal(float16Bits(value), bits, String(value));
});

test("every bfloat16 survives, and rounding is to the nearest, ties to even", () => {
  for (let bits = 0; bits < 0x10000; bits++) {
    const value = bfloat16Value(bits);
    if (!Number.isNaN(value)) assert.equal(bfloat16Bits(value), bits);
  }
  assert.equal(bfloat16Bits(1 + 2 ** -8), 0x3f80);
  assert.equal(bfloat16Bits(1 + 3 * 2 ** -8), 0x3f82);
  assert.equal(bfloat16Bits(3.3895e38 * 2), 0x7f80);
  assert.ok(Number.isNaN(bfloat16Value(bfloat16Bits(Number.NaN))));
});
