"""`gradrule rules` against a real server: showing, drawing, the gallery and checking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

import gradrule as gr
from gradrule._builder.overrides import override_messages
from gradrule.cli.failures import FOUND, REFUSED
from gradrule.cli.main import build_parser
from gradrule.viz import _rule_text as rule_text
from gradrule.viz._checking import check
from tests.service.servers import RunningServer
from tests.service.shell import Shell, shell_in


@pytest.fixture
def shell(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    return shell_in(tmp_path, server, monkeypatch, capsys)


# Showing.


def test_show_prints_family_formula_and_ranges(shell: Shell) -> None:
    done = shell("rules", "show", "ste_sign")
    assert done.rows("family", "straight_through")
    assert done.rows("formula", "where(abs(x) <= clip, dy, 0)")
    assert done.rows("clip", "1", "> 0")
    told = shell("rules", "show", "lrp_zplus", "--json").json
    assert told["formula"].startswith("pos(x)")
    assert {info["name"]: info["range"] for info in told["param_infos"]} == {"eps": "> 0"}


def test_show_prints_which_rule_a_user_rule_hides(client: Any, shell: Shell) -> None:
    told = shell("rules", "show", "ste", "--json").json
    assert told["hides_builtin"] is False


def test_rule_with_a_rule_for_its_own_gradient(shell: Shell) -> None:
    formula = "(None, None, b * dy)"
    made = shell("rules", "create", "Shelled", "b * dy", "--param", "b=2", "--gradient", formula)
    assert (made.code, made.rows("its gradient", formula) != []) == (0, True), made
    told = shell("rules", "show", "Shelled", "--json").json
    assert (told["gradient"]["expression"], told["params"]) == (formula, {"b": 2})
    assert shell("rules", "delete", "Shelled").code == 0


def test_rules_of_a_family(shell: Shell) -> None:
    listed = shell("rules", "list", "--family", "stable", "--json").json
    assert {"log1pexp", "safe_sqrt"} <= {rule["name"] for rule in listed}
    assert {rule["family"] for rule in listed} == {"stable"}
    assert shell("rules", "list", "--family", "stabel").out == "no rules of family stabel\n"


def test_rules_are_searched_and_counted(shell: Shell) -> None:
    listed = shell("rules", "list")
    assert not listed.rows("MatMul")
    assert re.search(r"and \d{3} gradients of TensorFlow's ops: --kind op", listed.out)
    found = shell("rules", "list", "--search", "LOG1PEXP exp")
    assert found.out.splitlines()[0].strip() == "1 rule"
    assert found.rows("log1pexp", "dy * sigmoid(x)")
    found = shell("rules", "list", "--search", "matmul", "--kind", "op", "--json").json
    assert {"MatMul", "BatchMatMul"} <= {rule["name"] for rule in found}
    assert all("matmul" in rule["name"].lower() for rule in found)
    assert shell("rules", "list", "--search", "nothing-has-this").out == "no rules with nothing-has-this\n"


def test_presets(shell: Shell) -> None:
    done = shell("rules", "presets")
    assert done.rows("epsilon_plus", "eps=1e-06", "@convolution → lrp_zplus(eps=1e-06)")
    one = shell("rules", "presets", "guided_backprop")
    assert one.rows("overrides", "Relu → guided_relu")
    names = {preset["name"] for preset in shell("rules", "presets", "--json").json}
    assert {"epsilon_plus", "guided_backprop", "excitation_backprop"} <= names
    unknown = shell("rules", "presets", "epsilon_plu")
    assert (unknown.code, unknown.out) == (REFUSED, "")
    assert "Did you mean 'epsilon_plus'" in unknown.err


# Drawing.


def values(told: dict[str, Any], role: str) -> Any:
    (line,) = [line for line in told["lines"] if line["role"] == role]
    return np.array(line["values"], float)


def test_curve_has_values_of_op_and_rule(shell: Shell) -> None:
    told = shell("rules", "plot", "ste_sign", "--param", "clip=2", "--range", "-4:4", "--json").json
    x = np.array(told["x"])
    assert (told["axis"], x[0], x[-1]) == ("x", -4, 4)
    np.testing.assert_array_equal(values(told, "forward"), np.sign(x))
    np.testing.assert_array_equal(values(told, "gradient"), np.abs(x) <= 2)
    assert [line["role"] for line in told["lines"]] == ["forward", "gradient"]


def test_step_is_drawn_under_its_surrogate(shell: Shell) -> None:
    told = shell("rules", "plot", "atan", "--json").json
    x = np.array(told["x"])
    np.testing.assert_array_equal(values(told, "forward"), x > 0)
    np.testing.assert_allclose(values(told, "gradient"), 1 / (1 + (np.pi * x) ** 2), rtol=1e-4)


def test_negative_upstream_gradient_is_drawn_if_it_differs(shell: Shell) -> None:
    told = shell("rules", "plot", "guided_relu", "--dy", "2", "--json").json
    x = np.array(told["x"])
    np.testing.assert_array_equal(values(told, "gradient"), 2.0 * (x > 0))
    np.testing.assert_array_equal(values(told, "opposite"), 0 * x)


def test_rule_of_dy_only_is_drawn_over_dy(shell: Shell) -> None:
    told = shell("rules", "plot", "gradient_clip_norm", "--json").json
    dy = np.array(told["x"])
    assert told["axis"] == "dy"
    np.testing.assert_allclose(values(told, "gradient"), np.clip(dy, -1, 1), atol=1e-6)


def test_further_inputs_are_given_or_chosen(shell: Shell) -> None:
    told = shell("rules", "plot", "pact", "--feed", "x1=0.5", "--json").json
    x = np.array(told["x"])
    np.testing.assert_allclose(values(told, "forward"), np.minimum(x, 0.5), atol=1e-6)
    np.testing.assert_array_equal(values(told, "gradient"), x <= 0.5)
    told = shell("rules", "plot", "expr:(dy * x1 * x, None)", "--feed", "x1=2", "--json").json
    np.testing.assert_allclose(values(told, "gradient"), 2 * np.array(told["x"]), atol=1e-6)


def test_curve_is_drawn_on_the_terminal_and_to_a_file(shell: Shell) -> None:
    done = shell("rules", "plot", "ste_sign", "--output", "ste.png", "--terminal")
    assert done.code == 0
    assert done.rows("wrote ste.png") and done.rows("── Sign(x)") and done.rows("-3", "x", "3")
    assert re.search("[⠁-⣿]{3}", done.out)
    assert image.imread("ste.png").shape[:2] > (300, 500)
    quiet = shell("rules", "plot", "ste_sign", "--output", "ste.svg")
    assert quiet.out == "wrote ste.svg\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lrp_zplus",), "layers with weights"),
        (("maxpool_smooth",), "several numbers at once"),
        (("eigh_lorentzian",), "matrix"),
        (("lrp_norm",), "a sum or a pool"),
        (("expr:dy * x1",), "--feed x1=…"),
        (("expr:dy * default",), "--op-type"),
        (("ste_sgn",), "'ste_sign'"),
        (("ste_sign", "--param", "clip=-1"), "clip"),
    ],
)
def test_rules_that_cannot_be_drawn_are_refused_with_a_reason(
    shell: Shell, arguments: tuple[str, ...], words: str
) -> None:
    done = shell("rules", "plot", *arguments)
    assert (done.code, done.out) == (REFUSED, "")
    assert words in done.err


# The gallery.


class Cards(HTMLParser):
    """Collects the text of each article, the articles with a curve, and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.curves: set[str] = set()
        self._card = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("meta", "input"):
            return
        self._open.append(tag)
        assert not {"src", "href"} & {name for name, value in attrs if not (value or "").startswith("#")}
        if tag == "article":
            self._card = dict(attrs)["id"] or ""
            self.texts[self._card] = ""
        elif tag == "svg" and self._card:
            self.curves.add(self._card)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._card = "" if tag == "article" else self._card

    def handle_data(self, data: str) -> None:
        if self._card:
            self.texts[self._card] += data


