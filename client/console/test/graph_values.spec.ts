import { expect, test } from "@playwright/test";
import {
  type Feed,
  FeedError,
  feedValue,
  imageSize,
  imageValues,
  initialFeed,
  parseShape,
  random,
  randomValues,
} from "../src/graphs/feeds";
import {
  commonRange,
  difference,
  diverging,
  elementText,
  histogram,
  imageShape,
  isColour,
  numberOf,
  type Numbers,
  numberText,
  pixels,
  shareText,
  summary,
  toValue,
} from "../src/graphs/results";
import { columns, initialForm, names, parseParams, programSpec, type SpecForm } from "../src/graphs/spec";
import type { GraphFacts } from "../src/graphs/types";

const numbers = (shape: number[], values: number[], dtype = "float32"): Numbers => ({
  dtype,
  shape,
  values: Float64Array.from(values),
});
const typed = (text: string): Feed => ({ kind: "values", shape: "", seed: 1, text });

test.describe("answers become numbers", () => {
  test("nested lists are read in row-major order", () => {
    const value = toValue({ dtype: "float32", shape: [2, 1, 3], values: [[[1, 2, 3]], [[4, 5, 6]]] });
    expect(value).toEqual(numbers([2, 1, 3], [1, 2, 3, 4, 5, 6]));
    expect(toValue({ dtype: "float64", shape: [], values: 7 })).toEqual(numbers([], [7], "float64"));
    expect(toValue({ dtype: "float32", shape: [0, 3], values: [] })).toEqual(numbers([0, 3], []));
  });

  test("texts of the JSON mapping are the numbers that they mean", () => {
    const value = toValue({ dtype: "float32", shape: [4], values: ["NaN", "Infinity", "-Infinity", "-0.5"] });
    expect([...(value as Numbers).values]).toEqual([NaN, Infinity, -Infinity, -0.5]);
    const large = toValue({ dtype: "int64", shape: [2], values: ["-9007199254740992", 3] }) as Numbers;
    expect([...large.values]).toEqual([-(2 ** 53), 3]);
    const flags = toValue({ dtype: "bool", shape: [3], values: [true, false, true] }) as Numbers;
    expect([...flags.values]).toEqual([1, 0, 1]);
  });

  test("integers are shown with all their digits", () => {
    const found = toValue({ dtype: "int64", shape: [3], values: [123456, "9007199254740993", "-9223372036854775808"] });
    const texts = [0, 1, 2].map((index) => elementText(found as Numbers, index));
    expect(texts).toEqual(["123456", "9007199254740993", "−9223372036854775808"]);
    expect(elementText(numbers([1], [123456]), 0)).toBe("123500");
    expect(numberOf("int32", -1234567)).toBe("−1234567");
  });

  test("complex numbers become absolute values, which are named so and not compared", () => {
    const pair = toValue({
      dtype: "complex64",
      shape: [2],
      values: [
        [3, -4],
        [0, 2],
      ],
    }) as Numbers;
    expect(pair).toEqual(numbers([2], [5, 2], "complex64, absolute values"));
    expect(toValue({ dtype: "complex128", shape: [], values: [-5, 12] })).toMatchObject({
      values: Float64Array.of(13),
    });
    // −1 and 1 have the same absolute value.
    expect(difference(pair, pair)).toBeUndefined();
  });

  test("slices of a sparse gradient are added at their rows", () => {
    const tensor = (shape: number[], values: never[] | number[] | number[][], dtype = "float32") => ({
      dtype,
      shape,
      values,
    });
    const value = toValue({
      sparse: {
        values: tensor(
          [3, 2],
          [
            [1, 2],
            [3, 4],
            [10, 20],
          ],
        ),
        indices: tensor([3], [2, 0, 2], "int64"),
        denseShape: tensor([2], [4, 2], "int64"),
      },
    });
    expect(value).toEqual(numbers([4, 2], [3, 4, 0, 0, 11, 22, 0, 0]));
  });

  test("a gradient that does not exist says why", () => {
    expect(toValue({ unconnected: {} })).toEqual({ missing: "no gradient: not connected" });
    expect(toValue({ notDifferentiable: {} })).toEqual({ missing: "no gradient: not differentiable" });
    expect(toValue({ dtype: "string", shape: [1], values: ["a"] })).toEqual({ missing: "text" });
    expect(toValue(undefined)).toHaveProperty("missing");
  });
});

