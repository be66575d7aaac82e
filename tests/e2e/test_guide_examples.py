"""The examples of docs/guide run against a real server as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.e2e.pages import ADDRESS, GUIDE, example_names, read_example, run_shell
from tests.node_client import node_version, run_node
from tests.service.certificates import Authority
from tests.service.guarded import Guarded

TESTED = {
    "command-line.md": {"error", "stdin", "completion"},
    "compression.md": {"compression", "node"},
    "derivatives.md": {"derivatives"},
    "explaining.md": {"compare", "explain"},
    "frameworks.md": {
        "program",
        "torch",
        "surrogate",
        "override",
        "jax",
        "scipy",
        "pymc",
        "tf",
    },  # in tests/bridges/test_guide.py
    "http.md": {"curl", "graph", "program", "r", "javascript", "julia", "problem"},  # in test_http_guide.py
    "models.md": {"connect", "from_torch", "models"},
    "notebooks.md": {"start", "pictures", "saliency", "progress"},
    "operating.md": {"credentials", "serve", "status"},
    "other-languages.md": {
        "go",
        "java",
        "cpp",
        "csharp",
        "ruby",
        "header",
    },  # in tests/contract and tests/service/test_call_paths.py
    "overrides.md": {"overrides", "keras", "sweep", "sweep_shell"},
    "ray.md": {"run", "connect", "nginx"},  # in tests/cluster/test_ray.py
    "rules.md": {"rules"},
    "settings.md": {"server"},
    "training.md": {"session", "remote_layer"},
    "writing-rules.md": {"python", "shell"},  # in test_guide.py
}


def test_every_example_of_the_guide_is_run_or_says_why_not() -> None:
    for page in GUIDE.glob("*.md"):
        assert example_names(page) == TESTED.get(page.name, set()), page.name
        text = page.read_text(encoding="utf-8")
        unmarked = re.findall(r"(?<! -->)\n```\w+\n.*", text)
        assert not unmarked, f"{page.name}: {unmarked}"
        outside_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert not re.findall(r"\n\n    .*", outside_blocks), f"{page.name} has code without a mark"


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
    assert scope["slopes"].shape == (2, 1, 2, 1)
    assert scope["slopes"].ravel().tolist() == [1.0, 2.0, 3.0, -1.0]
    assert scope["first"].ravel().tolist() == [1.0, 2.0]


def test_models(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"gr": gr, "client": client}
    code = read_example(GUIDE / "models.md", "models")
    exec(code, scope)
    assert scope["r"].gradients["score/kernel"].shape == (3, 2)
    of_words = scope["of_text"].gradients["embedding/embeddings"]
    assert of_words.indices.tolist() == [2, 1, 3]
    loaded = gr.load("exported")
    assert (list(loaded.inputs), len(loaded.outputs), len(loaded.variables)) == (["image"], 1, 2)
    seen = 0
    for line in code.splitlines():
        statement, _, told = line.partition("  # ")
        if statement.startswith("client."):
            numbers = [float(number) for number in re.findall(r"-?\d+\.\d*", told)]
            assert numbers == np.ravel(eval(statement, scope)).tolist()
            seen += 1
    assert seen == 4


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


@pytest.fixture
def scored_image() -> tuple[gr.Graph, dict[str, Any]]:
    """Returns a graph image → relu → relu → logits → score, and an image."""
    rng = np.random.default_rng(0)
    g = gr.Graph()
    h: Any = g.placeholder("image", "float32", [None, 6])
    for shape in ((6, 5), (5, 4)):
        h = g.op("Relu", g.matmul(h, rng.normal(size=shape).astype(np.float32)))
    logits = g.matmul(h, rng.normal(size=(4, 3)).astype(np.float32), name="logits")
    g.reduce_sum(logits * np.float32([1, -2, 1]), axis=[0, 1], name="score")
    return g, {"image": rng.normal(size=(2, 6)).astype(np.float32)}


def test_sweep(client: Any, scored_image: tuple[gr.Graph, dict[str, Any]]) -> None:
    graph, feeds = scored_image
    scope: dict[str, Any] = {"gr": gr, "client": client, "graph": graph, "feeds": feeds}
    exec(read_example(GUIDE / "overrides.md", "sweep"), scope)
    heat = scope["heat"]
    assert list(heat) == ["own", "guided", "lrp", "guided at 0", "guided at 1", 1e-6, 1e-3, 1.0]
    for label, overrides in scope["maps"].items():
        r = client.evaluate(graph, feeds, ys="score", xs="image", overrides=overrides)
        np.testing.assert_array_equal(heat[label], r.gradients["image"])


def test_sweep_in_the_shell(
    server: Any, scored_image: tuple[gr.Graph, dict[str, Any]], tmp_path: Path, client: Any
) -> None:
    graph, feeds = scored_image
    (tmp_path / "graph.pb").write_bytes(graph.to_bytes())
    np.save(tmp_path / "image.npy", feeds["image"])
    printed = run_shell(read_example(GUIDE / "overrides.md", "sweep_shell"), tmp_path, server.target)
    assert all(label in printed for label in ("own", "guided", "lrp", "@linear.eps=1e-06", "@linear.eps=1"))
    guided = client.evaluate(graph, feeds, ys="score", xs="image", overrides={"Relu": "guided_relu"})
    with np.load(tmp_path / "heat.npz") as arrays:
        np.testing.assert_array_equal(arrays["guided/gradients/image"], guided.gradients["image"])


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


def test_notebooks(client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gr, "local", lambda: client)
    shown: list[Any] = []
    scope: dict[str, Any] = {"display": shown.append}
    exec(read_example(GUIDE / "notebooks.md", "start"), scope)
    exec(read_example(GUIDE / "notebooks.md", "pictures"), scope)
    result, rule, check = (
        (picture if hasattr(picture, "get_title") else picture.axes[0]).get_title().replace("\n", " ")
        for picture in shown
    )
    assert result.startswith("gradient of x") and rule == "atan (alpha=3)"
    assert "as the gradient of Softplus: holds" in check
    rng = np.random.default_rng(0)
    scope |= {"images": rng.random((2, 28, 28, 3), np.float32), "kernel": rng.normal(size=(3, 3, 3, 4)).astype("f")}
    exec(read_example(GUIDE / "notebooks.md", "saliency"), scope)
    assert scope["gradient"].shape == (2, 28, 28, 3)
    exec(read_example(GUIDE / "notebooks.md", "progress"), scope)
    assert len(scope["results"]) == 3
    assert capsys.readouterr().out.splitlines() == [f"running {done} 3" for done in (0, 1, 2, 3, 3)]


def test_compression(client: Any, server: Any, signs: gr.Graph) -> None:
    scope: dict[str, Any] = {"gr": gr, "target": server.target, "feeds": {"x": [-2.0, 0.25]}}
    scope["program"] = client.compile(signs, fetches="loss")
    exec(read_example(GUIDE / "compression.md", "compression"), scope)
    scope["client"].close()


def test_compression_in_node(client: Any, server: Any, signs: gr.Graph) -> None:
    program = client.compile(signs, fetches="loss")
    code = read_example(GUIDE / "compression.md", "node")
    if node_version() < (22, 15):  # Without zstd: client/node/test/packing.test.ts tests that it is refused.
        assert code.count('compression: "zstd", ') == 1
        code = code.replace('compression: "zstd", ', "")
    printed = run_node(_node_module(code, server.target, program.name))
    assert printed.strip() == "loss 0"


def _node_module(code: str, target: str, program: str) -> str:
    """Returns a module that runs an example with a target, a program and feeds."""
    connected, _, evaluated = code.partition("\n")
    return "\n".join(
        [
            'import { connect } from "gradrule";',
            f"const target = {json.dumps(target)};",
            connected,
            f"const program = await client.program({json.dumps(program)});",
            "const feeds = { x: [-2, 0.5] };",
            evaluated,
            "const { outputs } = await program.evaluate(feeds);",
            'console.log("loss", outputs.loss.toArray());',
            "client.close();",
        ]
    )


def test_explain(server: Any, signs: gr.Graph, tmp_path: Path) -> None:
    (tmp_path / "graph.pb").write_bytes(signs.to_bytes())
    assert "active" in run_shell(read_example(GUIDE / "explaining.md", "explain"), tmp_path, server.target)
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "<html" in (tmp_path / "graph.html").read_text(encoding="utf-8")


def test_error_of_the_command_line(server: Any, tmp_path: Path) -> None:
    told = json.loads(read_example(GUIDE / "command-line.md", "error").replace("[…]", "[]"))["error"]
    code = "gradrule rules show ste_sgn --json 2>error.json || exit_code=$?; test $exit_code = 3"
    run_shell(code, tmp_path, server.target)
    error = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))["error"]
    assert error.keys() == told.keys()
    for key in ("reason", "message", "exit_code"):
        assert error[key] == told[key]


def test_formula_from_standard_input(server: Any, tmp_path: Path) -> None:
    assert "8" in run_shell(read_example(GUIDE / "command-line.md", "stdin"), tmp_path, server.target)


def test_completion_scripts(tmp_path: Path) -> None:
    files = ("share/bash-completion/completions/gradrule", ".zfunc/_gradrule", "fish/completions/gradrule.fish")
    code = read_example(GUIDE / "command-line.md", "completion").replace("~/.local/", "./").replace("~/.config/", "./")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
    run_shell(code.replace("~/", "./"), tmp_path)
    for file in files:
        assert "gradrule" in (tmp_path / file).read_text(encoding="utf-8")


def test_status(server: Any, tmp_path: Path) -> None:
    printed = run_shell(read_example(GUIDE / "operating.md", "status"), tmp_path, server.target)
    assert json.loads(printed.splitlines()[-1])["ready"] is True


def test_server_for_strangers_accepts_the_settings(tmp_path: Path) -> None:
    """`--print-config` checks the settings without a start, which the tests of authentication hold."""
    signed = Authority(tmp_path, "authority").server("server")
    signed.certificate.rename(tmp_path / "server.crt")
    signed.key.rename(tmp_path / "server.key")
    code = read_example(GUIDE / "operating.md", "serve").rstrip()
    assert "\ngradrule serve " in code
    token, *settings = run_shell(f"{code} --print-config", tmp_path).splitlines()
    assert token.startswith("gr_")
    assert 'tokens = "tokens.jsonl"  # --tokens' in settings


def test_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text(read_example(GUIDE / "settings.md", "server"))
    printed = run_shell("gradrule serve --config server.toml --print-config", tmp_path)
    assert "tenant-rules = 500  # server.toml: tenant-rules" in printed.splitlines()


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
