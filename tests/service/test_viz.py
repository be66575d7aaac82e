"""Pictures of rules and results of a real server, and reports of progress."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

import gradrule as gr
from gradrule import viz
from tests.service.servers import RunningServer

DIGITS = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


def lines_of(ax: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in ax.lines}


def tanh_graph() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 5])
    g.reduce_sum(g.op_output("Tanh", x, name="y"), axis=[0, 1], name="z")
    return g


@pytest.mark.parametrize("how", ["name", "formula", "Rule", "RuleInfo", "method"])
def test_rule_is_drawn_as_it_computes(client: gr.Client, how: str) -> None:
    formula = "where(abs(x) <= 1, dy, 0)"
    rules: dict[str, Any] = {"name": "ste_sign", "formula": formula, "Rule": gr.Rule(formula)}
    if how in rules:
        ax = viz.plot_rule(client, rules[how], op_type="Sign", interval=(-2, 2))
    else:
        info = client.get_rule("ste_sign")
        ax = info.plot(client) if how == "method" else viz.plot_rule(client, info)
    line = lines_of(ax)["dx, dy = 1"]
    x, drawn = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    away = np.abs(np.abs(x) - 1) > 1e-6
    np.testing.assert_allclose(drawn[away], (np.abs(x) <= 1)[away])
    assert "input x" in ax.get_xlabel()


def test_check_is_drawn_for_a_correct_and_a_wrong_rule(client: gr.Client) -> None:
    ax = viz.plot_check(client, "dy / (1 + exp(-x))", "log1p(exp(x))")
    assert "holds" in ax.get_title()
    lines = lines_of(ax)
    x = np.asarray(lines["rule dy / (1 + exp(-x))"].get_xdata())
    np.testing.assert_allclose(
        lines["finite differences of log1p(exp(x))"].get_ydata(), 1 / (1 + np.exp(-x)), rtol=1e-6
    )
    assert "WRONG" in viz.plot_check(client, "1.01 * dy / (1 + exp(-x))", "Softplus").get_title()
    with pytest.raises(gr.errors.UnsupportedError, match="of=…"):
        viz.plot_check(client, "ste_sign")


def test_results_are_drawn_and_shown(client: gr.Client) -> None:
    g = tanh_graph()
    r = client.evaluate(g, {"x": DIGITS}, fetches=["y", "z"], ys="z", xs="x", overrides={"Tanh": "0.5 * dy"})
    figure = r.plot()
    drawn = {ax.get_title().split("\n")[0]: ax for ax in figure.axes if ax.get_title()}
    assert list(drawn) == ["output y", "output z", "gradient of x"]
    np.testing.assert_allclose(drawn["gradient of x"].images[0].get_array(), np.full((3, 5), 0.5))
    html = r._repr_html_()
    assert "[3, 5]" in html and "CPU:0" in html and "Tanh" in html
    assert r.digests.program[:12] in html and r.digests.program not in html
    explained = client.explain(g, {"x": DIGITS}, ys="z", xs="x", overrides={"Tanh": "0.5 * dy"})
    assert "data:image/svg+xml" in explained._repr_html_()
    assert [bar.get_width() for bar in explained.plot().patches][:2] == [1, 1]  # type: ignore[attr-defined]
    compared = client.compare(g, {"x": DIGITS}, ys="z", xs="x", overrides={"half": {"Tanh": "0.5 * dy"}})
    norms = lines_of(compared.plot())["half"].get_ydata()
    wanted = [row.norm for row in compared.rows if row.label == "half" and not row.is_x]
    np.testing.assert_allclose(norms, wanted)
    assert "half: differs from default first at" in compared._repr_html_()


def test_gallery_reports_each_rule_and_is_saved(client: gr.Client, tmp_path: Path) -> None:
    reports: list[gr.ProgressReport] = []
    page = viz.gallery(client, progress=reports.append)
    assert reports[-1].done == reports[-1].total == page.rules and reports[-1].is_finished
    path = page.save(tmp_path / "new")
    assert path == tmp_path / "new" / "index.html" and path.read_text() == page.html
    html = page._repr_html_()
    assert html.startswith("<iframe") and 'sandbox="allow-scripts"' in html and "<script" not in html


def test_map_uploads_compilation_and_training_report_progress(either: Any) -> None:
    reports: list[gr.ProgressReport] = []
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    rng = np.random.default_rng()
    w = g.variable("w", rng.normal(size=500_000).astype(np.float32))
    g.reduce_sum(g.op("Square", g.multiply(g.reduce_sum(w, axis=[0]), x)), axis=[0], name="loss")
    program = either.compile(g, fetches="loss", progress=reports.append)
    uploads = [report for report in reports if report.task == "uploading"]
    assert uploads[-1].done == uploads[-1].total == 2_000_000 and len(uploads) == 4
    assert [report.is_finished for report in reports if report.task == "compiling"] == [False, True]
    reports.clear()
    assert len(list(program.map([{"x": [1.0]}] * 5, 2, progress=reports.append))) == 5
    assert [report.done for report in reports] == [0, 1, 2, 3, 4, 5, 5]
    assert {(report.task, report.total) for report in reports} == {("running", 5)}
    reports.clear()
    with either.session(g, progress=reports.append) as session:
        losses = [session.step({"x": [1.0]}, "loss", gr.optimizers.SGD(1e-9)).loss.item() for _ in range(2)]
    assert [(report.done, report.values.get("loss")) for report in reports] == [
        (0, None), (1, losses[0]), (2, losses[1]), (2, losses[1]),
    ]  # fmt: skip
    reports.clear()
    either.upload(rng.normal(size=400_000), progress=reports.append)
    assert reports[-1].done == reports[-1].total == 3_200_000


def test_an_abandoned_map_ends_its_report(client: gr.Client) -> None:
    reports: list[gr.ProgressReport] = []
    program = client.compile(tanh_graph(), fetches="z")
    results = program.map(({"x": DIGITS} for _ in range(9)), progress=reports.append)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert (reports[-1].done, reports[-1].total, reports[-1].is_finished) == (1, None, True)


def test_commands_show_bars_on_a_terminal(server: RunningServer, tmp_path: Path) -> None:
    tanh_graph().save(tmp_path / "graph.pb")
    command = [sys.executable, "-m", "gradrule.cli", "programs", "compile", "graph.pb", "--fetch", "z", "--json"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "GRADRULE_TARGET": server.target}
    terminal, slave = pty.openpty()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=slave, timeout=60, check=False
    )
    os.close(slave)
    shown = b""
    # Reading a terminal without a writer is an error on Linux, and an end of file elsewhere.
    with contextlib.suppress(OSError):
        while more := os.read(terminal, 65536):
            shown += more
    os.close(terminal)
    assert done.returncode == 0, shown
    assert b"compiling" in shown
    assert json.loads(done.stdout)["name"].startswith("programs/")
