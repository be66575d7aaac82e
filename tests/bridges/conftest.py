"""Provides the programs that the tests of all frameworks use."""

from __future__ import annotations

from typing import Any

import pytest

import gradrule as gr
from tests.bridges import examples


def pytest_configure(config: pytest.Config) -> None:
    # PyMC imports ArviZ, which warns once a day of its next release.
    config.addinivalue_line("filterwarnings", r"ignore:\s*ArviZ is undergoing a major refactor:FutureWarning")


@pytest.fixture(scope="session")
def smooth(client: Any) -> Any:
    """Returns the program of `examples.smooth_graph` in float64: ys y and z, xs x and w."""
    return client.compile(examples.smooth_graph(), fetches=["y", "z"], ys=["y", "z"], xs=["x", "w"])


@pytest.fixture(scope="session")
def binary(client: Any) -> Any:
    """Returns the program of a layer of signs in float32 with a straight-through estimator: y loss, xs x and w."""
    return client.compile(
        examples.binary_graph(), fetches=["loss"], ys=["loss"], xs=["x", "w"], overrides={"Sign": "ste_sign"}
    )


@pytest.fixture(scope="session")
def digits_network(client: Any) -> Any:
    """Returns the compiled binary network of `examples.digits_network`, and the initial values of its weights."""
    network = examples.digits_network()
    program = client.compile(
        network.graph,
        fetches=["loss", "logits"],
        ys=["loss"],
        xs=list(network.weights),
        overrides={"Sign": "ste_sign"},
    )
    return program, network.weights


@pytest.fixture(scope="session")
def dropout(client: Any) -> Any:
    """Returns a program that multiplies x by random zeros and twos, drawn anew in each call: y y, x x."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    drawn = g.op_output("RandomUniform", g.op_output("Shape", x), dtype="float32")
    mask = g.op_output("Cast", g.op_output("Greater", drawn, g.constant(0.5, dtype="float32")), DstT="float32")
    g.multiply(x, mask * 2.0, name="y")
    return client.compile(g, fetches=["y"], ys=["y"], xs=["x"])
