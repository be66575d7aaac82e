"""Tests that selection takes time linear in nodes plus overrides, and finds the same as a slow reference."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, Node
from gradrule.v1.override_pb2 import POSITION_NEAREST_XS, POSITION_NEAREST_YS, Position, Region, Selector
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import GradruleError, Reason
from gradrule_server.graphs import Expanded, Limits, OverrideSpec
from gradrule_server.graphs.matching import PatternSet
from tests.unit.graphs.helpers import FLOAT, call, expand, findings_of, function, graph, node, only_finding, placeholder

OPS = ("Tanh", "Relu", "Neg")


@dataclass
class Counter:
    """Counts the calls of Python and C functions."""

    calls: int = 0


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts function calls: a measure of work that does not depend on a clock."""
    counter = Counter()

    def note(_: FrameType, event: str, __: Any) -> None:
        counter.calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield counter
    finally:
        sys.setprofile(None)


def chain(count: int) -> Graph:
    nodes = [placeholder()]
    for number in range(count):
        op = "AddV2" if number % 10 == 9 else OPS[number % 3]
        inputs = [nodes[-1].name] + ([nodes[-8].name] if op == "AddV2" else [])
        nodes.append(node(f"s{number // 10}/n{number % 10}", op, *inputs, T=FLOAT))
    return graph(*nodes, node("y", "Neg", nodes[-1].name))


def spec(index: int, *, optional: bool = True, **conditions: Any) -> OverrideSpec:
    return OverrideSpec(Selector(**conditions), index, "rule", f"o{index}", optional=optional, index=index)


NODES = 1500
Conditions = Callable[[int], dict[str, Any]]
KINDS: dict[str, Conditions] = {
    "node_regex": lambda number: {"node_regex": f"s{number}/(n3|none)"},
    "glob": lambda number: {"node": f"s{number}/n?"},
    "nodes": lambda number: {"nodes": [f"s{number}/n1", f"s{number}/n3", f"s{number}/*5"]},
    "name": lambda number: {"node": f"s{number}/n1"},
    "scope": lambda number: {"scope": f"s{number}"},
    "attrs": lambda number: {"attrs": {"T": AttrValue(type=Dt.DT_HALF if number % 2 else Dt.DT_FLOAT)}},
    "depends_on": lambda number: {"depends_on": [f"s{number}/n1"], "op_type": "Relu"},
    "position": lambda number: {"op_type": "Relu", "position": Position(index=number)},
    "pattern": lambda number: {"pattern": [OPS[(number + step) % 3] for step in range(2 + number % 4)]},
    "region": lambda number: {"region": Region(inputs=[f"s{number}/n1"], outputs=[f"s{number}/n4"])},
}


def work(kind: str, count: int) -> int:
    overrides = [spec(number, **KINDS[kind](number)) for number in range(count)]
    made = chain(NODES)
    with counted() as counter:
        expand(made, ["y"], ys=["y"], xs=["x"], overrides=overrides)
    return counter.calls


@pytest.mark.parametrize("kind", KINDS)
def test_more_overrides_do_not_visit_all_nodes_again(kind: str) -> None:
    few, many = 2, 42
    work(kind, few)
    more = work(kind, many) - work(kind, few)
    # Each override matches some nodes, which costs calls; one call for each node and override is too much.
    assert more < (many - few) * NODES


def test_overrides_without_a_match_do_not_visit_all_nodes_again() -> None:
    def refused(count: int) -> int:
        overrides = [spec(number, optional=False, node_regex=f"none{number}") for number in range(count)]
        with counted() as counter:
            assert len(findings_of(chain(NODES), ["y"], ys=["y"], xs=["x"], overrides=overrides)) == count
        return counter.calls

    refused(2)
    assert refused(42) - refused(2) < 40 * NODES


def test_calls_are_not_matched_against_each_override() -> None:
    inner = function("f", ["a"], {"r": "n:y:0"}, [node("n", "Neg", "a")])
    calls = [placeholder()]
    for number in range(400):
        calls.append(call(f"c{number}", "f", calls[-1].name))
    made = graph(*calls, functions=[inner])

    def needed(count: int) -> int:
        overrides = [spec(number, node=f"none{number}*") for number in range(count)]
        with counted() as counter:
            expand(made, ["c399"], ys=["c399"], xs=["x"], overrides=overrides)
        return counter.calls

    needed(2)
    assert needed(42) - needed(2) < 40 * 400