test.describe("figures", () => {
  test("a summary is about finite numbers", () => {
    const found = summary(Float64Array.of(3, -4, 0, NaN, Infinity));
    expect(found).toEqual({ count: 5, least: -4, most: 3, mean: -1 / 3, norm: 5, zeros: 1, notFinite: 2 });
    expect(summary(Float64Array.of())).toMatchObject({ count: 0, least: NaN, mean: NaN, norm: 0 });
  });

  test("only none is 0 % and only all are 100 %", () => {
    expect([0, 1, 500, 999, 1000].map((part) => shareText(part, 1000))).toEqual([
      "0 %",
      "< 1 %",
      "50 %",
      "> 99 %",
      "100 %",
    ]);
    expect(shareText(0, 0)).toBe("–");
  });

  test("a histogram counts each finite number once; the last interval has both its ends", () => {
    const values = Float64Array.of(0, 0.5, 1, 1.5, 2, 2, 3.999, 4, NaN, -Infinity);
    // As numpy.histogram(values, bins=4, range=(0, 4)).
    expect(histogram(values, 0, 4, 4)).toEqual([2, 2, 2, 2]);
    expect(histogram(Float64Array.of(5, 5, 5), 5, 5, 3)).toEqual([3, 0, 0]);
    expect(histogram(Float64Array.of(-3, -1), -3, -1, 2)).toEqual([1, 1]);
  });

  test("a column without finite numbers does not hide the range of the others", () => {
    const range = commonRange([numbers([2], [NaN, Infinity]), numbers([2], [-1, 2]), numbers([0], [])]);
    expect(range).toEqual({ least: -1, most: 2 });
    expect(commonRange([numbers([1], [NaN])])).toEqual({ least: NaN, most: NaN });
  });

  test("differences and angles", () => {
    expect(difference(numbers([2], [1, 0]), numbers([2], [1, 1]))).toEqual({
      most: 1,
      cosine: expect.closeTo(0.7071, 4),
    });
    expect(difference(numbers([2], [1, 2]), numbers([2], [-2, -4]))).toEqual({
      most: 6,
      cosine: expect.closeTo(-1, 12),
    });
    expect(difference(numbers([2], [0, 0]), numbers([2], [1, 1]))).toEqual({ most: 1, cosine: NaN });
    // Squares of both are too small for a double.
    expect(difference(numbers([1], [1e-100]), numbers([1], [3e-100]))!.cosine).toBeCloseTo(1);
    expect(difference(numbers([2], [1, 2]), numbers([1, 2], [1, 2]))).toBeUndefined();
    const odd = difference(numbers([3], [NaN, Infinity, 1]), numbers([3], [NaN, Infinity, 4]));
    expect(odd!.most).toBe(3);
    expect(difference(numbers([1], [NaN]), numbers([1], [1]))!.most).toBe(Infinity);
  });

  test("numbers are short, and keep their sign and size", () => {
    const cases: [number, string][] = [
      [0, "0"],
      [-2, "−2"],
      [1 / 3, "0.3333"],
      [123456, "123500"],
      [1234567, "1.23e+6"],
      [-0.000123, "−1.23e−4"],
      [-Infinity, "−inf"],
      [NaN, "nan"],
    ];
    for (const [value, text] of cases) expect(numberText(value)).toBe(text);
  });
});

test.describe("images of tensors", () => {
  test("shapes that are images", () => {
    expect(imageShape([4, 28, 20, 1])).toEqual({ count: 4, height: 28, width: 20, channels: 1 });
    expect(imageShape([28, 20, 3])).toEqual({ count: 1, height: 28, width: 20, channels: 3 });
    expect(imageShape([28, 20])).toEqual({ count: 1, height: 28, width: 20, channels: 1 });
    for (const shape of [[], [100], [4, 4], [2, 3, 28, 28], [0, 28, 28, 1]]) expect(imageShape(shape)).toBeUndefined();
  });

  test("a picture is wholly in colours or wholly from blue to orange", () => {
    const ends = { least: -1, most: 0.5 };
    const image = numbers(
      [8, 8, 3],
      Array.from({ length: 192 }, (_, at) => [0.5, 0.2, -0.1][at % 3]!),
    );
    image.values.set([1, 1, 1, -1, -1, -1]);
    expect(isColour(image.shape, { least: -1, most: 1 })).toBe(false);
    const drawn = pixels(image, { least: -1, most: 1 });
    expect([...drawn.slice(0, 8)]).toEqual([213, 94, 0, 255, 0, 114, 178, 255]);
    // The mean of 0.5, 0.2 and −0.1 is 0.2.
    expect([...drawn.slice(8, 11)]).toEqual([247, 223, 204]);
    expect(isColour([8, 8, 1], { least: 0, most: 1 })).toBe(false);
    const photo = numbers(
      [8, 8, 3],
      Array.from({ length: 192 }, (_, at) => [1, 0.2, 0][at % 3]!),
    );
    expect([...pixels(photo, { least: 0, most: 1 }).slice(0, 4)]).toEqual([255, 51, 0, 255]);
    expect(isColour(photo.shape, ends)).toBe(false);
  });

  test("zero is white, ends are blue and orange, what is not finite is black", () => {
    expect(diverging(0)).toEqual([255, 255, 255]);
    expect(diverging(-1)).toEqual([0, 114, 178]);
    expect(diverging(9)).toEqual([213, 94, 0]);
    expect(diverging(NaN)).toEqual([0, 0, 0]);
  });
});

