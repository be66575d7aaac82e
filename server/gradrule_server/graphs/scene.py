"""The expanded graph as overrides are resolved on it: where nodes lie, what depends on what, what was resolved."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

from gradrule.v1 import override_pb2
from gradrule_server.graphs import paths
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.groups import BIAS, SUM
from gradrule_server.graphs.ir import DIFFERENTIABLE, Body, Node, Ref
from gradrule_server.graphs.knots import Knot
from gradrule_server.graphs.prune import bodies_of
from gradrule_server.graphs.selectors import OWN_GRADIENT, Chooser, OverrideSpec, Place
from gradrule_server.graphs.subgraphs import Chains, Subgraph, region, side_exits


@dataclass(slots=True, eq=False)
class Match:
    """A node that an override took.

    `mark` is None where no gradient can pass: the node is pruned. `override`: the spec's `index`, -1 for the node's own
    attribute. `function`: where in the uploaded graph the node lies. `differentiable`: whether its types have
    gradients. `rank`: it holds only for outputs of this rank. `nodes`: all nodes of a subgraph, `outputs`: how many
    tensors come out of it; 0 for a single node; `inputs`: how many of those that follow the rule sees; None: all.
    `is_step`: as in `Subgraph`. `every_order`: it holds wherever gradients are differentiated again, too.
    """

    rule: int
    node: str
    op_type: str
    function: str
    rule_name: str
    label: str
    override: int
    differentiable: bool
    rank: int | None = None
    nodes: tuple[str, ...] = ()
    outputs: int = 0
    inputs: int | None = None
    is_step: bool = False
    every_order: bool = False
    mark: int | None = None

    def tie(self, knot: Knot | None) -> None:
        """The node is a knot: the rule sees the region. The op's own gradient goes through the inside by itself."""
        if knot is not None and self.rule != OWN_GRADIENT:
            self.outputs, self.inputs = knot.outputs, knot.inputs


@dataclass(slots=True, eq=False)
class Foreign:
    """A node that names a gradient of another process, and that no override took."""

    node: str
    name: str


Resolved = list[Match | Foreign]
"""What was resolved for a node: matches that hold for one rank only, then at most one that holds for all."""


@dataclass(slots=True, eq=False)
class Asked:
    """What of the request path-dependent selectors need, as tensors of the copy's top level."""

    xs: AbstractSet[Ref]
    ys: AbstractSet[Ref]
    stop_gradients: AbstractSet[Ref]


