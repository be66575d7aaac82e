"""Which rule each node gets: regions, then the list in order, then what nodes carry; the first match wins.

A match of a call, loop or branch also takes what lies in it, as far as no earlier override has taken it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gradrule.v1.tensor_pb2 import Dt
from tests.generated.expanded import FLOATS, Body, Call, Expanded, Item, Node, Ref, bodies, inside
from tests.generated.paths import Dependents, needed, passes, ranks, ranks_from_ys
from tests.generated.requests import Override, Request, name_matches
from tests.generated.rules import DEFAULT, REGISTERED, RULES, Rule

GROUPS = {
    "@activation": {"Relu", "Tanh", "Sigmoid", "Softplus"},
    "@linear": {"MatMul"},
    "@dense": {"MatMul"},
    "@step": {"Greater"},
}
ADDS = {"AddV2"}
CARRIED = {rule.text: rule for rule in RULES if rule.kind in ("name", "default")}
assert REGISTERED in CARRIED


class Unclear(Exception):
    """The documents do not say what this case means; it is left out."""


@dataclass(eq=False)
class Unit:
    """A node, chain, region or call with one rule. members: indices of nodes of the body.

    item: the node or call; None for a chain or a region. shown: the node that the resolution names.
    """

    body: Body
    members: frozenset[int]
    inputs: list[Ref]
    outputs: list[Ref]
    rule: Rule
    shown: Item
    label: str
    override: int
    every_order: bool
    params: dict[str, float]
    item: Item | None = None
    is_step: bool = False
    depends_on_xs: bool = True

    @property
    def is_node(self) -> bool:
        return isinstance(self.item, Node)

    @property
    def is_differentiable(self) -> bool:
        takes = [self.body.dtype(ref) in FLOATS for ref in self.inputs]
        gives = [self.body.dtype(ref) in FLOATS for ref in self.outputs]
        return any(gives) and (any(takes) or not takes) if self.item else any(gives) and any(takes)


@dataclass
class Resolution:
    """units: all matches. refusals: reasons, each with the number of the override, that must be given."""

    units: list[Unit] = field(default_factory=list)
    refusals: list[tuple[str, int]] = field(default_factory=list)


class Resolver:
    """Resolves the overrides of one request."""

    def __init__(self, graph: Expanded, request: Request) -> None:
        self._graph = graph
        self._request = request
        self._top = graph.top

        def refs(names: object) -> set[Ref]:
            return {graph.tensors(name)[0][1] for name in names}  # type: ignore[attr-defined]

        self.xs, self.ys, self.stopped = refs(request.xs), refs(request.ys), refs(request.stopped)
        self._behind_xs = Dependents(self._top, {id(self._top): self.xs})
        self._before_ys = needed(self._top, self.ys)
        self._taken: dict[Item, int] = {}
        self.found = Resolution()

    def resolve(self) -> Resolution:
        overrides = self._request.overrides
        for number, override in enumerate(overrides):
            if override.region:
                self._region(number, override)
        self._find_path()
        for number, override in enumerate(overrides):
            if not override.region:
                self._apply(number, override)
        for item in self._graph.items:
            if isinstance(item, Node) and "_gradient_op_type" in item.attrs and item not in self._taken:
                rule = CARRIED[item.attrs["_gradient_op_type"].s.decode()]
                self._take([item], self._node(item, Override(rule, op_type=item.op), -1))
        self._check_straddling()
        self._check_borders()
        self._find_dependence()
        return self.found

    def _find_path(self) -> None:
        """Finds the path of gradients, on which rules may pass gradients on where ops do not."""
        self._shortcuts: dict[Node, set[Ref]] = {}
        self._ends_of_calls: set[Node] = set()
        for unit in self.found.units:
            self._pass_on(unit)
        taken = set(self._taken)
        for number, override in enumerate(self._request.overrides):
            for item in () if override.region else self._selected(replace(override, position=None)):
                members = item if isinstance(item, list) else [item]
                if not taken.isdisjoint(members):
                    continue
                if isinstance(item, list):
                    self._pass_on(self._chain(item, override, number))
                elif isinstance(item, Call) or item.op == "StopGradient":
                    unit = self._single(item, override, number)
                    self._pass_on(unit)
                    if isinstance(item, Call):
                        self._ends_of_calls.update(unit.body.nodes[ref[0]] for ref in unit.outputs)
                if override.position is None:
                    taken.update(members, *(inside(one) for one in members))
        options: dict[str, Any] = {"differentiable": True, "stopped": self.stopped, "shortcuts": self._shortcuts}
        self._behind_path = Dependents(self._top, {id(self._top): self.xs}, **options)
        self._path = self._behind_path.nodes & needed(self._top, self.ys, **options)

    def _pass_on(self, unit: Unit) -> None:
        for ref in () if unit.rule.is_default else unit.outputs:
            self._shortcuts.setdefault(unit.body.nodes[ref[0]], set()).update(unit.inputs)

    def _apply(self, number: int, override: Override) -> None:
        before = len(self.found.units)
        for item in self._selected(override):
            if isinstance(item, list):
                if not any(member in self._taken for member in item):
                    self._take(item, self._chain(item, override, number))
            elif item not in self._taken:
                self._take([item], self._single(item, override, number))
        made = self._request.kind == "hvp" and override.every_order and override.is_only_op_type
        if len(self.found.units) == before and not override.optional and not made:
            self.found.refusals.append(("UNMATCHED_OVERRIDE", number))

    def _take(self, items: list[Item], unit: Unit) -> None:
        for item in items:
            self._taken[item] = unit.override
            if isinstance(item, Call) or (isinstance(item, Node) and item.bodies):
                for held in inside(item):
                    self._taken.setdefault(held, unit.override)
        self.found.units.append(unit)

    def _selected(self, override: Override) -> Iterator[Item | list[Item]]:
        """The nodes, calls and chains that an override selects, taken or not; holders before what they hold."""
        if len(override.pattern) > 1 or override.op_type == "@step":
            words = override.pattern or ("@step", "Cast")
            chains = [chain for item in self._graph.items for chain in self._chains(item, words)]
            ends = [chain[-1] for chain in chains]
            kept = self._placed(override, [item for item in ends if self._meets(override, item)])
            yield from (chain for chain in chains if chain[-1] in kept)
            return
        fitting = [
            item
            for item in self._graph.items
            if self._fits(override.op_type or next(iter(override.pattern), None), item) and self._meets(override, item)
        ]
        yield from self._placed(override, fitting)

    def _fits(self, word: str | None, item: Item) -> bool:
        """Whether an item has an op type or is of a group."""
        if word in ("@bias", "@sum"):
            if isinstance(item, Call) or item.op not in ADDS | {"BiasAdd"}:
                return False
            assert isinstance(item, Node)
            changing = all(self._behind_xs.depends(item.body, ref) for ref in item.inputs)
            is_bias = item.op not in ADDS or not changing
            return is_bias if word == "@bias" else item.op in ADDS and not is_bias
        return word is None or item.op in GROUPS.get(word, {word})

    def _meets(self, override: Override, item: Item) -> bool:
        """Whether an item meets all conditions but op type and position."""
        if not name_matches(override, item.name):
            return False
        if isinstance(item, Call):
            # Only op type and name select a call itself.
            return (
                override.dtype is None
                and override.position is None
                and not override.depends_on
                and not override.pattern
            )
        assert isinstance(item, Node)
        if override.dtype is not None and item.dtypes[:1] != [override.dtype]:
            return False
        if override.depends_on:
            seeds: dict[int, set[Ref]] = {}
            for name in override.depends_on:
                for body, ref in self._graph.tensors(name):
                    seeds.setdefault(id(body), set()).add(ref)
            return item in Dependents(self._top, seeds).nodes
        return True

    def _placed(self, override: Override, items: list[Item]) -> list[Item]:
        place = override.position
        if place is None:
            return items
        members = {item for item in items if isinstance(item, Node) and self._is_on_path(item)}
        index = {"nearest_xs": 0, "nearest_ys": -1}.get(place, place) if isinstance(place, str) else place
        assert isinstance(index, int)
        if index >= 0:
            rank = ranks(self._top, members, self._path, self._shortcuts, self.xs)
        else:
            rank = ranks_from_ys(self._top, members, self._path, self._shortcuts)
        return [item for item in items if item in members and rank.get(item) == (index if index >= 0 else -1 - index)]

    def _is_on_path(self, item: Node) -> bool:
        """Whether gradients pass through a node itself; the rule of a call passes them by the node of its output."""
        if item not in self._path or item not in self._ends_of_calls:
            return item in self._path
        depends = any(self._behind_path.depends(item.body, ref) for ref in item.inputs)
        return passes(item) and (depends or any(node in self._path for body in item.bodies for node in body.nodes))

    def _chains(self, item: Item, words: tuple[str, ...]) -> list[list[Item]]:
        """The chain that ends at a node, if there is one."""
        if not isinstance(item, Node):
            return []
        found = self._chain_to(item, words)
        if found is None or words[0] != "@step":
            return [] if found is None else [found]
        first = found[0]
        assert isinstance(first, Node)
        types = {item.body.dtype(ref) for ref in first.inputs} | set(item.dtypes)
        return [found] if types <= FLOATS else []

    def _chain_to(self, node: Node, words: tuple[str, ...]) -> list[Item] | None:
        if not self._fits(words[-1], node):
            return None
        if len(words) == 1:
            return [node]
        for index in dict.fromkeys(ref[0] for ref in node.inputs):
            before = node.body.nodes[index]
            if index >= node.body.arguments and self._is_alone(before, node):
                found = self._chain_to(before, words[:-1])
                if found is not None:
                    return [*found, node]
        return None

    def _is_alone(self, producer: Node, consumer: Node) -> bool:
        body = producer.body
        users = [node for node in body.nodes for ref in node.inputs if ref[0] == producer.index]
        kept = {ref[0] for ref in body.results}
        if body is self._top:
            kept |= {ref[0] for ref in self.xs | self.ys | self.stopped}
        return users == [consumer] and producer.index not in kept

    def _params(self, override: Override) -> dict[str, float]:
        return {**override.params, **self._request.params.get(override.shown_label, {})}

    def _unit(
        self,
        body: Body,
        members: object,
        inputs: list[Ref],
        outputs: list[Ref],
        override: Override,
        number: int,
        shown: Item,
    ) -> Unit:
        return Unit(
            body,
            frozenset(members),
            inputs,
            outputs,
            override.rule,
            shown,
            override.shown_label,
            number,
            override.every_order,
            self._params(override),
        )

    def _single(self, item: Item, override: Override, number: int) -> Unit:
        if isinstance(item, Node):
            return self._node(item, override, number)
        assert isinstance(item, Call)
        unit = self._unit(item.body, item.members, item.inputs, item.results, override, number, item)
        unit.item = item
        return unit

    def _node(self, node: Node, override: Override, number: int) -> Unit:
        outputs = [(node.index, output) for output in range(len(node.dtypes))]
        unit = self._unit(node.body, [node.index], node.inputs, outputs, override, number, node)
        unit.item = node
        return unit

    def _chain(self, chain: list[Item], override: Override, number: int) -> Unit:
        nodes = [item for item in chain if isinstance(item, Node)]
        members = [node.index for node in nodes]
        inputs = [ref for place, node in enumerate(nodes) for ref in node.inputs if place == 0 or ref[0] not in members]
        last = nodes[-1]
        outputs = [(last.index, output) for output in range(len(last.dtypes))]
        if override.op_type == "@step":
            inputs = nodes[0].inputs
        unit = self._unit(last.body, members, list(inputs), outputs, override, number, last)
        unit.is_step = override.op_type == "@step"
        return unit

    def _region(self, number: int, override: Override) -> None:
        assert override.region is not None
        inputs, outputs = override.region
        held = [
            body
            for body in bodies(self._top)
            if all(any(found is body for found, _ in self._graph.tensors(name)) for name in (*inputs, *outputs))
        ]
        if any(not self._graph.tensors(name) for name in (*inputs, *outputs)):
            self.found.refusals.append(("UNKNOWN_TENSOR", number))
        elif not held or len({*inputs, *outputs}) < len([*inputs, *outputs]):
            self.found.refusals.append(("INVALID_OVERRIDE", number))
        for body in held:
            refs = [
                [next(ref for found, ref in self._graph.tensors(name) if found is body) for name in names]
                for names in (inputs, outputs)
            ]
            self._region_in(body, refs[0], refs[1], number, override)

    def _region_in(self, body: Body, inputs: list[Ref], outputs: list[Ref], number: int, override: Override) -> None:
        members = _between(body, inputs, outputs)
        invalid = any(ref[0] not in members for ref in outputs)
        for index in members:
            for ref in body.nodes[index].inputs:
                enters = ref[0] not in members and ref not in inputs
                invalid |= enters and self._behind_xs.depends(body, ref)
        uses = [
            ref for node in body.nodes if node.index not in members and node in self._before_ys for ref in node.inputs
        ]
        kept = self.xs | self.ys | self.stopped if body is self._top else set()
        invalid |= any(ref[0] in members and ref not in outputs for ref in [*uses, *body.results, *kept])
        items: list[Item] = [
            item
            for item in body.items
            if (isinstance(item, Node) and item.index in members)
            or (isinstance(item, Call) and item.members and members.issuperset(item.members))
        ]
        held = [one for item in items if isinstance(item, Node) and item.bodies for one in inside(item)]
        invalid |= any(item in self._taken for item in [*items, *held])
        if invalid or not items:
            self.found.refusals.append(("INVALID_OVERRIDE", number))
            return
        unit = self._unit(body, members, inputs, outputs, override, number, body.nodes[outputs[0][0]])
        self._take(items, unit)

    def _find_dependence(self) -> None:
        """Tells units whose gradients can reach the xs; rules of subgraphs pass gradients on, whatever is in them."""
        seeds: dict[int, set[Ref]] = {id(self._top): set(self.xs)}
        waiting = [
            unit
            for unit in self.found.units
            if not unit.is_node or (unit.shown.op == "StopGradient" and not unit.rule.is_default)
        ]
        reached = self._behind_xs
        while found := [unit for unit in waiting if any(reached.depends(unit.body, ref) for ref in unit.inputs)]:
            waiting = [unit for unit in waiting if unit not in found]
            for unit in found:
                seeds.setdefault(id(unit.body), set()).update(unit.outputs)
            reached = Dependents(self._top, seeds, differentiable=True)
        reached = Dependents(self._top, seeds, differentiable=True)
        for unit in self.found.units:
            unit.depends_on_xs = unit.item in reached.nodes or (
                not (unit.is_node and unit.rule.is_default)
                and any(reached.depends(unit.body, ref) for ref in unit.inputs)
            )

    def _check_straddling(self) -> None:
        """Refuses to judge a chain or region that lies partly in a call with a rule."""
        whole = [unit for unit in self.found.units if not unit.is_node]
        for one in whole:
            for other in whole:
                shared = one.members & other.members
                if (
                    one.body is other.body
                    and shared
                    and not (one.members <= other.members or other.members <= one.members)
                ):
                    raise Unclear("two subgraphs overlap in part")

    def _check_borders(self) -> None:
        """Refuses to judge a region that begins inside a call and ends outside it, if an override selects the call.

        The same for a call that is an x. The results of such a call are not the tensors of the nodes inside.
        """
        selecting = [override for override in self._request.overrides if not override.region and not override.pattern]
        numbers = {number for number, override in enumerate(self._request.overrides) if override.region}
        regions = [unit for unit in self.found.units if unit.override in numbers]
        for item in self._graph.items:
            if not isinstance(item, Call):
                continue
            is_x = not item.around and item.name in self._request.xs
            if is_x or any(self._fits(one.op_type, item) and self._meets(one, item) for one in selecting):
                for region in regions:
                    begins_inside = item.body is region.body and any(ref[0] in item.members for ref in region.inputs)
                    if begins_inside and not region.members.issubset(item.members):
                        raise Unclear("a region crosses the results of a call")


def _between(body: Body, inputs: list[Ref], outputs: list[Ref]) -> set[int]:
    """The nodes on the ways from the inputs to the outputs."""
    behind: set[int] = {ref[0] for ref in outputs if ref not in inputs}
    for node in reversed(body.nodes):
        if node.index in behind:
            behind.update(ref[0] for ref in node.inputs if ref not in inputs)
    inside_: set[int] = set()
    for node in body.nodes:
        if node.index in behind and any(ref in inputs or ref[0] in inside_ for ref in node.inputs):
            inside_.add(node.index)
    return inside_


__all__ = ["DEFAULT", "Dt", "Resolution", "Resolver", "Unclear", "Unit", "passes"]
