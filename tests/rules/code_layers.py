"""Makes linear layers from real ops, each with the equal dense matrix, built element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Build: TypeAlias = Callable[..., list[tf.Operation]]
Matrix: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Layer:
    """Describes a linear op with an optional bias; `matrix(w)` has the shape of Wx, then that of x."""

    label: str
    build: Build
    x: Array
    w: Array
    matrix: Matrix
    b: Array | None = None
    bias_shape: tuple[int, ...] = ()
    only_xla: bool = False

    @property
    def operands(self) -> list[Array]:
        return [self.x, self.w] if self.b is None else [self.x, self.w, self.b]


def values(*shape: int, seed: int = 0) -> Array:
    """Draws numbers of both signs."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def _linear(op: Any, data: str, weights: str, add: str = "", bias_format: str = "NHWC", **attributes: Any) -> Build:
    """Makes the ops of a layer: `op`, and a bias add whose bias is the last operand, or the first (`add` "bias+Wx")."""

    def build(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None) -> list[tf.Operation]:
        z = op(**{data: x, weights: w}, **attributes)
        if b is None:
            return [z.op]
        if add == "BiasAdd":
            return [z.op, tf.raw_ops.BiasAdd(value=z, bias=b, data_format=bias_format).op]
        return [z.op, (tf.raw_ops.AddV2(x=b, y=z) if add == "bias+Wx" else tf.raw_ops.Add(x=z, y=b)).op]

    return build


def _matmul_matrix(transpose_x: bool, transpose_w: bool, x_shape: tuple[int, ...]) -> Matrix:
    """Returns the matrix of a product of stacked matrices that broadcast."""

    def matrix(w: Array) -> Array:
        w = np.swapaxes(w, -1, -2) if transpose_w else w
        rows, inner = (x_shape[-1], x_shape[-2]) if transpose_x else (x_shape[-2], x_shape[-1])
        stack = np.broadcast_shapes(x_shape[:-2], w.shape[:-2])
        dense = np.zeros((*stack, rows, w.shape[-1], *x_shape))
        full = np.broadcast_to(w, (*stack, *w.shape[-2:]))
        for at in np.ndindex(*stack):
            of_x = zip(at[len(at) - len(x_shape) + 2 :], x_shape[:-2], strict=True)
            source = tuple(0 if size == 1 else i for i, size in of_x)
            for i, j, k in itertools.product(range(rows), range(w.shape[-1]), range(inner)):
                dense[(*at, i, j, *source, *((k, i) if transpose_x else (i, k)))] = full[(*at, k, j)]
        return dense

    return matrix


