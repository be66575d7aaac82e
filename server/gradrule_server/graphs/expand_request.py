"""Declares what an expansion takes and what it returns."""

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
    """What a program computes from a graph; tensors are named as in requests.

    `known_rule`: returns the rule index for a name in a node's attribute and the node's op type; raises UNKNOWN_RULE.
    `add_embedded_rule`: adds a rule that the graph contains, under a label, and returns its index.
    """

    fetches: Sequence[str] = ()
    ys: Sequence[str] = ()
    xs: Sequence[str] = ()
    grad_y_tensors: Sequence[str] = ()
    stop_gradients: Sequence[str] = ()
    fed: Sequence[str] = ()
    overrides: Sequence[OverrideSpec] = ()
    rewrites: Sequence[str] = ()
    # Request field of the derivative, and whether gradients are themselves differentiated.
    derivative: str = "vjp"
    second_order: bool = False
    known_rule: Callable[[str, str], int] = _refuse_rule
    add_embedded_rule: Callable[[str], int] = _refuse_embedded_rule
    # Prefix of all function names: names must be unique among the programs of one engine process.
    namespace: str = "gr"
    # Variables that have values, and whether the values that the graph assigns to variables are returned.
    variables: Sequence[str] = ()
    with_updates: bool = False
    # Whether all variables get their values from a session.
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of the expanded graph: a placeholder, a variable or another fed tensor (`x` or `h:1`).

    `optional`: it has a default or a bound value. `aliases`: other names that calls may use.
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
    # Public name of the containing loop, branch or call by function name.
    scopes: dict[str, str]
    matches: list[Match]
    inputs: list[GraphInput]
    # Public names of the nodes that rewrites replaced.
    rewritten: list[str]
    # Name in the expanded graph and element type by requested name; stop_gradients off the path have no name.
    tensor_names: dict[str, str]
    dtypes: dict[str, Dt.ValueType]
    # Serialized graphs of embedded rules by index: arguments are placeholders, results `dx`, `dx1`, …
    embedded_rules: dict[int, bytes]
    embedded_rule_nodes: dict[int, int]
    # Placeholders and variables of the uploaded graph that calls may feed without a new program, needed or not.
    placeholders: list[str] = field(default_factory=list)
    # Variables by the name under which the request gives their values, needed or not.
    variables: dict[str, GraphInput] = field(default_factory=dict)
    # Tensor with the new value by variable name, if `with_updates` was set.
    updates: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str) -> Dt.ValueType:
        """Returns the element type of a requested tensor."""
        return self.dtypes[name]


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """A variable of a graph.

    `names`: all names that requests may use, its own first. `initialised`: the graph computes its initial value.
    """

    names: tuple[str, ...]
    dtype: Dt.ValueType
    shape: TensorShape
    initialised: bool
