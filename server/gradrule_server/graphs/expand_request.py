"""Declares the request and the result of an expansion, and finds the tensors that a request names.

In names of tensors, `y` means `y:0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradrule.v1.tensor_pb2 import Dt, TensorSpec
from gradrule_server.errors import Findings, Reason, error, quote
from gradrule_server.graphs.copying import Copy
from gradrule_server.graphs.ir import (
    CONTAINERS,
    PLACEHOLDERS,
    Body,
    Ref,
    bodies_of,
    parse_tensor_name,
    short_tensor_name,
)
from gradrule_server.graphs.resolution_context import Match, Tensor
from gradrule_server.graphs.selectors import OverrideSpec, names_branch, without_branches
from gradrule_server.link.v1 import link_pb2


def _refuse_rule(name: str, _: str) -> int:
    raise error(Reason.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {quote(name)}")


def _refuse_embedded_rule(label: str) -> int:
    raise error(
        Reason.ERROR_REASON_UNSUPPORTED, f"the rule {quote(label)}, which the graph contains, is not supported here"
    )


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


@dataclass(slots=True)
class Expanded:
    """A graph in the form that the engine compiles."""

    graph_bytes: bytes
    # Number of nodes, including those in functions and embedded rules.
    nodes: int
    # The rules of nodes: the attribute `_gradrule_mark` of a node is an index of this list.
    marks: list[link_pb2.MarkedNode]
    # Public name of the loop, branch or call that contains a function, by name of the function.
    scopes: dict[str, str]
    matches: list[Match]
    # Placeholders, variables and other fed tensors (`x` or `h:1`); calls may leave out optional ones.
    inputs: list[TensorSpec]
    # Other names that calls may use, with the name of the input.
    input_aliases: dict[str, str]
    # Public names of the nodes that rewrites replaced.
    rewritten: list[str]
    # Whether a node draws random numbers, so that equal feeds give different results.
    draws_random: bool
    # Softmax whose elements a y has, so that the sum of the y is constant, by y.
    softmax_ys: dict[str, str]
    # Names in the expanded graph and element types, by requested name. Pruned stop_gradients have no name.
    tensor_names: dict[str, str]
    dtypes: dict[str, Dt.ValueType]
    # Serialized graphs of embedded rules, by index. Arguments are placeholders; results are the nodes `dx`, `dx1`, ….
    embedded_rules: dict[int, bytes]
    embedded_rule_nodes: dict[int, int]
    # Constants that are inputs of the graph, without the name of the file.
    constants: list[link_pb2.BoundVariable] = field(default_factory=list)
    # Placeholders and variables that calls may feed without a new program, including those that no result needs.
    placeholders: list[str] = field(default_factory=list)
    # Variables with values, by the name in the request, including those that no result needs.
    variables: dict[str, TensorSpec] = field(default_factory=dict)
    # If `with_updates` was set: the tensor with the new value, by name of the variable.
    updates: dict[str, str] = field(default_factory=dict)


_SHOWN = 10


class TensorNames:
    """Looks up tensors of a graph's top level by name."""

    def __init__(
        self,
        top: Body,
        findings: Findings,
        aliases: Mapping[str, str] | None = None,
        tensors: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: node names by alias. `tensors`: names of tensors by their names in the model's own format."""
        self._top = top
        self._findings = findings
        self._tensors = tensors or {}
        self.index = {node.name: position for position, node in enumerate(top.nodes)}
        for alias, name in (aliases or {}).items():
            self.index.setdefault(alias, self.index[name])

    def look_up(self, text: str) -> Ref | None:
        """Returns the tensor; None if there is none."""
        name, output = parse_tensor_name(self._tensors.get(text, text)) or ("", 0)
        position = self.index.get(name)
        if position is None:
            return None
        outputs = self._top.nodes[position].outputs
        return None if outputs is None or output >= len(outputs) else (position, output)

    def find(self, text: str, field: str, *, is_feed: bool = False) -> Ref | None:
        """Returns the tensor; None after adding a finding. `field`: the request field with the name."""
        reason = Reason.ERROR_REASON_UNKNOWN_FEED if is_feed else Reason.ERROR_REASON_UNKNOWN_TENSOR
        parsed = parse_tensor_name(self._tensors.get(text, text))
        if parsed is None:
            what = "an operation, not a tensor" if text.startswith("^") else "not the name of a tensor"
            self._findings.add(reason, f"{quote(text)} is {what}; write 'node' or 'node:output'.", field=field)
            return None
        name, output = parsed
        position = self.index.get(name)
        if position is None:
            hint = self._hint(name) + (self._placeholders() if is_feed else "")
            message = f"The graph has no tensor {quote(text)}: it has no node {quote(name)}.{hint}"
            self._findings.add(reason, message, field=field)
            return None
        outputs = self._top.nodes[position].outputs
        if outputs is not None and output >= len(outputs):
            many = f"it has {len(outputs)}, counted from 0" if outputs else "it has none"
            message = f"The graph has no tensor {quote(text)}: node {quote(name)} has no output {output}; {many}."
            self._findings.add(reason, message, name, field)
            return None
        return position, output

    def node(self, ref: Ref) -> str:
        """Returns the name of the node that computes a tensor."""
        return self._top.nodes[ref[0]].name

    def _placeholders(self) -> str:
        names = [node.name for node in self._top.nodes if node.op in PLACEHOLDERS]
        shown = ", ".join(quote(name) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return f" Its placeholders: {shown or 'none'}."

    def _hint(self, name: str) -> str:
        parts = name.split("/")
        for length in range(len(parts) - 1, 0, -1):
            position = self.index.get("/".join(parts[:length]))
            if position is None or not self._top.nodes[position].functions:
                continue
            node = self._top.nodes[position]
            what = "loop or branch" if node.op in CONTAINERS else "function call"
            return f" Tensors inside the {what} {quote(node.name)} cannot be requested; its outputs can."
        return self._findings.suggest_similar(name, [*self.index, *self._tensors])


def find_requested(request: ExpandRequest, names: TensorNames) -> dict[str, Ref]:
    """Returns the tensors that the fields of a request name, by the name in the request; adds UNKNOWN_TENSOR."""
    groups = (
        ("fetches", request.fetches),
        (f"{request.derivative}.ys", request.ys),
        (f"{request.derivative}.xs", request.xs),
        (f"{request.derivative}.grad_ys", request.grad_y_tensors),
        (f"{request.derivative}.stop_gradients", request.stop_gradients),
    )
    requested: dict[str, Ref] = {}
    for group, texts in groups:
        for position, text in enumerate(texts):
            ref = names.find(text, f"spec.{group}[{position}]")
            if ref is not None:
                requested[text] = ref
    return requested


def find_fed(request: ExpandRequest, names: TensorNames, findings: Findings) -> dict[str, Ref]:
    """Returns the fed tensors by short name; adds UNKNOWN_FEED."""
    fed: dict[str, Ref] = {}
    for position, text in enumerate(request.fed):
        ref = names.find(text, f"feeds[{position}]", is_feed=True)
        if ref is None:
            continue
        name = short_tensor_name(names.node(ref), ref[1])
        if name in fed:
            message = f"The tensor {quote(name)} is fed twice."
            findings.add(Reason.ERROR_REASON_UNKNOWN_FEED, message, field=f"feeds[{position}]")
        fed[name] = ref
    return fed


def find_selected(overrides: Iterable[OverrideSpec], names: TensorNames) -> dict[str, Ref]:
    """Returns the top-level tensors that selectors name; tensors in functions are looked up in the copy later."""
    texts = {
        text
        for spec in overrides
        for text in (*spec.selector.region.inputs, *spec.selector.region.outputs, *spec.selector.depends_on)
    }
    found = ((text, names.look_up(text)) for text in texts)
    return {text: ref for text, ref in found if ref is not None}


class CopiedTensors:
    """Looks up tensors of the copied graph, also those in calls, loops and branches.

    Args:
        copy: The copied graph.
        selected: The tensors of the uploaded graph's top level that selectors name, by the name in the selector.
        findings: Receives UNKNOWN_TENSOR.
    """

    def __init__(self, copy: Copy, selected: Mapping[str, Ref], findings: Findings) -> None:
        self._copy = copy
        self._selected = selected
        self._findings = findings
        # By public name and the positions of the parts with a branch, by the name with these branches.
        self._by_branches: dict[tuple[str, tuple[int, ...]], dict[str, list[_Place]]] = {}

    def find(self, text: str, field: str) -> Sequence[Tensor]:
        """Returns the tensors that have a name; adds UNKNOWN_TENSOR about the request field if there are none."""
        found = self.look_up(text)
        if not found:
            name, _ = parse_tensor_name(text) or ("", 0)
            known: Iterable[str] = self._places
            if names_branch(name):
                known = [place.qualified_name for places in self._places.values() for place in places]
            message = f"There is no tensor {quote(text)}.{self._findings.suggest_similar(name, known)}"
            self._findings.add(Reason.ERROR_REASON_UNKNOWN_TENSOR, message, field=field)
        return found

    def look_up(self, text: str) -> Sequence[Tensor]:
        """Returns the tensors that have a name: several, if nodes of two branches share it."""
        if text in self._selected:
            return [(self._copy.body, self._copy.tensors[self._selected[text]])]
        name, output = parse_tensor_name(text) or ("", 0)
        found: Sequence[_Place] = self._places.get(name, ())
        if not found and names_branch(name):
            found = self._in_branches(name)
        return [
            (place.body, (place.index, output))
            for place in found
            if output < len(place.body.nodes[place.index].outputs or ())
        ]

    def _in_branches(self, name: str) -> Sequence[_Place]:
        """Returns the nodes of a name with branches. Many names differ in their branches only: indexes all at once."""
        public = without_branches(name)
        named = tuple(position for position, part in enumerate(name.split("/")) if names_branch(part))
        if (public, named) not in self._by_branches:
            places = self._by_branches[public, named] = {}
            for place in self._places.get(public, ()):
                places.setdefault(without_branches(place.qualified_name, named), []).append(place)
        return self._by_branches[public, named].get(name, ())

    @cached_property
    def _places(self) -> Mapping[str, list[_Place]]:
        """The nodes, and the arguments of loops and branches, by public name."""
        copy = self._copy
        found: dict[str, list[_Place]] = {}
        for body in bodies_of(copy.body):
            for index, arg in enumerate(body.nodes[: body.arg_count]):
                place = _Place(body, index, f"{copy.qualified_scopes[body.name]}/{arg.name}")
                found.setdefault(f"{copy.scopes[body.name]}/{arg.name}", []).append(place)
        for one in copy.candidates:
            if one.call is None:
                found.setdefault(one.name, []).append(_Place(one.body, one.index, one.qualified_name))
        return found


@dataclass(frozen=True, slots=True)
class _Place:
    body: Body
    index: int
    qualified_name: str
