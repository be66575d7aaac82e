"""Holds the arguments of calls as callers give them, and resolves the names of tensors in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from gradrule._builder.array_values import is_array
from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.names import bare
from gradrule._builder.overrides import Overrides
from gradrule._results.call_results import Groups
from gradrule.errors import InvalidParamError, UnknownTensorError
from gradrule.v1 import program_pb2

Name: TypeAlias = "str | TensorHandle | Node"
Names: TypeAlias = "Name | Iterable[Name]"
GroupedNames: TypeAlias = "Names | Mapping[str, Names]"
Feeds: TypeAlias = "Mapping[Name, Any]"
GradYs: TypeAlias = "Mapping[Name, Any] | Sequence[Any]"
CallParams: TypeAlias = "Mapping[str, Mapping[str, Any]]"
UnconnectedGradients: TypeAlias = Literal["none", "zero"]
NoGradient: TypeAlias = Literal["error", "default", "pass", "zero"]
Jit: TypeAlias = Literal["off", "on"]


@dataclass(frozen=True, slots=True)
class Batching:
    """Declares that concurrent calls of a program may run together, with their examples concatenated along an axis.

    The results of an example must not depend on other examples. The server refuses what it knows to combine examples,
    and compares the first merged runs with single ones.

    Args:
        axis: The axis that counts examples, in every input whose size along it is not fixed and in every result; only
            0.

    Raises:
        InvalidParamError: The axis is not 0.
    """

    axis: int = 0

    def __post_init__(self) -> None:
        if type(self.axis) is not int or self.axis != 0:
            raise InvalidParamError(f"the axis of batching is 0, not {self.axis!r}")


@dataclass(frozen=True, slots=True)
class ProgramArguments:
    """Holds the arguments that define a program; `Client.evaluate` documents them."""

    fetches: Names = ()
    ys: Names = ()
    xs: GroupedNames = ()
    grad_ys: GradYs | None = None
    stop_gradients: Names = ()
    unconnected_gradients: UnconnectedGradients = "none"
    overrides: Overrides | None = None
    no_gradient: NoGradient = "error"
    rewrites: Sequence[str] = ()
    dense_gradients: bool = False
    batching: Batching | None = None
    jit: Jit = "off"


def names_of(names: Names, graph: GraphLike | None = None) -> list[str]:
    """Returns the names of tensors that are given as names or handles, one or several."""
    return [name_of_tensor(name, graph) for name in flat_list(names)]


def name_of_tensor(name: Any, graph: GraphLike | None = None) -> str:
    """Returns the name of a tensor.

    Args:
        name: A name, an alias, the name of a Keras layer, a handle, or a node with one output.
        graph: The graph that the tensor belongs to; resolves aliases and names of layers.

    Raises:
        UnknownTensorError: A handle belongs to another graph, or the value does not name a tensor.
    """
    name = as_tensor(name)
    if isinstance(name, TensorHandle):
        if isinstance(graph, Graph) and name.graph is not graph:
            raise UnknownTensorError(f"the handle {name.name!r} belongs to another graph")
        return name.name
    if not isinstance(name, str):
        message = f"a tensor is named by a string or a handle, not by {type(name).__name__}"
        if is_array(name):
            own = getattr(name, "path", None) or str(getattr(name, "name", "")).removesuffix(":0")
            message += f"; variables are named as in graph.variables{f', perhaps {own!r}' if own else ''}"
        raise UnknownTensorError(message)
    return graph.resolved(name) if isinstance(graph, Graph) else aliases_of(graph).get(name, name)


def aliases_of(graph: GraphLike | None) -> Mapping[str, str]:
    """Returns the aliases of a graph or program; empty for other graphs."""
    return graph.aliases if isinstance(graph, Graph | program_pb2.Program) else {}


def given_aliases(graph: GraphLike, arguments: ProgramArguments) -> dict[str, str]:
    """Returns a graph's aliases, with the names that the request uses first.

    Results name a tensor by its first alias.
    """
    aliases = aliases_of(graph)
    if not (aliases or (isinstance(graph, Graph) and graph.layers)):
        return {}
    # If the request uses a tensor's own name, results use it too.
    return {name: name_of_tensor(name, graph) for name in _requested(arguments)} | dict(aliases)


def sent_aliases(graph: GraphLike, arguments: ProgramArguments) -> dict[str, str]:
    """Returns a graph's aliases, with the names of layers that the request uses; a program keeps them."""
    aliases = dict(aliases_of(graph))
    if isinstance(graph, Graph) and graph.layers:
        found = {name: graph.resolved(name) for name in _requested(arguments)}
        aliases |= {name: tensor for name, tensor in found.items() if tensor != name and name not in aliases}
    return aliases


def _requested(arguments: ProgramArguments) -> list[str]:
    return [
        name
        for names in (arguments.fetches, arguments.ys, arguments.xs)
        for name in flat_list(names)
        if isinstance(name, str)
    ]


def flat_list(names: GroupedNames) -> list[Any]:
    """Returns names as a flat list: one name, several names, or groups of names."""
    if isinstance(names, Mapping):
        return [name for group in names.values() for name in flat_list(group)]
    return [names] if isinstance(names, str | TensorHandle | Node) or is_array(names) else list(names)


def groups_of(xs: GroupedNames, graph: GraphLike | None = None) -> Groups:
    """Returns the names in each group, aliases unchanged; None if the xs are in no groups."""
    if not isinstance(xs, Mapping):
        return None
    return {
        group: [name if isinstance(name, str) else name_of_tensor(name, graph) for name in flat_list(names)]
        for group, names in xs.items()
    }


def _flat_names(xs: GroupedNames, graph: GraphLike | None = None) -> list[str]:
    """Returns all names in order, as given, each tensor once."""
    groups = groups_of(xs, graph)
    if groups is None:
        return names_of(xs, graph)
    found: dict[str, str] = {}
    for names in groups.values():
        for name in names:
            found.setdefault(bare(name_of_tensor(name, graph)), name)
    return list(found.values())


def with_flat_xs(arguments: ProgramArguments, graph: GraphLike) -> ProgramArguments:
    """Returns the arguments with a flat list of xs."""
    return replace(arguments, xs=_flat_names(arguments.xs, graph)) if isinstance(arguments.xs, Mapping) else arguments