@pytest.mark.parametrize(("conditions", "matched"), [({"depends_on": ["x"]}, 9), ({"position": Position(index=5)}, 1)])
def test_paths_through_a_loop_that_shifts_its_values_are_found(conditions: dict[str, Any], matched: int) -> None:
    """Dependence needs one iteration for each value."""
    args = [f"a{number}" for number in range(8)]
    inside = [node(f"n{number}", "Neg", arg) for number, arg in enumerate(args)]
    made = graph(
        placeholder(),
        placeholder("w"),
        loop("loop", "x", *["w"] * 7),
        node("y", "Neg", "loop:7"),
        functions=loop_functions(
            "loop", args, {f"r{number}": f"n{max(number - 1, 0)}:y:0" for number in range(8)}, inside
        ),
    )
    found = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[spec(0, op_type="Neg", **conditions)])
    assert len(found.matches) == matched


def loop(name: str, *inputs: str) -> Node:
    made = node(name, "StatelessWhile", *inputs)
    made.attr["T"].list.type.extend([Dt.DT_FLOAT] * len(inputs))
    made.attr["cond"].func.name, made.attr["body"].func.name = f"{name}_cond", f"{name}_body"
    return made


def loop_functions(name: str, args: list[str], results: dict[str, str], nodes: list[Node]) -> list[Function]:
    test = function(f"{name}_cond", args, {"r": "g:z:0"}, [node("g", "Greater", args[0], args[0])])
    test.signature.output_arg[0].type = Dt.DT_BOOL
    return [test, function(f"{name}_body", args, results, nodes)]


@pytest.mark.parametrize(("place", "names"), [(0, {"outer/inner/data"}), (1, {"outer/inner/hidden", "y"})])
def test_positions_in_a_loop_count_the_first_iteration_of_a_path(place: int, names: set[str]) -> None:
    """In the inner loop, a path leads to the hidden value from the second iteration of the outer loop on."""
    inside = [node("data", "Neg", "a"), node("hidden", "Neg", "b")]
    around = [loop("inner", "c", "d")]
    made = graph(
        placeholder(),
        placeholder("w"),
        loop("outer", "x", "w"),
        node("y", "Neg", "outer:1"),
        functions=[
            *loop_functions("outer", ["c", "d"], {"r": "c", "s": "inner:output:0"}, around),
            *loop_functions("inner", ["a", "b"], {"r": "data:y:0", "s": "hidden:y:0"}, inside),
        ],
    )
    overrides = [spec(0, op_type="Neg", position=Position(index=place))]
    found = expand(made, ["y"], ys=["y"], xs=["x"], overrides=overrides)
    assert {match.resolution.node for match in found.matches} == names


def test_an_expansion_is_counted_without_inlining() -> None:
    """Returns a graph of nested functions with two bodies for each body of the level above."""
    levels = 14
    functions = []
    for level in range(levels):
        last = level == levels - 1
        made = function(f"f{level}", [], {}, [])
        made.signature.attr.add(name="K", type="int")
        made.signature.output_arg.add(name="r", type=Dt.DT_FLOAT)
        for number in range(2):
            if last:
                inner = node(f"n{number}", "Const", dtype=FLOAT)
                inner.attr["value"].tensor.dtype = Dt.DT_FLOAT
            else:
                inner = node(f"n{number}", f"f{level + 1}", K=AttrValue(i=number))
            made.node_def.append(inner)
        made.ret["r"] = "n0:output:0" if last else "n0:r:0"
        functions.append(made)
    top = graph(node("y", "f0", K=AttrValue(i=1)), functions=functions)
    with counted() as counter:
        found = only_finding(top, Reason.ERROR_REASON_LIMIT_EXCEEDED, ["y"], limits=Limits(inlined_nodes=10_000))
    # 1 + 2 + 4 + …, with two more for each call.
    assert str(3 * (2 ** (levels + 1) - 1) - 2 ** (levels + 1)) in found.message
    assert counter.calls < 2**levels


def test_functions_with_control_outputs_take_linear_time() -> None:
    inside = [node("n", "Neg", "a"), node("side", "Tanh", "a")]
    inner = function("f", ["a"], {"r": "n:y:0"}, inside, done="side")

    def needed(count: int) -> int:
        calls = [placeholder()]
        for number in range(count):
            calls.append(call(f"c{number}", "f", calls[-1].name))
        made = graph(*calls, functions=[inner])
        with counted() as counter:
            expand(made, [calls[-1].name])
        return counter.calls

    needed(10)
    assert needed(200) < 6 * needed(50)


