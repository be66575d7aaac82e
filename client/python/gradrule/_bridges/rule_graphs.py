"""Runs the graphs of rules with NumPy, PyTorch or JAX, without TensorFlow.

A formula becomes a graph of TensorFlow ops (`rules.language`); `OPS` says what each of these ops is in each library.
Values that do not depend on a tensor of the library, such as shapes, literals and params, are NumPy arrays, so that
they have the types of the expression language (int64, float64) in each library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from gradrule._bridges.philox import key_and_counter, normal, uniform
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import graph_pb2

Attrs = Mapping[str, graph_pb2.AttrValue]
Compute = Callable[..., Any]


class Library(Protocol):
    """An array library.

    Attributes:
        index: Position of its functions in the rows of `ELEMENTWISE`.
    """

    index: int

    def owns(self, value: Any) -> bool:
        """Returns whether a value is an array of the library, and not one of NumPy."""

    def function(self, name: str) -> Compute:
        """Returns the function with a name of `ELEMENTWISE`."""

    def array(self, value: Any, like: Any) -> Any:
        """Returns a NumPy array as an array of the library, on the device of `like`."""

    def cast(self, value: Any, dtype: str) -> Any:
        """Returns an array with another element type."""

    def reduce(self, op: str, value: Any, axes: tuple[int, ...], keep: bool) -> Any:
        """Returns a reduction: Sum, Mean, Prod, Max, Min, Any or All."""

    def sigmoid(self, value: Any) -> Any:
        """Returns the sigmoid of real numbers, whose derivatives do not overflow."""

    def softplus(self, value: Any) -> Any:
        """Returns log(1 + exp(value)), whose derivatives do not overflow."""

    def softmax(self, value: Any, log: bool) -> Any:
        """Returns softmax, or its logarithm, along the last axis."""

    def where(self, condition: Any, first: Any, second: Any) -> Any:
        """Returns the elements of `first` where the condition holds, otherwise those of `second`."""

    def constant(self, value: Any) -> Any:
        """Returns a value that counts as a constant in derivatives."""


# Elementwise ops: the function in NumPy (or SciPy's special functions), PyTorch and JAX.
ELEMENTWISE: Mapping[str, tuple[str, str, str]] = {
    "Neg": ("negative", "neg", "negative"),
    "Abs": ("abs", "abs", "abs"),
    "ComplexAbs": ("abs", "abs", "abs"),
    "Sign": ("sign", "sgn", "sign"),
    "Exp": ("exp", "exp", "exp"),
    "Log": ("log", "log", "log"),
    "Log1p": ("log1p", "log1p", "log1p"),
    "Expm1": ("expm1", "expm1", "expm1"),
    "Sqrt": ("sqrt", "sqrt", "sqrt"),
    "Square": ("square", "square", "square"),
    "Reciprocal": ("reciprocal", "reciprocal", "reciprocal"),
    "Sin": ("sin", "sin", "sin"),
    "Cos": ("cos", "cos", "cos"),
    "Tan": ("tan", "tan", "tan"),
    "Asin": ("arcsin", "asin", "arcsin"),
    "Acos": ("arccos", "acos", "arccos"),
    "Atan": ("arctan", "atan", "arctan"),
    "Sinh": ("sinh", "sinh", "sinh"),
    "Cosh": ("cosh", "cosh", "cosh"),
    "Tanh": ("tanh", "tanh", "tanh"),
    "Asinh": ("arcsinh", "asinh", "arcsinh"),
    "Acosh": ("arccosh", "acosh", "arccosh"),
    "Atanh": ("arctanh", "atanh", "arctanh"),
    "Erf": ("special.erf", "erf", "scipy.special.erf"),
    "Erfc": ("special.erfc", "erfc", "scipy.special.erfc"),
    "Lgamma": ("special.gammaln", "lgamma", "scipy.special.gammaln"),
    "Digamma": ("special.digamma", "digamma", "scipy.special.digamma"),
    "Floor": ("floor", "floor", "floor"),
    "Ceil": ("ceil", "ceil", "ceil"),
    "Round": ("round", "round", "round"),
    "IsFinite": ("isfinite", "isfinite", "isfinite"),
    "IsNan": ("isnan", "isnan", "isnan"),
    "IsInf": ("isinf", "isinf", "isinf"),
    "AddV2": ("add", "add", "add"),
    "Sub": ("subtract", "sub", "subtract"),
    "Mul": ("multiply", "mul", "multiply"),
    "RealDiv": ("divide", "div", "divide"),
    "FloorMod": ("mod", "remainder", "mod"),
    "Pow": ("power", "pow", "power"),
    "Atan2": ("arctan2", "atan2", "arctan2"),
    "Less": ("less", "lt", "less"),
    "LessEqual": ("less_equal", "le", "less_equal"),
    "Greater": ("greater", "gt", "greater"),
    "GreaterEqual": ("greater_equal", "ge", "greater_equal"),
    "Equal": ("equal", "eq", "equal"),
    "NotEqual": ("not_equal", "ne", "not_equal"),
    "LogicalAnd": ("logical_and", "logical_and", "logical_and"),
    "LogicalOr": ("logical_or", "logical_or", "logical_or"),
    "LogicalNot": ("logical_not", "logical_not", "logical_not"),
    "Real": ("real", "real", "real"),
    "Imag": ("imag", "imag", "imag"),
    "Conj": ("conj", "conj", "conj"),
    "ZerosLike": ("zeros_like", "zeros_like", "zeros_like"),
    "OnesLike": ("ones_like", "ones_like", "ones_like"),
}


def _elementwise(op: str) -> Compute:
    def compute(library: Library, _: Attrs, *values: Any) -> Any:
        return library.function(ELEMENTWISE[op][library.index])(*values)

    return compute


def _apply(library: Library, op: str, *values: Any) -> Any:
    return OPS[op](library, {}, *values)


def _number(library: Library, value: float, like: Any) -> Any:
    return library.cast(library.array(np.float64(value), like), _dtype_of(like))


def _dtype_of(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _larger_or_smaller(comparison: str) -> Compute:
    """Returns Maximum or Minimum with TensorFlow's derivatives: of equal values, and of NaN, those of one input."""

    def compute(library: Library, _: Attrs, first: Any, second: Any) -> Any:
        other = second + library.where(first != first, library.constant(first), _number(library, 0.0, first))
        return library.where(_apply(library, comparison, first, second), first, other)

    return compute


