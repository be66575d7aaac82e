"""Tests which node gets which rule."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.override_pb2 import Region, Selector
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, Reason, error
from gradrule_server.graphs import OverrideSpec
from gradrule_server.graphs.selectors import compile_regex, glob_regex
from gradrule_server.link.v1 import link_pb2
from tests.samples import size
from tests.unit.graphs.helpers import (
    call,
    expand,
    findings_of,
    function,
    graph,
    node,
    nodes_of,
    only_finding,
    placeholder,
    reasons_of,
)

INNER = function("inner", ["a"], {"r": "s:y:0"}, [node("s", "Sign", "a"), node("t", "Relu", "a")])


def network() -> Graph:
    return graph(
        placeholder(),
        node("a/s", "Sign", "x"),
        node("a/b/s", "Sign", "a/s"),
        node("a/b/r", "Relu", "a/b/s"),
        call("c", "inner", "a/b/r"),
        node("y", "Tanh", "c"),
        node("off/s", "Sign", "x"),
        functions=[INNER],
    )


def matches(*specs: OverrideSpec, made: Graph | None = None, **request: Any) -> dict[str, str]:
    expanded = expand(made or network(), ["y"], ys=["y"], xs=["x"], overrides=specs, **request)
    return {match.resolution.node: match.resolution.label for match in expanded.matches}


def spec(label: str, *, optional: bool = False, index: int = 0, **conditions: Any) -> OverrideSpec:
    return OverrideSpec(Selector(**conditions), 7, "rule", label, optional=optional, index=index)


@pytest.mark.parametrize(
    ("conditions", "nodes"),
    [
        ({"op_type": "Sign"}, {"a/s", "a/b/s", "c/s", "off/s"}),
        ({"node": "a/s"}, {"a/s"}),
        ({"node": "a/*"}, {"a/s"}),
        ({"node": "a/**"}, {"a/s", "a/b/s", "a/b/r"}),
        ({"node": "*/?"}, {"a/s", "off/s", "c/s", "c/t"}),
        ({"node": "**s", "op_type": "Sign", "scope": "a/b"}, {"a/b/s"}),
        ({"scope": "a"}, {"a/s", "a/b/s", "a/b/r"}),
        ({"scope": "a/"}, {"a/s", "a/b/s", "a/b/r"}),
        ({"scope": "c"}, {"c/s", "c/t"}),
        ({"op_type": "inner_by_name"}, {"d"}),
    ],
)
def test_conditions_select_nodes(conditions: dict[str, object], nodes: set[str]) -> None:
    made = network()
    if "inner_by_name" in conditions.values():
        made.library.function.add().CopyFrom(INNER)
        made.library.function[-1].signature.name = "inner_by_name"
        made.node.append(node("d", "inner_by_name", "x"))
    found = matches(spec("o", **conditions), made=made)
    assert {name for name in found if name != "d/s"} == nodes


def test_first_match_wins_and_default_makes_exceptions() -> None:
    carve = OverrideSpec(Selector(scope="a/b"), label="carve")
    found = matches(carve, spec("all", op_type="Sign"))
    assert found == {"a/b/s": "carve", "a/b/r": "carve", "a/s": "all", "c/s": "all", "off/s": "all"}
    expanded = expand(network(), ["y"], ys=["y"], xs=["x"], overrides=[carve, spec("all", op_type="Sign")])
    assert {mark.node: mark.rule for mark in expanded.marks} == {"a/b/s": -1, "a/b/r": -1, "a/s": 7, "c/s": 7}
    written = nodes_of(expanded)
    for number, mark in enumerate(expanded.marks):
        assert written[mark.node].attr["_gradrule_mark"].i == number
    assert sum("_gradrule_mark" in item.attr for item in written.values()) == len(expanded.marks)


def test_a_match_holds_node_op_rule_and_label() -> None:
    expanded = expand(network(), ["y"], ys=["y"], xs=["x"], overrides=[spec("Sign", op_type="Sign", index=0)])
    inside = next(match for match in expanded.matches if match.resolution.node == "c/s")
    assert (inside.resolution.op_type, inside.resolution.function, inside.resolution.rule, inside.override) == (
        "Sign",
        "inner",
        "rule",
        0,
    )
    pruned = next(match for match in expanded.matches if match.resolution.node == "off/s")
    assert pruned.mark is None
    assert pruned.differentiable


def test_matches_of_types_without_gradients_are_not_differentiable() -> None:
    made = graph(
        placeholder(),
        node("i", "Cast", "x", DstT=AttrValue(type=3)),
        node("y", "Cast", "i", DstT=AttrValue(type=1)),
    )
    expanded = expand(
        made, ["y"], ys=["y"], xs=["x"], overrides=[spec("o", op_type="Cast"), spec("p", op_type="Placeholder")]
    )
    assert {match.resolution.node: match.differentiable for match in expanded.matches} == {
        "x": True,
        "i": False,
        "y": False,
    }
    assert "_gradient_op_type" not in nodes_of(expanded)["i"].attr
    assert "_gradient_op_type" not in nodes_of(expanded)["x"].attr


def test_overrides_precede_the_attribute_of_a_node() -> None:
    made = network()
    for item in made.node:
        if item.op == "Sign":
            item.attr["_gradient_op_type"].s = b"known"
    asked: list[tuple[str, str]] = []

    def known_rule(name: str, op_type: str) -> int:
        asked.append((name, op_type))
        return 3

    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[spec("o", node="a/s")], known_rule=known_rule)
    own = {
        match.resolution.node: (match.rule, match.resolution.label, match.override)
        for match in expanded.matches
        if match.resolution.label != "o"
    }
    assert own == {"a/b/s": (3, "Sign", -1), "off/s": (3, "Sign", -1)}
    assert asked == [("known", "Sign")]


def test_gradients_of_other_processes_are_marked_as_foreign() -> None:
    made = network()
    for item in made.node:
        if item.op == "Sign":
            item.attr["_gradient_op_type"].s = b"CustomGradient-17"
    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[OverrideSpec(Selector(node="a/s"), label="o")])
    assert [(mark.rule, mark.node, mark.foreign) for mark in expanded.marks] == [
        (-1, "a/s", ""),
        (-2, "a/b/s", "CustomGradient-17"),
    ]
    assert [match.resolution.node for match in expanded.matches] == ["a/s"]


def test_unknown_rule_in_an_attribute_is_refused() -> None:
    made = network()
    made.node[1].attr["_gradient_op_type"].s = b"Unheard"
    finding = only_finding(made, Reason.ERROR_REASON_UNKNOWN_RULE, ["y"], ys=["y"], xs=["x"])
    assert "'Unheard'" in finding.message
    assert finding.node == "a/s"
    expand(made, ["y"])


def test_a_failed_look_up_of_a_rule_keeps_its_reason() -> None:
    made = network()
    made.node[1].attr["_gradient_op_type"].s = b"Mine"

    def known_rule(name: str, op_type: str) -> int:
        raise error(Reason.ERROR_REASON_LIMIT_EXCEEDED, "too many names")

    with pytest.raises(GradruleError) as caught:
        expand(made, ["y"], ys=["y"], xs=["x"], known_rule=known_rule)
    assert [finding.reason for finding in caught.value.findings] == [Reason.ERROR_REASON_LIMIT_EXCEEDED]


def test_attributes_that_tensorflow_sets_on_calls_request_no_rule() -> None:
    made = network()
    made.node[4].attr["_gradient_op_type"].s = b"PartitionedCall-12"
    assert expand(made, ["y"], ys=["y"], xs=["x"]).marks == []


@pytest.mark.parametrize(
    ("wrong", "reason", "hint"),
    [
        (spec("o"), "INVALID_OVERRIDE", "op_type, node and scope"),
        (spec("o", op_type="Sing"), "UNKNOWN_OP_TYPE", "'Sign'"),
        (spec("o", op_type="Abs"), "UNMATCHED_OVERRIDE", "there is no Abs"),
        (spec("o", node="a/z/s"), "UNMATCHED_OVERRIDE", "'a/s'"),
        (spec("o", node="a/S"), "UNMATCHED_OVERRIDE", "'a/s'"),
        (spec("o", op_type="Tanh", node="a/s"), "UNMATCHED_OVERRIDE", "of op type Tanh"),
        (spec("o", scope="a/bb"), "UNMATCHED_OVERRIDE", "'a/b'"),
        (spec("o", node="*" * 2000), "INVALID_OVERRIDE", "1000"),
    ],
)
def test_invalid_overrides_are_refused(wrong: OverrideSpec, reason: str, hint: str) -> None:
    finding = only_finding(
        network(), Reason.Value(f"ERROR_REASON_{reason}"), ["y"], ys=["y"], xs=["x"], overrides=[wrong]
    )
    assert hint in finding.message
    assert finding.field == "overrides[0]"


def test_optional_overrides_may_match_nothing() -> None:
    assert matches(spec("o", op_type="Abs", optional=True)) == {}


def test_a_shadowed_override_names_the_earlier_override() -> None:
    specs = [spec("first", op_type="Sign"), spec("second", node="a/s", index=1)]
    finding = only_finding(
        network(), Reason.ERROR_REASON_UNMATCHED_OVERRIDE, ["y"], ys=["y"], xs=["x"], overrides=specs
    )
    assert "'first'" in finding.message
    assert finding.field == "overrides[1]"


def test_a_matched_call_is_a_subgraph() -> None:
    nested = function("outer", ["a"], {"r": "i:r:0"}, [node("i", "inner", "a")])
    made = graph(placeholder(), call("c", "outer", "x"), node("y", "Tanh", "c"), functions=[INNER, nested])
    specs = [spec("call", node="c"), spec("sign", op_type="Sign", index=1, optional=True)]
    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=specs)
    written = nodes_of(expanded)
    assert [(mark.node, mark.outputs, mark.op_type) for mark in expanded.marks] == [("c", 1, "PartitionedCall")]
    assert {match.resolution.node: match.mark for match in expanded.matches} == {"c": 0}
    (marked,) = (item for item in written.values() if "_gradrule_mark" in item.attr)
    assert marked.op == "IdentityN"
    assert marked.input == ["c/result_0", "x"]
    assert written["y"].input == [marked.name]
    assert "_gradrule_mark" not in written["c/i/s"].attr


@pytest.mark.parametrize("holder", ["c", "c*"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_match_wins_in_calls_too(holder: str, is_first: bool) -> None:
    inner, outer = spec("inner", op_type="Sign", node="c/s"), spec("outer", node=holder, op_type="PartitionedCall")
    specs = [inner, replace(outer, index=1)] if is_first else [outer, replace(inner, index=1)]
    if is_first:
        assert matches(*specs) == {"c": "outer", "c/s": "inner"}
    else:
        finding = only_finding(
            network(), Reason.ERROR_REASON_UNMATCHED_OVERRIDE, ["y"], ys=["y"], xs=["x"], overrides=specs
        )
        assert "'outer'" in finding.message


def test_first_matches_win_in_calls_in_loops() -> None:
    """The loop comes first, then a call in it: the call is taken by the loop's override."""
    cond = function("cond", ["a"], {"r": "g:z:0"}, [node("g", "Greater", "a", "a")])
    cond.signature.output_arg[0].type = Dt.DT_BOOL
    body = function("body", ["a"], {"r": "c:output:0"}, [call("c", "inner", "a")])
    loop = node("loop", "StatelessWhile", "x")
    loop.attr["T"].list.type.append(Dt.DT_FLOAT)
    loop.attr["cond"].func.name, loop.attr["body"].func.name = "cond", "body"
    made = graph(placeholder(), loop, node("y", "Tanh", "loop"), functions=[INNER, cond, body])
    found = matches(spec("all", node="**"), spec("call", node="loop/c", optional=True, index=1), made=made)
    assert found == {"x": "all", "loop": "all", "y": "all"}


