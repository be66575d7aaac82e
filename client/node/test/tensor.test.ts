import assert from "node:assert/strict";
import { test } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import { EvaluateHeaderSchema, EvaluateRequestSchema } from "../src/gen/gradrule/v1/evaluate_pb.js";
import { Compression, Dt, TensorSchema, TensorShapeSchema } from "../src/gen/gradrule/v1/tensor_pb.js";
import { Tensor, errors, tensor } from "../src/index.js";
import type { DType, TensorLike } from "../src/index.js";
import { namedTensor, shapeMessage, readShape, swapBytes, tensorMessage, readTensor, withHeader } from "../src/wire.js";

const bytes = (value: Tensor): string => Buffer.from(tensorMessage(value).tensorContent).toString("hex");

test("the element type of what is given without one", () => {
  const rows: [TensorLike, DType][] = [
    [1, "float32"],
    [[1, 2], "float32"],
    [[], "float32"],
    [[1n], "int64"],
    [[true], "bool"],
    ["a", "string"],
    [[new Uint8Array([255])], "string"],
    [[{ re: 1, im: 2 }], "complex64"],
    [new Float64Array(1), "float64"],
    [new Uint8ClampedArray(1), "uint8"],
    [new BigUint64Array(1), "uint64"],
    [new Uint16Array(1), "uint16"],
  ];
  for (const [data, dtype] of rows) assert.equal(tensor(data).dtype, dtype);
});

test("bytes of each type are those that TensorFlow writes", () => {
  assert.equal(bytes(tensor([1, -2], { dtype: "float32" })), "0000803f000000c0");
  assert.equal(bytes(tensor(1.5, { dtype: "float64" })), "000000000000f83f");
  assert.equal(bytes(tensor([1.5, -0.25], { dtype: "float16" })), "003e00b4");
  assert.equal(bytes(tensor([1.5], { dtype: "bfloat16" })), "c03f");
  assert.equal(bytes(tensor([-2n], { dtype: "int64" })), "feffffffffffffff");
  assert.equal(bytes(tensor([2n ** 64n - 1n], { dtype: "uint64" })), "ffffffffffffffff");
  assert.equal(bytes(tensor([258, -1], { dtype: "int16" })), "0201ffff");
  assert.equal(bytes(tensor([true, false, true])), "010001");
  assert.equal(bytes(tensor([{ re: 1, im: -1 }, 2], { dtype: "complex64" })), "0000803f000080bf0000004000000000");
});

test("nested arrays have the shape of their nesting", () => {
  const value = tensor([
    [1, 2, 3],
    [4, 5, 6],
  ]);
  assert.deepEqual(value.shape, [2, 3]);
  assert.deepEqual(value.toArray(), [
    [1, 2, 3],
    [4, 5, 6],
  ]);
  assert.deepEqual(tensor(7).shape, []);
  assert.equal(tensor(7).toArray(), 7);
  assert.deepEqual(tensor([[], []]).shape, [2, 0]);
  assert.deepEqual(tensor([[], []]).toArray(), [[], []]);
  assert.deepEqual(tensor([1, 2, 3, 4], { dtype: "int32", shape: [2, 2] }).toArray(), [
    [1, 2],
    [3, 4],
  ]);
});

test("a typed array is not copied, and holds the types that have none of their own", () => {
  const bits = new Uint16Array([0x3c00]);
  const half = tensor(bits, { dtype: "float16" });
  assert.equal(half.data, bits);
  assert.deepEqual([...half.toFloat32()], [1]);
  assert.deepEqual(tensor(new Uint8Array([1, 0]), { dtype: "bool" }).toArray(), [true, false]);
  const complex = tensor(new Float32Array([1, 2, 3, 4]), { dtype: "complex64" });
  assert.deepEqual(complex.shape, [2]);
  assert.deepEqual(complex.toArray(), [
    { re: 1, im: 2 },
    { re: 3, im: 4 },
  ]);
  assert.deepEqual(tensor(new Float32Array(6), { shape: [2, 3] }).shape, [2, 3]);
});

