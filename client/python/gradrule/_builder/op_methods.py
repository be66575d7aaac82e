"""Offers every op type as a method of the builder, named in snake case: `reduce_sum` adds a `Sum` node."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from gradrule._builder.handles import TensorHandle
from gradrule._builder.names import did_you_mean
from gradrule.common import op_definitions

# Method names that are not the snake case of their op type.
_ALIASES = {
    "add": "AddV2",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "RealDiv",
    "truediv": "RealDiv",
    "divide_no_nan": "DivNoNan",
    "multiply_no_nan": "MulNoNan",
    "negative": "Neg",
    "mod": "FloorMod",
    "logical_xor": "NotEqual",
    "top_k": "TopKV2",
    "reverse": "ReverseV2",
    "batch_matmul": "BatchMatMulV2",
    "tensor_scatter_nd_update": "TensorScatterUpdate",
    "tensor_scatter_nd_add": "TensorScatterAdd",
    "fused_batch_norm": "FusedBatchNormV3",
    "max_pool2d": "MaxPool",
    "avg_pool2d": "AvgPool",
    "depthwise_conv2d": "DepthwiseConv2dNative",
}


def op_type_of(method: str) -> str | None:
    """Returns the op type for a method name (`MatMul` for `matmul` and `mat_mul`); None if there is none."""
    return _ALIASES.get(method) or _by_plain_name().get(method.lower().replace("_", ""))


def snake_case(op_type: str) -> str:
    """Converts an op type to snake case as TensorFlow does: `BiasAdd` → `bias_add`, `Conv2D` → `conv2d`."""
    letters = []
    for index, letter in enumerate(op_type):
        after_lower = index > 0 and op_type[index - 1].islower()
        before_lower = index > 0 and op_type[index + 1 : index + 2].islower()
        if letter.isupper() and (after_lower or before_lower):
            letters.append("_")
        letters.append(letter.lower())
    return "".join(letters)


def suggest_method(method: str, methods: Iterable[str]) -> str:
    """Returns a hint such as ` Did you mean 'reduce_sum'?` for an unknown method name; empty without a similar name."""
    return did_you_mean(method.lower(), dict.fromkeys([*methods, *_ALIASES, *_snake_names()]))


@functools.cache
def _by_plain_name() -> dict[str, str]:
    """Returns op types by their names in lower case without underscores."""
    return {
        name.lower().replace("_", ""): name for name in reversed(op_definitions.names()) if not name.startswith("_")
    }


@functools.cache
def _snake_names() -> tuple[str, ...]:
    return tuple(
        snake_case(name) for name in op_definitions.names() if name.isidentifier() and not name.startswith("_")
    )


class OpMethods(ABC):
    """Offers every op type as a method named in snake case; subclasses define the ops that take other arguments."""

    @abstractmethod
    def op(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> Any:
        """Adds a node of any op type."""

    @abstractmethod
    def op_output(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> TensorHandle:
        """Adds a node of an op type with one output."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        op_type = None if method.startswith("_") else op_type_of(method)
        if op_type is None:
            own = [name for name in dir(type(self)) if not name.startswith("_")]
            hint = "" if method.startswith("_") else suggest_method(method, own)
            raise AttributeError(f"a graph has no method {method!r}, and no op has that name.{hint}")
        return functools.partial(self.op, op_type)
