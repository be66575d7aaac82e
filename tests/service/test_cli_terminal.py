"""The tables of the command line on a terminal: real processes in pseudo-terminals of 80 and 120 columns."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradrule as gr
from tests.service.servers import RunningServer, server_environment
from tests.service.test_cli_plain import TABLES

COLUMNS = (80, 120)
LONG_NAME = "tower/" + "/".join(f"block{number}" for number in range(12)) + "/sign"
_ENDS = ("--y", "y", "--x", "x")
_COMMANDS = [
    *(arguments for arguments, _ in TABLES if arguments != ("status",)),
    ("status", "--once"),
    ("rules", "list"),
    ("explain", "graph.pb", *_ENDS, "--override", "Sign=ste_sing", "--override", "Relu=ste_sign"),
    ("explain", "long.pb", *_ENDS, "--override", "Sign=ste_sign"),
    ("evaluate", "long.pb", "--feed", "x=[1, 2]", *_ENDS, "--override", "Sign=ste_sign"),
]
_LINES_ARE_CUT = ("rules", "list")

# Runs each command twice, on the terminal and in memory, and writes the texts of the latter to a file.
_RUNNER = """
import contextlib, io, json, sys
from gradrule.cli.main import main
texts = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as kept:
        main(arguments)
    texts.append(kept.getvalue())
    main(arguments)
    print("END OF COMMAND", flush=True)
with open(sys.argv[2], "w") as file:
    json.dump(texts, file)
"""
Shown = tuple[int, dict[tuple[str, ...], tuple[str, str]]]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = re.compile(r"[\d.,:;e+-]+")


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, command: list[str], columns: int, folder: Path, target: str) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = server_environment({"GRADRULE_TARGET": target, "TERM": "xterm-256color"})
        environment.pop("COLUMNS", None)
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=writer, stdout=writer, stderr=subprocess.DEVNULL, cwd=folder, env=environment
        )
        os.close(writer)

    def parts(self) -> Iterator[str]:
        """Yields what the process writes, without escape sequences, until it ends."""
        decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
        while True:
            try:
                found = os.read(self._reader, 65536)
            except OSError:  # Linux reports the end of a pseudo-terminal as EIO.
                return
            # A read may end within a character or an escape sequence.
            text = rest + decoder.decode(found)
            start = text.rfind("\x1b")
            end = len(text) if start < 0 or _ESCAPES.match(text, start) else start
            text, rest = text[:end], text[end:]
            yield _ESCAPES.sub("", text).replace("\r\n", "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._reader)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with `graph.pb`, and `long.pb` with a node whose name is longer than 80 characters."""
    folder = tmp_path_factory.mktemp("terminal")
    for file, name in (("graph.pb", "sign"), ("long.pb", LONG_NAME)):
        g = gr.Graph()
        g.identity(g.op("Sign", g.placeholder("x", "float32", [None]), name=name), name="y")
        (folder / file).write_bytes(g.to_bytes())
    return folder


@pytest.fixture(scope="module", params=COLUMNS)
def shown(request: Any, server: RunningServer, folder: Path) -> Iterator[Shown]:
    """Returns the width, and the text on the terminal and the text in memory of each command."""
    columns: int = request.param
    command = [sys.executable, "-c", _RUNNER, json.dumps(_COMMANDS), "texts.json"]
    terminal = Terminal(command, columns, folder, server.target)
    try:
        texts = "".join(terminal.parts()).split("END OF COMMAND\n")
        assert terminal.process.wait() == 0, texts
    finally:
        terminal.close()
    kept = json.loads((folder / "texts.json").read_text())
    yield columns, dict(zip(_COMMANDS, zip(texts, kept, strict=False), strict=True))
    with gr.connect(server.target) as client:
        client.delete_program("plain")
        client.delete_rule("PlainHalf")


def test_words_are_whole_and_lines_fit(shown: Shown) -> None:
    columns, texts = shown
    for command, (on_terminal, kept) in texts.items():
        assert max(map(len, on_terminal.splitlines())) <= columns, (command, on_terminal)
        if command[:2] != _LINES_ARE_CUT:
            # Times and sizes may differ between two runs, words may not.
            expected = {word for word in kept.split() if len(word) <= columns - 20 and not _NUMBER.fullmatch(word)}
            assert not (expected - set(on_terminal.split()) - _frames(kept)), (command, on_terminal)


def test_rules_list_shows_whole_names(shown: Shown, server: RunningServer) -> None:
    _, texts = shown
    text = texts["rules", "list"][0]
    with gr.connect(server.target) as client:
        rules = [rule for rule in client.list_rules() if rule.kind != "op"]
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert all(rule.name in lines and (rule.family or rule.kind) in lines[rule.name] for rule in rules), text
    assert "The gradient of abs," in lines["abs_binary_sign"]
    assert "gradrule rules show NAME" in text


def test_names_longer_than_a_line_are_folded(shown: Shown) -> None:
    columns, texts = shown
    for command, (text, _) in texts.items():
        if "long.pb" in command:
            joined = re.sub(r"\s+", "", text)
            assert (LONG_NAME in joined) if columns == 80 else (LONG_NAME in text), text
            assert "ste_sign" in text
            assert "active" in text


def _frames(text: str) -> set[str]:
    return {word for word in text.split() if set(word) <= set("─")}


def test_live_status_fits(server: RunningServer, folder: Path) -> None:
    command = [sys.executable, "-m", "gradrule.cli", "status", "--interval", "0.1"]
    terminal = Terminal(command, 80, folder, server.target)
    try:
        text, is_interrupted = "", False
        for part in terminal.parts():
            text += part
            # One read may bring several updates.
            if text.count("TensorFlow") >= 3 and not is_interrupted:
                is_interrupted = True
                terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait() == 130
    finally:
        terminal.close()
    assert max(len(line.strip("\r")) for line in re.split(r"[\r\n]+", text)) <= 80
    for word in ("engine", "programs", "waiting", "ready", "default"):
        assert re.search(rf"\b{word}\b", text), text