test("what does not fit is INVALID_TENSOR, and the message says where and why", () => {
  const rows: [() => unknown, RegExp][] = [
    [() => tensor([[1, 2], [3]]), /\[1\] has shape \[1\], but those before it have \[2\]/],
    [() => tensor([1, "a"]), /Element 1 is "a", which is no float32/],
    [() => tensor([1.5], { dtype: "int32" }), /Element 0 is 1\.5, which is no int32/],
    [() => tensor([300], { dtype: "uint8" }), /Element 0 is 300, which is no uint8/],
    [() => tensor([2 ** 60], { dtype: "int64" }), /which is no int64/],
    [() => tensor([2n ** 63n], { dtype: "int64" }), /9223372036854775808n, which is no int64/],
    [() => tensor([1], { dtype: "bool" }), /Element 0 is 1, which is no bool/],
    [() => tensor([null as unknown as number]), /Element 0 is null/],
    [() => tensor([1, 2, 3], { shape: [2, 2] }), /shape \[2, 2\] takes 4 entries, but its data has 3/],
    [() => tensor([1], { shape: [-1] }), /dimension -1/],
    [() => tensor(new Float32Array(1), { dtype: "float64" }), /held by a Float64Array, not by a Float32Array/],
    [() => tensor(new Float32Array(3), { dtype: "complex64" }), /dimension 1\.5/],
    [() => tensor([new Float32Array(2)] as never), /\[0\] is a Float32Array; rows are plain arrays/],
    [() => tensor([1], { dtype: "float" as DType }), /no element type "float"; there are .*float32/],
    [() => tensor(tensor([1]), { dtype: "int32" }), /The tensor is float32, but int32 was requested/],
    [() => tensor([1]).strings(), /strings\(\) is for string tensors/],
    [() => tensor([new Uint8Array([0xff])]).strings(), /Element 0 is not UTF-8/],
  ];
  for (const [make, message] of rows) {
    assert.throws(make, (thrown) => {
      assert.ok(thrown instanceof errors.InvalidTensorError, String(thrown));
      assert.equal(thrown.reason, "INVALID_TENSOR");
      assert.match(thrown.message, message);
      return true;
    });
  }
});

test("tensors of every type come back from the wire, wherever in the message their bytes start", () => {
  const values = [
    tensor([[1.5, -2]], { dtype: "float32" }),
    tensor([1e300], { dtype: "float64" }),
    tensor([0.5, 2], { dtype: "float16" }),
    tensor([0.5, 2], { dtype: "bfloat16" }),
    tensor([-(2n ** 63n), 2n ** 63n - 1n], { dtype: "int64" }),
    tensor([2n ** 64n - 1n], { dtype: "uint64" }),
    tensor([-1, 2], { dtype: "int32" }),
    tensor([4294967295], { dtype: "uint32" }),
    tensor([true, false]),
    tensor([{ re: 1, im: 2 }], { dtype: "complex128" }),
    tensor(["a", "", "ü"]),
    tensor([], { dtype: "int16", shape: [0, 3] }),
  ];
  for (const value of values) {
    const message = toBinary(TensorSchema, tensorMessage(value));
    for (let offset = 0; offset < 8; offset++) {
      const moved = new Uint8Array(message.length + offset);
      moved.set(message, offset);
      const back = readTensor(fromBinary(TensorSchema, moved.subarray(offset)));
      assert.equal(back.dtype, value.dtype);
      assert.deepEqual(back.shape, value.shape);
      assert.deepEqual(back.toArray(), value.toArray());
      assert.equal(back.data.constructor, value.data.constructor);
    }
  }
});

