"""The command line without rich: every command that prints a table prints plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradrule as gr
from gradrule.cli.examples import leaves
from gradrule.cli.main import build_parser
from tests.service.servers import RunningServer
from tests.service.shell import Shell, shell_in

_ENDS = ("--y", "y", "--x", "x")
_FED = ("--feed", "x=[-2, 0.5, 3]")

# Commands in their order of execution, each with words of its table.
TABLES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("rules", "create", "PlainHalf", "a * dy", "--param", "a=0.5"), ("rule PlainHalf", "formula", "a * dy")),
    (("rules", "show", "PlainHalf"), ("rule PlainHalf", "digest", "params")),
    (("rules", "list", "--kind", "user"), ("name", "PlainHalf", "a=0.5")),
    (("rules", "presets"), ("epsilon_plus", "overrides")),
    (("rules", "presets", "epsilon_plus"), ("preset epsilon_plus", "params")),
    (("rules", "sample", "PlainHalf", "--feed", "x=[1]", "--feed", "dy=[4]"), ("gradients", "float32", "[2.]")),
    (("rules", "check", "ste", "--of", "expr:x"), ("special values", "all that is claimed holds")),
    (("rules", "plot", "ste"), ("│", "└")),
    (("programs", "compile", "graph.pb", *_ENDS, "--name", "plain"), ("programs/", "own gradient")),
    (("programs", "list"), (" program", "plain")),
    (("programs", "show", "plain"), ("digest",)),
    (("evaluate", "graph.pb", *_FED, *_ENDS, "--override", "Sign=PlainHalf"), ("gradients", "[0.5 0.5 0.5]", "active")),
    (("explain", "graph.pb", *_ENDS, "--override", "Sign=PlainHalf"), ("rules", "op type", "PlainHalf")),
    (("compare", "graph.pb", *_FED, *_ENDS, "--map", "half=Sign=PlainHalf"), ("gradients of the xs", "tensor", "half")),
    (
        ("sweep", "graph.pb", *_FED, *_ENDS, "--map", "own=", "--map", "half=Sign=PlainHalf"),
        ("map", "norm", "difference"),
    ),
    (("status",), ("engine", "ready", "cache", "tenant")),
]
NO_TABLE = {
    ("completion",), ("demo",), ("gateway",), ("health",), ("programs", "delete"), ("registry",), ("rules", "delete"),
    ("rules", "gallery"), ("serve",), ("token",),
}  # fmt: skip


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import rich` fail, as in an installation of the client alone."""
    for name in {"rich", *(name for name in sys.modules if name.startswith("rich."))}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def shell(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_rich: None,
) -> Iterator[Shell]:
    """Runs commands in a folder with `graph.pb`."""
    run = shell_in(tmp_path, server, monkeypatch, capsys)
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    Path("graph.pb").write_bytes(g.to_bytes())
    yield run
    run("programs", "delete", "plain")
    run("rules", "delete", "PlainHalf")


def test_tables_are_plain_text(shell: Shell) -> None:
    for arguments, words in TABLES:
        done = shell(*arguments)
        assert (done.code, done.err) == (0, ""), (arguments, done.err)
        assert all(word in done.out for word in words), (arguments, done.out)


def test_every_command_is_checked() -> None:
    commands = {words for words, _ in leaves(build_parser())}
    shown = {leaf for leaf in commands for arguments, _ in TABLES if arguments[: len(leaf)] == leaf}
    assert commands - shown == NO_TABLE
