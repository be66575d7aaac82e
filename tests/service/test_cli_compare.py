"""`gradrule compare` and `sweep`, and selectors, presets and rewrites of the command line, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

import gradrule as gr
from gradrule.cli.failures import INTERRUPTED, REFUSED, UNREACHABLE
from tests.service.servers import RunningServer
from tests.service.shell import Shell, shell_in

X = np.float32([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])


@pytest.fixture
def shell(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """Runs commands in a folder with a dense layer x · w + b → relu → y and values for it."""
    run = shell_in(tmp_path, server, monkeypatch, capsys)
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None, 3]), g.placeholder("w", "float32", [3, 2])
    h = g.op("BiasAdd", g.matmul(x, w, name="layer/mm"), g.constant(np.float32([0.5, -0.25])), name="layer/add")
    g.op("Relu", h, name="y")
    Path("graph.pb").write_bytes(g.to_bytes())
    np.savez("values.npz", x=X, w=np.float32([[1, -1], [2, 0.5], [-1, 1]]))
    return run


EVALUATE = ("evaluate", "graph.pb", "--feed", "values.npz", "--y", "y", "--x", "x", "--json")


@pytest.mark.parametrize(
    ("flags", "node", "rule"),
    [
        (("--override", "@activation=lrp_pass"), "y", "lrp_pass"),
        (("--override", "regex:layer/.*&BiasAdd=expr:(0.5 * default0, default1)"), "layer/add", "inline"),
        (("--override", "pattern:@dense+@bias=lrp_zplus:eps=1e-3"), "layer/add", "lrp_zplus"),
        (("--override", "region:layer/mm>y=expr:2 * default"), "y", "inline"),
        (("--override", "near_ys:Relu=guided_relu"), "y", "guided_relu"),
        (("--override", "Relu&depends_on:x&rank:2=guided_relu"), "y", "guided_relu"),
        (("--preset", "epsilon_plus"), "layer/add", "lrp_epsilon"),
        (("--preset", "epsilon_plus:eps=1e-3", "--override", "Relu=guided_relu"), "y", "guided_relu"),
    ],
)
def test_selectors_and_presets_reach_their_nodes(shell: Shell, flags: tuple[str, ...], node: str, rule: str) -> None:
    done = shell(*EVALUATE, *flags)
    assert done.code == 0, done.err
    assert (node, rule, "active") in [(item["node"], item["rule"], item["status"]) for item in done.json["overrides"]]


def test_params_of_override_and_of_call(shell: Shell) -> None:
    words = (*EVALUATE, "--override", "Relu=relu_beta_smooth:beta=0.5")
    smooth = np.array(shell(*words).json["gradients"]["x"]["values"])
    steep = np.array(shell(*words, "--param", "Relu.beta=500").json["gradients"]["x"]["values"])
    own = np.array(shell(*EVALUATE).json["gradients"]["x"]["values"])
    np.testing.assert_allclose(steep, own, atol=1e-4)
    assert np.abs(smooth - own).max() > 0.1


def test_policies_for_ops_without_gradient(shell: Shell) -> None:
    g = gr.Graph()
    g.op("RandomShuffle", g.placeholder("x", "float32", [None]), name="y")
    Path("shuffle.pb").write_bytes(g.to_bytes())
    words = ("evaluate", "shuffle.pb", "--feed", "x=[1, 2]", "--y", "y", "--x", "x", "--json")
    assert "NO_GRADIENT" in shell(*words).err
    assert shell(*words, "--no-gradient", "pass").json["gradients"]["x"]["values"] == [1, 1]
    assert shell(*words, "--no-gradient", "zero").json["gradients"]["x"]["values"] == [0, 0]


def test_rewrite_is_reported(shell: Shell) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 4, 4, 1])
    h = g.op("Conv2D", x, np.ones((3, 3, 1, 2), np.float32), strides=[1, 1, 1, 1], padding="SAME", name="conv")
    constants = [g.constant(np.float32(values)) for values in ([1, 2], [0, 1], [0.5, 0], [1, 2])]
    h, *_ = g.op("FusedBatchNormV3", h, *constants, is_training=False, name="bn")
    g.op("Relu", h, name="y")
    Path("bn.pb").write_bytes(g.to_bytes())
    np.save("bn.npy", np.ones((1, 4, 4, 1), np.float32))
    words = ("bn.pb", "--y", "y", "--x", "x", "--preset", "epsilon_plus", "--rewrite", "fold_batch_norm")
    told = shell("evaluate", *words, "--feed", "x=bn.npy", "--json").json
    assert "bn" in told["rewritten"]
    assert shell("explain", *words).rows("rewritten:", "bn")
    made = shell("programs", "compile", *words, "--name", "cli-rewritten", "--json").json
    assert "bn" in made["rewritten"]
    assert shell("programs", "delete", "cli-rewritten").code == 0


COMPARE = ("compare", "graph.pb", "--feed", "values.npz", "--y", "y", "--x", "x", "--x", "w")


def test_compare_prints_norms_and_first_differences(shell: Shell) -> None:
    done = shell(
        *COMPARE, "--map", "half=BiasAdd=expr:(0.5 * default0, default1)", "--map", "guided=Relu=guided_relu",
        "--preset", "lrp=epsilon_plus:eps=1e-4",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.rows("tensor", "op type", "default", "half", "guided", "lrp")
    assert done.rows("layer/add", "BiasAdd") and done.rows("layer/mm", "MatMul", "(50.0%)")
    assert done.rows("half: differs from default first at layer/mm (50.0%), because of inline at layer/add")
    assert done.rows("guided: same gradients as default")
    assert done.rows("lrp: differs from default")
    assert done.rows("finite differences: central differences in float64, along every element")


def test_compare_draws_and_prints_json(shell: Shell) -> None:
    done = shell(
        *COMPARE, "--map", "both=Relu=guided_relu", "--map", "both=MatMul=expr:each(2 * default)",
        "--no-finite-differences", "--output", "norms.png", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    told = done.json
    assert told["labels"] == ["default", "both"]
    assert told["finite_differences"] is None
    assert told["first_differences"]["both"]["tensor"] == "x"
    assert {item["rule"] for item in told["overrides"]["both"]} == {"guided_relu", "inline"}
    (row,) = [row for row in told["rows"] if row["tensor"] == "w" and row["label"] == "both"]
    assert row["difference"] == pytest.approx(1)
    assert image.imread("norms.png").shape[:2] > (300, 500)


def test_compare_reports_errors_like_other_commands(shell: Shell) -> None:
    done = shell(*COMPARE, "--map", "bad=Relu=guided_rel")
    assert (done.code, done.out) == (REFUSED, "")
    assert "overrides['bad']" in done.err and "'guided_relu'" in done.err


SWEEP = ("sweep", "graph.pb", "--feed", "values.npz", "--y", "y", "--x", "x", "--x", "w", "--fetch", "y")
THREE_MAPS = (
    "--map",
    "own=",
    "--map",
    "half=BiasAdd=expr:(0.5 * default0, default1)",
    "--preset",
    "lrp=epsilon_plus:eps=1e-4",
)


def test_sweep_prints_norms_and_distances(shell: Shell) -> None:
    done = shell(*SWEEP, *THREE_MAPS)
    assert done.code == 0, done.err
    assert done.rows("map", "x", "norm", "difference", "compile ms", "run ms")
    assert done.rows("half", "w", "50.0%") and done.rows("own", "w") and done.rows("lrp", "w")
    assert done.rows("y", "float32", "[2, 2]")
    assert done.rows("difference: distance from own, relative to its norm")


def test_sweep_writes_arrays_and_prints_json(shell: Shell) -> None:
    done = shell(*SWEEP, *THREE_MAPS, "--out", "maps.npz", "--json")
    assert done.code == 0, done.err
    results = {item["label"]: item for item in done.json["results"]}
    assert list(results) == ["own", "half", "lrp"]
    assert results["own"]["gradients"]["w"]["difference"] is None
    assert results["half"]["gradients"]["w"]["difference"] == pytest.approx(0.5)
    assert {item["rule"] for item in results["half"]["overrides"]} == {"inline"}
    with np.load("maps.npz") as arrays:
        # A layer under LRP gives its weights no gradient.
        assert len(arrays.files) == 8 and "lrp/gradients/w" not in arrays
        for label, override in (("own", ()), ("half", ("--override", "BiasAdd=expr:(0.5 * default0, default1)"))):
            wanted = shell(*EVALUATE, "--x", "w", "--fetch", "y", *override).json
            for name in ("gradients/x", "gradients/w", "outputs/y"):
                kind, _, tensor = name.partition("/")
                np.testing.assert_array_equal(arrays[f"{label}/{name}"], np.float32(wanted[kind][tensor]["values"]))
            assert results[label]["gradients"]["x"]["values"] == wanted["gradients"]["x"]["values"]
            norm = np.linalg.norm(arrays[f"{label}/gradients/x"])
            assert results[label]["gradients"]["x"]["norm"] == pytest.approx(norm)


def test_sweep_of_params_evaluates_all_combinations(shell: Shell) -> None:
    words = ("--map", "smooth=Relu=relu_beta_smooth", "--param", "Relu.beta=[0.5, 500]")
    done = shell(*SWEEP, *words, "--json")
    assert done.code == 0, done.err
    smooth, steep = (np.array(item["gradients"]["x"]["values"]) for item in done.json["results"])
    assert [item["label"] for item in done.json["results"]] == ["Relu.beta=0.5", "Relu.beta=500"]
    override = ("--override", "Relu=relu_beta_smooth", "--param", "Relu.beta=0.5")
    np.testing.assert_array_equal(smooth, shell(*EVALUATE, *override).json["gradients"]["x"]["values"])
    np.testing.assert_allclose(steep, shell(*EVALUATE).json["gradients"]["x"]["values"], atol=1e-4)
    table = shell(
        *SWEEP, "--map", "two=Relu=relu_beta_smooth,MatMul=lrp_epsilon",
        "--param", "Relu.beta=[0.5, 1]", "--param", "MatMul.eps=[0.25, 1]",
    )  # fmt: skip
    assert table.code == 0, table.err
    for beta in (0.5, 1):
        for eps in (0.25, 1):
            assert table.rows(f"Relu.beta={beta}, MatMul.eps={eps}", "x")
    assert table.rows("params", "x", "norm")


def test_sweep_shows_what_succeeded_and_reports_what_failed(shell: Shell) -> None:
    words = (*SWEEP, "--map", "bad=Relu=guided_rel", "--map", "own=", "--map", "none=Sign=ste")
    done = shell(*words)
    assert done.code == REFUSED
    assert done.rows("own", "w") and done.rows("bad", "failed") and done.rows("none", "failed")
    assert done.err.startswith("gradrule sweep: 2 of 3 failed\nbad: UNKNOWN_RULE: ")
    assert "none: UNMATCHED_OVERRIDE: " in done.err
    as_json = shell(*words, "--json")
    assert as_json.code == REFUSED
    assert [item.get("error", {}).get("reason") for item in as_json.json["results"]] == [
        "UNKNOWN_RULE", None, "UNMATCHED_OVERRIDE",
    ]  # fmt: skip


def test_an_interrupted_sweep_shows_and_writes_what_is_done(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gr.Client.sweep

    def interrupted(self: gr.Client, *arguments: Any, **words: Any) -> Iterator[gr.SweepResult]:
        results = iter(whole(self, *arguments, **words))
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(gr.Client, "sweep", interrupted)
    done = shell(*SWEEP, *THREE_MAPS, "--out", "done.npz")
    assert done.code == INTERRUPTED
    assert done.rows("own", "w") and not done.rows("half")
    with np.load("done.npz") as arrays:
        assert set(arrays.files) == {"own/outputs/y", "own/gradients/x", "own/gradients/w"}


def test_sweep_ends_at_once_without_a_server(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADRULE_TARGET", "localhost:1")
    done = shell(*SWEEP, *THREE_MAPS, "--timeout", "20")
    assert done.code == UNREACHABLE
    assert "1 of 1 failed" in done.err and "own: UNAVAILABLE" in done.err
