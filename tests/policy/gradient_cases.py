"""Lists nodes whose gradients are compared with finite differences: differentiable ops, with values of attributes.

Arrays of floats are inputs that are differentiated; lists, integers and `Fixed` are constants.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Build: TypeAlias = Callable[..., Any]
"""Builds the node from its differentiated inputs, in order; returns its outputs."""


@dataclass(frozen=True)
class Fixed:
    """A constant of floats, which has the type of the differentiated inputs."""

    value: Array


@dataclass(frozen=True, eq=False)
class Case:
    """A node. `label`: its attributes; `xs`: values of the differentiated inputs, in float64 or complex128."""

    op: str
    label: str
    build: Build
    xs: tuple[Array, ...]

    def __str__(self) -> str:
        return f"{self.op}({self.label})"


UNTRIED: Mapping[str, str] = {
    **dict.fromkeys(
        ("Case", "If", "While", "StatelessCase", "StatelessIf", "StatelessWhile"),
        "control flow, compared with local TensorFlow in the tests of the service",
    ),
    **dict.fromkeys(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"), "reads a variable, which is an input"),
    **dict.fromkeys(("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"), "runs on GPUs only"),
    **dict.fromkeys(
        (
            "TensorArrayConcatV3",
            "TensorArrayGatherV3",
            "TensorArrayReadV3",
            "TensorArrayScatterV3",
            "TensorArraySplitV3",
            "TensorArrayWriteV3",
        ),
        "works on a resource",
    ),
    **dict.fromkeys(
        ("CompositeTensorVariantFromComponents", "CompositeTensorVariantToComponents"), "packs tensors into a variant"
    ),
    **dict.fromkeys(
        ("StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessParameterizedTruncatedNormal"),
        "rejects random numbers, so its gradient is that of the distribution and not of a sample",
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), "gives integers"),
    **dict.fromkeys(("RandomGamma", "FractionalAvgPool", "FractionalMaxPool"), "draws random numbers in each run"),
}
"""Differentiable ops that have no case, with the reason."""


STRAIGHT_THROUGH = frozenset(
    {
        "FakeQuantWithMinMaxArgs",
        "FakeQuantWithMinMaxVars",
        "FakeQuantWithMinMaxVarsPerChannel",
        "QuantizeAndDequantize",
        "QuantizeAndDequantizeV2",
        "QuantizeAndDequantizeV3",
        "QuantizeAndDequantizeV4",
    }
)
"""Ops whose registered gradient is on purpose not the derivative."""


def cases() -> list[Case]:
    """Returns all cases, each with another name; their inputs are the same in each call."""
    names: Counter[str] = Counter()
    found = []
    for case in _all_cases():
        names[str(case)] += 1
        number = names[str(case)]
        found.append(replace(case, label=f"{case.label}, inputs {number}".lstrip(", ")) if number > 1 else case)
    return found


def _all_cases() -> list[Case]:
    return [
        *_elementwise(),
        *_arrays(),
        *_indexing(),
        *_reductions(),
        *_matrices(),
        *_convolutions(),
        *_pooling(),
        *_images(),
        *_normalisation(),
        *_losses_and_quantisers(),
        *_spectra(),
        *_segments(),
        *_sparse(),
        *_variants(),
    ]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def within(low: float, high: float, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def spread(*shape: int) -> Array:
    """Returns different numbers in random order, at least 0.1 apart, so that no small step changes their order."""
    size = int(np.prod(shape))
    return (np.random.default_rng(size).permutation(size).reshape(shape) - size / 2 + 0.3) * 0.1


def complex_normal(*shape: int, seed: int = 0) -> Array:
    return normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 1)


def node(op: str, inputs: Mapping[str, Any], **grid: Any) -> Iterator[Case]:
    """Yields a case for each combination of the attributes' values; several values of one are a tuple."""
    names = list(grid)
    for values in itertools.product(*(value if isinstance(value, tuple) else (value,) for value in grid.values())):
        attributes = dict(zip(names, values, strict=True))
        yield _node(op, inputs, attributes)