def branching(results: str = "s:y:0") -> Graph:
    """Two branches whose nodes have the same names: Sign and Relu, once each way round."""
    first = function("first", ["a"], {"r": results}, [node("s", "Sign", "a"), node("t", "Relu", "s:y:0")])
    second = function("second", ["a"], {"r": "t:y:0"}, [node("s", "Relu", "a"), node("t", "Sign", "s:activations:0")])
    fork = node("fork", "StatelessIf", "p", "x")
    fork.attr["Tcond"].type = Dt.DT_BOOL
    fork.attr["Tin"].list.type.append(Dt.DT_FLOAT)
    fork.attr["Tout"].list.type.append(Dt.DT_FLOAT)
    fork.attr["then_branch"].func.name, fork.attr["else_branch"].func.name = "first", "second"
    return graph(
        placeholder(), placeholder("p", Dt.DT_BOOL), fork, node("y", "Tanh", "fork"), functions=[first, second]
    )


def test_a_region_is_in_each_branch_that_has_its_tensors() -> None:
    chosen = OverrideSpec(Selector(region=Region(inputs=["fork/a"], outputs=["fork/t"])), 7, "rule", "region")
    made = branching("t:activations:0")
    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[chosen])
    assert [(match.resolution.function, tuple(match.resolution.nodes)) for match in expanded.matches] == [
        ("first", ("fork/s", "fork/t")),
        ("second", ("fork/s", "fork/t")),
    ]


