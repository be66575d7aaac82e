"""The command line against a real server: input, output and exit code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.text_format import MessageToString

import gradrule as gr
from gradrule.cli.failures import FAILED, FOUND, REFUSED, UNREACHABLE, USAGE
from gradrule.cli.main import main
from tests.service.servers import RunningServer
from tests.service.shell import CommandResult, Shell, shell_in


@pytest.fixture
def shell(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """Runs commands in a folder with `graph.pb` and values for it."""
    run = shell_in(tmp_path, server, monkeypatch, capsys)
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None]), g.placeholder("w", "float32", [None])
    y = g.op_output("Mul", g.op_output("Sign", x, name="layer/sign"), w, name="y")
    g.cast(x, "int32", name="i")
    g.cast(y, "bfloat16", name="narrow")
    g.op_output("AsString", x, name="text")
    g.op_output("Square", w, name="aside")
    g.placeholder("upstream", "float32", [None])
    Path("graph.pb").write_bytes(g.to_bytes())
    np.save("x.npy", np.float32([-2, 0.5, 3]))
    np.savez("both.npz", x=np.float32([-2, 0.5, 3]), w=np.float32([1, 2, 3]))

    return run


@pytest.fixture
def half(shell: Shell) -> Iterator[str]:
    """Registers the rule `CliHalf`: a·dy with a = 0.5."""
    assert shell("rules", "create", "CliHalf", "a * dy", "--param", "a=0.5", "--description", "Scales.").code == 0
    yield "CliHalf"
    shell("rules", "delete", "CliHalf")


def test_rule_is_created_shown_and_deleted(shell: Shell) -> None:
    made = shell("rules", "create", "CliRule", "(a + b) * dy", "--param", "a=2", "--param", "b", "--json")
    assert made.code == 0
    assert made.json["params"] == {"a": 2.0, "b": None}
    listed = shell("rules", "list", "--kind", "user")
    assert listed.rows("CliRule", "(a + b) * dy", "a=2, b")
    shown = shell("rules", "show", "CliRule")
    assert made.json["digest"] in shown.out
    other = shell("rules", "create", "CliRule", "3 * dy")
    assert (other.code, other.out) == (REFUSED, "")
    assert "RULE_EXISTS" in other.err
    assert "replace it (--replace)" in other.err
    assert shell("rules", "create", "CliRule", "3 * dy", "--replace", "--json").json["expression"] == "3 * dy"
    assert shell("rules", "delete", "CliRule").code == 0
    gone = shell("rules", "show", "CliRule")
    assert gone.code == REFUSED
    assert "UNKNOWN_RULE" in gone.err


def test_rules_of_all_kinds_are_listed(shell: Shell, half: str) -> None:
    rules = {rule["name"]: rule["kind"] for rule in shell("rules", "list", "--json").json}
    assert (rules[half], rules["ste_sign"], rules["MatMul"]) == ("user", "builtin", "op")
    only = {rule["kind"] for rule in shell("rules", "list", "--kind", "builtin", "--json").json}
    assert only == {"builtin"}


def test_rule_from_a_graph(shell: Shell) -> None:
    g = gr.Graph()
    g.op_output("Mul", g.placeholder("dy", "float32"), 7.0, name="dx")
    Path("rule.pb").write_bytes(g.to_bytes())
    assert shell("rules", "create", "CliGraphRule", "--graph", "rule.pb").code == 0
    try:
        words = ("evaluate", "graph.pb", "--feed", "both.npz", "--y", "y", "--x", "x", "--json")
        done = shell(*words, "--override", "Sign=CliGraphRule")
        assert done.json["gradients"]["x"]["values"] == [7.0, 14.0, 21.0]
    finally:
        shell("rules", "delete", "CliGraphRule")


def test_sample_runs_a_rule_on_numbers(shell: Shell) -> None:
    done = shell("rules", "sample", "ste_sign", "--value", "x=[-2.0, 0.5, 3]", "--value", "dy=[1.0, 10, 100]", "--json")
    assert done.json["gradients"]["dx"]["values"] == [0.0, 10.0, 0.0]
    done = shell("rules", "sample", "expr:a * dy", "--value", "x=[1.0]", "--param", "a=4")
    assert done.rows("dx", "float32", "[4.]")


def test_evaluate_shows_outputs_gradients_and_rules(shell: Shell, half: str) -> None:
    done = shell(
        "evaluate", "graph.pb", "--feed", "x=x.npy", "--feed", "w=[1, 2, 3]", "--fetch", "y", "--y", "y",
        "--x", "x", "--x", "w", "--x", "aside", "--x", "i", "--override", "Sign=CliHalf",
    )  # fmt: skip
    assert done.code == 0
    assert done.rows("y", "float32", "[3]", "[-1.  2.  3.]")
    assert done.rows("x", "float32", "[3]", "[0.5 1.  1.5]")
    assert done.rows("w", "float32", "[3]", "[-1.  1.  1.]")
    assert done.rows("aside", "unconnected")
    assert done.rows("i", "not differentiable")
    assert done.rows("layer/sign", "Sign", "CliHalf", "active")
    assert done.rows("own gradient: y")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), [0.5, 1.0, 1.5]),
        (("--param", "Sign.a=2"), [2.0, 4.0, 6.0]),
        (("--grad-y", "y=[1, 10, 100]"), [0.5, 10.0, 150.0]),
        (("--grad-y", "y=tensor:upstream", "--feed", "upstream=[1, 10, 100]"), [0.5, 10.0, 150.0]),
    ],
)
def test_flags_of_evaluate_reach_the_request(
    shell: Shell, half: str, more: tuple[str, ...], expected: list[float]
) -> None:
    words = (
        "evaluate",
        "graph.pb",
        "--feed",
        "both.npz",
        "--y",
        "y",
        "--x",
        "x",
        "--override",
        "Sign=CliHalf",
        "--json",
    )
    assert shell(*words, *more).json["gradients"]["x"]["values"] == expected


def test_stop_gradients_cut_the_path(shell: Shell) -> None:
    words = ("evaluate", "graph.pb", "--feed", "both.npz", "--y", "y", "--x", "x", "--x", "w", "--json")
    assert shell(*words).json["gradients"]["x"]["values"] == [0.0, 0.0, 0.0]
    stopped = shell(*words, "--stop-gradient", "layer/sign").json["gradients"]
    assert stopped["x"] == {"kind": "unconnected"}
    assert stopped["w"]["values"] == [-1.0, 1.0, 1.0]


def test_unconnected_gradients_can_be_zero(shell: Shell) -> None:
    words = ("evaluate", "graph.pb", "--feed", "both.npz", "--y", "y", "--x", "aside", "--json")
    assert shell(*words).json["gradients"]["aside"] == {"kind": "unconnected"}
    assert shell(*words, "--unconnected", "zero").json["gradients"]["aside"]["values"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("selector", ["Sign", "node:layer/*", "scope:layer"])
def test_each_selector_reaches_the_node(shell: Shell, selector: str) -> None:
    words = ("evaluate", "graph.pb", "--feed", "both.npz", "--y", "y", "--x", "x", "--json")
    done = shell(*words, "--override", f"{selector}=expr:dy * 3").json
    assert done["gradients"]["x"]["values"] == [3.0, 6.0, 9.0]
    assert [(item["node"], item["rule"], item["status"]) for item in done["overrides"]] == [
        ("layer/sign", "inline", "active")
    ]


def test_results_go_to_a_file(shell: Shell) -> None:
    done = shell(
        "evaluate", "graph.pb", "--feed", "both.npz", "--fetch", "narrow", "--fetch", "i", "--y", "y", "--x", "w",
        "--x", "aside", "--out", "results.npz",
    )  # fmt: skip
    assert done.code == 0
    with np.load("results.npz", allow_pickle=False) as saved:
        assert set(saved.files) == {"outputs/narrow", "outputs/i", "gradients/w"}
        assert saved["outputs/narrow"].dtype == np.float32
        np.testing.assert_array_equal(
            saved["outputs/narrow"], np.float32([-1, 2, 3]).astype(ml_dtypes.bfloat16).astype(np.float32)
        )
        np.testing.assert_array_equal(saved["outputs/i"], np.int32([-2, 0, 3]))
        np.testing.assert_array_equal(saved["gradients/w"], np.float32([-1, 1, 1]))


def test_strings_are_shown_but_not_pickled(shell: Shell) -> None:
    words = ("evaluate", "graph.pb", "--feed", "x=x.npy", "--fetch", "text")
    assert shell(*words, "--json").json["outputs"]["text"]["values"][1].startswith("0.5")
    refused = shell(*words, "--out", "text.npz")
    assert refused.code == FAILED
    assert "strings" in refused.err
    assert not Path("text.npz").exists()


def test_explain_runs_nothing(shell: Shell) -> None:
    done = shell("explain", "graph.pb", "--fetch", "y", "--y", "y", "--x", "x", "--override", "Sign=ste_sign")
    assert done.code == 0
    assert done.rows("feed", "x", "float32", "[?]")
    assert done.rows("layer/sign", "Sign", "ste_sign", "active")
    assert done.rows("y", "Mul", "its own")
    told = shell("explain", "graph.pb", "--y", "y", "--x", "x", "--override", "Sign=ste_sign", "--json").json
    assert told["findings"] == []
    assert told["default_gradient_nodes"] == ["y"]


def test_explain_lists_all_problems(shell: Shell) -> None:
    words = ("explain", "graph.pb", "--y", "y", "--x", "x", "--override", "Sgn=ste_sign", "--override", "Mul=ste_sgn")
    done = shell(*words)
    assert done.code == FOUND
    assert done.rows("UNKNOWN_OP_TYPE", "'Sign'")
    assert done.rows("UNKNOWN_RULE", "'ste_sign'")
    assert {item["reason"] for item in shell(*words, "--json").json["findings"]} == {"UNKNOWN_OP_TYPE", "UNKNOWN_RULE"}


def test_program_is_compiled_evaluated_and_deleted(shell: Shell) -> None:
    made = shell(
        "programs", "compile", "graph.pb", "--name", "cli-program", "--fetch", "y", "--y", "y", "--x", "x",
        "--override", "Sign=ste_sign",
    )  # fmt: skip
    assert made.code == 0
    assert made.rows("layer/sign", "ste_sign", "active")
    assert shell("programs", "list").rows("programs/cli-program", "x: float32[?]", "y by x")
    shown = shell("programs", "show", "cli-program", "--json").json
    assert shown["name"] == "programs/cli-program"
    assert [spec["name"] for spec in shown["xs"]] == ["x"]
    ran = shell("evaluate", "programs/cli-program", "--feed", "both.npz", "--grad-y", "y=[1, 10, 100]", "--json").json
    assert ran["gradients"]["x"]["values"] == [0.0, 20.0, 0.0]
    assert ran["overrides"] == shown["overrides"]
    assert shell("programs", "delete", "programs/cli-program").code == 0
    gone = shell("programs", "show", "cli-program")
    assert gone.code == REFUSED
    assert "PROGRAM_NOT_FOUND" in gone.err


REFUSALS = [
    (("evaluate", "graph.pb", "--feed", "x=x.npy", "--y", "y", "--x", "x"), REFUSED, "MISSING_FEED", "'w'"),
    (("evaluate", "graph.pb", "--feed", "x=x.npy", "--fetch", "z"), REFUSED, "UNKNOWN_TENSOR", "'z'"),
    (("evaluate", "both.npz", "--fetch", "y"), REFUSED, "INVALID_GRAPH", "both.npz"),
    (("evaluate", "none.pb", "--fetch", "y"), USAGE, "USAGE", "there is no file 'none.pb'"),
    (("evaluate", "graph.pb", "--fetch", "y", "--out", "y.npy"), USAGE, "USAGE", "ends with .npz"),
    (("evaluate", "graph.pb", "--fech", "y"), USAGE, "USAGE", "Did you mean '--fetch'"),
    (("rules", "show", "ste_sgn"), REFUSED, "UNKNOWN_RULE", "'ste_sign'"),
    (("rules", "delete", "ste_sign"), REFUSED, "RULE_READ_ONLY", "BUILTIN"),
    (("rules", "create", "Bad", "dy +"), REFUSED, "INVALID_EXPRESSION", "dy +"),
    (("rules", "create", "Neither"), USAGE, "USAGE", "give EXPRESSION or --graph FILE"),
    (("rules", "create", "Both", "dy", "--graph", "graph.pb"), USAGE, "USAGE", "give EXPRESSION or --graph FILE"),
    (("rules", "sample", "ste"), REFUSED, "MISSING_FEED", "x"),
    (("rules", "list", "--target", "127.0.0.1:1", "--timeout", "5"), UNREACHABLE, "UNAVAILABLE", "127.0.0.1:1"),
    (("explain", "graph.pb", "--y", "y", "--x", "x", "--html", "no/page.html"), FAILED, "FAILED", "no/page.html"),
]


@pytest.mark.parametrize(("arguments", "code", "reason", "words"), REFUSALS)
def test_refusals_are_one_message_on_stderr(
    shell: Shell, arguments: tuple[str, ...], code: int, reason: str, words: str
) -> None:
    done = shell(*arguments)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"gradrule {arguments[0]}")
    assert reason in ("USAGE", "FAILED") or reason in done.err
    assert "Traceback" not in done.err
    assert words in done.err
    told = shell(*arguments, "--json")
    assert (told.code, told.out) == (code, "")
    error = json.loads(told.err)["error"]
    assert (error["reason"], error["exit_code"]) == (reason, code)
    assert words in json.dumps(error, ensure_ascii=False)


def test_errors_in_json_have_all_details(shell: Shell) -> None:
    words = ("evaluate", "graph.pb", "--fetch", "nothing", "--y", "none", "--x", "x", "--feed", "x=x.npy")
    error = json.loads(shell(*words, "--json").err)["error"]
    assert {detail["reason"] for detail in error["details"]} == {"UNKNOWN_TENSOR"}
    assert len(error["details"]) == 2
    assert error["request_id"]


def test_notes_in_json_are_json(shell: Shell) -> None:
    done = shell(
        "evaluate", "graph.pb", "--feed", "both.npz", "--y", "y", "--x", "x", "--override", "Mul=ste", "--json"
    )
    assert done.code == 0
    assert all("note" in json.loads(line) for line in done.err.splitlines())


def test_graph_feeds_and_rules_come_from_standard_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(data: bytes, *arguments: str) -> CommandResult:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return shell(*arguments, "--json")

    graph = gr.load("graph.pb")
    texts = [graph.to_bytes(), MessageToJson(graph._message).encode(), MessageToString(graph._message).encode()]
    for data in texts:
        done = given(data, "evaluate", "-", "--feed", "both.npz", "--fetch", "y")
        assert done.json["outputs"]["y"]["values"] == [-1.0, 2.0, 3.0], done.err
        explained = given(data, "explain", "-", "--y", "y", "--x", "x", "--override", "Sign=ste_sign")
        assert [item["rule"] for item in explained.json["overrides"]] == ["ste_sign"]
    feeds = (Path("both.npz").read_bytes(), b'{"x": [-2, 0.5, 3], "w": [1, 2, 3]}')
    for data in feeds:
        done = given(data, "evaluate", "graph.pb", "--feed", "-", "--fetch", "y")
        assert done.json["outputs"]["y"]["values"] == [-1.0, 2.0, 3.0]
    for data in (Path("x.npy").read_bytes(), b"[-2, 0.5, 3]", feeds[0]):
        done = given(data, "evaluate", "graph.pb", "--feed", "x=-", "--feed", "w=[1, 2, 3]", "--fetch", "y")
        assert done.json["outputs"]["y"]["values"] == [-1.0, 2.0, 3.0]
    done = given(b"2 * dy\n", "rules", "sample", "-", "--feed", "x=[1]", "--feed", "dy=[4]")
    assert done.json["gradients"]["dx"]["values"] == [8.0]
    assert given(b"3 * dy\n", "rules", "create", "CliPiped", "-").json["expression"] == "3 * dy"
    assert shell("rules", "delete", "CliPiped").code == 0
    for data, arguments in (
        (texts[0], ("evaluate", "-", "--feed", "-", "--fetch", "y")),
        (b"", ("evaluate", "-", "--fetch", "y")),
        (b"no JSON", ("evaluate", "graph.pb", "--feed", "x=-", "--fetch", "y")),
    ):
        assert given(data, *arguments).code == USAGE


def test_duplicate_feed_is_wrong_usage(shell: Shell) -> None:
    done = shell("evaluate", "graph.pb", "--feed", "both.npz", "--feed", "x=[1]", "--fetch", "y")
    assert (done.code, done.out) == (2, "")
    assert "'x' is fed twice" in done.err


def test_health(shell: Shell, server: RunningServer) -> None:
    assert shell("health") == CommandResult(0, "SERVING\n", "")
    assert shell("health", server.target).code == 0
    told = shell("health", "--target", server.target, "--json")
    assert (told.code, told.json) == (0, {"status": "SERVING"})
    refused = shell("health", "127.0.0.1:1")
    assert (refused.code, refused.out) == (UNREACHABLE, "")
    assert "UNAVAILABLE" in refused.err


def test_closed_pipe_causes_no_traceback(server: RunningServer) -> None:
    command = f"{sys.executable} -m gradrule.cli rules list --target {server.target} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert re.match(r"\d+ rules", done.stdout)
    assert done.stderr == ""


def test_serve_from_start_to_drain(tmp_path: Path) -> None:
    environment = os.environ | {"GRADRULE_TARGET": "localhost:1", "GRADRULE_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "gradrule.cli", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            target = process.stdout.readline().strip().rpartition(" ")[2]
            assert main(["health", target]) == 0
            assert main(["rules", "create", "Kept", "dy", "--target", target]) == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (tmp_path / "data").is_dir()