@pytest.fixture(scope="module")
def builtins(client: Any) -> list[gr.RuleInfo]:
    return client.list_rules("builtin")


def test_gallery_shows_every_rule(client: Any, shell: Shell, builtins: list[gr.RuleInfo]) -> None:
    done = shell("rules", "gallery", "page")
    assert done.code == 0
    cards = Cards()
    cards.feed(Path("page/index.html").read_text(encoding="utf-8"))
    for rule in builtins:
        text = cards.texts[rule.name]
        shown = [rule.formula, rule.reference, *rule.aliases, *rule.op_types]
        shown += [word for info in rule.param_infos for word in (info.name, info.range)]
        assert all(word in text for word in shown), rule.name
        assert (rule.name in cards.curves) != ("no curve: " in text), rule.name
        example = rule_text.rule_example(rule)
        assert example.python in text and example.shell in text
    page = Path("page/index.html").read_text(encoding="utf-8")
    assert page.count("<button>copy</button>") == 2 * (len(builtins) + len(client.list_presets()))
    assert {f"preset-{preset.name}" for preset in client.list_presets()} <= cards.texts.keys()
    drawable = [
        rule.name for rule in builtins if rule.per_sample and rule.family == "surrogate" and "seed" not in rule.params
    ]
    assert cards.curves >= set(drawable)


