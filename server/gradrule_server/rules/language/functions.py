"""Lists the functions and operators of the language with their ops, arguments and element types.

Operators have their symbol as key, unary minus has `-v`, and a chain of comparisons has `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import numpy as np

Fold = Callable[..., Any]


class Domain(Flag):
    """Kinds of element types that a function accepts."""

    FLOAT = auto()
    COMPLEX = auto()
    INT = auto()


FLOAT = Domain.FLOAT
REAL = Domain.FLOAT | Domain.INT
SMOOTH = Domain.FLOAT | Domain.COMPLEX
NUMBER = Domain.FLOAT | Domain.COMPLEX | Domain.INT


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An elementwise function, which is one TensorFlow op.

    Attributes:
        op: The op type.
        domain: Accepted element types.
        fold: Computes the function for float64 constants; None: TensorFlow computes it.
        gives_bool: Whether the result is bool.
    """

    op: str
    domain: Domain
    fold: Fold | None = None
    gives_bool: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """The signature of a function.

    Attributes:
        name: Its name.
        usage: A call, which errors show.
        least: Smallest number of positional arguments.
        most: Largest number of positional arguments; None: no limit.
        axis: Whether `axis` may be the second positional argument; None: there is no axis.
    """

    name: str
    usage: str
    least: int
    most: int | None
    axis: bool | None = None


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _div_no_nan(above: float, below: float) -> float:
    return 0.0 if below == 0 else above / below


def _square(value: float) -> float:
    return value * value


UNARY: Mapping[str, Elementwise] = {
    "-v": Elementwise("Neg", NUMBER, np.negative),
    "abs": Elementwise("Abs", REAL, np.abs),
    "sign": Elementwise("Sign", NUMBER, np.sign),
    "exp": Elementwise("Exp", SMOOTH, np.exp),
    "log": Elementwise("Log", SMOOTH, np.log),
    "log1p": Elementwise("Log1p", SMOOTH, np.log1p),
    "expm1": Elementwise("Expm1", SMOOTH, np.expm1),
    "sqrt": Elementwise("Sqrt", SMOOTH, np.sqrt),
    "rsqrt": Elementwise("Rsqrt", SMOOTH, lambda value: 1.0 / np.sqrt(value)),
    "square": Elementwise("Square", NUMBER, _square),
    "reciprocal": Elementwise("Reciprocal", SMOOTH, np.reciprocal),
    "sin": Elementwise("Sin", SMOOTH, np.sin),
    "cos": Elementwise("Cos", SMOOTH, np.cos),
    "tan": Elementwise("Tan", SMOOTH, np.tan),
    "asin": Elementwise("Asin", SMOOTH, np.arcsin),
    "acos": Elementwise("Acos", SMOOTH, np.arccos),
    "atan": Elementwise("Atan", SMOOTH, np.arctan),
    "sinh": Elementwise("Sinh", SMOOTH, np.sinh),
    "cosh": Elementwise("Cosh", SMOOTH, np.cosh),
    "tanh": Elementwise("Tanh", SMOOTH, np.tanh),
    "asinh": Elementwise("Asinh", SMOOTH, np.arcsinh),
    "acosh": Elementwise("Acosh", SMOOTH, np.arccosh),
    "atanh": Elementwise("Atanh", SMOOTH, np.arctanh),
    "sigmoid": Elementwise("Sigmoid", SMOOTH, _sigmoid),
    "softplus": Elementwise("Softplus", FLOAT),
    "relu": Elementwise("Relu", REAL, lambda value: np.maximum(value, 0.0)),
    "erf": Elementwise("Erf", FLOAT, math.erf),
    "erfc": Elementwise("Erfc", FLOAT, math.erfc),
    "lgamma": Elementwise("Lgamma", FLOAT),
    "digamma": Elementwise("Digamma", FLOAT),
    "floor": Elementwise("Floor", FLOAT, np.floor),
    "ceil": Elementwise("Ceil", FLOAT, np.ceil),
    # Round and Rint both round halves to even.
    "round": Elementwise("Round", FLOAT, np.round),
    "rint": Elementwise("Round", FLOAT, np.round),
    "is_finite": Elementwise("IsFinite", FLOAT, np.isfinite, gives_bool=True),
    "is_nan": Elementwise("IsNan", FLOAT, np.isnan, gives_bool=True),
    "is_inf": Elementwise("IsInf", FLOAT, np.isinf, gives_bool=True),
}