test("tensors in the *_val fields, whose last value fills the rest", () => {
  const shape = (...sizes: number[]) => shapeMessage(sizes);
  const read = (init: Parameters<typeof create<typeof TensorSchema>>[1]) =>
    readTensor(create(TensorSchema, init)).toArray();
  assert.deepEqual(read({ dtype: Dt.FLOAT, tensorShape: shape(3), floatVal: [1, 2] }), [1, 2, 2]);
  assert.deepEqual(read({ dtype: Dt.INT64, tensorShape: shape(2), int64Val: [5n] }), [5n, 5n]);
  assert.deepEqual(read({ dtype: Dt.INT32, tensorShape: shape(2) }), [0, 0]);
  assert.deepEqual(read({ dtype: Dt.BOOL, tensorShape: shape(2), boolVal: [true] }), [true, true]);
  assert.deepEqual(read({ dtype: Dt.HALF, tensorShape: shape(2), halfVal: [0x3c00, 0x4000] }), [1, 2]);
  assert.deepEqual(read({ dtype: Dt.COMPLEX64, tensorShape: shape(2), scomplexVal: [1, 2] }), [
    { re: 1, im: 2 },
    { re: 1, im: 2 },
  ]);
  assert.equal(read({ dtype: Dt.DOUBLE, doubleVal: [2.5] }), 2.5);
  assert.throws(() => read({ dtype: Dt.FLOAT, tensorShape: shape(1), floatVal: [1, 2] }), errors.InvalidTensorError);
  assert.throws(() => read({ dtype: Dt.RESOURCE }), /no tensors of element type RESOURCE/);
  const short = { dtype: Dt.FLOAT, tensorShape: shape(1), tensorContent: new Uint8Array(3) };
  assert.throws(() => read(short), /3 bytes are no whole number of float32 elements/);
});

test("shapes with unknown dimensions and rank", () => {
  for (const shape of [[], [2, 3], [null, 3], null]) {
    assert.deepEqual(readShape(fromBinary(TensorShapeSchema, toBinary(TensorShapeSchema, shapeMessage(shape)))), shape);
  }
  assert.equal(readShape(undefined), null);
  assert.throws(() => shapeMessage([1.5]), errors.InvalidTensorError);
});

test("entries of a big-endian host are turned round", () => {
  assert.deepEqual([...swapBytes(new Uint8Array([1, 2, 3, 4, 5, 6, 7, 8]), 4)], [4, 3, 2, 1, 8, 7, 6, 5]);
});

test("a call of a compiled program is a header, equal for equal calls, and the contents of its tensors", () => {
  const packed = { dtype: Dt.FLOAT, shape: shapeMessage([2]), contentDtype: Dt.BFLOAT16, content: new Uint8Array(4) };
  const call = (x: number) =>
    create(EvaluateRequestSchema, {
      target: { case: "program", value: "programs/p" },
      feeds: [
        namedTensor("x", tensor([[x, 2]])),
        namedTensor("s", tensor(["a", ""])),
        namedTensor("empty", tensor([], { dtype: "int16", shape: [0, 3] })),
      ],
      gradYs: [{ name: "y", value: { source: { case: "inlineTensor", value: create(TensorSchema, { packed }) } } }],
      params: { L: { values: { a: { value: { case: "number", value: 2 } } } } },
      answerPacking: { compression: Compression.ZSTD },
      runTimeout: durationFromMs(30_000),
    });
  const { target, feeds, header, contents } = withHeader(call(1));
  assert.equal(target.case, undefined);
  assert.equal(feeds.length, 0);
  assert.deepEqual(withHeader(call(3)).header, header);
  const strings = toBinary(TensorSchema, tensorMessage(tensor(["a", ""])));
  assert.deepEqual(
    contents.map((content) => Buffer.from(content).toString("hex")),
    ["0000803f00000040", Buffer.from(strings).toString("hex"), "", "00000000"],
  );
  const found = fromBinary(EvaluateHeaderSchema, header);
  assert.equal(found.program, "programs/p");
  assert.deepEqual(
    [...found.feeds, ...found.gradYs].map(({ name, dtype, shape, contentIsTensor, compression, contentDtype }) => [
      name,
      dtype,
      shape.map(Number),
      contentIsTensor,
      compression,
      contentDtype,
    ]),
    [
      ["x", Dt.FLOAT, [1, 2], false, 0, 0],
      ["s", Dt.STRING, [2], true, 0, 0],
      ["empty", Dt.INT16, [0, 3], false, 0, 0],
      ["y", Dt.FLOAT, [2], false, 0, Dt.BFLOAT16],
    ],
  );
  const { params, answerPacking, runTimeout } = call(1);
  assert.deepEqual([found.params, found.answerPacking, found.runTimeout], [params, answerPacking, runTimeout]);
  const inline = create(EvaluateRequestSchema, { target: { case: "spec", value: {} } });
  assert.equal(withHeader(inline), inline);
});
