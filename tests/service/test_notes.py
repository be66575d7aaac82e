"""Notes about programs whose gradients are zero because ys are the output of a softmax."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule.errors import GradruleWarning
from tests.service.servers import RunningServer
from tests.service.shell import shell_in

X = np.float32([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]])


def softmax_graph(after: Callable[[gr.Graph, Any], Any] | None = None) -> gr.Graph:
    g = gr.Graph()
    probabilities = g.op("Softmax", g.placeholder("x", "float32", [None, 3]), name="softmax")
    y = probabilities if after is None else after(g, probabilities)
    g.op("Identity", y, name="predictions")
    return g


AFTER: dict[str, Any] = {
    "itself": None,
    "sum": lambda g, p: g.reduce_sum(p, axis=[0, 1]),
    "mean": lambda g, p: g.reduce_mean(p, axis=[1]),
    "reshape": lambda g, p: g.op("Reshape", p, [-1]),
}


@pytest.mark.parametrize("after", AFTER)
def test_evaluate_explain_and_programs_warn(either: Any, after: str) -> None:
    g = softmax_graph(AFTER[after])
    with pytest.warns(GradruleWarning, match="'predictions' is the output of the softmax 'softmax'") as caught:
        r = either.evaluate(g, {"x": X}, fetches="predictions", ys="predictions", xs="x")
    assert np.abs(r.gradients["x"]).max() < 1e-6
    assert len(caught) == 1 and r.notes == [str(caught[0].message)]
    program = either.compile(g, ys="predictions", xs="x", fetches="predictions")
    chosen = program.evaluate({"x": X}, grad_ys={"predictions": np.ones_like(r.outputs["predictions"])})
    assert chosen.notes == [], "a call with grad_ys does not warn"
    with pytest.warns(GradruleWarning, match="softmax"):
        program(x=X)
    program(x=X)
    assert program.notes == r.notes
    assert r.notes[0] in program._repr_html_().replace("&#x27;", "'")
    with pytest.warns(GradruleWarning):
        assert either.explain(g, {"x": X}, ys="predictions", xs="x").notes == r.notes


@pytest.mark.parametrize(
    ("after", "options"),
    [
        (None, {"grad_ys": {"predictions": np.eye(3, dtype=np.float32)[:2]}}),
        (None, {"overrides": {"Softmax": "2 * dy"}}),
        (lambda g, p: g.op("Log", p), {}),
        (lambda g, p: g.op("Square", p), {}),
    ],
    ids=["upstream", "override", "log", "square"],
)
def test_programs_with_other_gradients_have_no_note(client: gr.Client, after: Any, options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = client.evaluate(softmax_graph(after), {"x": X}, ys="predictions", xs="x", **options)
    assert r.notes == []
    assert np.abs(r.gradients["x"]).max() > 1e-3


def test_gradients_by_the_softmax_itself_have_no_note(client: gr.Client) -> None:
    r = client.evaluate(softmax_graph(), {"x": X}, ys="predictions", xs="softmax")
    assert r.notes == [] and r.gradients["softmax"].tolist() == np.ones((2, 3)).tolist()


def test_the_warning_names_the_line_of_the_caller_and_can_be_filtered(client: gr.Client) -> None:
    g = softmax_graph()
    frame = inspect.currentframe()
    assert frame is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = frame.f_lineno + 1
        client.evaluate(g, {"x": X}, ys="predictions", xs="x")
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", GradruleWarning)
        client.evaluate(g, {"x": X}, ys="predictions", xs="x")


def test_the_command_line_prints_notes(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    softmax_graph().save(tmp_path / "graph.pb")
    done = shell_in(tmp_path, server, monkeypatch, capsys)("explain", "graph.pb", "--y", "predictions", "--x", "x")
    assert "note: 'predictions' is the output of the softmax 'softmax'" in done.err
    assert ".py" not in done.err
    shell = shell_in(tmp_path, server, monkeypatch, capsys)
    words = ("programs", "compile", "graph.pb", "--y", "predictions", "--x", "x")
    assert "note: 'predictions' is the output" in shell(*words).out
    (note,) = shell(*words, "--json").json["notes"]
    assert note.startswith("'predictions' is the output of the softmax")