def test_dependence_begins_in_each_branch() -> None:
    found = expand(
        branching("t:activations:0"),
        ["y"],
        ys=["y"],
        xs=["x"],
        overrides=[spec("behind", depends_on=["fork/s"], scope="fork")],
    )
    assert [(match.resolution.node, match.resolution.function) for match in found.matches] == [
        ("fork/t", "first"),
        ("fork/t", "second"),
    ]


@pytest.mark.parametrize(
    "conditions",
    [
        {"node": "fork[then]/s"},
        {"node": "fork[th*]/s"},
        {"nodes": ["nope", "fork[then]/s"]},
        {"node": "f?rk[then]/**", "op_type": "Sign"},
        {"scope": "fork[then]", "op_type": "Sign"},
        {"scope": "fork[then]/", "node": "*/s"},
        {"scope": "fork", "node": "**[then]/s"},
        {"node_regex": r"fork\[then\]/s"},
        {"node": "fork/s", "node_regex": r".*\[then\].*"},
    ],
)
def test_a_branch_in_brackets_selects_its_nodes_alone(conditions: dict[str, Any]) -> None:
    found = expand(branching(), ["y"], ys=["y"], xs=["x"], overrides=[spec("one", **conditions)]).matches
    assert [(match.resolution.node, match.resolution.qualified_name, match.resolution.function) for match in found] == [
        ("fork/s", "fork[then]/s", "first")
    ]