def passing_on() -> Graph:
    """Returns a graph with a call that returns its argument after a side effect: inlining adds an Identity."""
    inner = function("f", ["a"], {"r": "a"}, [node("side", "Tanh", "a")], done="side")
    return graph(placeholder(), node("r", "Relu", "x"), call("c", "f", "r"), node("y", "Neg", "c"), functions=[inner])


def test_nodes_that_inlining_adds_belong_to_regions_but_do_not_match() -> None:
    selector = {"region": Region(inputs=["x"], outputs=["y"])}
    found = expand(passing_on(), ["y"], ys=["y"], xs=["x"], overrides=[spec(0, **selector)])
    assert [tuple(match.resolution.nodes) for match in found.matches] == [("r", "y")]
    pattern = spec(0, pattern=["Identity", "Neg"])
    assert expand(passing_on(), ["y"], ys=["y"], xs=["x"], overrides=[pattern]).matches == []


def test_a_region_without_a_node_is_refused() -> None:
    empty = spec(0, region=Region(inputs=["r"], outputs=["c"]))
    found = only_finding(
        passing_on(), Reason.ERROR_REASON_INVALID_OVERRIDE, ["y"], ys=["y"], xs=["x"], overrides=[empty]
    )
    assert "no node" in found.message


def test_the_number_of_matches_by_rank_is_limited() -> None:
    several = [spec(number, node="**", rank=number % 3) for number in range(20)]
    found = only_finding(
        chain(50),
        Reason.ERROR_REASON_LIMIT_EXCEEDED,
        ["y"],
        ys=["y"],
        xs=["x"],
        overrides=several,
        limits=Limits(inlined_nodes=200),
    )
    assert "matches" in found.message and found.field == "overrides[3]"


def test_patterns_still_match_if_their_set_cannot_be_compiled() -> None:
    # Together these take more memory than one set of expressions is allowed.
    huge = [f"(a?){{{300 + number % 3}}}.{{0,300}}b[^/]{{0,300}}" for number in range(100)]
    patterns = PatternSet([*huge, "a+", "b"])
    assert patterns.matching("aaa") == (100,)
    assert patterns.matching("aab") == tuple(range(100))


# The slow reference.


def fits(conditions: Selector, item: Node, behind: dict[str, set[str]]) -> bool:
    """Returns whether one node meets an override's conditions on single nodes."""
    return (
        (not conditions.op_type or item.op == conditions.op_type)
        and item.name.startswith(f"{conditions.scope}/" if conditions.scope else "")
        and all(
            any(re.fullmatch(name.replace("*", "[^/]*"), item.name) for name in names)
            for names in ([conditions.node], conditions.nodes)
            if any(names)
        )
        and (not conditions.node_regex or re.fullmatch(conditions.node_regex, item.name) is not None)
        and all(item.attr[name] == value for name, value in conditions.attrs.items() if name in item.attr)
        and (not conditions.depends_on or any(name in behind[item.name] for name in conditions.depends_on))
    )


