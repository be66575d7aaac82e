"""Tests the SVG picture: boxes, colours, texts, and names from untrusted users."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import pytest

import gradrule as gr
from gradrule._picture import svg
from gradrule._picture.placing import initially_open
from gradrule._picture.view import View
from gradrule.v1.graph_pb2 import Graph
from tests.unit.client.picture.made import (
    explained,
    graph,
    large,
    large_explained,
    layered_explained,
    nested,
    node,
    took,
    view,
)

NS = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\"'&<!--]]>\x00\x1b\u202e"


def parsed(explanation: gr.Explanation) -> ElementTree.Element:
    return ElementTree.fromstring(explanation.svg())


def boxes(drawn: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Leaves and folded scopes by title; a title twice fails."""
    found: dict[str, ElementTree.Element] = {}
    for group in drawn.iter(f"{NS}g"):
        classes = (group.get("class") or "").split()
        title = group.find(f"{NS}title")
        if title is not None and title.text is not None and classes[0] in ("leaf", "scope"):
            name = title.text if classes[0] == "scope" else "\n".join(title.text.splitlines()[:3])
            assert name not in found, name
            found[name] = group
    return found


def marks_of(group: ElementTree.Element) -> list[str | None]:
    return [text.text for text in group.iter(f"{NS}text") if text.get("class") == "mark"]


def names(drawn: ElementTree.Element) -> list[str]:
    return sorted(name.splitlines()[0] for name in boxes(drawn))


def nested_with_rules() -> gr.Explanation:
    overrides = [
        took("block/call/call/s", "ste_sign", function="inner"),
        took("loop/s", "ste_sign", function="body"),
        took("aside", "guided_relu", "off_path", op="Relu"),
        took("pred", "cosine", "not_differentiable", op="Greater"),
    ]
    said = ["block/in", "block/call/call/m", "block/call/i", "if/s", "if/z", "y"]
    return explained(nested(), overrides=overrides, default_gradient_nodes=said)


def shown_boxes(of: View, opened: set[int]) -> list[str]:
    seen: list[int] = []
    pending = [0]
    for box in pending:
        for child in of.children[box]:
            (pending if child in opened else seen).append(child)
    return sorted(of.titles[box] for box in seen)


def test_every_visible_node_is_drawn_once() -> None:
    explanation = nested_with_rules()
    drawn = view(explanation)
    everything = [leaf.name for leaf in Graph.FromString(explanation.graph).node]
    assert set(everything) <= set(names(parsed(explanation)))
    assert names(parsed(explanation)) == shown_boxes(drawn, set(initially_open(drawn)))
    assert len(names(parsed(explanation))) == 21


def test_overridden_nodes_have_the_colour_and_the_letter_of_their_rule() -> None:
    drawn = parsed(nested_with_rules())
    sheet = drawn.findtext(f"{NS}style") or ""
    legend = {
        letter.text: "".join(line.itertext())
        for row in drawn.iter(f"{NS}g")
        if row.get("class") == "legend"
        for letter in row.iter(f"{NS}text")
        if letter.get("class") == "mark"
        for line in row.findall(f"{NS}text")
    }
    assert legend == {
        "A": "ste_sign: 2 active",
        "B": "guided_relu: 1 off path",
        "C": "cosine: 1 not differentiable",
    }
    ruled = {
        name.splitlines()[0]: (group.get("class", "").split(), marks_of(group))
        for name, group in boxes(drawn).items()
        if "rule" in group.get("class", "").split()
    }
    assert {name: (marks, classes[-1]) for name, (classes, marks) in ruled.items()} == {
        "block/call/call/s": (["A"], "r0"),
        "loop/s": (["A"], "r0"),
        "aside": (["B"], "r1"),
        "pred": (["C"], "r2"),
    }
    assert "off_path" in ruled["aside"][0] and "not_differentiable" in ruled["pred"][0]
    for number in range(3):
        assert f".r{number} rect.mark {{ fill: {svg.PALETTE[number][0]}; }}" in sheet


