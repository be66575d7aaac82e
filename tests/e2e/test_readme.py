"""The quick starts of the README run against a real server as they are written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.contract.test_protos import Reflection
from tests.e2e.pages import ADDRESS, README, example_names, read_example, run_shell
from tests.node_client import run_node
from tests.service.servers import RunningServer


def blocks(language: str) -> str:
    """Returns the README's quick start in one language."""
    return read_example(README, language)


@pytest.fixture
def without_readme_rules(client: Any) -> Any:
    """Deletes the rules that the README creates."""
    yield
    for rule in client.list_rules("user"):
        if rule.name in ("QuantizeGrad", "HalfGrad"):
            client.delete_rule(rule.name)


@pytest.mark.usefixtures("without_readme_rules")
def test_python_quick_start(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(blocks("python").replace(ADDRESS, server.target), scope)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["[-1.  1.  1.]", "[0. 1. 0.]"]
    assert "QuantizeGrad" in printed[2]
    np.testing.assert_array_equal(scope["r"].gradients["x"], [1, 1, 0])
    scope["client"].close()


def test_node_quick_start(server: RunningServer) -> None:
    printed = run_node(blocks("node").replace(ADDRESS, server.target))
    assert "[ -1, 1, 1 ]" in printed and "[ 0, 1, 0 ]" in printed


@pytest.mark.usefixtures("without_readme_rules")
def test_shell_quick_start(server: RunningServer, tmp_path: Path) -> None:
    printed = run_shell(blocks("shell"), tmp_path, server.target)
    assert "HalfGrad" in printed and "active" in printed
    assert re.search(r"0\.5\b.*0\.5\b.*0\.5\b", printed), printed


def test_grpcurl_quick_start(channel: grpc.Channel) -> None:
    """grpcurl reads descriptors by reflection and its data as protobuf's JSON; this test does the same."""
    words = shlex.split(blocks("grpcurl"))
    request = json.loads(words[words.index("-d") + 1])
    service, _, method = words[-1].partition("/")
    reflection = Reflection(channel)
    reflection.load(service)
    answer = reflection.call(channel, service, method, request)
    assert answer["gradients"][0]["x"] == "x"
    assert answer["overrides"][0]["rule"] == "ste_sign"


def test_readme_is_short_and_has_no_other_examples() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert example_names(README) == {"python", "node", "shell", "grpcurl"}
    assert text.count("\n```") == 2 * text.count("<!-- quickstart: ")