def _sigmoid(library: Library, _: Attrs, x: Any) -> Any:
    if "complex" not in _dtype_of(x):
        return library.sigmoid(x)
    one = _number(library, 1.0, x)
    return _apply(library, "Reciprocal", _apply(library, "AddV2", one, _apply(library, "Exp", -x)))


def _relu(library: Library, _: Attrs, x: Any) -> Any:
    # The derivative at 0 is 0. NaN stays NaN, with the derivative 0.
    return library.where(x > 0, x, library.constant(library.where(x != x, x, _number(library, 0.0, x))))


def _rsqrt(library: Library, _: Attrs, x: Any) -> Any:
    return _apply(library, "Reciprocal", _apply(library, "Sqrt", x))


def _floor_div(library: Library, _: Attrs, above: Any, below: Any) -> Any:
    above, below = library.constant(above), library.constant(below)
    if "int" in _dtype_of(above):
        return above // below
    return _apply(library, "Floor", above / below)


def _div_no_nan(library: Library, _: Attrs, above: Any, below: Any) -> Any:
    is_zero = below == 0
    one, zero = _number(library, 1.0, below), _number(library, 0.0, above)
    return library.where(is_zero, zero, above / library.where(is_zero, one, below))


def _reduce(op: str) -> Compute:
    def compute(library: Library, attrs: Attrs, value: Any, axes: Any) -> Any:
        return library.reduce(op, value, tuple(int(axis) for axis in np.ravel(axes)), attrs["keep_dims"].b)

    return compute


def _strided_slice(_: Library, __: Attrs, value: Any, begin: Any, *___: Any) -> Any:
    return value[int(begin[0])]


def _range(_: Library, __: Attrs, start: Any, limit: Any, delta: Any) -> Any:
    if start > limit:
        raise ValueError("the axes 'sample' and 'channel' need a tensor of rank 1 or more")
    return np.arange(start, limit, delta)


def _broadcast_axes(_: Library, __: Attrs, wanted: Any, shape: Any) -> Any:
    """Returns the axes to sum over so that a tensor of one shape becomes one that broadcasts to it."""
    padded = np.concatenate([np.ones(len(shape) - len(wanted), np.int64), wanted])
    return np.flatnonzero(
        (padded == 1) & ((np.asarray(shape) != 1) | (np.arange(len(shape)) < len(shape) - len(wanted)))
    )


def _draw(numbers: Callable[..., Any]) -> Compute:
    def compute(_: Library, attrs: Attrs, shape: Any, key: Any, counter: Any, __: Any) -> Any:
        dtype = _numpy_type(attrs["dtype"].type)
        return numbers(tuple(int(size) for size in shape), key, counter, dtype)

    return compute


