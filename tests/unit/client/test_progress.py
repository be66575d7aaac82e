"""Progress goes to a function, or to bars on a terminal; otherwise nothing happens."""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from typing import Any

import pytest

import gradrule as gr
from gradrule import _progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_function_gets_each_report_and_one_last() -> None:
    reports: list[gr.ProgressReport] = []
    with _progress.start(reports.append, "running", 3, "calls") as task:
        task.advance()
        task.advance(2, loss=0.5)
        task.close()
    assert [(report.done, report.is_finished, dict(report.values)) for report in reports] == [
        (0, False, {}), (1, False, {}), (3, False, {"loss": 0.5}), (3, True, {"loss": 0.5}),
    ]  # fmt: skip
    assert {(report.task, report.total, report.unit) for report in reports} == {("running", 3, "calls")}


def test_the_last_report_comes_after_an_error_too() -> None:
    reports: list[gr.ProgressReport] = []
    with pytest.raises(KeyError), _progress.start(reports.append, "running", None, "calls"):
        raise KeyError
    assert [report.is_finished for report in reports] == [False, True]


@pytest.mark.parametrize("progress", [None, False])
def test_nothing_is_loaded_or_drawn_when_off(progress: Any) -> None:
    assert _progress.start(progress, "running", 3, "calls") is _progress.SILENT


def test_bars_are_off_where_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert _progress.start(True, "running", 3, "calls") is _progress.SILENT
    monkeypatch.setattr(sys, "stderr", None)
    assert _progress.start(True, "running", 3, "calls") is _progress.SILENT


def test_tasks_share_one_display_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    outer = _progress.start(True, "training", None, "steps")
    outer.advance(loss=0.125)
    with _progress.start(True, "uploading", 2_000_000, "bytes") as inner:
        inner.advance(2_000_000)
    outer.close()
    shown = terminal.getvalue()
    assert "training" in shown and "1 steps, loss 0.125" in shown
    assert "2.0/2.0 MB" in shown
    # The display is closed: a further task opens a new one.
    with _progress.start(True, "running", 1, "calls") as task:
        task.advance()
    assert "1/1 calls" in terminal.getvalue()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(gr.errors.UnsupportedError, match=r"gradrule\[cli\]"):
        _progress.start(True, "running", 1, "calls")


def test_other_values_are_refused() -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="progress is True"):
        _progress.start("yes", "running", 1, "calls")


def test_a_notebook_needs_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else object())
    with pytest.raises(gr.errors.UnsupportedError, match=r"ipywidgets.*gradrule\[notebook\]"):
        _progress.start(True, "running", 1, "calls")
    # IPython on a terminal has no kernel.
    del shell.kernel
    assert not _progress.can_show()


def test_the_error_of_the_task_counts_more_than_one_of_the_function() -> None:
    def refuse_the_last(report: gr.ProgressReport) -> None:
        if report.is_finished:
            raise KeyError("the function")

    with pytest.raises(ValueError, match="the task"), _progress.start(refuse_the_last, "compiling", None, ""):
        raise ValueError("the task")
    with pytest.raises(KeyError, match="the function"), _progress.start(refuse_the_last, "compiling", None, ""):
        pass