test.describe("values of placeholders", () => {
  test("shapes are read; what is none is refused", () => {
    expect(parseShape("4, 28,28")).toEqual([4, 28, 28]);
    expect(parseShape("2×3")).toEqual([2, 3]);
    expect(parseShape(" ")).toEqual([]);
    for (const text of ["4, ?", "-1, 3", "2.5", "4, y"]) expect(() => parseShape(text)).toThrow(FeedError);
    expect(() => parseShape("2001, 2000")).toThrow(/4 million/);
  });

  test("random numbers repeat, and are those of the generator mulberry32", () => {
    const next = random(1);
    // Computed with 32-bit integers of NumPy.
    expect([next(), next(), next()]).toEqual([0.6270739405881613, 0.002735721180215478, 0.5274470399599522]);
    expect(randomValues([2, 3], "float32", 5)).toEqual(randomValues([2, 3], "float32", 5));
    expect(randomValues([2, 3], "float32", 5)).not.toEqual(randomValues([2, 3], "float32", 6));
  });

  test("random values fit the dtype", () => {
    const floats = (randomValues([20000], "bfloat16", 3) as number[]).map(Number);
    const mean = floats.reduce((sum, value) => sum + value, 0) / floats.length;
    const variance = floats.reduce((sum, value) => sum + (value - mean) ** 2, 0) / floats.length;
    expect(Math.abs(mean)).toBeLessThan(0.03);
    expect(Math.abs(variance - 1)).toBeLessThan(0.05);
    const integers = new Set(randomValues([500], "uint8", 3) as number[]);
    expect([...integers].sort()).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    expect(new Set(randomValues([50], "bool", 3) as boolean[])).toEqual(new Set([true, false]));
    const complex = randomValues([3], "complex64", 3) as number[][];
    expect(complex.map((pair) => pair.map((part) => typeof part))).toEqual(Array(3).fill(["number", "number"]));
    expect(() => randomValues([3], "string", 1)).toThrow(/type the texts/);
  });

  test("typed values are JSON, and an error names the placeholder", () => {
    const spec = { name: "x", dtype: "float32", shape: [2] };
    expect(feedValue(spec, typed("[[1, -2.5]]"))).toEqual([[1, -2.5]]);
    expect(() => feedValue(spec, typed("[1, 2"))).toThrow(/value of x is not JSON/);
    expect(() => feedValue(spec, { ...typed(""), kind: "image", shape: "28, 28" })).toThrow(/image for x/);
    expect(initialFeed({ name: "x", shape: [null, 3] }).shape).toBe("4, 3");
    expect(initialFeed({ name: "x", shape: null }).shape).toBe("");
  });

  test("integers that no double is exactly are sent as text", () => {
    const text = "[[9007199254740993, -9223372036854775808], [12, 9007199254740991]]";
    const spec = { name: "x", dtype: "int64", shape: [2, 2] };
    expect(feedValue(spec, typed(text))).toEqual([
      ["9007199254740993", "-9223372036854775808"],
      [12, 9007199254740991],
    ]);
    expect(feedValue({ ...spec, dtype: "float64" }, typed("9007199254740993"))).toBe(9007199254740992);
    expect(feedValue({ ...spec, dtype: "string" }, typed('"9007199254740993"'))).toBe("9007199254740993");
    expect(() => feedValue(spec, typed("[01]"))).toThrow(/not JSON/);
  });

  // Two pixels: pure red and a grey of 51.
  const RGBA = Uint8ClampedArray.of(255, 0, 0, 255, 51, 51, 51, 255);

  test("an image fills the shape of its tensor", () => {
    expect(imageValues(RGBA, [1, 2, 3], "float32")).toEqual([
      [
        [1, 0, 0],
        [0.2, 0.2, 0.2],
      ],
    ]);
    // Rec. 601: 0.2989 of red.
    expect(imageValues(RGBA, [1, 2, 1], "float32")).toEqual([[[0.2989], [0.2]]]);
    expect(imageValues(RGBA, [1, 2], "float64")).toEqual([[0.2989, 0.2]]);
    const batch = imageValues(RGBA, [2, 1, 2, 1], "bfloat16");
    expect(batch).toEqual([[[[0.2989], [0.2]]], [[[0.2989], [0.2]]]]);
    expect(imageValues(RGBA, [2, 1, 2], "float32")).toEqual([[[0.2989, 0.2]], [[0.2989, 0.2]]]);
    for (const shape of [[5], [1, 2, 3, 4], [1, 1, 1, 1, 1]]) expect(() => imageSize(shape)).toThrow(FeedError);
  });

  test("an image for integers has bytes; other dtypes are refused", () => {
    expect(imageValues(RGBA, [1, 2, 3], "uint8")).toEqual([
      [
        [255, 0, 0],
        [51, 51, 51],
      ],
    ]);
    expect(imageValues(RGBA, [1, 2], "int32")).toEqual([[76, 51]]);
    for (const dtype of ["bool", "string", "int8", "complex64"])
      expect(() => imageValues(RGBA, [1, 2], dtype)).toThrow(dtype);
  });
});