# What each op of a rule's graph computes: (library, attributes, inputs) → value; a tuple if the op has several outputs.
OPS: Mapping[str, Compute] = {
    **{op: _elementwise(op) for op in ELEMENTWISE},
    **{op: _reduce(op) for op in ("Sum", "Mean", "Prod", "Max", "Min", "Any", "All")},
    "Maximum": _larger_or_smaller("GreaterEqual"),
    "Minimum": _larger_or_smaller("LessEqual"),
    "Sigmoid": _sigmoid,
    "Softplus": lambda library, _, value: library.softplus(value),
    "Relu": _relu,
    "Rsqrt": _rsqrt,
    "FloorDiv": _floor_div,
    "DivNoNan": _div_no_nan,
    "SelectV2": lambda library, _, *values: library.where(*values),
    "Identity": lambda _, __, value: value,
    "StopGradient": lambda library, _, value: library.constant(value),
    "Cast": lambda library, attrs, value: library.cast(value, dtype_name(attrs["DstT"].type)),
    "Softmax": lambda library, _, value: library.softmax(value, log=False),
    "LogSoftmax": lambda library, _, value: library.softmax(value, log=True),
    "Reshape": lambda _, __, value, shape: value.reshape(tuple(int(size) for size in np.ravel(shape))),
    # Of shapes, which are NumPy arrays in each library:
    "Shape": lambda _, attrs, value: np.array(value.shape, _numpy_type(attrs["out_type"].type)),
    "Size": lambda _, __, value: np.int64(np.prod(value.shape, dtype=np.int64)),
    "Rank": lambda _, __, value: np.int32(len(value.shape)),
    "Range": _range,
    "GatherV2": lambda _, __, value, indices, axis: np.take(value, indices, int(axis)),
    "StridedSlice": _strided_slice,
    "Fill": lambda _, __, shape, value: np.full(shape, value),
    "BroadcastGradientArgs": _broadcast_axes,
    "Pack": lambda _, __, *values: np.stack(values),
    "StatelessRandomGetKeyCounter": lambda _, __, seed: key_and_counter(seed),
    "StatelessRandomUniformV2": _draw(uniform),
    "StatelessRandomNormalV2": _draw(normal),
}
# Ops that give NumPy arrays, whatever library their inputs belong to.
_OF_SHAPES = frozenset({"Shape", "Size", "Rank"})


def run_rule_graph(
    library: Library,
    graph: graph_pb2.Graph,
    results: Sequence[str | None],
    inputs: Mapping[str, str],
    values: Mapping[str, Any],
) -> list[Any]:
    """Runs the graph of a rule.

    Args:
        library: The array library.
        graph: The graph of a bound rule, in topological order.
        results: Names of the tensors to return; None: no result.
        inputs: Names of placeholders by variable.
        values: Arrays of the library, or of NumPy, by variable.

    Returns:
        Arrays of the library; None for results without a name.
    """
    variables = {placeholder: variable for variable, placeholder in inputs.items()}
    found: dict[str, Any] = {}
    like = next((value for value in values.values() if library.owns(value)), None)
    with np.errstate(all="ignore"):
        for node in graph.node:
            if node.op == "Placeholder":
                outputs: Any = values[variables[node.name]]
            elif node.op == "Const":
                outputs = tensor_codec.to_numpy(node.attr["value"].tensor)
            else:
                arguments = [found[name if ":" in name else f"{name}:0"] for name in node.input if name[0] != "^"]
                outputs = _computed(library, node, arguments, like)
            for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
                found[f"{node.name}:{index}"] = output
    return [None if name is None else _owned(library, found[name], like) for name in results]


def _computed(library: Library, node: graph_pb2.Node, arguments: Sequence[Any], like: Any) -> Any:
    compute = OPS[node.op]
    if not any(library.owns(value) for value in arguments):
        return compute(NUMPY, node.attr, *(np.asarray(value) for value in arguments))
    if node.op in _OF_SHAPES:
        return compute(library, node.attr, *arguments)
    keeps = 1 if node.op == "Reshape" or node.op in ("Sum", "Mean", "Prod", "Max", "Min", "Any", "All") else None
    owned = [_owned(library, value, like) for value in arguments[:keeps]]
    return compute(library, node.attr, *owned, *(arguments[keeps:] if keeps else ()))


def _owned(library: Library, value: Any, like: Any) -> Any:
    return value if library.owns(value) or like is None else library.array(np.asarray(value), like)


def _numpy_type(number: int) -> np.dtype[Any]:
    name = dtype_name(number)
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


class NumpyLibrary:
    """NumPy, with SciPy for special functions."""

    index = 0

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def function(self, name: str) -> Compute:
        if name.startswith("special."):
            import scipy.special

            found: Compute = getattr(scipy.special, name.removeprefix("special."))
            return found
        named: Compute = getattr(np, name)
        return named

    def array(self, value: Any, like: Any) -> Any:
        return value

    def cast(self, value: Any, dtype: str) -> Any:
        return np.asarray(value).astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)

    def reduce(self, op: str, value: Any, axes: tuple[int, ...], keep: bool) -> Any:
        empty = {"initial": lowest_or_highest(op, value.dtype)} if op in ("Max", "Min") and value.size == 0 else {}
        return getattr(np, op.lower())(value, axis=axes, keepdims=keep, **empty)

    def sigmoid(self, value: Any) -> Any:
        import scipy.special

        return scipy.special.expit(value)

    def softplus(self, value: Any) -> Any:
        return np.logaddexp(value, np.zeros((), value.dtype))

    def softmax(self, value: Any, log: bool) -> Any:
        import scipy.special

        return (scipy.special.log_softmax if log else scipy.special.softmax)(value, axis=-1)

    def where(self, condition: Any, first: Any, second: Any) -> Any:
        return np.where(condition, first, second)

    def constant(self, value: Any) -> Any:
        return value


NUMPY = NumpyLibrary()


def lowest_or_highest(op: str, dtype: np.dtype[Any]) -> Any:
    """Returns the result of Max or Min of no elements, as TensorFlow computes it."""
    sign = -1 if op == "Max" else 1
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if op == "Max" else np.iinfo(dtype).max
    return sign * np.inf
