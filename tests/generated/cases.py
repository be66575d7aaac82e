"""Numbered cases: a random graph, a derivative of it, and overrides that mostly select something on the path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradrule.v1.tensor_pb2 import Dt
from tests.generated.expanded import FLOATS, Body, Call, Expanded, Item, Node, expand
from tests.generated.paths import Dependents, needed
from tests.generated.programs import BINARY, EXAMPLES, SHAPE, SIZE, UNARY, generate
from tests.generated.requests import Override, Request, name_matches
from tests.generated.resolution import GROUPS
from tests.generated.rules import DEFAULT, REGISTERED, RULES, WRONG_ARITY, Rule

KINDS = ("vjp", "stacked", "jacobian", "batched", "hvp")
MADE = frozenset({"Tanh", "Sigmoid", "Relu", "Sin", "Floor"})
"""Op types that no gradient and no rule here makes, so that an order="all" for all of them means known nodes."""


def case(number: int) -> Request:
    """The request of a case; the same whenever and wherever it is made."""
    return _Cases(random.Random(number)).request()


class _Cases:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def request(self) -> Request:
        rng = self._rng
        graph = generate(rng, rng.choice([0, 1, 1, 2]))
        expanded = expand(graph)
        kind = rng.choices(KINDS, [50, 10, 8, 12, 20])[0]
        vectors = [node.name for node in expanded.top.nodes if self._is_vector(node)]
        calls = [item for item in expanded.top.items if isinstance(item, Call) and not item.around]
        inner = [name for name in vectors if "/" not in name and name not in ("x", "w", "y")]
        inner += [call.name for call in calls]
        xs = rng.choice([["x"], ["x", "w"], ["x"]])
        # TensorFlow's gradients of loops and branches use some of their outputs and copies of others, so a second
        # derivative with respect to an output of theirs has no meaning of its own.
        held = {node.name for node in expanded.top.nodes if node.bodies} if kind == "hvp" else set()
        named = [name for name in inner if name not in held]
        xs = xs + rng.sample(named, rng.choice([0, 0, 0, 1]) if named else 0)
        ys = ["y"] + [name for name in rng.sample(inner, rng.choice([0, 0, 1]) if inner else 0) if name not in xs]
        free = [name for name in inner if name not in xs + ys and name in {node.name for node in expanded.top.nodes}]
        stopped = rng.sample(free, 1) if free and rng.random() < 0.12 else []
        if rng.random() < 0.15:
            self._carry(graph, expanded)
            expanded = expand(graph)
        rank = 3 if kind == "stacked" else 2
        upstream = {y: self._array(rank) for y in ys if rng.random() < 0.4 or kind == "stacked"}
        overrides = self._overrides(expanded, kind, (ys, xs))
        params: dict[str, dict[str, float]] = {}
        labels = [override.shown_label for override in overrides]
        for override in overrides:
            if override.params and rng.random() < 0.3 and labels.count(override.shown_label) == 1:
                params[override.shown_label] = {name: rng.choice([0.5, 1.75, 3.0]) for name in override.params}
        return Request(
            graph,
            {"x": self._array(2), "w": self._array(2), "k": np.int32(rng.randint(0, 3))},
            ys,
            xs,
            kind,
            overrides,
            upstream if kind in ("vjp", "stacked") else {},
            {x: self._array(2) for x in xs} if kind == "hvp" else {},
            stopped,
            params,
        )

    def _array(self, rank: int) -> Any:
        shape = (2, *SHAPE) if rank == 3 else SHAPE
        return np.array([self._rng.gauss(0, 1) for _ in range(int(np.prod(shape)))]).reshape(shape)

    def _is_vector(self, node: Node) -> bool:
        """Whether a node gives one vector."""
        return node.dtypes == [Dt.DT_DOUBLE] and node.op not in ("Const", "_Arg")

    def _carry(self, graph: Any, expanded: Expanded) -> None:
        """Lets some nodes of one op type name a rule themselves, as `gradient_override_map` does."""
        rng = self._rng
        nodes = [node for body in (graph.node, *(f.node_def for f in graph.library.function)) for node in body]
        candidates = [node for node in nodes if node.op in UNARY and node.attr["T"].type == Dt.DT_DOUBLE]
        if candidates:
            op = rng.choice(candidates).op
            rule = rng.choice([REGISTERED, "Identity", "default"])
            for node in candidates:
                if node.op == op and rng.random() < 0.7:
                    node.attr["_gradient_op_type"].s = rule.encode()

    def _overrides(self, expanded: Expanded, kind: str, kept: tuple[Sequence[str], Sequence[str]]) -> list[Override]:
        rng = self._rng
        floats: list[Item] = [
            item
            for item in expanded.items
            if isinstance(item, Call) or (isinstance(item, Node) and item.dtypes[-1] in FLOATS and item.inputs)
        ]
        tops = {id(expanded.top): {ref for name in kept[1] for _, ref in expanded.tensors(name)}}
        behind = Dependents(expanded.top, tops, differentiable=True).nodes
        ys = {ref for name in kept[0] for _, ref in expanded.tensors(name)}
        path = behind & needed(expanded.top, ys, differentiable=True)
        # Where a step is, only its rule makes a path.
        steps: list[Item] = [node for node in floats if isinstance(node, Node) and _is_step(node)]
        floats += 5 * [item for item in floats if item in path or isinstance(item, Call)] + 5 * steps
        made = []
        for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
            override = self._override(expanded, floats, kind)
            if override is not None:
                made.append(override)
        return made

    def _override(self, expanded: Expanded, floats: list[Item], kind: str) -> Override | None:
        rng = self._rng
        item = rng.choice([*floats, *[one for one in floats if one.around]])
        how = rng.choices(
            [
                "type",
                "node",
                "last",
                "glob",
                "scope",
                "regex",
                "position",
                "depends",
                "dtype",
                "chain",
                "region",
                "all",
            ],
            [14, 14, 8, 8, 8, 4, 12, 8, 5, 12, 12, 2],
        )[0]
        given = self._conditions(expanded, item, how)
        if given is None:
            return None
        rule = self._rule(expanded, given, kind)
        order = kind == "hvp" and rng.random() < 0.4 and self._may_be_all(expanded, given)
        return Override(
            rule,
            label=f"label{rng.randint(0, 99)}" if rng.random() < 0.4 or rule.params else None,
            optional=rng.random() < 0.75,
            every_order=order,
            params=dict(rule.params),
            **given,
        )

    def _may_be_all(self, expanded: Expanded, given: dict[str, Any]) -> bool:
        """Whether order="all" means nodes that are known here: none that TensorFlow's gradients make or change.

        TensorFlow's gradients give loops and branches more outputs, which count as theirs in a second derivative.
        """
        if {"region", "pattern"} & given.keys() or given.get("op_type", "").startswith("@"):
            return False
        if any(isinstance(item, Node) and item.bodies for item in self._selected(expanded, given)):
            return False
        return set(given) != {"op_type"} or given["op_type"] in MADE

    def _conditions(self, expanded: Expanded, item: Item, how: str) -> dict[str, Any] | None:
        rng = self._rng
        path, _, last = item.name.rpartition("/")
        groups = [group for group, ops in GROUPS.items() if item.op in ops and group != "@step"]
        op_type = rng.choice([item.op, *groups])
        if item.op == "AddV2" and rng.random() < 0.4:
            op_type = rng.choice(["@bias", "@sum"])
        if isinstance(item, Node) and _is_step(item) and rng.random() < 0.8:
            op_type = "@step"
        maybe_type = {"op_type": op_type} if rng.random() < 0.5 else {}
        if how == "type":
            return {"op_type": op_type}
        if how == "node":
            return {"node": item.name}
        if how == "last":
            return {"node": f"**/{last}" if path else last, **maybe_type}
        if how == "glob":
            return {"node": rng.choice([f"{path}/*" if path else "*", f"{item.name.split('/')[0]}/**"]), **maybe_type}
        if how == "all":
            return {"node": "**", **maybe_type}
        if how == "regex":
            return {"node_regex": rng.choice([rf"{item.name[:-1]}.", r"(.*/)?op\d*[02468]"]), **maybe_type}
        if how == "scope":
            parts = path.split("/")
            return {"scope": "/".join(parts[: rng.randint(1, len(parts))]), **maybe_type} if path else None
        if how == "position":
            more = {"op_type": op_type} if rng.random() < 0.8 or not path else {"scope": path}
            return {"position": rng.choice(["nearest_xs", "nearest_ys", 0, 1, -1, -2]), **more}
        if how == "depends":
            names = [one.name for one in expanded.items if isinstance(one, Node) and self._is_vector(one)]
            return {
                "depends_on": tuple(rng.sample(names, rng.choice([1, 1, 2]) if names[1:] else 1)),
                "op_type": op_type,
            }
        if how == "dtype":
            return {"dtype": rng.choice([Dt.DT_DOUBLE, Dt.DT_FLOAT, Dt.DT_FLOAT]), **maybe_type}
        return self._chain(item) if how == "chain" else self._region(expanded, item)

    def _chain(self, item: Item) -> dict[str, Any] | None:
        """The op types of nodes one behind the other, up to the item."""
        if not isinstance(item, Node):
            return None
        words, node = [item.op], item
        for _ in range(self._rng.choice([1, 1, 2])):
            before = [node.body.nodes[ref[0]] for ref in node.inputs if ref[0] >= node.body.arguments]
            before = [one for one in before if one.op not in ("Const", "Placeholder")]
            if not before:
                break
            node = self._rng.choice(before)
            words.insert(0, node.op)
        return {"pattern": tuple(words)} if len(words) > 1 or self._rng.random() < 0.2 else None

    def _region(self, expanded: Expanded, item: Item) -> dict[str, Any] | None:
        """From tensors some nodes before an item to the item."""
        rng = self._rng
        if not isinstance(item, Node):
            return None
        body, inputs = item.body, {(item.index, 0)}
        for _ in range(rng.randint(1, 4)):
            if not inputs:
                return None
            ref = rng.choice(sorted(inputs))
            node = body.nodes[ref[0]]
            if ref[0] >= body.arguments and node.op not in ("Placeholder", "Const"):
                inputs.remove(ref)
                inputs.update(one for one in node.inputs if body.dtype(one) in FLOATS)
        names = [_tensor_name(body, ref) for ref in sorted(inputs) if body.nodes[ref[0]].op != "Const"]
        outputs = [item.name]
        if rng.random() < 0.1:
            outputs.append(rng.choice([node.name for node in body.nodes]))
        # In another branch the same names may mean tensors of other types.
        meant = [place for name in (*names, item.name) for place in expanded.tensors(name)]
        narrow = any(held.dtype(ref) != Dt.DT_DOUBLE for held, ref in meant)
        return {"region": (tuple(names), tuple(outputs))} if names and not narrow else None

    def _arities(self, expanded: Expanded, given: dict[str, Any]) -> set[str]:
        """The arities of rules that fit whatever the conditions may select."""
        if given.get("op_type") == "@step":
            return {"any", "one"}
        if "region" in given:
            inputs, outputs = given["region"]
            single = len(outputs) == 1
            return {"any", *(["like"] if single else []), *(["one"] if single and len(inputs) == 1 else [])}
        words = given.get("pattern", ())
        if len(words) > 1:
            like = words[0] in UNARY and not {"Cast", "IdentityN"} & set(words)
            return {"any", *(["like"] if like else []), *(["one"] if set(words) <= set(UNARY) else [])}
        selected = self._selected(expanded, given)
        return {arity for arity in _FITTING if all(item.op in _FITTING[arity] for item in selected)} | {"any"}

    def _selected(self, expanded: Expanded, given: dict[str, Any]) -> list[Item]:
        """All items that a selector without chain and region may select."""
        conditions = {key: given[key] for key in ("op_type", "node", "node_regex", "scope") if key in given}
        if given.get("pattern"):
            conditions["op_type"] = given["pattern"][0]
        meant = Override(DEFAULT, **conditions)
        return [
            item
            for item in expanded.items
            if name_matches(meant, item.name)
            and (meant.op_type is None or item.op in GROUPS.get(meant.op_type, {meant.op_type}) or "@" in meant.op_type)
        ]

    def _rule(self, expanded: Expanded, given: dict[str, Any], kind: str) -> Rule:
        rng = self._rng
        draw = rng.random()
        if draw < 0.22:
            return DEFAULT
        if draw < 0.23:
            return WRONG_ARITY
        arities = self._arities(expanded, given)
        rules = [rule for rule in RULES if rule.arity in arities and not rule.is_default]
        if kind == "batched":
            rules = [rule for rule in rules if rule.per_sample or self._rng.random() < 0.5]
        chosen = rng.choice([rule.arity for rule in rules])
        return rng.choice([rule for rule in rules if rule.arity == chosen])


def _is_step(node: Node) -> bool:
    return node.op == "Cast" and node.body.nodes[node.inputs[0][0]].op == "Greater"


_FITTING = {
    "one": {*UNARY},
    "two": {*BINARY},
    "like": {*UNARY, *BINARY, "MatMul", "BiasAdd", "PartitionedCall"},
    "same": {*UNARY, "IdentityN"},
}
"""The op types that rules of an arity fit."""


def _tensor_name(body: Body, ref: tuple[int, int]) -> str:
    name = body.nodes[ref[0]].name
    return f"{name}:{ref[1]}" if ref[1] else name


__all__ = ["EXAMPLES", "SIZE", "case"]
