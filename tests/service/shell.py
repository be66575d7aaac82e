"""Runs shell commands in a folder and returns their output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gradrule.cli.main import main
from tests.service.servers import RunningServer


@dataclass(frozen=True)
class CommandResult:
    """Holds the exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def rows(self, *words: str) -> list[str]:
        """Returns the lines of the output that contain all the words."""
        return [line for line in self.out.splitlines() if all(word in line for word in words)]


Shell = Callable[..., CommandResult]


def shell_in(
    folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """Returns a function that runs commands in the folder, with the server's address set."""
    monkeypatch.setenv("GRADRULE_TARGET", server.target)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> CommandResult:
        code = main(arguments)
        printed = capsys.readouterr()
        return CommandResult(code, printed.out, printed.err)

    return run
