import { expect, test } from "@playwright/test";
import { numberText } from "../src/api/numbers";
import { findBreaks } from "../src/rules/breaks";

test("integers are shown in full, other numbers shortly", () => {
  const shown = [123456, 1234567, -41, 0, 12345678, 0.123456789, 1e-5, NaN, -Infinity].map((value) =>
    numberText(value),
  );
  expect(shown).toEqual(["123456", "1234567", "−41", "0", "1.23e+7", "0.12346", "1.00e−5", "nan", "−inf"]);
});

for (const [name, f, wanted] of [
  ["kinks", (x) => Math.min(Math.max(x, 0), 2.6), [0, 2.6]],
  ["a kink between the points of a grid", (x) => Math.abs(x - 0.0123), [0.0123]],
  ["a jump", (x) => (x > 1 / 3 ? 1 : 0), [1 / 3]],
  ["two jumps that are close", (x) => (Math.abs(x) <= 0.03 ? 1 : 0), [-0.03, 0.03]],
  ["a pole", (x) => 1 / (x - 1.7), [1.7]],
  ["an edge of the values that are defined", (x) => Math.sqrt(x - 0.5), [0.5]],
  ["a jump with a value in its middle", Math.sign, [0]],
  ["many jumps", Math.round, [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]],
  ["no break of a line", (x) => 3 * x + 1, []],
  ["no break of smooth functions", (x) => Math.exp(x) + Math.sin(5 * x) + Math.tanh(20 * (x - 0.7)), []],
] as [string, (x: number) => number, number[]][]) {
  test(`finds ${name}`, async () => {
    const found = await findBreaks((x) => Promise.resolve(x.map(f)), -3, 3);
    expect(found.length).toBe(wanted.length);
    wanted.forEach((value, index) => expect(found[index]).toBeCloseTo(value, 6));
  });
}