def _conv_matrix(
    x_shape: tuple[int, ...],
    stride: int = 1,
    dilation: int = 1,
    same: bool = False,
    pads: Sequence[tuple[int, int]] | None = None,
    depthwise: bool = False,
    groups: int = 1,
) -> Matrix:
    """Returns the matrix of a convolution in NHWC or NDHWC, element by element."""
    n, *spatial, channels = x_shape

    def matrix(w: Array) -> Array:
        kernel = w.shape[:-2]
        reach = [(k - 1) * dilation + 1 for k in kernel]
        if same:
            outs = [-(-size // stride) for size in spatial]
            totals = [max((o - 1) * stride + r - s, 0) for o, r, s in zip(outs, reach, spatial, strict=True)]
            before = [total // 2 for total in totals]
        else:
            around = pads or [(0, 0)] * len(kernel)
            before = [low for low, _ in around]
            outs = [(s + sum(p) - r) // stride + 1 for s, p, r in zip(spatial, around, reach, strict=True)]
        n_out = channels * w.shape[-1] if depthwise else w.shape[-1]
        dense = np.zeros((n, *outs, n_out, *x_shape))
        for b, out, tap in itertools.product(range(n), np.ndindex(*outs), np.ndindex(*kernel)):
            at = tuple(o * stride + t * dilation - p for o, t, p in zip(out, tap, before, strict=True))
            if any(not 0 <= i < size for i, size in zip(at, spatial, strict=True)):
                continue
            for c, m in itertools.product(range(w.shape[-2]), range(w.shape[-1])):
                source = c + m // (w.shape[-1] // groups) * w.shape[-2]
                dense[(b, *out, c * w.shape[-1] + m if depthwise else m, b, *at, source)] = w[(*tap, c, m)]
        return dense

    return matrix


def _channels_first(of_last: Callable[[tuple[int, ...]], Matrix], x_shape: tuple[int, ...]) -> Matrix:
    """Makes the same convolution in NCHW."""
    n, c, h, wide = x_shape

    def matrix(w: Array) -> Array:
        dense = of_last((n, h, wide, c))(w)
        return np.moveaxis(np.moveaxis(dense, 3, 1), 7, 5)

    return matrix


def _matmul(label: str, x: Array, w: Array, b: Array | None = None, add: str = "", **transposes: bool) -> Layer:
    by = (transposes.get("transpose_a", False), transposes.get("transpose_b", False))
    build = _linear(tf.raw_ops.MatMul, "a", "b", add, **transposes)
    return Layer(label, build, x, w, _matmul_matrix(*by, x.shape), b, () if b is None else b.shape)


def _batch_matmul(label: str, x: Array, w: Array, b: Array | None = None, *, x_t: bool, w_t: bool) -> Layer:
    """Makes a batched product; a bias is a BiasAdd along axis 1."""
    build = _linear(tf.raw_ops.BatchMatMulV2, "x", "y", "BiasAdd", "NCHW", adj_x=x_t, adj_y=w_t)
    return Layer(label, build, x, w, _matmul_matrix(x_t, w_t, x.shape), b, () if b is None else (b.size, 1))


def _conv(label: str, op: Any, x: Array, w: Array, b: Array | None, add: str, matrix: Matrix, **more: Any) -> Layer:
    build = _linear(op, "input", "filter", add, **more)
    return Layer(label, build, x, w, matrix, b, () if b is None else (b.size,))


def layers() -> list[Layer]:
    """Lists small layers of all ops that LRP supports, with transposes, borders, strides, layouts and biases."""
    raw = tf.raw_ops
    x4, w4 = values(2, 5, 4, 2), values(3, 2, 2, 3)
    plain = {"strides": [1, 1, 1, 1], "padding": "VALID"}
    explicit = [0, 0, 1, 2, 0, 1, 0, 0]
    nchw = values(2, 2, 5, 4)
    return [
        _matmul("matmul", values(3, 12), values(12, 5)),
        _matmul("matmul_ta", values(12, 3), values(12, 5), transpose_a=True),
        _matmul("matmul_tb_biasadd", values(3, 12), values(5, 12), values(5), "BiasAdd", transpose_b=True),
        _matmul("matmul_ta_tb_add", values(12, 3), values(5, 12), values(5), "Add", transpose_a=True, transpose_b=True),
        _matmul("matmul_bias_first", values(3, 12), values(12, 5), values(5), "bias+Wx"),
        _matmul("matmul_bias_broadcasts", values(1, 12), values(12, 5), values(2, 3, 5), "Add"),
        _batch_matmul("batch_matmul", values(2, 3, 12), values(12, 2), x_t=False, w_t=False),
        _batch_matmul("batch_matmul_adj", values(1, 12, 3), values(2, 2, 12), values(3), x_t=True, w_t=True),
        _conv("conv2d", raw.Conv2D, x4, w4, None, "", _conv_matrix(x4.shape), **plain),
        _conv(
            "conv2d_same_strides_biasadd",
            raw.Conv2D,
            x4,
            w4,
            values(3),
            "BiasAdd",
            _conv_matrix(x4.shape, 2, same=True),
            padding="SAME",
            strides=[1, 2, 2, 1],
        ),
        _conv(
            "conv2d_explicit_add",
            raw.Conv2D,
            x4,
            w4,
            values(3),
            "Add",
            _conv_matrix(x4.shape, pads=[(1, 2), (0, 1)]),
            strides=[1, 1, 1, 1],
            padding="EXPLICIT",
            explicit_paddings=explicit,
        ),
        _conv(
            "conv2d_dilated",
            raw.Conv2D,
            x4,
            w4,
            None,
            "",
            _conv_matrix(x4.shape, dilation=2),
            **plain,
            dilations=[1, 2, 2, 1],
        ),
        _conv(
            "grouped_conv2d_biasadd",
            raw.Conv2D,
            x4,
            values(3, 2, 1, 4),
            values(4),
            "BiasAdd",
            _conv_matrix(x4.shape, groups=2),
            **plain,
        ),
        Layer(
            "conv2d_nchw_biasadd",
            _linear(raw.Conv2D, "input", "filter", "BiasAdd", "NCHW", data_format="NCHW", **plain),
            nchw,
            w4,
            _channels_first(_conv_matrix, nchw.shape),
            values(3),
            (3, 1, 1),
            only_xla=True,
        ),
        _conv(
            "conv3d_biasadd",
            raw.Conv3D,
            values(1, 3, 3, 2, 2),
            values(2, 2, 1, 2, 2),
            values(2),
            "BiasAdd",
            _conv_matrix((1, 3, 3, 2, 2)),
            strides=[1, 1, 1, 1, 1],
            padding="VALID",
        ),
        _conv(
            "depthwise_biasadd",
            raw.DepthwiseConv2dNative,
            x4,
            values(3, 2, 2, 2, seed=1),
            values(4),
            "BiasAdd",
            _conv_matrix(x4.shape, same=True, depthwise=True),
            strides=[1, 1, 1, 1],
            padding="SAME",
        ),
    ]
