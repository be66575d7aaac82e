"""Declares the request and the result of an expansion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.errors import error
from gradrule_server.graphs.findings import Reason, quote
from gradrule_server.graphs.marks import Mark
from gradrule_server.graphs.resolution_context import Match
from gradrule_server.graphs.selectors import OverrideSpec


def _refuse_rule(name: str, _: str) -> int:
    raise error(Reason.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {quote(name)}")


def _refuse_embedded_rule(label: str) -> int:
    raise error(Reason.ERROR_REASON_UNSUPPORTED, f"there is no place for {quote(label)}, a rule of the graph's own")


@dataclass(frozen=True, slots=True)
class ExpandRequest:
    """What a program computes from a graph; tensors have the names of the caller's request.

    Attributes:
        derivative: The field of the request that holds the derivative.
        second_order: Whether gradients are differentiated again.
        known_rule: Returns the index of a rule, given the name in a node's attribute and the node's op type. Raises
            UNKNOWN_RULE.
        add_embedded_rule: Adds a rule that the graph contains, under a label, and returns its index.
        namespace: Prefix of the names of all functions, which must be unique among the programs of an engine process.
        variables: Names of the variables that have values.
        with_updates: Whether the values that the graph assigns to variables are returned.
        stateful: Whether all variables get their values from a session.
    """

    fetches: Sequence[str] = ()
    ys: Sequence[str] = ()
    xs: Sequence[str] = ()
    grad_y_tensors: Sequence[str] = ()
    stop_gradients: Sequence[str] = ()
    fed: Sequence[str] = ()
    overrides: Sequence[OverrideSpec] = ()
    rewrites: Sequence[str] = ()
    derivative: str = "vjp"
    second_order: bool = False
    known_rule: Callable[[str, str], int] = _refuse_rule
    add_embedded_rule: Callable[[str], int] = _refuse_embedded_rule
    namespace: str = "gr"
    variables: Sequence[str] = ()
    with_updates: bool = False
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of the expanded graph: a placeholder, a variable or another fed tensor (`x` or `h:1`).

    Attributes:
        optional: Whether calls may leave it out, because it has a default value or a bound value.
        aliases: Other names that calls may use.
    """

    name: str
    dtype: Dt.ValueType
    shape: TensorShape
    optional: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class Expanded:
    """A graph in the form that the engine compiles."""

    graph_bytes: bytes
    # Number of nodes, including those in functions and embedded rules.
    nodes: int
    marks: list[Mark]
    # Public name of the loop, branch or call that contains a function, by name of the function.
    scopes: dict[str, str]
    matches: list[Match]
    inputs: list[GraphInput]
    # Public names of the nodes that rewrites replaced.
    rewritten: list[str]
    # Names in the expanded graph and element types, by requested name. Pruned stop_gradients have no name.
    tensor_names: dict[str, str]
    dtypes: dict[str, Dt.ValueType]
    # Serialized graphs of embedded rules, by index. Arguments are placeholders; results are the nodes `dx`, `dx1`, ….
    embedded_rules: dict[int, bytes]
    embedded_rule_nodes: dict[int, int]
    # Placeholders and variables that calls may feed without a new program, including those that no result needs.
    placeholders: list[str] = field(default_factory=list)
    # Variables with values, by the name in the request, including those that no result needs.
    variables: dict[str, GraphInput] = field(default_factory=dict)
    # If `with_updates` was set: the tensor with the new value, by name of the variable.
    updates: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str) -> Dt.ValueType:
        """Returns the element type of a requested tensor."""
        return self.dtypes[name]


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """A variable of a graph.

    Attributes:
        names: All names that requests may use, the variable's own name first.
        initialised: Whether the graph computes the initial value.
    """

    names: tuple[str, ...]
    dtype: Dt.ValueType
    shape: TensorShape
    initialised: bool
