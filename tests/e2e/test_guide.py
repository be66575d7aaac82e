"""The code of the guide to writing rules prints what its comments say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pages import ADDRESS, GUIDE, read_example, run_shell
from tests.service.servers import RunningServer

_PRINTED = re.compile(r"^\s*print\(.*\) +# (.*)$", re.MULTILINE)
_RULES = ("Triangle", "RunningSum")


def blocks(language: str) -> str:
    return read_example(GUIDE / "writing-rules.md", language)


@pytest.fixture
def guide_rules(client: Any) -> Iterator[None]:
    """Creates the rules of the guide for the shell, and deletes them afterwards."""
    client.create_rule("Triangle", "dy * gamma * maximum(0, 1 - abs(x))", params={"gamma": 0.3})
    yield
    for rule in client.list_rules("user"):
        if rule.name in _RULES:
            client.delete_rule(rule.name)


@pytest.mark.usefixtures("guide_rules")
def test_python_examples_print_their_comments(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")
    scope: dict[str, Any] = {}
    exec(code.replace(ADDRESS, server.target), scope)
    scope["client"].close()
    # The comment of a line that prints several times separates the outputs with |.
    expected = [part for line in _PRINTED.findall(code) for part in line.split(" | ")]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.usefixtures("guide_rules")
def test_shell_examples_run(server: RunningServer, tmp_path: Path) -> None:
    printed = run_shell(blocks("shell"), tmp_path, server.target)
    assert printed.count("all that is claimed holds") == 2
    assert "dx, dy = 1" in printed