def test_examples_of_the_gallery_are_valid(client: Any, builtins: list[gr.RuleInfo]) -> None:
    """Examples in Python and in the shell are equivalent, and the server knows all their names."""
    parser = build_parser()
    presets = client.list_presets()
    for example in [*map(rule_text.rule_example, builtins), *map(rule_text.preset_example, presets)]:
        given = eval(example.overrides, {"gr": gr})
        options = parser.parse_args(["evaluate", "graph.pb", *_words(example.flag)])
        typed = [*options.override, *options.preset]
        expected = override_messages(given)
        assert [item.message() for item in typed] == expected
        g = gr.Graph()
        g.op("Identity", g.placeholder("x", "float32", [None]), name="y")
        findings = client.explain(g, ys=["y"], xs=["x"], overrides=given).findings
        # The graph lacks the ops of most rules; no other problem is allowed.
        assert {item.reason for item in findings} <= {"UNMATCHED_OVERRIDE", "UNKNOWN_TENSOR", "RULE_ARITY"}, example


def _words(flag: str) -> list[str]:
    import shlex

    return shlex.split(flag)


# Checking.


def report(client: Any, rule: str, **words: Any) -> Any:
    found = client.get_rule(rule) if not rule.startswith("expr:") else gr.Rule(rule.removeprefix("expr:"))
    report, _ = check(client, found, **words)
    return report


def test_every_true_gradient_of_the_catalogue_passes_the_check(client: Any, builtins: list[gr.RuleInfo]) -> None:
    checked = [rule.name for rule in builtins if rule.true_gradient and rule.op_types]
    assert len(checked) >= 6
    for name in checked:
        found = report(client, name)
        assert found.claims and found.holds, name


@pytest.mark.parametrize(
    ("rule", "of"),
    [
        ("expr:dy * sigmoid(x)", "Softplus"),
        ("expr:dy * exp(x) / (1 + exp(x))", "expr:log1p(exp(x))"),
        ("expr:2 * x * dy", "expr:x ** 2"),
        ("expr:where(abs(x) <= 1, dy, 0)", "expr:clip(x, -1, 1)"),
        ("expr:dy * (1 - y * y)", "Tanh"),
        ("atan", "expr:0.5 + atan(pi * x) / pi"),
    ],
)
def test_correct_gradients_pass(client: Any, rule: str, of: str) -> None:
    found = report(client, rule, of=of)
    assert found.holds and found.claims[0].compared > 200
    assert found.claims[0].largest < 1e-7


@pytest.mark.parametrize(
    ("rule", "of"),
    [
        ("expr:1.001 * dy * sigmoid(x)", "Softplus"),
        ("expr:dy * sigmoid(x) + 0.001", "Softplus"),
        ("expr:where(dy > 0, dy * sigmoid(x), 0)", "Softplus"),
        ("expr:where(abs(x) <= 1.1, dy, 0)", "expr:clip(x, -1, 1)"),
        ("expr:where(x > 2.9, dy / 0, dy * 2 * x)", "expr:x ** 2"),
        ("ste_sign", "Sign"),
    ],
)
def test_relative_error_of_a_thousandth_is_found(client: Any, rule: str, of: str) -> None:
    found = report(client, rule, of=of)
    assert not found.holds
    claim = found.claims[0]
    assert abs(claim.rule - claim.expected) > 1e-4 or not np.isfinite(claim.rule)


def test_every_input_is_compared(client: Any) -> None:
    right = report(client, "expr:(dy / x1, sum_to(-dy * y / x1, x1))", of="RealDiv")
    assert [claim.name for claim in right.claims] == ["x", "x1"] and right.holds
    wrong = report(client, "expr:(dy / x1, sum_to(dy * y / x1, x1))", of="RealDiv")
    assert [claim.holds for claim in wrong.claims] == [True, False]