def reference(made: Graph, overrides: list[OverrideSpec]) -> dict[tuple[str, ...], str]:
    """Returns the labels by node, or by the nodes of a chain; matches each override against each node."""
    nodes = {item.name: item for item in made.node}
    users: dict[str, list[str]] = {name: [] for name in nodes}
    for item in made.node:
        for source in item.input:
            users[source].append(item.name)
    behind: dict[str, set[str]] = {}
    for item in made.node:
        behind[item.name] = set(item.input).union(*(behind[source] for source in item.input))
    path = {name for name in nodes if ("x" in behind[name] or name == "x") and (name in behind["y"] or name == "y")}

    def chain_to(name: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
        if nodes[name].op != words[-1]:
            return None
        if len(words) == 1:
            return (name,)
        for source in dict.fromkeys(nodes[name].input):
            before = chain_to(source, words[:-1]) if users[source] == [name] and source not in ("x", "y") else None
            if before is not None:
                return (*before, name)
        return None

    def rank(name: str, among: set[str], step: Callable[[str], list[str]]) -> int:
        @functools.cache
        def count(at: str) -> int:
            return max((count(other) + (other in among) for other in step(at) if other in path), default=0)

        return count(name)

    taken: dict[str, str] = {}
    labels: dict[tuple[str, ...], str] = {}
    for override in overrides:
        conditions = override.selector
        rows = []
        for item in made.node:
            row = chain_to(item.name, tuple(conditions.pattern)) if conditions.pattern else (item.name,)
            if row is not None and fits(conditions, item, behind):
                rows.append(row)
        if conditions.HasField("position"):
            nearest = {POSITION_NEAREST_XS: 0, POSITION_NEAREST_YS: -1}
            place = conditions.position
            index = place.index if place.WhichOneof("place") == "index" else nearest[place.nearest]
            rows = [row for row in rows if row[-1] in path]
            among = {row[-1] for row in rows}
            step: Callable[[str], list[str]] = (lambda at: list(nodes[at].input)) if index >= 0 else users.__getitem__
            wanted = index if index >= 0 else -1 - index
            rows = [row for row in rows if rank(row[-1], among, step) == wanted]
        for row in rows:
            if not any(name in taken for name in row):
                taken.update(dict.fromkeys(row, override.label))
                labels[row] = override.label
    return labels


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    nodes = [placeholder(), node("first", "Relu", "x", T=FLOAT), node("second", "Neg", "x", T=FLOAT)]
    for number in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from([*OPS, "AddV2"]))
        sources = st.sampled_from([item.name for item in nodes[-3:]])
        inputs = [draw(sources) for _ in range(2 if op == "AddV2" else 1)]
        nodes.append(node(draw(st.sampled_from(["", "p/", "p/q/"])) + f"n{number}", op, *inputs, T=FLOAT))
    return graph(*nodes, node("y", "Neg", nodes[-1].name, T=FLOAT))


@st.composite
def selectors(draw: st.DrawFn) -> dict[str, Any]:
    number = draw(st.integers(0, 14))
    conditions = st.fixed_dictionaries(
        {},
        optional={
            "scope": st.sampled_from(["p", "p/q", "none"]),
            "node": st.sampled_from(["*", "p/*", "*/*/*", f"n{number}", "*1"]),
            "nodes": st.lists(st.sampled_from(["p/*", "n1", "p/n2", "*3", "none"]), min_size=1, max_size=3),
            "node_regex": st.sampled_from([".*", "p/.*", "[^/]*", ".*[0-4]"]),
            "depends_on": st.lists(st.sampled_from(["x", "first", "second"]), min_size=1, max_size=2),
            "attrs": st.just({"T": FLOAT}),
            "position": st.builds(Position, index=st.integers(-3, 3))
            | st.builds(Position, nearest=st.sampled_from([POSITION_NEAREST_XS, POSITION_NEAREST_YS])),
        },
    )
    found: dict[str, Any] = draw(conditions)
    if "nodes" in found:
        found.pop("node", None)
    if draw(st.booleans()):
        found["op_type"] = draw(st.sampled_from([*OPS, "AddV2"]))
    else:
        found["pattern"] = draw(st.lists(st.sampled_from([*OPS, "AddV2"]), min_size=2, max_size=3))
    return found


def labels_of(found: Expanded) -> dict[tuple[str, ...], str]:
    return {
        tuple(match.resolution.nodes) or (match.resolution.node,): match.resolution.label for match in found.matches
    }


@settings(max_examples=150, deadline=None)
@given(graphs(), st.lists(selectors(), min_size=1, max_size=5))
def test_selection_equals_the_slow_reference(made: Graph, conditions: list[dict[str, Any]]) -> None:
    overrides = [spec(number, **item) for number, item in enumerate(conditions)]
    found = expand(made, ["y"], ys=["y"], xs=["x"], overrides=overrides)
    assert labels_of(found) == reference(made, overrides)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.lists(selectors(), min_size=1, max_size=4))
def test_overrides_without_a_node_are_reported(made: Graph, conditions: list[dict[str, Any]]) -> None:
    overrides = [spec(number, optional=False, **item) for number, item in enumerate(conditions)]
    idle = {item.label for item in overrides} - set(reference(made, overrides).values())
    try:
        expand(made, ["y"], ys=["y"], xs=["x"], overrides=overrides)
        told: set[str] = set()
    except GradruleError as refusal:
        told = {overrides[int(re.sub(r"\D", "", finding.field))].label for finding in refusal.findings}
    assert told == idle
