"""Converts ONNX operations on matrices."""

from __future__ import annotations

import re

import numpy as np

from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, converts


@converts("MatMul", nodes="MatMul, or BatchMatMulV2 of more than two axes", refuses="uint64")
def _matmul(call: OpCall) -> Converted:
    a, b, own = call.x(0), call.x(1), call.dtype()
    ranks = call.rank(0), call.rank(1)
    if own == "uint64":
        raise UnsupportedOpError("of uint64")
    if own == "uint32":
        a, b = call.cast(a, "int64"), call.cast(b, "int64")
    if ranks == (2, 2):
        return Value(call.cast(call.op("MatMul", a, b), own), 2)
    if ranks[0] == 1:
        a = call.op("ExpandDims", a, 0)
    if ranks[1] == 1:
        b = call.op("ExpandDims", b, 1)
    y = call.op("BatchMatMulV2", a, b)
    rank = max(ranks[0], ranks[1], 2)
    single = [axis for axis, short in ((-2, ranks[0] == 1), (-1, ranks[1] == 1)) if short]
    if single:
        y = call.op("Squeeze", y, squeeze_dims=single)
    return Value(call.cast(y, own), rank - len(single))


@converts("Gemm", nodes="Gemm", refuses="unsigned integers")
def _gemm(call: OpCall) -> Converted:
    a, own = call.x(0), call.dtype()
    if own.startswith("u"):
        raise UnsupportedOpError(f"of {own}")
    alpha, beta = float(call.attr("alpha")), float(call.attr("beta"))
    if not own.startswith(("float", "bfloat")) and (alpha % 1 or beta % 1):
        raise UnsupportedOpError(f"of {own} with alpha {alpha} and beta {beta}")
    if alpha != 1:
        a = call.op("Mul", a, call.const(alpha))
    c = call.x(2) if call.has(2) and beta != 0 else call.const(0)
    if beta not in (0, 1):
        c = call.op("Mul", c, call.const(beta))
    flags = {"transA": bool(call.attr("transA")), "transB": bool(call.attr("transB"))}
    return Value(call.model.composite("Gemm", a, call.x(1), c, **flags), 2)


@converts("Einsum", nodes="Einsum", refuses="more than two tensors")
def _einsum(call: OpCall) -> Converted:
    if len(call) > 2:
        raise UnsupportedOpError(f"of {len(call)} tensors; TensorFlow's Einsum takes at most two")
    equation = re.sub(r"\s", "", call.attr("equation"))
    if "->" not in equation:
        letters = equation.replace(".", "").replace(",", "")
        single = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        equation += "->" + ("..." if "..." in equation else "") + "".join(single)
    rank = call.output_rank()
    return Value(call.op("Einsum", [call.x(index) for index in range(len(call))], equation=equation), rank)


@converts("Det", nodes="MatrixDeterminant")
def _determinant(call: OpCall) -> Converted:
    return Value(call.op("MatrixDeterminant", call.x()), call.rank() - 2)


@converts("Dropout", nodes="none: the tensor itself", refuses="training_mode, unless the ratio is 0")
def _dropout(call: OpCall) -> Converted:
    call.attr("seed"), call.attr("ratio")
    ratio, training = call.array(1), call.array(2)
    if call.has(2) and (training is None or bool(training.reshape(-1)[0])):
        default = np.float32(0.5) if not call.has(1) else None
        amount = default if ratio is None else ratio.reshape(-1)[0]
        if amount is None or amount != 0:
            raise UnsupportedOpError("in training mode; export the model for inference")
    x = call.value(0)
    if not call.wants(1):
        return x
    mask = call.op("Fill", call.op("Shape", call.x()), call.const(True, "bool"))
    return [x, Value(mask, x.rank)]
