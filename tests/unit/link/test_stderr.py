"""Lines of an engine's stderr, however long and however they arrive."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gradrule_server.link.stderr import LastWords, Lines, log_stderr


def test_lines_that_arrive_in_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\n\nth") == ["two", ""]
    assert lines.end() == ["th"]
    assert lines.end() == []


def test_a_long_line_is_cut_and_counted() -> None:
    lines = Lines(limit=4)
    assert lines.feed(b"abcdef") == []
    assert lines.feed(b"gh\nnext\n") == ["abcd… (4 bytes more)", "next"]


async def test_reading_goes_on_behind_a_line_that_no_reader_of_lines_takes(caplog: pytest.LogCaptureFixture) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"z" * 300_000 + b"\nlast words")
    stream.feed_eof()
    with caplog.at_level(logging.INFO):
        await log_stderr(stream, "engine 7", LastWords())
    assert [len(record.getMessage()) < 5000 for record in caplog.records] == [True, True]
    assert caplog.records[-1].getMessage() == "engine 7: last words"
