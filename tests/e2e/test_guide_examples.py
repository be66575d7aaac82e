"""The examples of docs/guide run against a real server as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.e2e.pages import ADDRESS, GUIDE, example_names, read_example
from tests.service.guarded import Guarded

TESTED = {
    "compression.md": {"compression"},
    "derivatives.md": {"derivatives"},
    "explaining.md": {"compare"},
    "models.md": {"connect", "models"},
    "operating.md": {"credentials"},
    "overrides.md": {"overrides", "keras"},
    "rules.md": {"rules"},
    "training.md": {"session", "remote_layer"},
    "writing-rules.md": {"python", "shell"},  # in test_guide.py
}


def test_every_python_example_of_the_guide_is_run() -> None:
    for page in GUIDE.glob("*.md"):
        assert example_names(page) == TESTED.get(page.name, set()), page.name
        text = page.read_text(encoding="utf-8")
        unmarked = re.findall(r"(?<! -->)\n```(?:python|sh)\n.*", text)
        assert not unmarked, f"{page.name}: {unmarked}"


@pytest.fixture
def signs() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.reduce_sum(g.op("Sign", g.op("Tanh", x, name="h"), name="s") * 2.0, axis=[0], name="loss")
    return g


@pytest.fixture
def keras() -> Any:
    return pytest.importorskip("keras")


def test_client(server: Any) -> None:
    scope: dict[str, Any] = {}
    exec(read_example(GUIDE / "models.md", "connect").replace(ADDRESS, server.target), scope)
    assert scope["client"].list_rules("builtin")
    scope["client"].close()


def test_derivatives_equal_those_beside_the_code(client: Any) -> None:
    code = read_example(GUIDE / "derivatives.md", "derivatives")
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


def test_session_trains(client: Any) -> None:
    scope: dict[str, Any] = {"gr": gr, "client": client}
    exec(read_example(GUIDE / "training.md", "session"), scope)
    assert scope["losses"][-1] == 0.0 < scope["losses"][0]
    assert np.sign(scope["trained"].variables["w"]).ravel().tolist() == [1.0, -1.0]


def test_models(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"gr": gr, "client": client}
    code = read_example(GUIDE / "models.md", "models")
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


def test_overrides_are_known_to_a_server(client: Any) -> None:
    scope: dict[str, Any] = {"gr": gr}
    exec(read_example(GUIDE / "overrides.md", "overrides"), scope)
    presets = {preset.name for preset in client.list_presets()}
    for override in scope["overrides"]:
        if isinstance(override, gr.Preset):
            assert override.name in presets
        elif override.rule != "default":
            assert client.get_rule(override.rule)


@pytest.fixture
def without_guide_rules(client: Any) -> Iterator[None]:
    """Deletes the rules that the guide creates."""
    yield
    for rule in client.list_rules("user"):
        if rule.name in ("Surrogate", "ProductGrad"):
            client.delete_rule(rule.name)


@pytest.mark.usefixtures("without_guide_rules")
def test_rules(client: Any) -> None:
    exec(read_example(GUIDE / "rules.md", "rules"), {"gr": gr, "client": client})
    assert {"Surrogate", "ProductGrad"} <= {rule.name for rule in client.list_rules("user")}


def test_keras_layers(client: Any, keras: Any) -> None:
    image = keras.Input((4,), name="image")
    h = keras.layers.Dense(3, activation="relu", name="conv1")(image)
    h = keras.layers.Activation("relu", name="first")(h)
    h = keras.layers.Activation("relu", name="second")(keras.layers.Dense(3, name="dense")(h))
    model = keras.Model(image, keras.layers.Dense(2, name="predictions")(h))
    scope: dict[str, Any] = {"gr": gr, "keras": keras, "client": client, "model": model}
    scope["x"] = np.ones((1, 4), np.float32)
    exec(read_example(GUIDE / "overrides.md", "keras"), scope)
    assert scope["r"].gradients["image"].shape == (1, 4)
    assert scope["lrp"]


def test_remote_layer(client: Any, keras: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import tensorflow as tf

    rows = np.random.default_rng(0)
    scope: dict[str, Any] = {"gr": gr, "keras": keras, "tf": tf, "client": client}
    scope |= {"x": rows.normal(size=(8, 4)).astype("f"), "y": rows.normal(size=(8, 10)).astype("f")}
    exec(read_example(GUIDE / "training.md", "remote_layer"), scope)
    assert "loss" in capsys.readouterr().out


def test_compare(client: Any, signs: gr.Graph) -> None:
    scope: dict[str, Any] = {"gr": gr, "client": client, "graph": signs, "feeds": {"x": [-2.0, 0.25]}}
    exec(read_example(GUIDE / "explaining.md", "compare"), scope)
    assert scope["found"].first_differences["ste"].tensor == "h"


def test_compression(client: Any, server: Any, signs: gr.Graph) -> None:
    scope: dict[str, Any] = {"gr": gr, "target": server.target, "feeds": {"x": [-2.0, 0.25]}}
    scope["program"] = client.compile(signs, fetches="loss")
    exec(read_example(GUIDE / "compression.md", "compression"), scope)
    scope["client"].close()


def test_credentials(guarded: Guarded) -> None:
    code = read_example(GUIDE / "operating.md", "credentials")
    for written, real in (
        ("gradrule.example.org:8470", guarded.running.target),
        ("ca.crt", str(guarded.authority.file)),
        ("gr_…", guarded.new_token("reader")),
    ):
        assert written in code
        code = code.replace(written, real)
    scope: dict[str, Any] = {"gr": gr}
    exec(code, scope)
    assert scope["client"].list_rules("builtin")
    scope["client"].close()
