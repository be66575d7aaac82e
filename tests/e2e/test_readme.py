"""Every quick start of the README is run as it stands there, against a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from tests.contract.test_protos import Reflection
from tests.service.servers import RunningServer
from tests.service.test_node_client import NODE_CLIENT, npm

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"<!-- quickstart: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
_ADDRESS = "localhost:8470"


def blocks(language: str) -> str:
    """All of the README's quick-start code in one language."""
    found = [code for name, code in _BLOCK.findall((ROOT / "README.md").read_text()) if name == language]
    assert found, f"the README has no quick start for {language}"
    return "\n".join(found)


@pytest.fixture
def without_readme_rules(client: Any) -> Any:
    """The rules that the README creates, taken away again."""
    yield
    for rule in client.list_rules("user"):
        if rule.name in ("QuantizeGrad", "HalfGrad"):
            client.delete_rule(rule.name)


@pytest.mark.usefixtures("without_readme_rules")
def test_python(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    exec(blocks("python").replace(_ADDRESS, server.target), scope)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["[-1.  1.  1.]", "[0. 1. 0.]"]
    assert "QuantizeGrad" in printed[2]
    np.testing.assert_array_equal(scope["r"].gradients["x"], [1, 1, 0])
    scope["client"].close()


def test_derivatives_are_those_beside_the_code(client: Any) -> None:
    code = blocks("derivatives")
    scope: dict[str, Any] = {"gr": gr, "client": client}
    seen = 0
    for line in code.splitlines():
        statement, _, told = line.partition("  # ")
        exec(statement, scope)
        numbers = re.findall(r"-?\d+\.", told)
        if statement.startswith("client."):
            assert [float(number) for number in numbers] == np.ravel(eval(statement, scope)).tolist()
            seen += 1
    assert seen == 4
    scope["p"].delete()


def test_the_session_trains(client: Any) -> None:
    scope: dict[str, Any] = {"gr": gr, "client": client}
    exec(blocks("session"), scope)
    assert scope["losses"][-1] == 0.0 < scope["losses"][0]
    assert np.sign(scope["trained"].variables["w"]).ravel().tolist() == [1.0, -1.0]


def test_models(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"gr": gr, "client": client}
    code = blocks("models")
    exec(code, scope)
    assert scope["r"].gradients["score/kernel"].shape == (3, 2)
    loaded = gr.load("exported")
    assert (list(loaded.inputs), len(loaded.outputs), len(loaded.variables)) == (["image"], 1, 2)
    seen = 0
    for line in code.splitlines():
        statement, _, told = line.partition("  # ")
        if statement.startswith("client."):
            numbers = [float(number) for number in re.findall(r"-?\d+\.\d*", told)]
            assert numbers == np.ravel(eval(statement, scope)).tolist()
            seen += 1
    assert seen == 3


def test_overrides_are_ones_that_a_server_knows(client: Any) -> None:
    scope: dict[str, Any] = {"gr": gr}
    exec(blocks("overrides"), scope)
    presets = {preset.name for preset in client.list_presets()}
    for override in scope["overrides"]:
        if isinstance(override, gr.Preset):
            assert override.name in presets
        elif override.rule != "default":
            assert client.get_rule(override.rule)


def test_node(server: RunningServer) -> None:
    npm("run", "build")
    script = NODE_CLIENT / f"readme-{os.getpid()}.mjs"
    script.write_text(blocks("node").replace(_ADDRESS, server.target))
    try:
        done = subprocess.run(
            ["node", script.name], cwd=NODE_CLIENT, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        script.unlink()
    assert done.returncode == 0, done.stderr
    assert "[ -1, 1, 1 ]" in done.stdout and "[ 0, 1, 0 ]" in done.stdout


@pytest.mark.usefixtures("without_readme_rules")
def test_shell(server: RunningServer, tmp_path: Path) -> None:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    (tmp_path / "graph.pb").write_bytes(g.to_bytes())
    command = tmp_path / "bin" / "gradrule"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gradrule.cli "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "GRADRULE_TARGET": server.target,
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["sh", "-e", "-c", blocks("shell")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "HalfGrad" in done.stdout and "active" in done.stdout
    assert re.search(r"0\.5\b.*0\.5\b.*0\.5\b", done.stdout), done.stdout


def test_grpcurl(channel: grpc.Channel) -> None:
    """grpcurl reads descriptors by reflection and its data as protobuf's JSON: this does the same."""
    words = shlex.split(blocks("grpcurl"))
    request = json.loads(words[words.index("-d") + 1])
    service, _, method = words[-1].partition("/")
    reflection = Reflection(channel)
    reflection.load(service)
    answer = reflection.call(channel, service, method, request)
    assert answer["gradients"][0]["x"] == "x"
    assert answer["overrides"][0]["rule"] == "ste_sign"
