"""Tests the text of the page: it needs nothing else, runs nothing of untrusted users, and holds what a picture shows.

`client/console/test/explain.spec.ts` tests the page in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from html.parser import HTMLParser
from typing import Any

import gradrule as gr
from gradrule import _picture
from gradrule._picture.page import data
from tests.unit.client.picture.made import (
    explained,
    graph,
    large_explained,
    layered_explained,
    nested,
    node,
    took,
    view,
)

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028"


def ruled() -> gr.Explanation:
    return explained(
        nested(), overrides=[took("loop/s", "ste_sign", function="body")], default_gradient_nodes=["y", "if/s"]
    )


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
    # The script itself must not end its element either.
    script = importlib.resources.files("gradrule._picture").joinpath("graph_page.js").read_text(encoding="utf-8")
    assert "</script" not in script and "<!--" not in script


def test_the_page_needs_no_other_file_and_allows_no_other_script() -> None:
    html = hostile().html()
    found = parts(html)
    assert not [attributes for _, attributes in found.tags if {"src", "href", "action"} & set(attributes)]
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    policy = next(attributes["content"] for _, attributes in found.tags if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(found.scripts[-1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_page_of_five_thousand_nodes_is_small_and_a_page_of_a_small_graph_is_smaller() -> None:
    explanation = large_explained(5000)
    assert len(explanation.html()) < 2 << 20
    assert len(view(explanation).details) == 5000
    assert len(ruled().html()) < 100 << 10


def test_no_scope_has_too_many_boxes() -> None:
    for explanation in (large_explained(5000), layered_explained((30, 40))):
        drawn = view(explanation)
        assert max(map(len, drawn.children)) <= 24


def labels_below(explanation: gr.Explanation, title: str = "") -> list[str]:
    drawn = view(explanation)
    return [drawn.labels[box] for box in drawn.children[drawn.titles.index(title) if title else 0]]


def test_layers_are_grouped_where_their_names_change() -> None:
    explanation = layered_explained()
    assert labels_below(explanation) == ["keras_tensor", "conv1", "conv2", "head", "predictions"]
    assert labels_below(explanation, "conv2") == [f"conv2_block{number}" for number in range(1, 5)]
    assert len(labels_below(explanation, "conv2_block3")) == 8


def test_groups_of_one_name_are_told_apart_by_their_ranges() -> None:
    last, nodes = "x", [node("x", "Placeholder")]
    for number in range(100):
        for part in "ab":
            nodes.append(node(f"block_{number}/{part}", "Neg", last))
            last = f"block_{number}/{part}"
    explanation = explained(graph(*nodes, node("y", "Neg", last)))
    assert labels_below(explanation) == ["x", "block", "y"]
    drawn = view(explanation)
    (block,) = (box for box in drawn.children[0] if drawn.labels[box] == "block")
    assert [drawn.labels[box] for box in drawn.children[block]] == [
        f"block_{start} … block_{start + 19}" for start in range(0, 100, 20)
    ]


def test_names_that_do_not_follow_the_data_flow_are_grouped_by_neighbourhood() -> None:
    last, nodes = "x", [node("x", "Placeholder")]
    for number in range(60):
        for kind in ("add", "relu"):
            nodes.append(node(f"{kind}_{number}", "Neg", last))
            last = f"{kind}_{number}"
    drawn = view(explained(graph(*nodes, node("y", "Neg", last))))
    groups = [drawn.labels[box] for box in drawn.children[0]]
    assert len(groups) <= 24 and "add_0" in groups[0] + groups[1]
    # Groups of neighbours depend on each other in one direction only.
    order = {box: index for index, box in enumerate(drawn.children[0])}

    def top(box: int) -> int:
        while drawn.parents[box]:
            box = drawn.parents[box]
        return order[box]

    assert all(top(edge.source) <= top(edge.target) for edge in drawn.edges)


def details(explanation: gr.Explanation, title: str) -> dict[str, str]:
    drawn = view(explanation)
    (found,) = [detail for detail in drawn.details.values() if detail.name == title]
    return dict(line.split(": ", 1) for line in found.lines)


def test_details_tell_the_rule_and_why() -> None:
    overrides = [
        took("loop/s", "ste_sign", function="body"),
        took("aside", "guided_relu", "off_path", op="Relu"),
        took("pred", "cosine", "not_differentiable", op="Greater"),
    ]
    explanation = explained(nested(), overrides=overrides, default_gradient_nodes=["y"])
    found = details(explanation, "aside")
    assert (found["rule"], found["override"], found["status"]) == ("guided_relu", "Relu", "off path")
    assert "not on the path" in found["why"]
    assert "not floating-point" in details(explanation, "pred")["why"]
    assert details(explanation, "y")["gradient"] == "its own" and "no override" in details(explanation, "y")["why"]
    assert details(explanation, "stop")["gradient"] == "not computed"


def test_tensors_have_the_names_types_and_shapes_that_are_known() -> None:
    found = details(layered_explained(), "conv1_block1_1_conv/MatMul")
    assert found["input 0"] == "keras_tensor, float32 [?, 8]"
    assert found["input 1"] == "conv1_block1_1_conv/kernel, float32 [8, 8]"
    drawn = view(layered_explained())
    assert ("y", "ys: predictions (Identity)") in drawn.heading
    assert "predictions" in drawn.labels and "Identity" not in drawn.labels
    # The op's name is the node's: once is enough.
    assert drawn.subtitles[drawn.labels.index("predictions")] == "Identity"


def test_constants_are_marked_unless_a_gradient_passes_them() -> None:
    def constants(explanation: gr.Explanation) -> set[str]:
        drawn = view(explanation)
        return {drawn.titles[box] for box, words in enumerate(drawn.classes) if "constant" in words.split()}

    explanation = layered_explained((1,))
    assert constants(explanation) == {f"conv1_block1_{number}_conv/kernel" for number in range(1, 5)} | {"head/kernel"}
    random = graph(
        node("x", "Placeholder"),
        node("shape", "Const"),
        node("noise", "RandomNormal", "shape"),
        node("y", "Add", "x", "noise"),
    )
    assert constants(explained(random)) == {"shape"}
    assert constants(explained(random, xs=["shape"])) == set()


def test_data_and_the_page_agree() -> None:
    values: dict[str, Any] = json.loads(parts(ruled().html()).scripts[0])
    assert values == json.loads(json.dumps(data(view(ruled()))))


def test_the_page_can_be_embedded_in_another_page() -> None:
    framed = parts(_picture.draw_embedded(hostile(), hostile().graph, height=300)).tags
    (frame,) = framed
    assert frame[0] == "iframe" and frame[1]["height"] == "300"
    # Without `allow-same-origin`, the page's script has no access to the notebook.
    assert frame[1]["sandbox"] == "allow-scripts"
    assert frame[1]["srcdoc"] == hostile().html()