@pytest.mark.parametrize(
    ("regex", "found"),
    [
        (r"fork\[then\]/s|y", ["fork[then]/s", "y"]),
        (r"fork(\[then\]/s)?", ["fork"]),
        (r"(fork\[then\]/)?[sy]", ["fork[then]/s", "y"]),
        (r"y|\[", ["y"]),
    ],
)
def test_a_regex_with_a_branch_matches_nodes_outside_of_branches_too(regex: str, found: list[str]) -> None:
    chosen = spec("one", node_regex=regex)
    matches = expand(branching(), ["y"], ys=["y"], xs=["x"], overrides=[chosen]).matches
    assert sorted(match.resolution.qualified_name or match.resolution.node for match in matches) == found


def test_a_region_and_dependence_of_one_branch() -> None:
    made = branching("t:activations:0")
    region = OverrideSpec(Selector(region=Region(inputs=["fork/a"], outputs=["fork[else]/t"])), 7, "rule", "region")
    behind = spec("behind", depends_on=["fork[else]/s"], scope="fork")
    for one in (region, behind):
        (match,) = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[one]).matches
        assert (match.resolution.node, match.resolution.qualified_name, match.resolution.function) == (
            "fork/t",
            "fork[else]/t",
            "second",
        )


def test_conditionals_without_brackets_stand_for_all_branches() -> None:
    """A Case in both branches of an If: both branches of the Case are the same function, which contains a call."""
    leaf = function("leaf", ["a"], {"r": "c:output:0"}, [call("c", "inner", "a")])
    case = node("case", "StatelessCase", "i:y:0", "a")
    case.attr["branches"].list.func.add(name="leaf")
    case.attr["branches"].list.func.add(name="leaf")
    index = node("i", "Cast", "a", SrcT=AttrValue(type=Dt.DT_FLOAT), DstT=AttrValue(type=Dt.DT_INT32))
    arm = function("arm", ["a"], {"r": "case:output:0"}, [index, case])
    made = branching()
    for item in (case, arm.node_def[1]):
        item.attr["Tin"].list.type.append(Dt.DT_FLOAT)
        item.attr["Tout"].list.type.append(Dt.DT_FLOAT)
    del made.library.function[:]
    made.library.function.extend([INNER, leaf, arm])
    made.node[2].attr["then_branch"].func.name = made.node[2].attr["else_branch"].func.name = "arm"

    def found(name: str) -> list[str]:
        expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[spec("one", node=name)])
        return [match.resolution.qualified_name or match.resolution.node for match in expanded.matches]

    both = {name: f"fork[{name}]/case" for name in ("then", "else")}
    assert found("fork/case[1]/c/s") == [f"{one}[1]/c/s" for one in both.values()]
    assert found("fork[else]/case/c/s") == [f"{both['else']}[0]/c/s", f"{both['else']}[1]/c/s"]
    assert found("fork[then]/case[0]/**/s") == ["fork[then]/case[0]/c/s"]

    def behind(name: str) -> list[str]:
        chosen = spec("one", node="fork/case/c/s", depends_on=[name])
        expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[chosen])
        return [match.resolution.qualified_name or match.resolution.node for match in expanded.matches]

    assert behind("fork/case[1]/a") == [f"{one}[1]/c/s" for one in both.values()]
    assert behind("fork[else]/case/a") == [f"{both['else']}[0]/c/s", f"{both['else']}[1]/c/s"]
    assert behind("fork[else]/case[1]/a") == [f"{both['else']}[1]/c/s"]
    assert behind("fork[else]/a") == [f"{both['else']}[0]/c/s", f"{both['else']}[1]/c/s"]