def test_kinks_are_found_everywhere(client: Any) -> None:
    found = report(client, "expr:where(abs(x) < 1 / 3, dy, 0)", of="expr:clip(x, -1 / 3, 1 / 3)")
    np.testing.assert_allclose([kink.x for kink in found.kinks], [-1 / 3, 1 / 3], atol=1e-6)
    assert [(round(kink.left, 6), round(kink.right, 6)) for kink in found.kinks] == [(0, 1), (1, 0)]
    (kink,) = report(client, "guided_relu").kinks
    assert (kink.x, kink.is_jump, kink.rule) == (0, False, 0)
    (jump,) = report(client, "fast_sigmoid").kinks
    assert (jump.x, jump.is_jump, jump.rule) == (0, True, 1)
    assert not report(client, "log1pexp").kinks


def test_dtypes_shapes_and_special_values_are_reported(client: Any) -> None:
    found = report(client, "safe_sqrt", interval=(0.5, 4.0))
    assert [item.gives for item in found.types] == ["float16", "bfloat16", "float32", "float64"]
    assert found.types[0].difference is not None and 0 < found.types[0].difference < 1e-2
    assert [item.gives for item in found.shapes] == ["[]", "[0]", "[3]", "[2, 3]", "[2, 2, 3]", "[0, 3]"]
    by_x = {item.x: item.dx for item in found.specials if item.dy == 1}
    assert by_x[0.0] == 0 and by_x[float("inf")] == 0
    refused = report(client, "expr:dy / norm(dy, axis='sample')")
    assert refused.shapes[0].gives == "refused: EXECUTION_FAILED"


@pytest.mark.parametrize("name", ["Tanh", "Sqrt", "Softplus", "Minimum"])
def test_rule_of_an_op_is_compared_with_the_ops_gradient(client: Any, name: str) -> None:
    found = report(client, name, interval=(0.1, 4.0))
    assert found.of == name and found.holds


def test_incomparable_parts_are_reported(client: Any) -> None:
    softmax = report(client, "Softmax")
    assert softmax.of is None and softmax.holds and "several elements" in softmax.notes[0]
    quantised = report(client, "fake_quant")
    assert [item.gives for item in quantised.types if item.difference is None] != []
    assert any("float64" in note for note in quantised.notes)


def test_dependence_between_samples_is_found(client: Any) -> None:
    found = report(client, "gradient_clip_norm")
    assert (found.samples.claimed, found.samples.found, found.samples.holds) == (False, False, True)
    assert report(client, "rectgrad").samples.found


def test_check_fails_for_a_wrong_claim(shell: Shell) -> None:
    right = shell("rules", "check", "log1pexp")
    assert right.code == 0
    assert right.rows("x", "241 points", "holds") and right.rows("all that is claimed holds")
    wrong = shell("rules", "check", "expr:dy * 1.1", "--of", "Identity", "--range", "-1:1")
    assert wrong.code == FOUND
    assert wrong.rows("241 points", "WRONG") and wrong.rows("a claim is WRONG")
    told = shell("rules", "check", "safe_log", "--range", "0:3", "--json").json
    assert (told["of"], told["holds"], told["interval"]) == ("Log", True, [0.0, 3.0])
    several = shell("rules", "check", "expr:dy * softmax(x)", "--of", "Softmax")
    assert (several.code, several.out) == (REFUSED, "")
    assert "several elements" in several.err


@pytest.fixture
def user_rule(client: Any) -> Iterator[str]:
    client.create_rule("CliChecked", "where(abs(x) <= width, dy, 0)", params={"width": None})
    yield "CliChecked"
    client.delete_rule("CliChecked")


def test_user_rule_is_drawn_and_checked(shell: Shell, user_rule: str) -> None:
    missing = shell("rules", "plot", user_rule)
    assert missing.code == REFUSED
    assert "--param width=…" in missing.err
    words = (user_rule, "--param", "width=2", "--op-type", "Sign", "--json")
    told = shell("rules", "plot", *words).json
    np.testing.assert_array_equal(values(told, "gradient"), np.abs(told["x"]) <= 2)
    assert shell("rules", "check", *words).json["kinks"][0]["is_jump"]
