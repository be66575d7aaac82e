"""Tests the parsing of values, rules, overrides and presets on a command line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule.cli import parsing

SELECTORS: dict[str, dict[str, object]] = {
    "Sign": {"op_type": "Sign"},
    "op:Sign": {"op_type": "Sign"},
    "@activation": {"op_type": "@activation"},
    "node:layer/*": {"node": "layer/*"},
    "nodes:a/Relu+b/*": {"node": ["a/Relu", "b/*"]},
    "regex:conv[0-9]+(_1)?": {"node_regex": "conv[0-9]+(_1)?"},
    "scope:block": {"scope": "block"},
    "node:cond[then]/*": {"node": "cond[then]/*"},
    "region:cond[0]/a,cond[0]/b>cond[0]/c": {"region": gr.Region(["cond[0]/a", "cond[0]/b"], ["cond[0]/c"])},
    "pattern:MatMul+BiasAdd": {"pattern": ["MatMul", "BiasAdd"]},
    "region:x,w>y": {"region": gr.Region(["x", "w"], ["y"])},
    "region:x>y:1,z": {"region": gr.Region(["x"], ["y:1", "z"])},
    "region:spike_fn": {"region": "spike_fn"},
    "near_xs:Conv2D": {"op_type": "Conv2D", "position": "nearest_xs"},
    "near_ys:@linear": {"op_type": "@linear", "position": "nearest_ys"},
    "scope:block & near_ys": {"scope": "block", "position": "nearest_ys"},
    "Relu&position:-2": {"op_type": "Relu", "position": -2},
    "Relu&dtype:float32&rank:4": {"op_type": "Relu", "dtype": "float32", "rank": 4},
    "Relu&depends_on:x,w:1": {"op_type": "Relu", "depends_on": ["x", "w:1"]},
    "layer:@convolution": {"layer": "@convolution"},
    "Sign&order:all": {"op_type": "Sign", "order": "all"},
    "Conv2D&attr:padding:SAME&attr:explicit_paddings:[]": {
        "op_type": "Conv2D",
        "attrs": {"padding": "SAME", "explicit_paddings": []},
    },
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.array([1, 2], np.int64))
    np.savez("one.npz", only=np.float32([1.5]))
    np.savez("two.npz", x=np.float32([1]), w=np.float32([2]))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("text.npy").write_text("no array")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x=[1, 2.5]", "x", [1, 2.5]),
        ("x=2", "x", 2),
        ("layer/x:0=[[true], [false]]", "layer/x:0", [[True], [False]]),
        ('x="a=b"', "x", "a=b"),
    ],
)
def test_inline_values(text: str, name: str, expected: object) -> None:
    assert parsing.feed(text) == {name: expected}


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x=x.npy", "x", np.array([1, 2], np.int64)),
        ("y=one.npz", "y", np.float32([1.5])),
        ("w=two.npz", "w", np.float32([2])),
        ("other=two.npz:x", "other", np.float32([1])),
    ],
)
def test_values_from_files_keep_their_type(files: Path, text: str, name: str, expected: Any) -> None:
    value = parsing.feed(text)[name]
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def test_a_npz_file_alone_feeds_all_its_arrays(files: Path) -> None:
    assert {name: list(value) for name, value in parsing.feed("two.npz").items()} == {"x": [1], "w": [2]}


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (parsing.feed, "x", "expected NAME=VALUE"),
        (parsing.feed, "=1", "no name before the ="),
        (parsing.feed, "x=[1,", "JSON value"),
        (parsing.feed, "x=missing.npy", "no file 'missing.npy'"),
        (parsing.feed, "x=text.npy", "cannot read 'text.npy'"),
        (parsing.feed, "x=objects.npy", "cannot read 'objects.npy'"),
        (parsing.feed, "y=two.npz", "no array 'y'; it has 'x', 'w'"),
        (parsing.feed, "y=two.npz:z", "no array 'z'"),
        (parsing.variable, "z=1", "'z' is no variable"),
        (parsing.call_param, "alpha=2", "expected LABEL.PARAM=VALUE"),
        (parsing.call_param, ".alpha=2", "expected LABEL.PARAM=VALUE"),
        (parsing.call_param, "Sign.alpha=two", "JSON value"),
        (parsing.rule_param, "a=", "expected NAME=VALUE"),
    ],
)
def test_values_that_cannot_be_parsed_are_refused_with_the_valid_form(
    files: Path, read: Callable[[str], object], text: str, words: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(words)):
        read(text)


def test_params_upstream_gradients_and_declared_params() -> None:
    assert parsing.call_param("layer.1/*.alpha=2") == ("layer.1/*", "alpha", 2)
    assert parsing.call_param("Sign.w=[1, 2]") == ("Sign", "w", [1, 2])
    assert parsing.grad_y("y=tensor:upstream:1") == ("y", "upstream:1")
    assert parsing.grad_y("y:1=[1, 10]") == ("y:1", [1, 10])
    assert parsing.rule_param("a=0.5") == ("a", 0.5)
    assert parsing.rule_param("a") == ("a", None)


@pytest.mark.parametrize("text", SELECTORS)
def test_every_selector(text: str) -> None:
    assert parsing.override(f"{text}=ste").message() == gr.Override("ste", **SELECTORS[text]).message()


def test_every_field_of_a_selector_has_a_condition() -> None:
    """What the message of a selector has, a condition can say."""
    said = {
        field.name for text in SELECTORS for field, _ in parsing.override(f"{text}=ste").message().selector.ListFields()
    }
    assert said == {field.name for field in gr.Override("ste", op_type="Sign").message().selector.DESCRIPTOR.fields}


def test_an_override_may_contain_a_formula_with_equals_signs_and_colons() -> None:
    read = parsing.override("Sign=expr:where(x == 0, dy, 0)")
    assert isinstance(read.rule, gr.Rule)
    assert (read.selector.op_type, read.rule.expression) == ("Sign", "where(x == 0, dy, 0)")


@pytest.mark.parametrize("formula", ["dy * (1 - y ** 2)", "where(x == 0, dy, 0)", "(dy, None)", "-dy", "2*dy"])
def test_text_that_cannot_be_a_name_is_a_formula(formula: str) -> None:
    for rule in (parsing.override(f"Tanh={formula}").rule, parsing.parse_rule(formula)):
        assert isinstance(rule, gr.Rule)
        assert rule.expression == formula
    _, (in_map,) = parsing.override_map(f"label=Tanh={formula}")
    assert in_map.message() == gr.Override(gr.Rule(formula), op_type="Tanh").message()


def test_params_of_a_formula() -> None:
    read = parsing.override("Sign=slope * dy:slope=2")
    assert read.message() == gr.Override(gr.Rule("slope * dy"), op_type="Sign", params={"slope": 2}).message()


@pytest.mark.parametrize("name", ["dy", "ste", "rules/ste", "builtin/atan", "x-y", "My>Op"])
def test_text_that_can_be_a_name_is_one(name: str) -> None:
    assert parsing.override(f"Sign={name}").rule == name


def test_params_of_a_rule() -> None:
    read = parsing.override("Sign=ste_sign:clip=2,mask=[1, 2]")
    assert (read.rule, read.params) == ("ste_sign", {"clip": 2, "mask": [1, 2]})


@pytest.mark.parametrize(
    ("text", "name", "params"),
    [
        ("epsilon_plus", "epsilon_plus", {}),
        ("epsilon_plus:eps=1e-4", "epsilon_plus", {"eps": 1e-4}),
        ("epsilon_gamma_box:low=-1,high=1", "epsilon_gamma_box", {"low": -1, "high": 1}),
    ],
)
def test_presets(text: str, name: str, params: dict[str, object]) -> None:
    read = parsing.preset(text)
    assert (read.name, read.params) == (name, params)


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("none=", "none", []),
        ("guided=Relu=guided_relu", "guided", [gr.Override("guided_relu", op_type="Relu")]),
        (
            "both=Sign=ste_sign,Relu=guided_relu",
            "both",
            [gr.Override("ste_sign", op_type="Sign"), gr.Override("guided_relu", op_type="Relu")],
        ),
        (
            "params=Sign=ste_sign:clip=2,other=[1, 2],Relu=guided_relu",
            "params",
            [
                gr.Override("ste_sign", op_type="Sign", params={"clip": 2, "other": [1, 2]}),
                gr.Override("guided_relu", op_type="Relu"),
            ],
        ),
        (
            "region=region:x,w>y,z=lsq,Relu=ste",
            "region",
            [gr.Override("lsq", region=gr.Region(["x", "w"], ["y", "z"])), gr.Override("ste", op_type="Relu")],
        ),
        (
            "formula=Sign=expr:where(abs(x) <= 1, dy, 0),Relu=ste",
            "formula",
            [gr.Override(gr.Rule("where(abs(x) <= 1, dy, 0)"), op_type="Sign"), gr.Override("ste", op_type="Relu")],
        ),
        (
            "preset=Relu=ste,preset:epsilon_plus:eps=1e-4,preset:deconvnet",
            "preset",
            [gr.Override("ste", op_type="Relu"), gr.Preset("epsilon_plus", eps=1e-4), gr.Preset("deconvnet")],
        ),
    ],
)
def test_maps(text: str, label: str, expected: list[gr.Override | gr.Preset]) -> None:
    found_label, found = parsing.override_map(text)
    assert found_label == label
    assert [item.message() for item in found] == [item.message() for item in expected]


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (parsing.override, "Sign", "expected OP_TYPE=RULE"),
        (parsing.override, "Sign=", "expected OP_TYPE=RULE"),
        (
            parsing.override,
            "nodez:a/*=ste",
            "'nodez' is no selector; expected one of op, node, nodes, regex, scope, pattern",
        ),
        (parsing.override, "node:=ste", "nothing is selected"),
        (parsing.override, "Sign&op:Relu=ste", "op_type is given twice"),
        (parsing.override, "region:x,y=ste", "region:INPUT,…>OUTPUT,…=RULE"),
        (parsing.override, "region:>y=ste", "empty name"),
        (parsing.override, "pattern:MatMul++Relu=ste", "empty name"),
        (parsing.override, "Relu&position:first=ste", "position is a number, not 'first'"),
        (parsing.override, "Relu&dtype:float=ste", "no element type such as float32"),
        (parsing.override, "Relu&rank:-1=ste", "from 0 on"),
        (parsing.override, "Sign=ste_sign:clip", "expected param=value"),
        (parsing.override, "Sign=ste_sign:clip=wide", "JSON value"),
        (parsing.preset, "epsilon plus", "no preset's name"),
        (parsing.override_map, "Sign", "NAME=OVERRIDE"),
        (parsing.override_map, "a=Sign", "expected OP_TYPE=RULE"),
    ],
)
def test_overrides_that_cannot_be_parsed_are_refused_with_the_valid_form(
    read: Callable[[str], object], text: str, words: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(words)):
        read(text)
