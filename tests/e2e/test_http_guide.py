"""The examples of the page about HTTP, and those in examples/http, run as they are written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pages import GUIDE, read_example
from tests.service.gateways import RunningGateway, running_gateway
from tests.service.servers import RunningServer

PAGE = GUIDE / "http.md"
EXAMPLES = Path(__file__).parents[2] / "examples" / "http"
ADDRESS = "http://localhost:8480"


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway(server.target) as running:
        yield running


@pytest.fixture
def signs(gateway: RunningGateway, client: Any) -> Iterator[str]:
    """Creates the program that the page's calls name, as the page does; returns what curl prints."""
    yield curl(read_example(PAGE, "program"), gateway)
    client.delete_program("signs")


def run(*command: str) -> str:
    """Runs a command and returns what it prints; `make http-tools` installs what is missing."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADRULE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curl(commands: str, gateway: RunningGateway) -> str:
    """Runs commands of the page."""
    return run("bash", "-e", "-c", commands.replace("curl ", "curl --silent ").replace(ADDRESS, gateway.url))


def test_curl_prints_what_the_page_says(gateway: RunningGateway) -> None:
    command, told = read_example(PAGE, "curl").strip().split("\n# ")
    assert json.loads(curl(command, gateway)) == json.loads(told)


def test_curl_sends_a_graph_and_calls_a_program(gateway: RunningGateway, signs: str) -> None:
    sent = json.loads(curl(read_example(PAGE, "graph"), gateway))
    program, called = json.JSONDecoder().raw_decode(signs)
    assert program["program"]["name"] == "programs/signs"
    for answer in (sent, json.loads(signs[called:])):
        assert answer["outputs"]["y"]["values"] == [-1, 1, 1]
        assert answer["gradients"]["x"]["values"] == [0, 1, 0]


def test_r(gateway: RunningGateway, signs: str) -> None:
    printed = run("Rscript", "-e", read_example(PAGE, "r").replace(ADDRESS, gateway.url))
    assert printed.split() == ["[1]", "0", "1", "0"]


def test_javascript(gateway: RunningGateway, signs: str) -> None:
    code = read_example(PAGE, "javascript").replace(ADDRESS, gateway.url)
    assert run("node", "--input-type=module", "--eval", code).split() == ["[", "0,", "1,", "0", "]"]


def test_the_problem_is_the_one_on_the_page(gateway: RunningGateway) -> None:
    assert gateway.get("/v1/rules/stx").json == json.loads(read_example(PAGE, "problem"))


@pytest.mark.parametrize("command", [("bash", "train.sh"), ("Rscript", "train.R")], ids=["shell", "R"])
def test_a_network_is_trained(gateway: RunningGateway, command: tuple[str, str]) -> None:
    if command[0] == "bash" and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    printed = run(command[0], str(EXAMPLES / command[1]), gateway.url)
    accuracies = [float(text) for text in re.findall(r"accuracy (\S+)", printed)]
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.85, printed


def test_the_network_learns_nothing_without_its_rule(gateway: RunningGateway) -> None:
    """TensorFlow's gradient of Sign is zero: the weights before it would not change."""
    spec = json.loads((EXAMPLES / "network.json").read_text())["spec"] | {"overrides": []}
    feeds = {"x": [[0.5, -0.5]], "target": [[1]], "w1": [[0.1] * 16] * 2, "b1": [0] * 16, "w2": [[1]] * 16, "b2": [0]}
    gradients = gateway.post("/v1/evaluate", {"spec": spec, "feeds": feeds}).json["gradients"]
    assert gradients["w1"]["values"] == [[0] * 16] * 2
    assert gradients["b2"]["values"] != [0]
