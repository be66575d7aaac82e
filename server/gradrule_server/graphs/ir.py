"""The form in which graphs are worked on: nodes that refer to one another by index, bodies that hold them.

The top level of a graph and every function are a `Body`. Checking fills bodies in; copying makes new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import policy

Limits = policy.Limits

# A tensor: index of the node in its body, index among the node's outputs.
Ref = tuple[int, int]

ARG = "_Arg"

# Names the rule, or the gradient of another process, that gives the node's gradient.
GRADIENT_ATTR = "_gradient_op_type"

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

# Ops that run functions as parts of themselves, with their attributes that hold one.
CONTAINERS: dict[str, tuple[str, ...]] = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
}
LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset(CONTAINERS) - LOOPS

# Nodes whose value a call must give.
PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
PLACEHOLDER_WITH_DEFAULT = "PlaceholderWithDefault"

# Element types through which gradients pass; resources and variants (TensorLists) carry floats inside.
DIFFERENTIABLE = frozenset(
    {Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128}
    | {Dt.DT_RESOURCE, Dt.DT_VARIANT}
    | {Dt.DT_FLOAT8_E5M2, Dt.DT_FLOAT8_E4M3FN, Dt.DT_FLOAT8_E4M3FNUZ, Dt.DT_FLOAT8_E4M3B11FNUZ, Dt.DT_FLOAT8_E5M2FNUZ}
    | {Dt.DT_FLOAT4_E2M1FN}
)


@dataclass(slots=True)
class Node:
    """One operation. `outputs`: element types (`Dt` numbers; 0: not known); None where an error hides their number."""

    name: str
    op: str
    # What is the same for many nodes is shared by them: none of these is changed in place.
    inputs: Sequence[Ref]
    controls: Sequence[int]
    attrs: Mapping[str, AttrValue]
    outputs: tuple[int, ...] | None = None
    # Functions that the node calls or runs: per attribute (`f` for calls) its bodies.
    functions: tuple[tuple[str, tuple[Body, ...]], ...] = ()
    # Why gradrule does not run this node; it matters only if the node is needed.
    unsupported: str = ""
    # In expanded bodies: index into the marks, and whether its gradient passes through gradrule's hands.
    mark: int | None = None
    watched: bool = False
    # In expanded bodies: the op type in the uploaded graph, where it is another by now.
    uploaded_op: str = ""

    @property
    def op_type(self) -> str:
        """The op type as selectors and people know it."""
        return self.uploaded_op or self.op


@dataclass(slots=True)
class Body:
    """The top level (`name` is empty) or a function; its first nodes are the arguments, of op `_Arg`."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    arg_count: int = 0
    # Notes on arguments (`_output_shapes`), in their order.
    arg_notes: list[dict[str, AttrValue]] = field(default_factory=list)
    result_names: list[str] = field(default_factory=list)
    result_types: list[int] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)
    control_results: list[tuple[str, int]] = field(default_factory=list)
    # Indices of nodes, producers before consumers.
    order: list[int] = field(default_factory=list)
    is_stateful: bool = False

    @property
    def arg_types(self) -> list[int]:
        """Element types of the arguments."""
        return [node.outputs[0] for node in self.nodes[: self.arg_count] if node.outputs]


def replaced(inputs: Sequence[Ref], number: int, by: Ref) -> Sequence[Ref]:
    """Inputs of which one is another."""
    return (*inputs[:number], by, *inputs[number + 1 :])


def is_call(node: Node) -> bool:
    """Whether the node calls a function and does nothing else."""
    return bool(node.functions) and node.op not in CONTAINERS
