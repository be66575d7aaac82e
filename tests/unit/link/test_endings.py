"""How an engine's end is told."""

from __future__ import annotations

import socket

import pytest

from gradrule_server.link.endings import Reason, ending_of, fatal_text

_ABSL = (
    "F0000 00:00:1732220000.123456 4711 conv_ops_impl.h:312] Check failed: input.dims() == 4 "
    "(2 vs. 4) in /home/runner/work/tensorflow/core/kernels/conv.cc:51 at 0x7f00dead"
)


@pytest.mark.parametrize(
    ("code", "ended_for", "fatal", "reason", "words"),
    [
        (-6, None, "Check failed: a", Reason.CRASH, "SIGABRT: Check failed: a"),
        (-11, None, "", Reason.CRASH, "SIGSEGV"),
        (-8, None, "", Reason.CRASH, "SIGFPE"),
        (3, None, "", Reason.CRASH, "exit code 3"),
        (0, None, "", Reason.CRASH, "exit code 0"),
        (-6, None, "terminate called after throwing an instance of 'std::bad_alloc'", Reason.MEMORY, "SIGABRT: term"),
        (-9, None, "", Reason.KILLED, "SIGKILL"),
        (-15, None, "", Reason.KILLED, "SIGTERM"),
        (None, None, "", Reason.CRASH, "its connection broke"),
        (-9, Reason.MEMORY, "", Reason.MEMORY, "--memory-limit"),
        (-9, Reason.OVERRUN, "", Reason.OVERRUN, "deadline"),
        (-9, Reason.HEARTBEAT, "", Reason.HEARTBEAT, "answered nothing"),
        (-200, None, "", Reason.CRASH, "signal 200"),
    ],
)
def test_what_ended_it(code: int | None, ended_for: Reason | None, fatal: str, reason: Reason, words: str) -> None:
    ending = ending_of(code, ended_for, fatal)
    assert ending.reason is reason
    assert words in str(ending)


@pytest.mark.parametrize(
    ("code", "ended_for", "reason"),
    [
        (-9, None, Reason.MEMORY),
        (-15, None, Reason.KILLED),
        (-11, None, Reason.CRASH),
        (-9, Reason.OVERRUN, Reason.OVERRUN),
    ],
)
def test_who_is_killed_where_no_memory_is_left_took_too_much(
    code: int, ended_for: Reason | None, reason: Reason
) -> None:
    assert ending_of(code, ended_for, "", was_short=True).reason is reason


@pytest.mark.parametrize("reason", Reason)
def test_only_what_a_graph_can_do_is_held_against_it(reason: Reason) -> None:
    ending = ending_of(-6 if reason is Reason.CRASH else -9, None if reason is Reason.CRASH else reason, "")
    assert ending.is_blamable is (reason in {Reason.CRASH, Reason.MEMORY, Reason.HEARTBEAT})


def test_what_tensorflow_said_is_told_without_places() -> None:
    text = fatal_text(_ABSL)
    assert text.startswith("Check failed: input.dims() == 4 (2 vs. 4)")
    for place in ("/home", "conv.cc", "0x7f", "4711"):
        assert place not in text


def test_the_older_form_of_a_fatal_line() -> None:
    line = "2026-01-02 03:04:05.678901: F tensorflow/core/framework/tensor.cc:852] Check failed: dtype() == 1"
    assert fatal_text(line) == "Check failed: dtype() == 1"


@pytest.mark.parametrize("line", ["", "W0000 00:00:1.2 3 a.cc:1] careful", "E0000 00:00:1.2 3 a.cc:1] bad", "FATAL"])
def test_other_lines_tell_of_no_end(line: str) -> None:
    assert fatal_text(line) == ""


def test_neither_host_names_nor_long_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-7")
    text = fatal_text("F0000 00:00:1.2 3 a.cc:1] on machine-7 " + "z" * 1000)
    assert "machine-7" not in text
    assert len(text) == 300
