"""Tests splitting and logging the stderr of an engine."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gradrule_server.link.fork_server import FatalMessage, log_stderr


async def test_lines_that_arrive_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    stream = asyncio.StreamReader()
    with caplog.at_level(logging.INFO):
        logging_lines = asyncio.create_task(log_stderr(stream, "engine 7", FatalMessage()))
        for piece in (b"one\ntw", b"o\n\nth"):
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()
        await logging_lines
    assert [record.getMessage() for record in caplog.records] == [
        f"engine 7: {line}" for line in ("one", "two", "", "th")
    ]


async def test_reading_goes_on_behind_a_line_that_no_reader_of_lines_takes(caplog: pytest.LogCaptureFixture) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"z" * 300_000 + b"\nlast words")
    stream.feed_eof()
    with caplog.at_level(logging.INFO):
        await log_stderr(stream, "engine 7", FatalMessage())
    assert [len(record.getMessage()) < 5000 for record in caplog.records] == [True, True]
    assert caplog.records[-1].getMessage() == "engine 7: last words"


async def test_information_of_tensorflow_is_for_debugging_and_its_errors_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795358470.939667    2626 port.cc:153] oneDNN custom operations are on.\n"
        b"E0000 00:00:1795358470.939667    2626 platform.cc:52] failed call\n"
        b"F0000 00:00:1795358470.939667    2626 tensor.cc:1] Check failed: ok\n"
    )
    stream.feed_eof()
    fatal = FatalMessage()
    with caplog.at_level(logging.DEBUG):
        await log_stderr(stream, "engine 7", fatal)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG", "INFO", "INFO"]
    assert fatal.text == "Check failed: ok"