def test_many_names_of_branches_are_found_quickly() -> None:
    """2000 branches and 1000 of their nodes: a search of all nodes for each name takes 19 s."""
    case = node("fork", "StatelessCase", "n", "x")
    for _ in range(2000):
        case.attr["branches"].list.func.add(name="leaf")
    case.attr["Tin"].list.type.append(Dt.DT_FLOAT)
    case.attr["Tout"].list.type.append(Dt.DT_FLOAT)
    leaf = function("leaf", ["a"], {"r": "t:y:0"}, [node("t", "Tanh", "a")])
    made = graph(placeholder(), placeholder("n", Dt.DT_INT32), case, node("y", "Tanh", "fork"), functions=[leaf])
    chosen = spec("one", node="y", depends_on=[f"fork[{number}]/t" for number in range(1000)])
    started = time.process_time()
    (match,) = expand(made, ["y"], ys=["y"], xs=["x"], overrides=[chosen]).matches
    assert match.resolution.node == "y"
    assert time.process_time() - started < 6


def test_names_of_branches_in_errors() -> None:
    finding = only_finding(
        branching(), Reason.ERROR_REASON_UNMATCHED_OVERRIDE, ["y"], ys=["y"], xs=["x"],
        overrides=[spec("one", node="fork[them]/s")],
    )  # fmt: skip
    assert "'fork[then]/s'" in finding.message
    behind = spec("one", depends_on=["fork[2]/s"], op_type="Tanh")
    finding = only_finding(
        branching(), Reason.ERROR_REASON_UNKNOWN_TENSOR, ["y"], ys=["y"], xs=["x"], overrides=[behind]
    )
    assert "'fork[2]/s'" in finding.message
    assert "'fork[then]/s'" in finding.message


@pytest.mark.parametrize("names", [["fork/a", "fork[then]/a"], ["fork/a", "fork/a:0"]])
def test_a_tensor_with_two_names_is_twice_in_a_region(names: list[str]) -> None:
    chosen = OverrideSpec(Selector(region=Region(inputs=names, outputs=["fork/s"])), 7, "rule", "region")
    finding = only_finding(
        branching(), Reason.ERROR_REASON_INVALID_OVERRIDE, ["y"], ys=["y"], xs=["x"], overrides=[chosen]
    )
    assert "'fork/a' is named twice" in finding.message


def test_what_follows_a_branch_depends_on_its_results() -> None:
    """The tensor is a result itself, so that nothing in the branch depends on it."""
    found = matches(spec("behind", depends_on=["fork/t"], op_type="Tanh"), made=branching("t:activations:0"))
    assert found == {"y": "behind"}