def test_the_path_is_drawn_and_its_ends_are_marked() -> None:
    explanation = nested_with_rules()
    drawn = parsed(explanation)
    edges = [
        path
        for path in drawn.iter(f"{NS}path")
        if (path.get("class") or "").startswith("edge") and path.get("marker-end")
    ]
    thick = [path for path in edges if path.get("class") == "edge path"]
    # Twelve nodes, and two ways each from `block/in` into the function and from the loop through the branch.
    assert len(thick) == 14
    assert len(edges) == len(view(explanation).edges)
    marked = {
        name.splitlines()[0]: pill.text
        for name, group in boxes(drawn).items()
        for pill in group.findall(f"{NS}text")
        if pill.get("class") == "pill"
    }
    assert marked == {"x": "x", "y": "y"}
    plain = {
        name.splitlines()[0] for name, group in boxes(drawn).items() if "path" not in group.get("class", "").split()
    }
    assert plain >= {"aside", "stop", "pred", "start", "loop/more", "loop/one"}


def test_texts_repeat_the_meaning_of_colours() -> None:
    texts = {name: "".join(group.itertext()) for name, group in boxes(parsed(nested_with_rules())).items()}
    told = {name.splitlines()[0]: text for name, text in texts.items() if "cond" not in name}
    assert "Sign → ste_sign" in told["loop/s"]
    assert "Relu → guided_relu (off path)" in told["aside"]
    assert "Greater → cosine (not differentiable)" in told["pred"]
    assert "status: active" in told["loop/s"] and "in function: body" in told["loop/s"]
    assert "gradient: its own" in told["y"] and "gradient: not computed" in told["stop"]


def test_a_large_graph_is_folded_and_scopes_count_their_nodes() -> None:
    explanation = large_explained(5000)
    drawn = parsed(explanation)
    assert 10 <= len(boxes(drawn)) <= 60
    rules = {"ste_sign": 0, "cosine": 0}
    for name, group in boxes(drawn).items():
        for badge in group.iter(f"{NS}text"):
            if badge.get("class") == "mark" and "×" in (badge.text or ""):
                mark, count = (badge.text or "").split("×")
                rules[{"A": "ste_sign", "B": "cosine"}[mark]] += int(count)
                assert f"{mark}×{count}" in name
    ops = [each.op for each in Graph.FromString(explanation.graph).node]
    leaves = [group for group in boxes(drawn).values() if "leaf" in group.get("class", "")]
    shown = [group.get("class", "").split()[-1] for group in leaves if "rule" in group.get("class", "").split()]
    assert rules["ste_sign"] + shown.count("r0") == ops.count("Sign")
    assert rules["cosine"] + shown.count("r1") == ops.count("Tanh")


def test_many_nodes_without_scopes_are_grouped() -> None:
    nodes = [
        node("x", "Placeholder"),
        *(node(f"n{number}", "Neg", "x") for number in range(4998)),
        node("y", "AddN", "n7"),
    ]
    assert len(boxes(parsed(explained(graph(*nodes))))) <= 60


def test_names_are_escaped() -> None:
    of = graph(
        node("x", "Placeholder"),
        node(f"scope{HOSTILE}/a", HOSTILE, "x"),
        node(f"scope{HOSTILE}/b", "Sign", f"scope{HOSTILE}/a"),
        node("y", "Neg", f"scope{HOSTILE}/b"),
    )
    explanation = explained(of, overrides=[took(f"scope{HOSTILE}/b", HOSTILE, label=HOSTILE)], rewritten=[HOSTILE])
    drawn = parsed(explanation)
    clean = HOSTILE.replace("\x00", "�").replace("\x1b", "�").replace("\u202e", "�")
    assert f"scope{clean}/b" in names(drawn)
    assert not list(drawn.iter(f"{NS}script")) and not list(drawn.iter("script"))
    assert "<script" not in explanation.svg()


