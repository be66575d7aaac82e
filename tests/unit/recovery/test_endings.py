"""How the end of an engine is classified and described."""

from __future__ import annotations

import signal
import socket

import pytest

from gradrule_server.recovery.endings import EndReason, end_from_exit, fatal_message

_ABSL = (
    "F0000 00:00:1732220000.123456 4711 conv_ops_impl.h:312] Check failed: input.dims() == 4 "
    "(2 vs. 4) in /home/runner/work/tensorflow/core/kernels/conv.cc:51 at 0x7f00dead"
)


@pytest.mark.parametrize(
    ("code", "ended_for", "fatal", "reason", "words"),
    [
        (-6, None, "Check failed: a", EndReason.CRASH, "SIGABRT: Check failed: a"),
        (-11, None, "", EndReason.CRASH, "SIGSEGV"),
        (-8, None, "", EndReason.CRASH, "SIGFPE"),
        (3, None, "", EndReason.CRASH, "exit code 3"),
        (0, None, "", EndReason.CRASH, "exit code 0"),
        (
            -6,
            None,
            "terminate called after throwing an instance of 'std::bad_alloc'",
            EndReason.MEMORY,
            "SIGABRT: term",
        ),
        (-9, None, "", EndReason.KILLED, "SIGKILL"),
        (-15, None, "", EndReason.KILLED, "SIGTERM"),
        (None, None, "", EndReason.CRASH, "its connection broke"),
        (-9, EndReason.MEMORY, "", EndReason.MEMORY, "--memory-limit"),
        (-9, EndReason.OVERRUN, "", EndReason.OVERRUN, "deadline"),
        (-9, EndReason.HEARTBEAT, "", EndReason.HEARTBEAT, "answered nothing"),
        (-200, None, "", EndReason.CRASH, "signal 200"),
    ],
)
def test_what_ended_it(
    code: int | None, ended_for: EndReason | None, fatal: str, reason: EndReason, words: str
) -> None:
    ending = end_from_exit(code, ended_for, fatal)
    assert ending.reason is reason
    assert words in str(ending)


@pytest.mark.parametrize(
    ("code", "ended_for", "reason"),
    [
        (-9, None, EndReason.MEMORY),
        (-15, None, EndReason.KILLED),
        (-11, None, EndReason.CRASH),
        (-9, EndReason.OVERRUN, EndReason.OVERRUN),
    ],
)
def test_a_process_killed_when_memory_is_short_ended_for_memory(
    code: int, ended_for: EndReason | None, reason: EndReason
) -> None:
    assert end_from_exit(code, ended_for, "", was_short_of_memory=True).reason is reason


@pytest.mark.parametrize(
    ("code", "fatal", "reason"),
    [
        (-signal.SIGSEGV, "", EndReason.MEMORY),
        (-signal.SIGABRT, "", EndReason.MEMORY),
        (-signal.SIGABRT, "Check failed: a", EndReason.CRASH),
        (-signal.SIGKILL, "", EndReason.KILLED),
    ],
)
def test_a_crash_without_a_message_counts_as_lack_of_memory_when_little_was_left(
    code: int, fatal: str, reason: EndReason
) -> None:
    assert end_from_exit(code, None, fatal, may_lack_memory=True).reason is reason


@pytest.mark.parametrize(
    "line",
    [
        "cannot allocate memory for thread-local data: ABORT",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "2026-01-01 00:00:00.000000: F external/xla/env.cc:74] Check failed: ret == 0 Thread creation via "
        "pthread_create() failed.",
    ],
)
def test_lack_of_memory_is_read_from_the_last_words_of_a_process(line: str) -> None:
    assert end_from_exit(127, None, fatal_message(line)).reason is EndReason.MEMORY


@pytest.mark.parametrize("reason", EndReason)
def test_only_reasons_that_a_graph_can_cause_are_blamable(reason: EndReason) -> None:
    ending = end_from_exit(-6 if reason is EndReason.CRASH else -9, None if reason is EndReason.CRASH else reason, "")
    assert ending.is_blamable is (reason in {EndReason.CRASH, EndReason.MEMORY, EndReason.HEARTBEAT})


def test_fatal_messages_contain_no_paths_and_addresses() -> None:
    text = fatal_message(_ABSL)
    assert text.startswith("Check failed: input.dims() == 4 (2 vs. 4)")
    for place in ("/home", "conv.cc", "0x7f", "4711"):
        assert place not in text


def test_fatal_message_in_the_older_log_format() -> None:
    line = "2026-01-02 03:04:05.678901: F tensorflow/core/framework/tensor.cc:852] Check failed: dtype() == 1"
    assert fatal_message(line) == "Check failed: dtype() == 1"


@pytest.mark.parametrize("line", ["", "W0000 00:00:1.2 3 a.cc:1] careful", "E0000 00:00:1.2 3 a.cc:1] bad", "FATAL"])
def test_other_lines_are_no_fatal_messages(line: str) -> None:
    assert fatal_message(line) == ""


def test_fatal_messages_contain_no_host_name_and_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-7")
    text = fatal_message("F0000 00:00:1.2 3 a.cc:1] on machine-7 " + "z" * 1000)
    assert "machine-7" not in text
    assert len(text) == 300