def _node(op: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> Case:
    xs = tuple(value for value in inputs.values() if isinstance(value, np.ndarray))

    def build(*given: Any) -> Any:
        rest = iter(given)
        kind = given[0].dtype
        kind = kind.real_dtype if kind.is_complex else kind

        def tensor(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return next(rest)
            return tf.constant(value.value, kind) if isinstance(value, Fixed) else value

        arguments = {name: tensor(value) for name, value in inputs.items()}
        return getattr(tf.raw_ops, op)(**arguments, **attributes)

    constants = {name: value for name, value in inputs.items() if not isinstance(value, (np.ndarray, Fixed))}
    shown = {**constants, **attributes}
    label = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    return Case(op, label, build, xs)


def built(op: str, label: str, build: Build, *xs: Array) -> Case:
    return Case(op, label, build, xs)


_ONE = {
    "any": "Abs Asinh Atan BesselI0 BesselI0e BesselI1 BesselI1e Ceil Cos Cosh Dawsn Elu Erf Erfc Exp Expm1 Floor "
    "FresnelCos FresnelSin Identity LeakyRelu Neg Ndtri Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh Softplus "
    "Softsign Square Tan Tanh L2Loss",
    "positive": "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Digamma Expint Inv Lgamma "
    "Log Log1p Reciprocal Rsqrt Spence Sqrt",
    "unit": "Acos Asin Atanh Erfinv Ndtri",
    "above_one": "Acosh",
}
_DOMAINS: Mapping[str, Array] = {
    "any": within(-2, 2, 3, 4),
    "positive": within(0.3, 2.5, 3, 4),
    "unit": within(0.05, 0.9, 3, 4),
    "above_one": within(1.2, 3, 3, 4),
}
_COMPLEX = (
    "Acos Acosh Asin Asinh Atan Atanh Conj Cos Cosh Exp Expm1 Inv Log Log1p Neg Reciprocal Rsqrt Sigmoid Sin Sinh Sqrt "
    "Square Tan Tanh Identity"
)


def _elementwise() -> Iterator[Case]:
    for domain, ops in _ONE.items():
        for op in ops.split():
            if op == "Ndtri" and domain == "any":
                continue
            parameter = {"LeakyRelu": "features", "Relu": "features", "Relu6": "features", "Elu": "features"}
            parameter |= dict.fromkeys(("Selu", "Softplus", "Softsign"), "features")
            parameter |= {"L2Loss": "t", "Identity": "input"}
            yield from node(op, {parameter.get(op, "x"): _DOMAINS[domain]})
    for op in _COMPLEX.split():
        name = {"Conj": "input", "Identity": "input"}.get(op, "x")
        yield Case(op, "complex", node_build(op, name), (0.5 * complex_normal(3, 4),))
    yield from node("LeakyRelu", {"features": normal(3, 4)}, alpha=(0.0, 0.5, 1.5, -0.3))
    x, y = within(0.4, 2, 3, 4), within(0.4, 2, 4, seed=1)
    real = (
        "Add AddV2 Atan2 Div DivNoNan FloorDiv FloorMod Maximum Minimum Mod Mul MulNoNan NextAfter Pow RealDiv "
        "SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy"
    )
    for op in real.split():
        if op in ("Mod", "TruncateMod"):
            continue
        a, b = {"Atan2": ("y", "x"), "NextAfter": ("x1", "x2")}.get(op, ("x", "y"))
        for left, right in ((x, y), (y, x), (-x, y), (x, -y)):
            if op in ("Pow", "Xlogy", "Xlog1py") and (left.min() < 0 or right.min() < 0):
                continue
            signs = ", ".join(f"{name}{'<0' if value.max() < 0 else '>0'}" for name, value in ((a, left), (b, right)))
            (case,) = node(op, {a: left, b: right})
            yield Case(op, f"{signs}, broadcast {'y' if left.ndim == 2 else 'x'}", case.build, case.xs)
    complex_ops = "Add AddV2 Sub Mul RealDiv Div DivNoNan MulNoNan Pow SquaredDifference Xdivy Xlogy Xlog1py"
    for op in complex_ops.split():
        (case,) = node(op, {"x": complex_normal(3, 4) + 2, "y": complex_normal(4, seed=3) + 2})
        yield Case(op, "complex, broadcast y", case.build, case.xs)
    yield from node("Betainc", {"a": Fixed(x), "b": Fixed(x + 0.5), "x": within(0.1, 0.9, 3, 4)})
    yield from node("Igamma", {"a": x, "x": within(0.4, 2, 3, 4, seed=2)})
    yield from node("Igammac", {"a": x, "x": within(0.4, 2, 3, 4, seed=2)})
    yield from node("Polygamma", {"a": Fixed(np.array([[1.0], [2], [3]])), "x": x})
    yield from node("Zeta", {"x": Fixed(x + 1.5), "q": x})
    for op, a, b in (
        ("InvGrad", "y", "dy"),
        ("ReciprocalGrad", "y", "dy"),
        ("RsqrtGrad", "y", "dy"),
        ("SigmoidGrad", "y", "dy"),
        ("SqrtGrad", "y", "dy"),
        ("TanhGrad", "y", "dy"),
        ("EluGrad", "outputs", "gradients"),
        ("SeluGrad", "outputs", "gradients"),
        ("ReluGrad", "features", "gradients"),
        ("Relu6Grad", "features", "gradients"),
        ("LeakyReluGrad", "features", "gradients"),
        ("SoftplusGrad", "features", "gradients"),
    ):
        yield from node(op, {a: within(0.2, 0.9, 3, 4), b: normal(3, 4)})
        if a != "y":
            (case,) = node(op, {a: within(-0.9, -0.2, 3, 4), b: normal(3, 4)})
            yield Case(op, "negative", case.build, case.xs)
    yield from node(
        "ClipByValue", {"t": spread(3, 4) * 2, "clip_value_min": np.asarray(-0.5), "clip_value_max": np.asarray(0.6)}
    )
    yield from node("CheckNumerics", {"tensor": normal(3)}, message="m")
    yield from node("CheckNumericsV2", {"tensor": normal(3)}, message="m")
    yield from node("PreventGradient", {"input": normal(3)}, message="")
    yield built(
        "Complex",
        "",
        lambda re, im: tf.raw_ops.Complex(real=re, imag=im, Tout=tf.complex(re, re).dtype),
        normal(3),
        normal(3, seed=1),
    )
    for op in ("Real", "Imag", "Angle", "ComplexAbs"):
        yield built(op, "", _of_complex(op), complex_normal(3, 4))
    yield built("Cast", "to float64", lambda x: tf.cast(x, tf.float64), normal(3, 4))
    yield built("Cast", "to complex", lambda x: tf.cast(x, tf.complex(x, x).dtype), normal(3, 4))
    yield built("AddN", "N=3", lambda *xs: tf.raw_ops.AddN(inputs=xs), *(normal(3, 4, seed=s) for s in range(3)))
    yield built(
        "AccumulateNV2",
        "N=2",
        lambda *xs: tf.raw_ops.AccumulateNV2(inputs=xs, shape=[3, 4]),
        normal(3, 4),
        normal(3, 4, seed=1),
    )
    yield built("IdentityN", "N=2", lambda *xs: tf.raw_ops.IdentityN(input=xs), normal(3), normal(2, 2))
    yield built(
        "PlaceholderWithDefault", "", lambda x: tf.raw_ops.PlaceholderWithDefault(input=x, shape=x.shape), normal(3, 4)
    )
    condition = [[True, False, True, False]] * 3
    yield built(
        "Select",
        "same shape",
        lambda a, b: tf.raw_ops.Select(condition=condition, x=a, y=b),
        normal(3, 4),
        normal(3, 4, seed=1),
    )
    yield built(
        "Select",
        "rows",
        lambda a, b: tf.raw_ops.Select(condition=[True, False, True], x=a, y=b),
        normal(3, 4),
        normal(3, 4, seed=1),
    )
    yield built(
        "SelectV2",
        "broadcast",
        lambda a, b: tf.raw_ops.SelectV2(condition=condition[0], t=a, e=b),
        normal(3, 4),
        normal(3, 1, seed=1),
    )


def node_build(op: str, name: str) -> Build:
    return lambda x: getattr(tf.raw_ops, op)(**{name: x})


def _of_complex(op: str) -> Build:
    name = "x" if op == "ComplexAbs" else "input"
    return lambda x: getattr(tf.raw_ops, op)(**{name: x}, Tout=x.dtype.real_dtype)


def _arrays() -> Iterator[Case]:
    x = normal(2, 3, 4)
    for perm in ([2, 0, 1], [1, 0, 2], [0, 1, 2]):
        yield from node("Transpose", {"x": x, "perm": perm})
        yield from node("ConjugateTranspose", {"x": complex_normal(2, 3, 4), "perm": perm})
    yield from node("Reshape", {"tensor": x, "shape": [4, -1]})
    yield from node("ExpandDims", {"input": x}, axis=(0, 1, -1))
    yield from node("Squeeze", {"input": normal(1, 3, 1)}, axis=([], [0], [-1]))
    yield from node("BroadcastTo", {"input": normal(3, 1), "shape": [2, 3, 4]})
    yield from node("Tile", {"input": normal(2, 3), "multiples": [2, 3]})
    yield from node("Tile", {"input": normal(2, 3), "multiples": [1, 1]})
    yield from node("EnsureShape", {"input": x}, shape=[2, None, 4])
    yield built("Fill", "", lambda v: tf.raw_ops.Fill(dims=[2, 3], value=v), np.asarray(normal(1)[0]))
    for op, name in (("Concat", "concat_dim"), ("ConcatV2", "axis")):
        for axis in (0, 1, -1):
            if op == "Concat" and axis < 0:
                continue
            yield from _several(op, "values", [normal(2, 3), normal(2, 3, seed=1)], **{name: axis})
    for axis in (0, 1, -1):
        yield from _several("Pack", "values", [normal(2, 3), normal(2, 3, seed=1)], axis=axis)
        yield from node("Unpack", {"value": normal(2, 2, 2)}, num=2, axis=axis)
        yield from node("Split", {"value": normal(4, 2, 4)}, axis=axis, num_split=2)
    yield from node("SplitV", {"value": normal(5, 2), "size_splits": [1, 3, 1]}, axis=0, num_split=3)
    yield from node("SplitV", {"value": normal(2, 5), "size_splits": [2, -1]}, axis=(1, -1), num_split=2)
    for pads in ([[1, 2], [0, 1]], [[0, 0], [0, 0]]):
        yield from node("Pad", {"input": normal(2, 3), "paddings": pads})
        yield from node("PadV2", {"input": normal(2, 3), "paddings": pads, "constant_values": np.asarray(1.5)})
    for mode, pads in (("REFLECT", [[1, 1], [2, 1]]), ("SYMMETRIC", [[2, 1], [3, 0]])):
        yield from node("MirrorPad", {"input": normal(2, 3), "paddings": pads}, mode=mode)
        yield from node(
            "MirrorPadGrad", {"input": normal(*((4, 6) if mode == "REFLECT" else (5, 6))), "paddings": pads}, mode=mode
        )
    yield from node("ReverseV2", {"tensor": x}, axis=([0], [1, 2], [-1]))
    yield from node("Reverse", {"tensor": x, "dims": [True, False, True]})
    yield from node("ReverseSequence", {"input": normal(3, 4, 2), "seq_lengths": [1, 4, 2]}, seq_dim=1, batch_dim=0)
    yield from node("ReverseSequence", {"input": normal(4, 3, 2), "seq_lengths": [1, 4, 2]}, seq_dim=0, batch_dim=1)
    yield from node("Roll", {"input": x}, shift=([1], [-2]), axis=([0], [2]))
    yield from node("Roll", {"input": x}, shift=[1, 2], axis=[0, 1])
    yield from node("Slice", {"input": x, "begin": [0, 1, 2], "size": [-1, 2, 1]})
    blocks = {"block_shape": [2, 1], "paddings": [[1, 1], [0, 0]]}
    yield from node("SpaceToBatchND", {"input": normal(1, 4, 3, 2), **blocks})
    yield from node("BatchToSpaceND", {"input": normal(2, 3, 3, 2), "block_shape": [2, 1], "crops": [[1, 1], [0, 0]]})
    yield from node("SpaceToBatch", {"input": normal(1, 4, 2, 2), "paddings": [[1, 1], [0, 0]]}, block_size=2)
    yield from node("BatchToSpace", {"input": normal(4, 3, 1, 2), "crops": [[1, 1], [0, 0]]}, block_size=2)
    for layout, wide, deep in (("NHWC", (1, 4, 2, 3), (1, 2, 1, 8)), ("NCHW", (1, 3, 4, 2), (1, 8, 2, 1))):
        yield from node("SpaceToDepth", {"input": normal(*wide)}, block_size=2, data_format=layout)
        yield from node("DepthToSpace", {"input": normal(*deep)}, block_size=2, data_format=layout)
    yield from node("Diag", {"diagonal": normal(3)})
    yield from node("DiagPart", {"input": normal(3, 3)})
    yield from node("MatrixDiag", {"diagonal": normal(2, 3)})
    yield from node("MatrixDiagPart", {"input": normal(2, 3, 4)})
    yield from node("MatrixSetDiag", {"input": normal(2, 3, 4), "diagonal": normal(2, 3)})
    yield from node("MatrixBandPart", {"input": normal(2, 3, 4)}, num_lower=(0, 1, -1), num_upper=(0, 2, -1))
    aligns = ("LEFT_RIGHT", "RIGHT_LEFT", "LEFT_LEFT", "RIGHT_RIGHT")
    pad = np.asarray(0.7)
    for k, diagonal in ((0, (2, 3)), (1, (2, 3)), ([-1, 1], (2, 3, 3))):
        yield from node("MatrixDiagPartV2", {"input": normal(2, 3, 4), "k": k, "padding_value": pad})
        yield from node("MatrixSetDiagV2", {"input": normal(2, 3, 4), "diagonal": normal(*diagonal), "k": k})
        yield from node("MatrixDiagPartV3", {"input": normal(2, 3, 4), "k": k, "padding_value": pad}, align=aligns)
        yield from node(
            "MatrixSetDiagV3", {"input": normal(2, 3, 4), "diagonal": normal(*diagonal), "k": k}, align=aligns
        )
        sizes = {"k": k, "num_rows": 3, "num_cols": 4, "padding_value": pad}
        yield from node("MatrixDiagV2", {"diagonal": normal(*diagonal), **sizes})
        yield from node("MatrixDiagV3", {"diagonal": normal(*diagonal), **sizes}, align=aligns)


def _several(op: str, name: str, xs: Sequence[Array], **attributes: Any) -> Iterator[Case]:
    """Yields a case of an op whose differentiated input is a list."""
    label = ", ".join(f"{key}={value!r}" for key, value in attributes.items())
    yield Case(op, label, lambda *given: getattr(tf.raw_ops, op)(**{name: list(given)}, **attributes), tuple(xs))


def _indexing() -> Iterator[Case]:
    x = normal(3, 4, 2)
    yield from node("Gather", {"params": x, "indices": [2, 0, 2]})
    yield from node("GatherV2", {"params": x, "indices": [1, 0, 1]}, axis=(0, 1, 2, -1, -2), batch_dims=0)
    yield from node("GatherV2", {"params": x, "indices": [[1, 0], [1, 1], [0, 1]]}, axis=(0, 1, -1), batch_dims=0)
    yield from node("GatherV2", {"params": x, "indices": [[1, 0], [1, 1], [0, 1]]}, axis=(1, 2, -1), batch_dims=1)
    yield from node("GatherNd", {"params": x, "indices": [[2, 1], [0, 3], [2, 1]]})
    yield from node("GatherNd", {"params": x, "indices": [[2], [0]]})
    rows, some = [[2], [0]], normal(2, 4)
    yield from node("ScatterNd", {"updates": some, "indices": rows, "shape": [4, 4]})
    yield from node("ScatterNd", {"updates": some, "indices": [[1], [1]], "shape": [4, 4]})
    for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"):
        yield from node(op, {"tensor": normal(4, 4), "updates": some, "indices": rows})
    for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin"):
        yield from node(op, {"tensor": spread(4, 4), "updates": spread(2, 4) + 0.05, "indices": [[1], [1]]})
    for op in ("TensorScatterMax", "TensorScatterMin"):
        yield from node(op, {"tensor": spread(4, 4), "updates": spread(2, 4) + 0.05, "indices": rows})
    yield from node("ScatterNdNonAliasingAdd", {"input": normal(4, 4), "updates": some, "indices": rows})
    window = {"begin": [0, 3, 0], "end": [2, 0, 2], "strides": [1, -2, 1]}
    yield from node("StridedSlice", {"input": x, **window}, begin_mask=(0, 1, 2), end_mask=(0, 2, 4))
    one = {"begin": [1, 0], "end": [2, 2], "strides": [1, 1]}
    yield from node("StridedSlice", {"input": x, **one}, ellipsis_mask=(0, 2), new_axis_mask=0, shrink_axis_mask=(0, 1))
    yield from node("StridedSlice", {"input": x, **one}, new_axis_mask=(1, 2), shrink_axis_mask=0)
    yield from node("StridedSliceGrad", {"dy": normal(2, 2, 2), "shape": [3, 4, 2], **window}, begin_mask=(0, 2))
    yield from node("TensorStridedSliceUpdate", {"input": x, "value": normal(2, 2, 2), **window})
    yield from node("TensorStridedSliceUpdate", {"input": x, "value": normal(2, 2), **one}, shrink_axis_mask=1)
    yield from node("DynamicPartition", {"data": x, "partitions": [1, 0, 1]}, num_partitions=(2, 3))
    for op in ("DynamicStitch", "ParallelDynamicStitch"):
        for indices in ([[0, 2], [1, 3]], [[0, 2], [2, 1]]):
            if op == "ParallelDynamicStitch" and indices[1][0] == 2:
                continue
            yield built(op, f"indices={indices}", _stitch(op, indices), normal(2, 3), normal(2, 3, seed=1))
    for largest in (True, False):
        yield from node("TopKV2", {"input": spread(3, 5)}, k=(1, 3), sorted=largest)
        yield from node("TopK", {"input": spread(3, 5)}, k=2, sorted=largest)
        yield from node("ApproxTopK", {"input": spread(3, 5)}, k=2, is_max_k=largest, reduction_dimension=(-1, 0))
        yield from node("NthElement", {"input": spread(3, 5)}, n=(0, 2), reverse=largest)


def _stitch(op: str, indices: Any) -> Build:
    return lambda *data: getattr(tf.raw_ops, op)(indices=indices, data=data)


def _reductions() -> Iterator[Case]:
    x = spread(2, 3, 4)
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"):
        yield from node(op, {"input": x + 0.01}, axis=([], [0], [-1], [0, 2], [1, 0, -1]), keep_dims=(False, True))
    yield from node("Prod", {"input": np.float64([[0, 2, 3], [4, 0, 0], [1, 2, 3]])}, axis=([0], [1], [0, 1]))
    yield from node("Max", {"input": np.float64([[1, 2, 3], [4, 0, -1]])}, axis=[1])
    for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
        yield from node(op, {"x": x}, axis=(0, 1, -1), exclusive=(False, True), reverse=(False, True))
    yield from node(
        "Cumprod", {"x": np.float64([[0, 2, 3], [4, 0, 5]])}, axis=1, exclusive=(False, True), reverse=(False, True)
    )
    for op in ("Softmax", "LogSoftmax"):
        yield from node(op, {"logits": normal(3, 4)})
    yield from node("IsotonicRegression", {"input": normal(2, 5)})


def _matrices() -> Iterator[Case]:
    flags = (False, True)
    for ta, tb in itertools.product(flags, flags):
        a, b = normal(*((3, 2) if ta else (2, 3))), normal(*((4, 3) if tb else (3, 4)))
        yield from node("MatMul", {"a": a, "b": b}, transpose_a=ta, transpose_b=tb)
        yield from node(
            "SparseMatMul", {"a": a, "b": b}, transpose_a=ta, transpose_b=tb, a_is_sparse=flags, b_is_sparse=flags
        )
        ca, cb = complex_normal(*a.shape), complex_normal(*b.shape, seed=4)
        yield from node("MatMul", {"a": ca, "b": cb}, transpose_a=ta, transpose_b=tb)
        for op in ("BatchMatMul", "BatchMatMulV2"):
            left = np.stack([ca, 2 * ca])
            right = np.stack([cb, cb + 1]) if op == "BatchMatMul" else cb[None]
            yield from node(op, {"x": left.real.copy(), "y": right.real.copy()}, adj_x=ta, adj_y=tb)
            (case,) = node(op, {"x": left, "y": right}, adj_x=ta, adj_y=tb)
            yield Case(op, f"complex, {case.label}", case.build, case.xs)
        yield built("BatchMatMulV3", f"adj_x={ta}, adj_y={tb}", _batch_matmul_v3(ta, tb), np.stack([a, 2 * a]), b[None])
    for equation, shapes in (
        ("ij,jk->ik", ((2, 3), (3, 4))),
        ("bij,jk->bik", ((2, 3, 4), (4, 5))),
        ("bij,bjk->kib", ((2, 3, 4), (2, 4, 5))),
        ("ij->ji", ((2, 3),)),
        ("ij->i", ((2, 3),)),
        ("ii->i", ((3, 3),)),
        ("ii->", ((3, 3),)),
        ("ij,j->i", ((2, 3), (3,))),
        ("i,j->ij", ((2,), (3,))),
        ("...ij,...jk->...ik", ((2, 1, 2, 3), (4, 3, 2))),
        ("ij,kl->", ((2, 3), (4, 5))),
        ("iij,j->i", ((3, 3, 2), (2,))),
    ):
        yield from _several(
            "Einsum", "inputs", [normal(*shape, seed=i) for i, shape in enumerate(shapes)], equation=equation
        )
    square = normal(2, 3, 3) + 3 * np.eye(3)
    rhs = normal(2, 3, 2)
    yield from node("MatrixInverse", {"input": square}, adjoint=flags)
    yield from node("MatrixSolve", {"matrix": square, "rhs": rhs}, adjoint=flags)
    yield from node("MatrixTriangularSolve", {"matrix": square, "rhs": rhs}, lower=flags, adjoint=flags)
    yield from node("MatrixTriangularSolve", {"matrix": square, "rhs": rhs[:1]}, lower=flags, adjoint=flags)
    yield from node("MatrixTriangularSolve", {"matrix": square + 0.3j, "rhs": rhs + 0.5j}, lower=flags, adjoint=flags)
    yield from node("MatrixSolve", {"matrix": square + 0.3j, "rhs": rhs + 0.5j}, adjoint=flags)
    yield from node("MatrixInverse", {"input": square + 0.3j}, adjoint=flags)
    for shape in ((4, 3), (3, 4)):
        yield built(
            "MatrixSolveLs",
            f"shape={shape}",
            lambda a, b: tf.raw_ops.MatrixSolveLs(
                matrix=a, rhs=b, l2_regularizer=tf.constant(0.1, tf.float64), fast=True
            ),
            normal(*shape),
            normal(shape[0], 2),
        )
    yield from node(
        "BandedTriangularSolve", {"matrix": normal(2, 4) + 3, "rhs": normal(4, 2)}, lower=flags, adjoint=flags
    )
    yield from node("MatrixDeterminant", {"input": square})
    yield from node("LogMatrixDeterminant", {"input": square})
    yield built(
        "Cholesky", "", lambda a: tf.raw_ops.Cholesky(input=a @ tf.linalg.adjoint(a) + tf.eye(3, dtype=a.dtype)), square
    )
    yield built(
        "Cholesky",
        "complex",
        lambda a: tf.raw_ops.Cholesky(input=a @ tf.linalg.adjoint(a) + tf.eye(3, dtype=a.dtype)),
        square + 0.3j,
    )
    yield from node("MatrixSquareRoot", {"input": square + 3 * np.eye(3)})
    for shape, full in (
        ((3, 3), False),
        ((4, 3), False),
        ((3, 4), False),
        ((3, 3), True),
        ((4, 3), True),
        ((3, 4), True),
    ):
        yield built("Qr", f"shape={shape}, full_matrices={full}", _qr(full), normal(*shape))
        yield built("Qr", f"complex, shape={shape}, full_matrices={full}", _qr(full), complex_normal(*shape))
    for compute in flags:
        yield built("SelfAdjointEigV2", f"compute_v={compute}", _eigh(compute), square)
        yield built("Eig", f"compute_v={compute}", _eig(compute), normal(3, 3) + np.diag([1.0, 4, 8]))
        for shape, full in (((3, 3), False), ((4, 3), False), ((3, 4), False), ((4, 3), True)):
            label = f"compute_uv={compute}, full_matrices={full}, shape={shape}"
            yield built("Svd", label, _svd(compute, full), normal(*shape))
    yield from node("Cross", {"a": normal(2, 3), "b": normal(2, 3, seed=1)})
    diagonals = normal(2, 3, 4) + np.array([[0.0], [4], [0]])
    yield from node("TridiagonalSolve", {"diagonals": diagonals, "rhs": normal(2, 4, 2)}, partial_pivoting=flags)
    yield from node(
        "TridiagonalMatMul",
        {
            "superdiag": normal(2, 1, 4),
            "maindiag": normal(2, 1, 4, seed=1),
            "subdiag": normal(2, 1, 4, seed=2),
            "rhs": normal(2, 4, 3),
        },
    )


def _batch_matmul_v3(adj_x: bool, adj_y: bool) -> Build:
    return lambda x, y: tf.raw_ops.BatchMatMulV3(x=x, y=y, Tout=x.dtype, adj_x=adj_x, adj_y=adj_y)


def _qr(full: bool) -> Build:
    """Returns q times r and r's absolute values, which do not depend on the signs that the kernel chooses."""

    def build(a: Any) -> Any:
        q, r = tf.raw_ops.Qr(input=a, full_matrices=full)
        return [tf.abs(q), tf.abs(r)]

    return build


def _eigh(compute: bool) -> Build:
    def build(a: Any) -> Any:
        e, v = tf.raw_ops.SelfAdjointEigV2(input=a + tf.linalg.adjoint(a), compute_v=compute)
        return [e, tf.abs(v)] if compute else e

    return build


def _eig(compute: bool) -> Build:
    def build(a: Any) -> Any:
        e, v = tf.raw_ops.Eig(input=a, compute_v=compute, Tout=tf.complex(a, a).dtype)
        return [tf.sort(tf.math.real(e)), tf.abs(v)] if compute else tf.sort(tf.math.real(e))

    return build


def _svd(compute: bool, full: bool) -> Build:
    def build(a: Any) -> Any:
        s, u, v = tf.raw_ops.Svd(input=a, compute_uv=compute, full_matrices=full)
        return [s, tf.abs(u), tf.abs(v)] if compute else s

    return build


_EXPLICIT = {"padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 1, 0, 0]}


def _convolutions() -> Iterator[Case]:
    x = normal(2, 6, 7, 4)
    unit = [1, 1, 1, 1]
    for groups, strides, rates, padding in (
        *itertools.product(
            (1, 2), (unit, [1, 2, 1, 1], [1, 2, 3, 1]), (unit,), ({"padding": "SAME"}, {"padding": "VALID"}, _EXPLICIT)
        ),
        *itertools.product(
            (1, 2), (unit,), ([1, 2, 1, 1], [1, 2, 3, 1]), ({"padding": "SAME"}, {"padding": "VALID"}, _EXPLICIT)
        ),
        (4, unit, unit, {"padding": "SAME"}),
        (4, [1, 2, 2, 1], unit, {"padding": "VALID"}),
    ):
        w = normal(3, 2, 4 // groups, 8)
        (case,) = node("Conv2D", {"input": x, "filter": w}, strides=strides, dilations=rates, **padding)
        yield Case("Conv2D", f"groups={groups}, {case.label}", case.build, case.xs)
    yield from node(
        "Conv2D",
        {"input": normal(2, 4, 6, 7), "filter": normal(3, 2, 4, 8)},
        strides=[1, 1, 1, 1],
        padding="SAME",
        data_format="NCHW",
    )
    w = normal(3, 2, 4, 2)
    for padding in ({"padding": "SAME"}, {"padding": "VALID"}, _EXPLICIT):
        for step in (1, 2):
            strides = [1, step, step, 1]
            yield from node("DepthwiseConv2dNative", {"input": x, "filter": w}, strides=strides, **padding)
            for op, full in (("Conv2D", normal(3, 2, 4, 3)), ("DepthwiseConv2dNative", w)):
                y = getattr(tf.raw_ops, op)(input=x, filter=full, strides=strides, **padding)
                dy = normal(*y.shape)
                name = f"{op}Backprop"
                yield from node(
                    f"{name}Input",
                    {"filter": full, "out_backprop": dy, "input_sizes": list(x.shape)},
                    strides=strides,
                    **padding,
                )
                yield from node(
                    f"{name}Filter",
                    {"input": x, "out_backprop": dy, "filter_sizes": list(full.shape)},
                    strides=strides,
                    **padding,
                )
    yield from node(
        "DepthwiseConv2dNative", {"input": x, "filter": w}, strides=[1, 1, 1, 1], padding="SAME", dilations=[1, 2, 2, 1]
    )
    yield from node(
        "DepthwiseConv2dNative",
        {"input": normal(2, 4, 6, 7), "filter": w},
        strides=[1, 1, 1, 1],
        padding="SAME",
        data_format="NCHW",
    )
    for op, sizes in (("Conv2D", [1, 2, 1, 1]), ("DepthwiseConv2dNative", [1, 2, 2, 1])):
        full = normal(3, 2, 4, 3) if op == "Conv2D" else w
        dy = normal(2, 6, 7, 3 if op == "Conv2D" else 8)
        more = {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": sizes}
        yield from node(
            f"{op}BackpropInput", {"filter": full, "out_backprop": dy, "input_sizes": list(x.shape)}, **more
        )
        yield from node(
            f"{op}BackpropFilter", {"input": x, "out_backprop": dy, "filter_sizes": list(full.shape)}, **more
        )
    x, w = normal(1, 4, 5, 3, 2), normal(2, 3, 2, 2, 3)
    for strides, padding in itertools.product(([1, 1, 1, 1, 1], [1, 2, 1, 2, 1]), ("SAME", "VALID")):
        yield from node("Conv3D", {"input": x, "filter": w}, strides=strides, padding=padding)
        dy = normal(*tf.raw_ops.Conv3D(input=x, filter=w, strides=strides, padding=padding).shape)
        more = {"strides": strides, "padding": padding}
        yield from node(
            "Conv3DBackpropInputV2", {"filter": w, "out_backprop": dy, "input_sizes": list(x.shape)}, **more
        )
        yield from node(
            "Conv3DBackpropFilterV2", {"input": x, "out_backprop": dy, "filter_sizes": list(w.shape)}, **more
        )
    yield from node(
        "Conv3D",
        {"input": x, "filter": w},
        strides=[1] * 5,
        padding="SAME",
        dilations=([1, 2, 1, 1, 1], [1, 1, 2, 1, 1]),
    )
    yield from node(
        "Conv3D", {"input": normal(1, 2, 4, 5, 3), "filter": w}, strides=[1] * 5, padding="SAME", data_format="NCDHW"
    )
    yield from node(
        "Dilation2D",
        {"input": spread(1, 5, 6, 2), "filter": 0.1 * normal(2, 3, 2)},
        strides=([1, 1, 1, 1], [1, 2, 1, 1]),
        rates=([1, 1, 1, 1], [1, 2, 2, 1]),
        padding=("SAME", "VALID"),
    )
    for layout, shape in (("NHWC", (2, 3, 4, 5)), ("NCHW", (2, 5, 3, 4))):
        yield from node("BiasAdd", {"value": normal(*shape), "bias": normal(5)}, data_format=layout)
        yield from node("BiasAddGrad", {"out_backprop": normal(*shape)}, data_format=layout)
    yield from node("BiasAdd", {"value": normal(3, 5), "bias": normal(5)}, data_format=("NHWC", "NCHW"))
    yield from node("BiasAddV1", {"value": normal(3, 5), "bias": normal(5)})


def _pooling() -> Iterator[Case]:
    x = spread(2, 6, 5, 2)
    sizes = [1, 3, 2, 1]
    for strides, padding in itertools.product(([1, 1, 1, 1], [1, 2, 2, 1], [1, 4, 1, 1]), ("SAME", "VALID")):
        more = {"ksize": sizes, "strides": strides, "padding": padding}
        yield from node("AvgPool", {"value": x}, **more)
        yield from node("MaxPool", {"input": x}, **more)
        yield from node("MaxPoolV2", {"input": x, "ksize": sizes, "strides": strides}, padding=padding)
        yield built("MaxPoolWithArgmax", _text(more), _max_pool_with_argmax(more), x)
        shape = tf.raw_ops.MaxPool(input=x, **more).shape
        dy = normal(*shape)
        for op in ("MaxPoolGrad", "MaxPoolGradV2", "MaxPoolGradGrad"):
            yield built(
                op, _text(more), _of_pool(op, "MaxPool", x, more), normal(*x.shape) if op.endswith("GradGrad") else dy
            )
        yield from node("AvgPoolGrad", {"grad": dy, "orig_input_shape": list(x.shape)}, **more)
    yield from node(
        "MaxPool",
        {"input": x},
        ksize=sizes,
        strides=[1, 1, 1, 1],
        padding="EXPLICIT",
        explicit_paddings=[0, 0, 1, 1, 0, 1, 0, 0],
    )
    nchw = spread(2, 2, 6, 5)
    for op, name in (("AvgPool", "value"), ("MaxPool", "input")):
        yield from node(op, {name: nchw}, ksize=[1, 1, 3, 2], strides=[1, 1, 2, 1], padding="VALID", data_format="NCHW")
    x = spread(1, 4, 5, 4, 2)
    sizes = [1, 2, 3, 2, 1]
    for strides, padding in itertools.product(([1, 1, 1, 1, 1], [1, 2, 2, 1, 1]), ("SAME", "VALID")):
        more = {"ksize": sizes, "strides": strides, "padding": padding}
        yield from node("AvgPool3D", {"input": x}, **more)
        yield from node("MaxPool3D", {"input": x}, **more)
        dy = normal(*tf.raw_ops.MaxPool3D(input=x.astype(np.float32), **more).shape)
        for op in ("MaxPool3DGrad", "MaxPool3DGradGrad"):
            yield built(
                op, _text(more), _of_pool(op, "MaxPool3D", x, more), normal(*x.shape) if op.endswith("GradGrad") else dy
            )
        yield from node("AvgPool3DGrad", {"grad": dy, "orig_input_shape": list(x.shape)}, **more)
    yield from node("LRN", {"input": normal(1, 2, 2, 7)}, depth_radius=(1, 5), bias=2.0, alpha=0.3, beta=(0.5, 0.75))


def _of_pool(op: str, pool: str, x: Array, attributes: Mapping[str, Any]) -> Build:
    """Returns a gradient of a pooling at fixed x, as a function of its upstream gradient."""
    sizes = {name: attributes[name] for name in ("ksize", "strides")}

    def build(grad: Any) -> Any:
        given = tf.constant(x, grad.dtype)
        pooled = getattr(tf.raw_ops, pool)(input=given, **attributes)
        rest = {"padding": attributes["padding"], **sizes}
        return getattr(tf.raw_ops, op)(orig_input=given, orig_output=pooled, grad=grad, **rest)

    return build


def _text(attributes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in attributes.items())


def _max_pool_with_argmax(attributes: Mapping[str, Any]) -> Build:
    return lambda x: tf.raw_ops.MaxPoolWithArgmax(input=x, **attributes).output


def _images() -> Iterator[Case]:
    x, flags = normal(1, 4, 5, 2), ((False, False), (True, False), (False, True))
    for op in ("ResizeBilinear", "ResizeBicubic", "ResizeNearestNeighbor"):
        for size, (corners, centers) in itertools.product(([7, 3], [4, 5], [2, 2], [8, 10]), flags):
            yield from node(op, {"images": x, "size": size}, align_corners=corners, half_pixel_centers=centers)
    for kernel, antialias in itertools.product(
        ("lanczos1", "lanczos3", "box", "triangle", "keyscubic", "mitchellcubic"), (True, False)
    ):
        yield built("ScaleAndTranslate", f"kernel_type={kernel!r}, antialias={antialias}", _scale(kernel, antialias), x)
    for method in ("bilinear", "nearest"):
        yield built(
            "CropAndResize", f"method={method!r}", _crop(method, [[0.1, 0.2, 0.8, 0.9], [0.5, 0.1, 1.3, 0.7]]), x
        )
    yield built(
        "CropAndResize",
        "boxes",
        lambda b: _crop("bilinear", b)(tf.constant(x, tf.float32)),
        np.float64([[0.13, 0.22, 0.81, 0.93]]),
    )
    for version, method in itertools.product((2, 3), ("NEAREST", "BILINEAR")):
        for fill in ("CONSTANT", "REFLECT", "WRAP", "NEAREST"):
            label = f"interpolation={method!r}, fill_mode={fill!r}"
            yield built(f"ImageProjectiveTransformV{version}", label, _projection(version, method, fill), x)
    yield from node(
        "ExtractImagePatches",
        {"images": x},
        ksizes=[1, 2, 3, 1],
        strides=([1, 1, 1, 1], [1, 2, 1, 1]),
        rates=([1, 1, 1, 1], [1, 2, 1, 1]),
        padding=("SAME", "VALID"),
    )
    yield from node(
        "ExtractVolumePatches",
        {"input": normal(1, 3, 4, 3, 2)},
        ksizes=[1, 2, 3, 2, 1],
        strides=([1, 1, 1, 1, 1], [1, 2, 1, 1, 1]),
        padding=("SAME", "VALID"),
    )
    yield from node("RGBToHSV", {"images": within(0.1, 0.9, 4, 3)})


def _scale(kernel: str, antialias: bool) -> Build:
    return lambda x: tf.raw_ops.ScaleAndTranslate(
        images=x, size=[3, 6], scale=[0.8, 1.3], translation=[0.2, -0.4], kernel_type=kernel, antialias=antialias
    )


def _crop(method: str, boxes: Any) -> Build:
    return lambda x: tf.raw_ops.CropAndResize(
        image=x, boxes=boxes, box_ind=[0] * len(boxes), crop_size=[3, 4], method=method, extrapolation_value=0.5
    )


def _projection(version: int, method: str, fill: str) -> Build:
    def build(x: Any) -> Any:
        given = {"images": x, "transforms": [[0.9, 0.2, 0.3, -0.1, 1.1, 0.4, 0.0, 0.0]], "output_shape": [4, 5]}
        if version == 3:
            given["fill_value"] = 0.5
        return getattr(tf.raw_ops, f"ImageProjectiveTransformV{version}")(**given, interpolation=method, fill_mode=fill)

    return build


def _normalisation() -> Iterator[Case]:
    for layout, training in itertools.product(("NHWC", "NCHW"), (True, False)):
        x = normal(3, 2, 2, 4) if layout == "NHWC" else normal(3, 4, 2, 2)
        scale, offset, mean, variance = normal(4), normal(4, seed=1), normal(4, seed=2), within(0.5, 2, 4)
        empty = training
        for version in ("", "V2", "V3"):
            # In training, the given mean and variance are not read, and must be empty.
            given = {"x": x, "scale": scale, "offset": offset}
            statistics = (
                {"mean": Fixed(mean[:0]), "variance": Fixed(variance[:0])}
                if empty
                else {"mean": mean, "variance": variance}
            )
            more = {"epsilon": 0.01, "data_format": layout, "is_training": training}
            (case,) = node(f"FusedBatchNorm{version}", {**given, **statistics}, **more)
            yield Case(case.op, case.label, _first(case.build, 3), case.xs)
            saved = {"y_backprop": normal(*x.shape, seed=7), "x": x, "scale": scale}
            reserved: dict[str, Any] = {"reserve_space_1": mean, "reserve_space_2": variance}
            if version == "V3":
                reserved["reserve_space_3"] = Fixed(mean[:0])
            if training:
                yield built(
                    f"FusedBatchNormGrad{version}",
                    _text(more),
                    _norm_gradient(version, more),
                    normal(*x.shape, seed=7),
                    x,
                    scale,
                )
            else:
                (case,) = node(f"FusedBatchNormGrad{version}", {**saved, **reserved}, **more)
                yield Case(case.op, case.label, _first(case.build, 3), case.xs)
    statistics = {"mean": normal(4, seed=2), "variance": within(0.5, 2, 4)}
    (case,) = node(
        "FusedBatchNormV3",
        {"x": normal(3, 2, 2, 4), "scale": normal(4), "offset": normal(4, seed=1), **statistics},
        epsilon=0.01,
        is_training=True,
        exponential_avg_factor=0.25,
    )
    yield Case(case.op, case.label, _first(case.build, 3), case.xs)
    x5 = normal(2, 2, 2, 2, 4)
    (case,) = node(
        "FusedBatchNormV3",
        {
            "x": x5,
            "scale": normal(4),
            "offset": normal(4, seed=1),
            "mean": Fixed(np.zeros(0)),
            "variance": Fixed(np.zeros(0)),
        },
        epsilon=0.01,
        data_format="NDHWC",
        is_training=True,
    )
    yield Case(case.op, case.label, _first(case.build, 3), case.xs)
    norm = {
        "t": normal(3, 2, 2, 4),
        "m": normal(4),
        "v": within(0.5, 2, 4),
        "beta": normal(4, seed=1),
        "gamma": normal(4, seed=2),
    }
    yield from node(
        "BatchNormWithGlobalNormalization", norm, variance_epsilon=0.01, scale_after_normalization=(True, False)
    )


def _first(build: Build, count: int = 1) -> Build:
    """Returns the first outputs only: others are saved for the gradient."""
    return lambda *xs: list(build(*xs))[:count]


def _norm_gradient(version: str, attributes: Mapping[str, Any]) -> Build:
    """Returns the gradient of a normalisation with the mean and variance of its own batch."""

    def build(dy: Any, x: Any, scale: Any) -> Any:
        axes = [0, 1, 2] if attributes["data_format"] == "NHWC" else [0, 2, 3]
        # Constants for the reserved tensors: the kernel needs them, but the function is that of dy, x and scale.
        norm = getattr(tf.raw_ops, f"FusedBatchNorm{version}")
        del axes
        outputs = norm(
            x=x,
            scale=scale,
            offset=tf.zeros_like(scale),
            mean=tf.zeros([0], scale.dtype),
            variance=tf.zeros([0], scale.dtype),
            **attributes,
        )
        saved = {f"reserve_space_{n}": value for n, value in enumerate(outputs[3:], 1)}
        saved = {name: tf.stop_gradient(value) for name, value in saved.items()}
        found = getattr(tf.raw_ops, f"FusedBatchNormGrad{version}")(
            y_backprop=dy, x=x, scale=scale, **saved, **attributes
        )
        return list(found)[:3]

    return build


def _losses_and_quantisers() -> Iterator[Case]:
    probabilities = within(0.1, 1, 3, 4)
    probabilities /= probabilities.sum(1, keepdims=True)
    for shape in ((3, 4), (1, 4)):
        yield built(
            "SoftmaxCrossEntropyWithLogits",
            f"labels {shape}",
            lambda x, labels: tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=labels),
            normal(3, 4),
            probabilities[: shape[0]],
        )
    yield built(
        "SparseSoftmaxCrossEntropyWithLogits",
        "",
        lambda x: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[1, 3, 0]),
        normal(3, 4),
    )
    labels = {"labels_indices": [[0, 0], [0, 1], [1, 0]], "labels_values": [0, 2, 1], "sequence_length": [5, 4]}
    for op in ("CTCLoss", "CTCLossV2"):
        (case,) = node(op, {"inputs": normal(5, 2, 4), **labels}, ctc_merge_repeated=True)
        yield Case(op, "ctc_merge_repeated=True", _first(case.build), case.xs)
        if op == "CTCLoss":
            (case,) = node(op, {"inputs": normal(5, 2, 4), **labels}, ctc_merge_repeated=False)
            yield Case(op, "ctc_merge_repeated=False", _first(case.build), case.xs)
    steps = {"seq_len_max": 3}
    weights = [
        normal(3, 2, 4),
        normal(2, 5),
        normal(2, 5, seed=1),
        normal(9, 20) * 0.3,
        normal(5),
        normal(5, seed=2),
        normal(5, seed=3),
        normal(20),
    ]
    names = ["x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b"]
    for op, more in (("BlockLSTM", {"forget_bias": 1.0}), ("BlockLSTMV2", {})):
        for peephole in (False, True):
            given: dict[str, Any] = dict(zip(names, weights, strict=True))
            if not peephole:
                given |= {name: Fixed(given[name]) for name in ("wci", "wcf", "wco")}
            (case,) = node(
                op,
                {**given, **{k: np.int64(v) for k, v in steps.items()}},
                cell_clip=-1.0,
                use_peephole=peephole,
                **more,
            )
            yield Case(op, f"use_peephole={peephole}", _outputs(case.build, 1, 6), case.xs)


def _outputs(build: Build, *numbers: int) -> Build:
    return lambda *xs: [list(build(*xs))[number] for number in numbers]


def _spectra() -> Iterator[Case]:
    for op in ("FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D"):
        yield from node(op, {"input": complex_normal(2, 3, 4)})
    for length in ([4], [5], [3]):
        yield built("RFFT", f"fft_length={length}", _spectrum("RFFT", length), normal(2, 5))
        yield built("IRFFT", f"fft_length={length}", _spectrum("IRFFT", length), complex_normal(2, 3))
    for length in ([3, 4], [3, 5], [2, 3]):
        yield built("RFFT2D", f"fft_length={length}", _spectrum("RFFT2D", length), normal(2, 3, 5))
        yield built("IRFFT2D", f"fft_length={length}", _spectrum("IRFFT2D", length), complex_normal(2, 3, 3))


def _spectrum(op: str, length: Sequence[int]) -> Build:
    def build(x: Any) -> Any:
        kind = {"Treal": x.dtype.real_dtype} if x.dtype.is_complex else {"Tcomplex": tf.complex(x, x).dtype}
        return getattr(tf.raw_ops, op)(input=x, fft_length=length, **kind)

    return build


def _segments() -> Iterator[Case]:
    x = spread(5, 3)
    for op in ("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum"):
        yield from node(op, {"data": x, "segment_ids": [0, 0, 1, 3, 3]})
    for op in ("Max", "Min", "Prod", "Sum"):
        yield from node(f"UnsortedSegment{op}", {"data": x, "segment_ids": [2, 0, 2, 3, -1]}, num_segments=5)
        yield from node(
            f"UnsortedSegment{op}", {"data": spread(2, 2, 3), "segment_ids": [[1, 0], [1, 1]]}, num_segments=2
        )
    yield from node(
        "UnsortedSegmentProd", {"data": np.float64([0, 2, 3, 0, 0]), "segment_ids": [0, 0, 0, 1, 1]}, num_segments=2
    )
    rows = {"data": x, "indices": [4, 0, 0, 2], "segment_ids": [0, 0, 2, 2]}
    for op in ("Sum", "Mean", "SqrtN"):
        yield from node(f"SparseSegment{op}", rows, sparse_gradient=(False, True))
        yield from node(f"SparseSegment{op}WithNumSegments", {**rows, "num_segments": 4}, sparse_gradient=(False, True))


_PLACES = [[0, 1], [0, 3], [2, 0]]


def _sparse() -> Iterator[Case]:
    values, shape = normal(3), [3, 4]
    places = _PLACES

    def long(value: Any) -> Any:
        return tf.constant(value, tf.int64)

    def sparse(op: str, label: str, call: Build, *xs: Array) -> Case:
        return built(op, label, call, *xs)

    dense = within(0.5, 2, 3, 4)
    for kind in ("Add", "Mul", "Div"):
        for operand in (dense, dense[0]):
            yield sparse(
                f"SparseDenseCwise{kind}",
                f"dense rank {operand.ndim}",
                lambda v, d, kind=kind: getattr(tf.raw_ops, f"SparseDenseCwise{kind}")(
                    sp_indices=long(places), sp_values=v, sp_shape=long(shape), dense=d
                ),
                values,
                operand,
            )
    for adjoint_a, adjoint_b in itertools.product((False, True), (False, True)):
        rows, columns = (3, 2) if adjoint_a else (4, 2)
        b = normal(columns, rows) if adjoint_b else normal(rows, columns)
        yield sparse(
            "SparseTensorDenseMatMul",
            f"adjoint_a={adjoint_a}, adjoint_b={adjoint_b}",
            lambda v, b, a=adjoint_a, c=adjoint_b: tf.raw_ops.SparseTensorDenseMatMul(
                a_indices=long(places), a_values=v, a_shape=long(shape), b=b, adjoint_a=a, adjoint_b=c
            ),
            values,
            b,
        )
    yield sparse(
        "SparseTensorDenseAdd",
        "",
        lambda v, b: tf.raw_ops.SparseTensorDenseAdd(a_indices=long(places), a_values=v, a_shape=long(shape), b=b),
        values,
        dense,
    )
    for keep in (False, True):
        for axes in ([0], [1], [0, 1], [-1]):
            yield sparse(
                "SparseReduceSum",
                f"reduction_axes={axes}, keep_dims={keep}",
                lambda v, axes=axes, keep=keep: tf.raw_ops.SparseReduceSum(
                    input_indices=long(places),
                    input_values=v,
                    input_shape=long(shape),
                    reduction_axes=axes,
                    keep_dims=keep,
                ),
                values,
            )
    yield sparse(
        "SparseReorder",
        "",
        lambda v: (
            tf.raw_ops.SparseReorder(
                input_indices=long(places[::-1]), input_values=v, input_shape=long(shape)
            ).output_values
        ),
        values,
    )
    yield sparse(
        "SparseSoftmax",
        "",
        lambda v: tf.raw_ops.SparseSoftmax(sp_indices=long(places), sp_values=v, sp_shape=long(shape)),
        values,
    )
    other = [[0, 1], [1, 2]]
    yield sparse(
        "SparseAdd",
        "",
        lambda a, b: (
            tf.raw_ops.SparseAdd(
                a_indices=long(places),
                a_values=a,
                a_shape=long(shape),
                b_indices=long(other),
                b_values=b,
                b_shape=long(shape),
                thresh=tf.zeros([], a.dtype),
            ).sum_values
        ),
        values,
        normal(2),
    )
    for kind in ("Maximum", "Minimum"):
        yield sparse(
            f"SparseSparse{kind}",
            "",
            lambda a, b, kind=kind: (
                getattr(tf.raw_ops, f"SparseSparse{kind}")(
                    a_indices=long(places),
                    a_values=a,
                    a_shape=long(shape),
                    b_indices=long(other),
                    b_values=b,
                    b_shape=long(shape),
                ).output_values
            ),
            values,
            normal(2),
        )
    yield sparse(
        "SparseSlice",
        "",
        lambda v: (
            tf.raw_ops.SparseSlice(
                indices=long(places), values=v, shape=long(shape), start=long([0, 1]), size=long([2, 3])
            ).output_values
        ),
        values,
    )
    yield sparse(
        "SparseFillEmptyRows",
        "",
        lambda v, d: (
            tf.raw_ops.SparseFillEmptyRows(
                indices=long(places), values=v, dense_shape=long(shape), default_value=d
            ).output_values
        ),
        values,
        np.asarray(0.7),
    )
    yield sparse(
        "SparseToDense",
        "",
        lambda v, d: tf.raw_ops.SparseToDense(
            sparse_indices=long(places), output_shape=long(shape), sparse_values=v, default_value=d
        ),
        values,
        np.asarray(0.7),
    )
    yield sparse(
        "RaggedFillEmptyRows",
        "",
        lambda v, d: (
            tf.raw_ops.RaggedFillEmptyRows(
                value_rowids=long([0, 0, 2]), values=v, nrows=long(4), default_value=d
            ).output_values
        ),
        values,
        np.asarray(0.7),
    )
    splits = [0, 1, 1, 3]
    yield sparse(
        "RaggedGather",
        "",
        lambda v: (
            tf.raw_ops.RaggedGather(
                params_nested_splits=[long(splits)],
                params_dense_values=v,
                indices=long([2, 0, 2]),
                OUTPUT_RAGGED_RANK=1,
            ).output_dense_values
        ),
        values,
    )
    yield sparse(
        "RaggedTensorToSparse",
        "",
        lambda v: tf.raw_ops.RaggedTensorToSparse(rt_nested_splits=[long(splits)], rt_dense_values=v).sparse_values,
        values,
    )
    for size in ([3, 2], [-1, -1], [2, 1], [4, 3]):
        yield sparse(
            "RaggedTensorToTensor",
            f"shape={size}",
            lambda v, d, size=size: tf.raw_ops.RaggedTensorToTensor(
                shape=long(size),
                values=v,
                default_value=d,
                row_partition_tensors=[long(splits)],
                row_partition_types=["ROW_SPLITS"],
            ),
            values,
            np.asarray(0.7),
        )

    def variant_and_back(v: tf.Tensor) -> tf.Tensor:
        variant = tf.raw_ops.RaggedTensorToVariant(
            rt_nested_splits=[long(splits)], rt_dense_values=v, batched_input=True
        )
        ragged = tf.raw_ops.RaggedTensorFromVariant(
            encoded_ragged=variant, input_ragged_rank=0, output_ragged_rank=1, Tvalues=v.dtype, Tsplits=tf.int64
        )
        return ragged.output_dense_values

    yield sparse("RaggedTensorToVariant", "", variant_and_back, values)
    yield built("RaggedTensorFromVariant", "", variant_and_back, values)


def _variants() -> Iterator[Case]:
    a = normal(3, 4)
    raw = tf.raw_ops
    places = np.int64(_PLACES)

    def csr(x: Any) -> Any:
        return raw.DenseToCSRSparseMatrix(dense_input=x, indices=places)

    def full(matrix: Any, x: Any) -> Any:
        return raw.CSRSparseMatrixToDense(sparse_input=matrix, type=x.dtype)

    yield built("DenseToCSRSparseMatrix", "", lambda x: full(csr(x), x), a)
    yield built("CSRSparseMatrixToDense", "", lambda x: full(csr(x), x), a)
    yield built(
        "CSRSparseMatrixToSparseTensor",
        "",
        lambda x: raw.CSRSparseMatrixToSparseTensor(sparse_matrix=csr(x), type=x.dtype).values,
        a,
    )
    yield built(
        "SparseTensorToCSRSparseMatrix",
        "",
        lambda v: full(
            raw.SparseTensorToCSRSparseMatrix(indices=places, values=v, dense_shape=tf.constant([3, 4], tf.int64)), v
        ),
        normal(3),
    )
    yield built(
        "SparseMatrixAdd",
        "",
        lambda x, y: full(
            raw.SparseMatrixAdd(a=csr(x), b=csr(y), alpha=tf.constant(2, x.dtype), beta=tf.constant(-1, x.dtype)), x
        ),
        a,
        normal(3, 4, seed=2),
    )
    yield built("SparseMatrixMul", "", lambda x, y: full(raw.SparseMatrixMul(a=csr(x), b=y), x), a, np.asarray(1.5))
    yield built("SparseMatrixSoftmax", "", lambda x: full(raw.SparseMatrixSoftmax(logits=csr(x), type=x.dtype), x), a)
    for conjugate in (False, True):
        yield built(
            "SparseMatrixTranspose",
            f"conjugate={conjugate}",
            lambda x, c=conjugate: full(raw.SparseMatrixTranspose(input=csr(x), conjugate=c, type=x.dtype), x),
            a,
        )
        yield built(
            "SparseMatrixTranspose",
            f"complex, conjugate={conjugate}",
            lambda x, c=conjugate: full(raw.SparseMatrixTranspose(input=csr(x), conjugate=c, type=x.dtype), x),
            complex_normal(3, 4),
        )
    for ta, tb, tout in itertools.product((False, True), (False, True), (False, True)):
        for kind in ("transpose", "adjoint"):
            right = normal(*((2, 3) if ta and tb else (3, 2) if ta else (2, 4) if tb else (4, 2)))
            for operands in ((a, right), (a + 0.5j * normal(3, 4, seed=9), right + 0.2j)):
                label = (
                    f"{'complex, ' * np.iscomplexobj(operands[0])}{kind}_a={ta}, {kind}_b={tb}, transpose_output={tout}"
                )
                yield built(
                    "SparseMatrixMatMul",
                    label,
                    lambda x, y, kind=kind, ta=ta, tb=tb, tout=tout: raw.SparseMatrixMatMul(
                        a=csr(x), b=y, transpose_output=tout, **{f"{kind}_a": ta, f"{kind}_b": tb}
                    ),
                    *operands,
                )
        if not tout:
            yield built(
                "SparseMatrixSparseMatMul",
                f"transpose_a={ta}, transpose_b={tb}",
                lambda x, y, ta=ta, tb=tb: full(
                    raw.SparseMatrixSparseMatMul(
                        a=csr(x),
                        b=raw.DenseToCSRSparseMatrix(dense_input=y, indices=tf.where(tf.ones_like(y) > 0)),
                        type=x.dtype,
                        transpose_a=ta,
                        transpose_b=tb,
                    ),
                    x,
                ),
                a,
                normal(*((2, 3) if ta and tb else (3, 2) if ta else (2, 4) if tb else (4, 2))),
            )
    x = normal(3, 2)
    yield built(
        "OptionalFromValue",
        "",
        lambda v: raw.OptionalGetValue(
            optional=raw.OptionalFromValue(components=[v]), output_types=[v.dtype], output_shapes=[v.shape]
        ),
        x,
    )
    yield built(
        "OptionalGetValue",
        "",
        lambda v: raw.OptionalGetValue(
            optional=raw.OptionalFromValue(components=[v]), output_types=[v.dtype], output_shapes=[v.shape]
        ),
        x,
    )

    def stacked(handle: Any, v: Any) -> Any:
        return raw.TensorListStack(input_handle=handle, element_shape=[2], element_dtype=v.dtype, num_elements=-1)

    def listed(v: Any) -> Any:
        return raw.TensorListFromTensor(tensor=v, element_shape=[2])

    lists: Mapping[str, Build] = {
        "TensorListFromTensor": lambda v: stacked(listed(v), v),
        "TensorListStack": lambda v: stacked(listed(v), v),
        "TensorListGather": lambda v: raw.TensorListGather(
            input_handle=listed(v), indices=[2, 0, 2], element_shape=[2], element_dtype=v.dtype
        ),
        "TensorListGetItem": lambda v: raw.TensorListGetItem(
            input_handle=listed(v), index=1, element_shape=[2], element_dtype=v.dtype
        ),
        "TensorListPopBack": lambda v: (
            raw.TensorListPopBack(input_handle=listed(v), element_shape=[2], element_dtype=v.dtype).tensor
        ),
        "TensorListPushBack": lambda v: stacked(raw.TensorListPushBack(input_handle=listed(v), tensor=2 * v[0]), v),
        "TensorListResize": lambda v: stacked(raw.TensorListResize(input_handle=listed(v), size=2), v),
        "TensorListScatter": lambda v: stacked(
            raw.TensorListScatter(tensor=v, indices=[2, 0, 1], element_shape=[2]), v
        ),
        "TensorListScatterV2": lambda v: stacked(
            raw.TensorListScatterV2(tensor=v, indices=[2, 0, 1], element_shape=[2], num_elements=3), v
        ),
        "TensorListScatterIntoExistingList": lambda v: stacked(
            raw.TensorListScatterIntoExistingList(input_handle=listed(v), tensor=3 * v[:2], indices=[2, 0]), v
        ),
        "TensorListSetItem": lambda v: stacked(
            raw.TensorListSetItem(input_handle=listed(v), index=1, item=3 * v[0]), v
        ),
        "TensorListSplit": lambda v: (
            raw.TensorListConcatV2(
                input_handle=raw.TensorListSplit(
                    tensor=v, element_shape=[-1, 2], lengths=tf.constant([1, 2], tf.int64)
                ),
                element_shape=[-1, 2],
                leading_dims=tf.constant([], tf.int64),
                element_dtype=v.dtype,
            ).tensor
        ),
        "TensorListConcatV2": lambda v: (
            raw.TensorListConcatV2(
                input_handle=raw.TensorListSplit(
                    tensor=v, element_shape=[-1, 2], lengths=tf.constant([2, 1], tf.int64)
                ),
                element_shape=[-1, 2],
                leading_dims=tf.constant([], tf.int64),
                element_dtype=v.dtype,
            ).tensor
        ),
        "TensorListConcat": lambda v: (
            raw.TensorListConcat(
                input_handle=raw.TensorListSplit(
                    tensor=v, element_shape=[-1, 2], lengths=tf.constant([2, 1], tf.int64)
                ),
                element_dtype=v.dtype,
                element_shape=[None, 2],
            ).tensor
        ),
    }
    for op, build in lists.items():
        yield built(op, "", build, x)
    grid = {"signed_input": (True, False), "range_given": (True, False), "narrow_range": (False, True)}
    values = np.round(spread(4, 3) * 3) / 3 + 0.04
    for op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"):
        yield from node(
            op,
            {"input": values, "input_min": Fixed(np.float64(-0.5)), "input_max": Fixed(np.float64(0.6))},
            num_bits=8,
            **grid,
        )
    yield from node(
        "QuantizeAndDequantizeV3",
        {"input": values, "input_min": Fixed(np.float64(-0.5)), "input_max": Fixed(np.float64(0.6)), "num_bits": 8},
        **grid,
    )
    yield from node("QuantizeAndDequantize", {"input": values}, range_given=True, input_min=-0.5, input_max=0.6)
    yield from node(
        "QuantizeAndDequantizeV4Grad",
        {
            "gradients": normal(4, 3),
            "input": values,
            "input_min": Fixed(np.float64(-0.5)),
            "input_max": Fixed(np.float64(0.6)),
        },
    )
    bits = {"num_bits": (2, 8), "narrow_range": (False, True)}
    yield from node("FakeQuantWithMinMaxArgs", {"inputs": values}, min=-0.5, max=0.6, **bits)
    yield from node(
        "FakeQuantWithMinMaxVars", {"inputs": values, "min": np.asarray(-0.5), "max": np.asarray(0.6)}, **bits
    )
    yield from node(
        "FakeQuantWithMinMaxVarsPerChannel",
        {"inputs": values, "min": np.float64([-0.5, -0.4, -1]), "max": np.float64([0.6, 0.9, 0.3])},
        **bits,
    )