def test_a_rule_lets_gradients_through_a_stop() -> None:
    made = graph(placeholder(), node("s", "Sign", "x"), node("stop", "StopGradient", "s"), node("y", "Tanh", "stop"))
    specs = [spec("stop", node="stop"), spec("behind", node="y", index=1)]
    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=specs)
    assert [(mark.node, mark.rule) for mark in expanded.marks] == [("stop", 7), ("y", 7)]
    expanded = expand(made, ["y"], ys=["y"], xs=["x"], overrides=specs[1:])
    assert [(mark.node, mark.rule) for mark in expanded.marks] == [("y", -3)]


def test_a_carve_out_by_region_is_a_match_with_a_mark() -> None:
    carve = OverrideSpec(Selector(region=Region(inputs=["a/s"], outputs=["a/b/r"])), label="carve")
    expanded = expand(
        network(), ["y"], ys=["y"], xs=["x"], overrides=[carve, spec("s", op_type="Sign", index=1, optional=True)]
    )
    (carved,) = (match for match in expanded.matches if match.resolution.label == "carve")
    assert carved.mark is not None
    assert expanded.marks[carved.mark].rule == -1
    assert expanded.marks[carved.mark].outputs == 1


def test_default_on_a_call_exempts_its_inner_nodes() -> None:
    carve = OverrideSpec(Selector(node="c"), label="carve")
    expanded = expand(network(), ["y"], ys=["y"], xs=["x"], overrides=[carve, spec("s", op_type="Sign", index=1)])
    written = nodes_of(expanded)
    (marked,) = (item for item in written.values() if item.op == "Identity" and "_gradrule_mark" in item.attr)
    assert expanded.marks[marked.attr["_gradrule_mark"].i] == link_pb2.MarkedNode(rule=-1, node="c")
    assert marked.attr["_gradient_op_type"].s == b"gradrule"
    assert {mark.node for mark in expanded.marks} == {"c", "a/s", "a/b/s"}
    assert "c/s" not in {match.resolution.node for match in expanded.matches}
    assert reasons_of(network(), ["y"], ys=["y"], xs=["x"], overrides=[spec("n", node="nope")]) == [
        "UNMATCHED_OVERRIDE"
    ]


def test_nodes_inside_a_matched_call_are_not_matched() -> None:
    specs = [spec("call", node="c"), spec("inner", node="c/s", index=1)]
    (finding,) = findings_of(network(), ["y"], ys=["y"], xs=["x"], overrides=specs)
    assert finding.message.endswith("taken by an earlier override ('call').")


def slow_glob(glob: str, name: str) -> bool:
    """Matches a glob by trying every possibility."""

    @functools.cache
    def fits(g: int, n: int) -> bool:
        if g == len(glob):
            return n == len(name)
        if glob[g] == "*":
            end = g
            while end < len(glob) and glob[end] == "*":
                end += 1
            crosses = end - g > 1
            return fits(end, n) or (n < len(name) and (crosses or name[n] != "/") and fits(g, n + 1))
        if n == len(name):
            return False
        return (name[n] == glob[g] or (glob[g] == "?" and name[n] != "/")) and fits(g + 1, n + 1)

    return fits(0, 0)


@settings(max_examples=size(333, 1000), deadline=None)
@given(st.text("ab/*?", max_size=9), st.text("ab/", max_size=11))
def test_globs_match_like_the_slow_reference(glob: str, name: str) -> None:
    assert bool(compile_regex(glob_regex(glob)).fullmatch(name)) == slow_glob(glob, name)


@pytest.mark.parametrize("glob", ["*a" * 30 + "b", "**a" * 30 + "b", "a**" * 30 + "*?b", "*?" * 30 + "b/c"])
@pytest.mark.timeout(60)
def test_globs_do_not_take_exponential_time(glob: str) -> None:
    pattern = compile_regex(glob_regex(glob))
    assert not pattern.fullmatch("a" * 200)
    assert not pattern.fullmatch("a/" * 100)


def test_too_many_overrides_times_nodes_are_refused_before_matching() -> None:
    several = [spec(str(index), node="**", index=index) for index in range(30)]
    made = network()
    bound = graphs.Limits(selections=30)
    found = only_finding(
        made, Reason.ERROR_REASON_LIMIT_EXCEEDED, ["y"], ys=["y"], xs=["x"], overrides=several, limits=bound
    )
    assert "30 overrides" in found.message
    assert "--max-selections" in found.message
    assert found.field == "spec.overrides"
