"""Declares the element types that rules support, the signature of an op to which a rule is bound, and a bound rule."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2, graph_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import GradruleError, error

FLOAT_TYPES = frozenset({Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE})
COMPLEX_TYPES = frozenset({Dt.DT_COMPLEX64, Dt.DT_COMPLEX128})
DIFFERENTIABLE: frozenset[int] = frozenset(FLOAT_TYPES | COMPLEX_TYPES)

# Integer types with kernels for arithmetic. Other integers must be cast first.
INTEGER_TYPES = frozenset({Dt.DT_INT32, Dt.DT_INT64})

# The types in which rules compute 16-bit types: results are rounded to 16 bits once, at the end.
COMPUTED_IN: Mapping[int, int] = {Dt.DT_HALF: Dt.DT_FLOAT, Dt.DT_BFLOAT16: Dt.DT_FLOAT}

REAL_TYPES: Mapping[int, int] = {Dt.DT_COMPLEX64: Dt.DT_FLOAT, Dt.DT_COMPLEX128: Dt.DT_DOUBLE}

NUMPY_TYPES: Mapping[int, np.dtype[Any]] = {
    dtype: tensor_codec.numpy_dtype(dtype)
    for dtype in (
        *(Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128),
        *(Dt.DT_INT8, Dt.DT_INT16, Dt.DT_INT32, Dt.DT_INT64, Dt.DT_UINT8, Dt.DT_UINT16, Dt.DT_UINT32, Dt.DT_UINT64),
        Dt.DT_BOOL,
    )
}

# Types that expressions can name.
TYPES_BY_NAME: Mapping[str, int] = {dtype_name(dtype): dtype for dtype in NUMPY_TYPES}


@dataclass(frozen=True)
class Signature:
    """Element types (`Dt` numbers) of an op's inputs and outputs, in order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the inputs of floating-point or complex type."""
        return tuple(index for index, dtype in enumerate(self.inputs) if dtype in DIFFERENTIABLE)

    @property
    def x_dtype(self) -> int:
        """The type of literals and params: that of the first differentiable input, else of `dy0`."""
        if self.differentiable:
            return self.inputs[self.differentiable[0]]
        return self.outputs[0] if self.outputs else Dt.DT_FLOAT

    def dtype_of(self, family: str, index: int) -> int:
        """Returns the type of a variable (`x0`, `y0`, `dy0`, `default0`). Raises RULE_ARITY if the op lacks it."""
        is_input = family in ("x", "default")
        dtypes_of_family = self.inputs if is_input else self.outputs
        if index < len(dtypes_of_family):
            return dtypes_of_family[index]
        raise error(
            errors_pb2.ERROR_REASON_RULE_ARITY,
            f"the rule uses {family}{index}, but the op has "
            f"{count_noun(len(dtypes_of_family), 'input' if is_input else 'output')}"
            f"{variable_list(family, len(dtypes_of_family))}",
        )


@dataclass(frozen=True, slots=True)
class RuleGraph:
    """A rule bound to a signature.

    Attributes:
        graph: Nodes of TensorFlow ops with all attributes.
        inputs: Names of the placeholders that the rule uses, by variable (`x0`, `dy1`, `default0`) or `param/NAME`. A
            param is DT_DOUBLE of any shape. A rule that draws random numbers also has `salt`, DT_INT64 of rank 0:
            `salt_for` the op, so that two ops draw different numbers.
        results: For each input of the op: the name of the tensor of its gradient; None: not connected.
        shape_sources: For each input of the op: the sources from which the shape of its gradient is broadcast. A source
            is a variable (x0 stands for `default0`), `param/NAME`, `reduced/x0` (x0 with some axes of size 1) or
            `graph` (unknown). A gradient whose only source is its own input has the shape of that input; a gradient
            without sources has rank 0.
        columns: For each node of an expression: the column of the function or operator that it belongs to, from 1.
    """

    graph: graph_pb2.Graph
    inputs: Mapping[str, str]
    results: tuple[str | None, ...]
    shape_sources: tuple[frozenset[str], ...]
    columns: Mapping[str, int] = field(default_factory=dict)


def salt_for(node: str) -> int:
    """Returns a number for a node's name, the same in every process."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "little", signed=True)


def count_noun(number: int, noun: str) -> str:
    """Returns a number with a noun: `1 input`, `2 inputs`, `no inputs`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def variable_list(family: str, number: int) -> str:
    """Returns the variables of a family in parentheses, ` (x0, x1)`; empty if there are none."""
    if number == 0:
        return ""
    names = [f"{family}{index}" for index in range(min(number, 8))]
    return f" ({', '.join(names)}{', …' if number > 8 else ''})"


def not_differentiable_error(signature: Signature, index: int) -> GradruleError:
    """Returns RULE_ARITY for a rule with a gradient for an input that is not differentiable."""
    return error(
        errors_pb2.ERROR_REASON_RULE_ARITY,
        f"the rule gives a gradient for input {index}, which is {dtype_name(signature.inputs[index])} "
        "and has no gradient: write None there",
    )
