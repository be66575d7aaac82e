from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import gradrule as gr
from gradrule.cli.rules import curve_drawing
from gradrule.viz import _curve_svg
from gradrule.viz._curves import Curve, Line
from gradrule.viz._setups import SETUPS, NoSetupError, params_with_examples, setup_of

X = np.linspace(-2, 2, 41)


def made(*lines: Line) -> Curve:
    return Curve("rule <a & b>", "x", X, lines, ("a note",))


def info(**words: Any) -> gr.RuleInfo:
    given: dict[str, Any] = {
        "name": "r", "kind": "builtin", "expression": "dy * x", "graph": None, "params": {}, "description": "",
        "op_types": (), "reference": "", "digest": "", "per_sample": True, "aliases": (), "formula": "", "family": "",
        "true_gradient": False, "hides_builtin": False, "param_infos": (),
    }  # fmt: skip
    return gr.RuleInfo(**given | words)


def test_svg_has_a_line_for_each_finite_part() -> None:
    broken = np.where(np.abs(X) < 0.2, np.nan, X)
    drawn = ElementTree.fromstring(
        _curve_svg.curve_svg(made(Line("Sign(x)", np.sign(X), "forward"), Line("dx", broken)))
    )
    lines = [element for element in drawn.iter() if element.tag == "polyline"]
    assert [line.get("class") for line in lines] == ["forward", "gradient", "gradient"]
    points = [tuple(map(float, point.split(","))) for point in (lines[1].get("points") or "").split()]
    xs, ys = zip(*points, strict=True)
    assert list(xs) == sorted(xs) and list(ys) == sorted(ys, reverse=True)
    title = drawn.find("title")
    assert title is not None and title.text == "rule <a & b>, Sign(x), dx"


def test_a_far_outlier_does_not_flatten_the_picture() -> None:
    values = np.sin(X)
    values[20] = 1e6
    low, high = _curve_svg.span(made(Line("dx", values)))
    assert high < 20 and low < -1
    assert _curve_svg.span(made(Line("dx", np.full_like(X, np.nan)))) == (-1, 1)
    low, high = _curve_svg.span(made(Line("dx", np.ones_like(X))))
    assert low < 1 < high


def test_terminal_draws_axes_and_lines() -> None:
    screen = Console(width=100, record=True, markup=False, highlight=False, file=io.StringIO())
    curve_drawing.print_curve(
        screen, made(Line("Relu(x)", np.maximum(X, 0), "forward"), Line("dx", 1.0 * (X > 0), "opposite"))
    )
    text = screen.export_text()
    rows = [line for line in text.splitlines() if "│" in line or "┤" in line]
    assert len(rows) == 16
    assert {row.split("┤")[0].strip() for row in rows if "┤" in row} == {"2", "1", "0"}
    # Relu rises to the right: the first row has dots at its end alone.
    first = rows[0].partition("┤")[2]
    assert re.fullmatch("⠀{60,}[⠀-⣿]*[⠁-⣿]", first)
    assert "── Relu(x)" in text and "╌╌ dx" in text and "a note" in text


def test_the_first_op_that_maps_one_number_to_one_number_is_chosen() -> None:
    assert setup_of(info(op_types=("@linear", "@activation")), None).op_type == "Relu"
    assert setup_of(info(op_types=("@step", "Sign")), None).is_step
    assert setup_of(info(op_types=("Sign",)), "Tanh").op_type == "Tanh"
    assert setup_of(info(op_types=("Identity",), expression="-dy"), None).over_dy
    assert not setup_of(info(op_types=("Identity",), expression="dy * y"), None).over_dy
    assert setup_of(gr.Rule("dy * x"), None).op_type is None
    assert setup_of(info(op_types=("Minimum",)), None, (0.5,)).forward == "Minimum(x, 0.5)"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (info(op_types=("@linear",)), "layers with weights"),
        (info(op_types=("Svd",)), "it is for Svd"),
        (gr.Rule("(dy * x1, dy * x0)"), "--feed x1=…"),
    ],
)
def test_reasons_why_a_rule_has_no_setup(rule: Any, words: str) -> None:
    with pytest.raises(NoSetupError, match=re.escape(words)):
        setup_of(rule, None)


def test_example_params_are_used_for_builtin_rules_only() -> None:
    seed = gr.ParamInfo("seed", None, "", "")
    assert params_with_examples(info(param_infos=(seed,)), {}) == {"seed": 0}
    assert params_with_examples(info(param_infos=(seed,)), {"seed": 3}) == {"seed": 3}
    with pytest.raises(NoSetupError, match="--param seed"):
        params_with_examples(info(kind="user", param_infos=(seed,)), {})


def test_all_setups_use_existing_ops() -> None:
    from gradrule.common import op_definitions

    for name, setup in SETUPS.items():
        if setup.op_type is not None:
            definition = op_definitions.find(setup.op_type)
            assert definition is not None, name
            assert len(definition.inputs) == 1 + len(setup.others), name