test.describe("what is asked", () => {
  const FORM: SpecForm = {
    ys: "loss",
    xs: "x, w",
    fetches: "loss",
    overrides: [
      { kind: "opType", value: " Sign ", rule: "ste ", params: "clip = 2; alpha=0.5" },
      { kind: "scope", value: "block", rule: "atan", params: "" },
      { kind: "opType", value: "Relu", rule: "", params: "" },
    ],
  };

  const compared = (rule: string, params = "") => ({ rule, params });

  test("a form becomes a program", () => {
    expect(programSpec({ sha256: "ab" }, FORM)).toEqual({
      graph: { blobSha256: "ab" },
      fetches: ["loss"],
      vjp: { ys: ["loss"], xs: ["x", "w"] },
      overrides: [
        { selector: { opType: "Sign" }, rule: "ste", params: { clip: 2, alpha: 0.5 } },
        { selector: { scope: "block" }, rule: "atan", params: {} },
      ],
    });
    expect(programSpec({ sha256: "ab", format: "GRAPH_FORMAT_ONNX" }, { ...FORM, ys: " " })).toEqual({
      graph: { blobSha256: "ab", format: "GRAPH_FORMAT_ONNX" },
      fetches: ["loss"],
    });
    expect(names(" a, b\nc,,")).toEqual(["a", "b", "c"]);
  });

  test("a param without a number is refused", () => {
    for (const text of ["clip", "clip=", "=1", "clip=1=2", "clip=one", "clip=Infinity"])
      expect(() => parseParams(text)).toThrow(/name=number/);
    expect(parseParams("")).toEqual({});
  });

  test("a comparison replaces the first rule everywhere and keeps the others", () => {
    const found = columns(FORM, [compared("tanh_surrogate"), compared(" ")], true);
    expect(found.map(({ title }) => title)).toEqual([
      "ste (clip = 2; alpha=0.5), atan",
      "tanh_surrogate",
      "no overrides",
    ]);
    const rules = (index: number) => found[index]!.form.overrides.map(({ rule, params }) => [rule, params]);
    // A param of one rule is not one of another.
    expect(rules(1)).toEqual([
      ["tanh_surrogate", ""],
      ["atan", ""],
    ]);
    expect(rules(2)).toEqual([]);
    const none = { ...FORM, overrides: [] };
    expect(columns(none, [compared("")], true).map(({ title }) => title)).toEqual(["no overrides"]);
  });

  test("a rule is compared with other params of its own", () => {
    const found = columns(FORM, [compared("ste", "clip=1"), compared("ste")], false);
    expect(found.map(({ title }) => title).slice(1)).toEqual(["ste (clip=1)", "ste"]);
    expect(found.map(({ form }) => form.overrides[0]!.params).slice(1)).toEqual(["clip=1", ""]);
  });

  test("a comparison that has nothing to replace says so", () => {
    const none = { ...FORM, overrides: [] };
    expect(() => columns(none, [compared("atan")], true)).toThrow(/Add an override.*atan/);
    expect(() => columns(FORM, [compared("", "clip=1")], true)).toThrow(/clip=1/);
  });

  test("a graph of integers starts without gradients", () => {
    const facts = { inputs: [{ name: "ids", dtype: "int32" }], outputs: ["y"] } as unknown as GraphFacts;
    expect(initialForm(facts)).toEqual({ ys: "", xs: "", fetches: "y", overrides: [] });
  });

  test("gradients are asked of floating-point inputs", () => {
    const inputs = [
      { name: "x", dtype: "float32" },
      { name: "ids", dtype: "int32" },
      { name: "z", dtype: "complex64" },
      { name: "h", dtype: "bfloat16" },
    ];
    const facts = { inputs, outputs: ["a", "y"] } as unknown as GraphFacts;
    expect(initialForm(facts)).toEqual({ ys: "y", xs: "x, z, h", fetches: "y", overrides: [] });
  });
});
