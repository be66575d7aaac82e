"""The command line as a person uses it: commands in a folder, and what they leave."""

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
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def rows(self, *words: str) -> list[str]:
        """Lines of the output that hold all the words."""
        return [line for line in self.out.splitlines() if all(word in line for word in words)]


Shell = Callable[..., Done]


def shell_in(
    folder: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """Runs commands in the folder, at the server."""
    monkeypatch.setenv("GRADRULE_TARGET", server.target)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> Done:
        code = main(arguments)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return run
