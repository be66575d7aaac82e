"""What a rule is bound to, and what binding gives: an op's element types in, a graph with inputs and results out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gradrule.v1 import errors_pb2, graph_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.rules import dtypes


@dataclass(frozen=True)
class Signature:
    """Element types (`Dt` numbers) of an op's inputs and outputs, in order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the inputs of floating or complex type."""
        return tuple(index for index, dtype in enumerate(self.inputs) if dtype in dtypes.DIFFERENTIABLE)

    @property
    def x_dtype(self) -> int:
        """The type that literals and params take: that of the first differentiable input, else of `dy0`."""
        if self.differentiable:
            return self.inputs[self.differentiable[0]]
        return self.outputs[0] if self.outputs else dtypes.Dt.DT_FLOAT

    def dtype_of(self, family: str, index: int) -> int:
        """Type of variable `x0`, `y0`, `dy0` or `default0`, by family and index. RULE_ARITY if the op lacks it."""
        of_inputs = family in ("x", "default")
        held = self.inputs if of_inputs else self.outputs
        if index < len(held):
            return held[index]
        raise error(
            errors_pb2.ERROR_REASON_RULE_ARITY,
            f"the rule uses {family}{index}, but the op has {count(len(held), 'input' if of_inputs else 'output')}"
            f"{listed(family, len(held))}",
        )


@dataclass(frozen=True, slots=True)
class RuleGraph:
    """A rule bound to a signature.

    `graph`: nodes of plain TensorFlow ops with all attributes.
    `inputs`: variable (`x0`, `dy1`, `default0`) or `param/NAME` → the placeholder that takes it; only those used.
    A param's placeholder is DT_DOUBLE of any shape. `salt` is there where the rule draws random numbers: DT_INT64 of
    rank 0, a number of the op's own, so that two ops draw different ones.
    `results`: per op input the tensor's name, None for "not connected".
    `shape_sources`: per op input what the result's shape is broadcast from: variables (`default0` counts as x0),
    `param/NAME`, `reduced/x0` (x0 with axes of size 1), `graph` (not known). A result whose sources are its own input
    alone has that input's shape, one without sources has rank 0.
    """

    graph: graph_pb2.Graph
    inputs: Mapping[str, str]
    results: tuple[str | None, ...]
    shape_sources: tuple[frozenset[str], ...]


def count(number: int, noun: str) -> str:
    """`1 input`, `2 inputs`, `no inputs`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def listed(family: str, number: int) -> str:
    """` (x0, x1)`; nothing where there is none."""
    if number == 0:
        return ""
    names = [f"{family}{index}" for index in range(min(number, 8))]
    return f" ({', '.join(names)}{', …' if number > 8 else ''})"


def not_differentiable(signature: Signature, index: int) -> GradruleError:
    """RULE_ARITY: the rule gives a gradient for an input whose type has none."""
    return error(
        errors_pb2.ERROR_REASON_RULE_ARITY,
        f"the rule gives a gradient for input {index}, which is {dtypes.dtype_name(signature.inputs[index])} "
        "and has none: say None there",
    )