class Scene:
    """The expanded graph as overrides are resolved on it, and what comes of it.

    `find`: the tensor of a name, and its body; None after noting what is wrong under the field given.
    """

    def __init__(
        self,
        top: Body,
        places: Sequence[Place],
        scopes: Mapping[str, str],
        asked: Asked,
        find: Callable[[str, str], tuple[Body, Ref] | None],
    ) -> None:
        self.top = top
        self._scopes = scopes
        self.places = places
        self.subgraphs: list[tuple[Subgraph, Match]] = []
        # Subgraphs with a match but no rule to run, under their last place.
        self.idle: list[tuple[Place, Match]] = []
        self.resolved: dict[int, Resolved] = {}
        # Knots that the graph brought along; per knot (by id) the inputs that gradients go to.
        self.knots: list[tuple[Place, Knot]] = []
        self.flows: dict[int, range] = {}
        self._noted: list[tuple[Place, Match | Foreign]] = []
        self._asked = asked
        self._find = find
        kept = {(id(top), ref[0]) for ref in (*asked.xs, *asked.ys, *asked.stop_gradients)}
        self._chains = Chains(self._changes, kept, self.flows)

    def note(self, place: Place, what: Match | Foreign) -> None:
        """Keeps what was resolved for a place."""
        self._noted.append((place, what))
        if place.live:
            self.resolved.setdefault(id(place.node), []).append(what)

    def matches(self) -> list[Match]:
        """All matches, in the order of places."""
        order = {id(place): number for number, place in enumerate(self.places)}
        found = [(order[id(place)], match) for place, match in self._noted if isinstance(match, Match)]
        found += [(order[id(place)], match) for place, match in self.idle]
        found += [(order[id(self.place(item.body, item.members[-1]))], match) for item, match in self.subgraphs]
        return [match for _, match in sorted(found, key=lambda item: item[0])]

    def place(self, body: Body, index: int) -> Place:
        """The place of a node."""
        return self._by_node[id(body), index]

    def inside(self, place: Place) -> list[Place]:
        """All places in the functions of a loop or branch."""
        if not place.node.functions:
            return []
        bodies = [id(inner) for _, own in place.node.functions for body in own for inner in bodies_of(body)]
        return [item for body in bodies for item in self._by_body.get(body, ())]

    def is_differentiable(self, place: Place, subgraph: Subgraph | None) -> bool:
        """Whether gradients can pass through the node, or the subgraph."""
        if subgraph is None:
            return is_differentiable(place.node, place.input_types)
        nodes = subgraph.body.nodes
        borders = (
            [(nodes[ref[0]].outputs or ())[ref[1]] for ref in refs] for refs in (subgraph.inputs, subgraph.outputs)
        )
        return all(not DIFFERENTIABLE.isdisjoint(types) for types in borders)

    def chosen(self, chooser: Chooser) -> list[tuple[Place, Subgraph | None]]:
        """All places that the chooser means, taken or not, each with its chain if it wants one."""
        selector = chooser.spec.selector
        found: list[tuple[Place, Subgraph | None]] = []
        roots = self._depended_on(chooser) if selector.depends_on else None
        for place in self._candidates(chooser):
            if not chooser.fits(place) or (roots is not None and id(place.node) not in roots):
                continue
            chain = None
            if len(chooser.words) > 1:
                chain = self._chains.ending_at(place.body, place.index, chooser.words)
                if chain is None:
                    continue
            elif chooser.words and not self._fits_alone(chooser, place):
                continue
            found.append((place, chain))
        return self._positioned(selector.position, found) if selector.HasField("position") else found

    def region(self, spec: OverrideSpec, findings: Findings) -> Subgraph | None:
        """The region of a spec; None after noting what is wrong."""
        wanted = spec.selector.region
        found: list[list[Ref]] = []
        bodies: set[int] = set()
        body = self.top
        for kind, names in (("inputs", wanted.inputs), ("outputs", wanted.outputs)):
            refs = []
            for number, name in enumerate(names):
                tensor = self._find(name, f"{spec.field}.selector.region.{kind}[{number}]")
                if tensor is not None:
                    body = tensor[0]
                    bodies.add(id(body))
                    refs.append(tensor[1])
            found.append(refs)
        inputs, outputs = found
        twice = [
            name for name in (*wanted.inputs, *wanted.outputs) if [*wanted.inputs, *wanted.outputs].count(name) > 1
        ]
        if len(inputs) < len(wanted.inputs) or len(outputs) < len(wanted.outputs):
            return None
        problem = "its tensors lie in different functions, loops or branches" if len(bodies) > 1 else ""
        problem = problem or (f"{quote(twice[0])} is named twice" if twice else "")
        if not problem:
            subgraph, elsewhere = region(body, inputs, outputs)
            problem = self._region_problem(subgraph, elsewhere)
        if problem:
            message = f"Override {quote(spec.label)}: the region cannot be: {problem}."
            findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=spec.field)
            return None
        return subgraph

    def _region_problem(self, subgraph: Subgraph, elsewhere: Iterable[Ref]) -> str:
        body, inside = subgraph.body, set(subgraph.members)
        for ref in subgraph.outputs:
            if ref[0] not in inside:
                return f"its output {self._text(body, ref)} does not depend on its inputs"
        for ref in elsewhere:
            if self._changes(body, ref):
                text = self._text(body, ref)
                return f"{text} goes into it from outside and depends on the xs; make it one of the inputs"
        kept = self._asked.xs | self._asked.ys | self._asked.stop_gradients if body is self.top else frozenset()
        for member, user in side_exits(subgraph, self._before_ys, kept, self.flows)[:1]:
            text = self._text(body, (member, 0))
            return f"{text} inside it is used outside, by {user}; make it one of the outputs"
        return ""

    def _changes(self, body: Body, ref: Ref) -> bool:
        """Whether a tensor is one of the xs or depends on one."""
        return id(body.nodes[ref[0]]) in self._behind_xs or (body is self.top and ref in self._asked.xs)

    def _text(self, body: Body, ref: Ref) -> str:
        place = self._by_node.get((id(body), ref[0]))
        own = body.nodes[ref[0]].name
        # Arguments of loops and branches have no place.
        name = place.name if place is not None else f"{self._scopes[body.name]}/{own}" if body.name else own
        return quote(f"{name}:{ref[1]}" if ref[1] else name)

    def _candidates(self, chooser: Chooser) -> Iterator[Place]:
        if chooser.op_types is None:
            return iter(self.places)
        groups = [self._by_op.get(op_type, []) for op_type in sorted(chooser.op_types)]
        return (place for _, place in heapq.merge(*groups, key=lambda item: item[0]))

    def _fits_alone(self, chooser: Chooser, place: Place) -> bool:
        """A group may ask more than the op type: an add is either a bias's or a sum."""
        word = chooser.words[0]
        return word not in (BIAS, SUM) or self._chains.is_bias(place.node, place.body) == (word == BIAS)

    def _depended_on(self, chooser: Chooser) -> AbstractSet[int]:
        spec, seeds = chooser.spec, []
        for number, name in enumerate(spec.selector.depends_on):
            found = self._find(name, f"{spec.field}.selector.depends_on[{number}]")
            if found is None:
                chooser.faulty = True
            else:
                seeds.append(found)
        dependents: set[int] = set()
        for body, ref in seeds:
            dependents |= paths.dependents(self.top, body, {ref})
        return dependents

    def _positioned(
        self, position: override_pb2.Position, found: Sequence[tuple[Place, Subgraph | None]]
    ) -> list[tuple[Place, Subgraph | None]]:
        on_path = [item for item in found if id(item[0].node) in self._path]
        ids = {id(place.node) for place, _ in on_path}
        index = position.index
        if position.WhichOneof("place") == "nearest":
            index = 0 if position.nearest == override_pb2.POSITION_NEAREST_XS else -1
        from_end = paths.ranks_from_xs if index >= 0 else paths.ranks_from_ys
        ranks = from_end(self.top, ids, self._path, self.flows)
        wanted = index if index >= 0 else -1 - index
        return [item for item in on_path if ranks.get(id(item[0].node)) == wanted]

    @cached_property
    def _behind_xs(self) -> AbstractSet[int]:
        return paths.dependents(self.top, self.top, self._asked.xs)

    @cached_property
    def _path(self) -> AbstractSet[int]:
        """Nodes that gradients pass on their way from the ys to the xs."""
        cut = paths.Cut(self._asked.stop_gradients, self.flows)
        return paths.dependents(self.top, self.top, self._asked.xs, cut) & paths.dependencies(
            self.top, self._asked.ys, cut
        )

    @cached_property
    def _by_body(self) -> Mapping[int, list[Place]]:
        found: dict[int, list[Place]] = {}
        for place in self.places:
            found.setdefault(id(place.body), []).append(place)
        return found

    @cached_property
    def _before_ys(self) -> AbstractSet[int]:
        return paths.dependencies(self.top, self._asked.ys)

    @cached_property
    def _by_op(self) -> Mapping[str, list[tuple[int, Place]]]:
        found: dict[str, list[tuple[int, Place]]] = {}
        for number, place in enumerate(self.places):
            found.setdefault(place.node.op_type, []).append((number, place))
        return found

    @cached_property
    def _by_node(self) -> Mapping[tuple[int, int], Place]:
        return {(id(place.body), place.index): place for place in self.places}


def is_differentiable(node: Node, input_types: Sequence[int]) -> bool:
    """Whether gradients can pass through a node: some output, and some input if there are any, is of such a type."""
    takes = not input_types or any(dtype in DIFFERENTIABLE for dtype in input_types)
    return takes and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