BINARY: Mapping[str, Elementwise] = {
    "+": Elementwise("AddV2", NUMBER, np.add),
    "-": Elementwise("Sub", NUMBER, np.subtract),
    "*": Elementwise("Mul", NUMBER, np.multiply),
    "/": Elementwise("RealDiv", SMOOTH, np.divide),
    "//": Elementwise("FloorDiv", REAL, lambda above, below: np.floor(np.divide(above, below))),
    "%": Elementwise("FloorMod", REAL, np.mod),
    "**": Elementwise("Pow", SMOOTH, np.power),
    "atan2": Elementwise("Atan2", FLOAT, np.arctan2),
    "div_no_nan": Elementwise("DivNoNan", SMOOTH, _div_no_nan),
    "maximum": Elementwise("Maximum", REAL, np.maximum),
    "minimum": Elementwise("Minimum", REAL, np.minimum),
}

COMPARISONS: Mapping[str, Elementwise] = {
    "<": Elementwise("Less", REAL, np.less, gives_bool=True),
    "<=": Elementwise("LessEqual", REAL, np.less_equal, gives_bool=True),
    ">": Elementwise("Greater", REAL, np.greater, gives_bool=True),
    ">=": Elementwise("GreaterEqual", REAL, np.greater_equal, gives_bool=True),
    "==": Elementwise("Equal", NUMBER, np.equal, gives_bool=True),
    "!=": Elementwise("NotEqual", NUMBER, np.not_equal, gives_bool=True),
}

LOGIC = frozenset({"and", "or", "not"})

# Functions that mean the same as an operator.
SPELLINGS: Mapping[str, str] = {"pow": "**", "mod": "%", "floordiv": "//"}

# Reductions: op, element types; `any` and `all` take bool.
REDUCTIONS: Mapping[str, tuple[str, Domain]] = {
    "sum": ("Sum", NUMBER),
    "mean": ("Mean", SMOOTH),
    "prod": ("Prod", NUMBER),
    "max": ("Max", REAL),
    "min": ("Min", REAL),
    "any": ("Any", NUMBER),
    "all": ("All", NUMBER),
}

# Functions that combine elements along axes; their axes determine whether a rule is per sample.
MIXING = frozenset(REDUCTIONS) | {"norm", "size", "softmax", "log_softmax"}

# Ops of random numbers; both functions take a value, for the shape, and a seed.
RANDOM: Mapping[str, str] = {"uniform": "StatelessRandomUniformV2", "normal": "StatelessRandomNormalV2"}

# Arguments of which only shape or type matter, by function and position.
SHAPE_ONLY: Mapping[str, tuple[int, ...]] = {
    "zeros_like": (0,),
    "ones_like": (0,),
    "size": (0,),
    "uniform": (0,),
    "normal": (0,),
    "cast": (1,),
    "sum_to": (1,),
}

# The function around a gradient that does not depend on the upstream gradient.
IGNORE_DY = "ignore_dy"

CONSTANTS: Mapping[str, float | bool] = {"pi": math.pi, "inf": math.inf, "nan": math.nan, "True": True, "False": False}


def _functions() -> dict[str, Function]:
    functions = [Function(name, f"{name}(v)", 1, 1) for name in UNARY if name.isidentifier()]
    functions += [Function(name, f"{name}(a, b)", 2, 2) for name in (*SPELLINGS, "atan2", "div_no_nan")]
    functions += [Function(name, f"{name}(a, b, …)", 2, None) for name in ("maximum", "minimum")]
    functions += [Function(name, f"{name}(v)", 1, 1) for name in ("zeros_like", "ones_like", "stop_gradient")]
    functions += [Function(name, f"{name}(v)", 1, 1) for name in ("conj", "real", "imag")]
    functions += [Function(name, f"{name}(v, seed)", 2, 2) for name in RANDOM]
    functions += [
        Function(name, f"{name}(v, axis=None)", 1, 1, axis=True) for name in ("sum", "mean", "prod", "any", "all")
    ]
    # The axis of these two must be named, because max(v, 0) could be meant as maximum(v, 0).
    functions += [Function(name, f"{name}(v, axis=None)", 1, 1, axis=False) for name in ("max", "min")]
    functions += [Function(name, f"{name}(v, axis=None)", 1, 1, axis=True) for name in ("norm", "size")]
    functions += [Function(name, f"{name}(v, axis=-1)", 1, 1, axis=True) for name in ("softmax", "log_softmax")]
    functions += [
        Function("clip", "clip(v, lo, hi)", 3, 3),
        Function("where", "where(condition, a, b)", 3, 3),
        Function("sum_to", "sum_to(v, like)", 2, 2),
        Function("cast", 'cast(v, like) or cast(v, "float32")', 2, 2),
        Function("each", "each(expression)", 1, 1),
        Function("first", "first(expression)", 1, 1),
        Function(IGNORE_DY, f"{IGNORE_DY}(expression)", 1, 1),
    ]
    return {function.name: function for function in functions}


FUNCTIONS: Mapping[str, Function] = _functions()