def test_findings_are_marked() -> None:
    finding = gr.errors.Detail("UNKNOWN_OP_TYPE", "There is no op type Sgn.", "aside", "")
    others = [gr.errors.Detail("UNKNOWN_RULE", f"There is no rule {number}.", "", "") for number in range(20)]
    drawn = parsed(explained(nested(), xs=[], ys=[], findings=[finding, *others]))
    legend = ["".join(row.itertext()).replace("\n", "") for row in drawn.iter(f"{NS}g") if row.get("class") == "legend"]
    assert "!UNKNOWN_OP_TYPE: There is no op type Sgn." in legend and "… 13 more" in legend
    group = next(group for name, group in boxes(drawn).items() if name.startswith("aside\n"))
    assert "wrong" in group.get("class", "").split()
    assert "There is no op type Sgn." in "".join(group.itertext())


def test_letters_distinguish_more_rules_than_colours() -> None:
    count = 30
    nodes = [node("x", "Placeholder"), *(node(f"s{number}", "Sign", "x") for number in range(count))]
    of = graph(*nodes, node("y", "AddN", *(f"s{number}" for number in range(count))))
    drawn = parsed(explained(of, overrides=[took(f"s{number}", f"rule_{number}") for number in range(count)]))
    marks = [mark for group in boxes(drawn).values() for mark in marks_of(group)]
    assert len(marks) == len(set(marks)) == count


def test_texts_can_be_read_on_every_background() -> None:
    theme = svg._theme(7)
    assert_readable(theme["text"], theme["muted"], theme, [value for name, value in theme.items() if "strong" in name])


@pytest.mark.parametrize("variant", [0, 1], ids=["light", "dark"])
def test_texts_of_the_page_can_be_read_in_both_themes(variant: int) -> None:
    sheet = importlib.resources.files("gradrule._picture").joinpath("graph_page.css").read_text(encoding="utf-8")
    found = re.findall(r"--([a-z-]+):light-dark\(#([0-9a-f]+), ?#([0-9a-f]+)\)", sheet)
    colours = {name: expanded(pair[variant]) for name, *pair in found}
    tinted = [svg._mix_colours(colour, colours["surface"], 0.32) for colour, _ in svg.PALETTE]
    theme = {"box": colours["surface"], "scope": colours["raised"], "background": colours["page"]}
    assert_readable(colours["text"], colours["muted"], theme, tinted)


def expanded(digits: str) -> str:
    return f"#{''.join(2 * digit for digit in digits) if len(digits) == 3 else digits}"


def assert_readable(text: str, muted: str, theme: Mapping[str, str], tinted: Sequence[str]) -> None:
    for background in (theme["box"], theme["scope"], theme["background"], *tinted):
        assert contrast(text, background) >= 4.5
    for background in (theme["box"], theme["scope"]):
        assert contrast(muted, background) >= 4.5
    for colour, text_colour in svg.PALETTE:
        assert contrast(expanded(text_colour[1:]), colour) >= 4.5


def test_no_text_is_smaller_than_twelve_pixels() -> None:
    for sheet in (
        svg.svg_style_sheet(3),
        importlib.resources.files("gradrule._picture").joinpath("graph_page.css").read_text(),
    ):
        assert min(float(size) for size in re.findall(r"font(?:-size)?:\s*([\d.]+)px", sheet)) >= 12


def test_large_graphs_are_drawn_without_constants() -> None:
    drawn = parsed(layered_explained())
    shown = names(drawn)
    assert not [name for name in shown if "kernel" in name]
    # A layer whose other node is a constant is one box under the layer's name.
    labels = {name.splitlines()[0]: group.findtext(f"{NS}text") for name, group in boxes(drawn).items()}
    assert labels["head/MatMul"] == "head"


def test_edges_tell_the_shapes_that_are_known() -> None:
    drawn = parsed(layered_explained())
    assert [text.text for text in drawn.iter(f"{NS}text") if text.get("class") == "tensor"] == ["float32 [?, 8]"]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_equal_graphs_give_equal_pictures() -> None:
    one, other = (explained(large(300)).svg() for _ in range(2))
    assert one == other
