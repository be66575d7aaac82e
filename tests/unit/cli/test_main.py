from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gradrule
import gradrule_server
from gradrule import errors
from gradrule.cli import connection, examples, serve
from gradrule.cli.failures import EXIT_CODES, FAILED, UNREACHABLE, USAGE, describe
from gradrule.cli.main import build_parser, main
from gradrule_server.settings import Settings

COMMANDS = ("serve", "health", "rules", "programs", "evaluate", "explain", "compare", "sweep", "gateway", "demo")


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in an installation that lacks a module."""
    code = (
        f"import sys; sys.modules[{module!r}] = None; from gradrule.cli.main import main; sys.exit(main({arguments!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_bare_call_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "serve"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"gradrule {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["-m", "gradrule"], ["-m", "gradrule.cli"]])
def test_the_version(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"gradrule {gradrule.__version__}\n"


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == gradrule.__version__ == gradrule_server.__version__


def test_help_of_serve_is_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--data-dir" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "invalid choice"),
        (["rules"], "VERB. It is one of list, show, presets, create"),
        (["rules", "list", "--kind", "none"], "invalid choice"),
        (["rules", "list", "--timeout", "0"], "positive number of seconds"),
        (["evaluate"], "GRAPH"),
        (["evaluate", "g.pb", "--override", "Sign"], "OP_TYPE=RULE"),
        (["rules", "sample", "ste", "--param", "a"], "NAME=VALUE"),
        (["rules", "sample", "ste", "--feed", "x=1", "--feed", "x=2"], "'x' is fed twice"),
        (["evaluate", "programs/p", "--y", "y"], "its own --y"),
        (["evaluate", "programs/p", "--preset", "epsilon_plus"], "its own --preset"),
        (["evaluate", "programs/p", "--no-gradient", "pass"], "its own --no-gradient"),
        (["evaluate", "programs/p", "--rewrite", "fold_batch_norm"], "its own --rewrite"),
        (["evaluate", "g.pb", "--no-gradient", "stop"], "invalid choice"),
        (["compare", "g.pb", "--y", "y", "--x", "x"], "nothing to compare"),
        (["compare", "g.pb", "--map", "Sign"], "NAME=OVERRIDE"),
        (["compare", "g.pb", "--map", "a=Sign=ste", "--output", "a.txt"], ".png"),
        (["sweep", "g.pb", "--y", "y", "--x", "x"], "nothing to evaluate"),
        (["sweep", "g.pb", "--param", "Sign.clip=1"], "LABEL.PARAM=[VALUE,…]"),
        (["sweep", "g.pb", "--param", "Sign.clip=[1]"], "--param takes one override map"),
        (["sweep", "g.pb", "--map", "a=Sign=ste", "--map", "b=Sign=ste", "--param", "Sign.clip=[1]"], "not 2"),
        (["sweep", "g.pb", "--map", "a=Sign=ste", "--out", "a.npy"], "ends with .npz"),
        (["rules", "plot", "ste", "--range", "3:-3"], "FROM less than TO"),
        (["rules", "plot", "ste", "--feed", "y=1"], "x1, x2"),
        (["rules", "plot", "ste", "--output", "ste"], ".png"),
        (["rules", "check", "ste", "--of", "Sign", "--op-type", "Sign"], "--of names the op already"),
        (["evaluate", "g.pb", "--out", "x.npy"], "ends with .npz"),
        (["demo", "--epochs", "0"], "at least 1"),
        (["serve", "--prot", "1"], "--port"),
    ],
)
def test_wrong_usage_is_code_2_on_stderr(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rules", "lst"], "gradrule rules: .*'lst'.* Did you mean 'list'?"),
        (["evaluat"], "gradrule: .*'evaluat'.* Did you mean 'evaluate'"),
        (["rules", "list", "--kidn", "x"], "gradrule rules list: .*--kidn x. Did you mean '--kind'"),
        (["rules", "list", "--server", "x"], "gradrule rules list: .*--server x. .* is --target HOST:PORT"),
        (["status", "--port", "1"], "gradrule status: .*--port 1. .* is --target HOST:PORT"),
        (["rules", "list", "--kind", "usr"], "gradrule rules list: .*'usr'.* Did you mean 'user'"),
    ],
)
def test_a_typing_error_is_answered_in_two_lines(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert re.match(says, first)
    assert re.fullmatch("gradrule.* --help shows the usage", second)


def test_target_and_token_come_from_flag_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADRULE_TARGET", "elsewhere:1")
    monkeypatch.setenv("GRADRULE_TOKEN", "secret")
    options = build_parser().parse_args(["rules", "list"])
    assert (options.target, options.token) == ("elsewhere:1", "secret")
    options = build_parser().parse_args(["rules", "list", "--target", "here:2", "--token", "t"])
    assert (options.target, options.token) == ("here:2", "t")
    monkeypatch.delenv("GRADRULE_TARGET")
    assert build_parser().parse_args(["rules", "list"]).target == "localhost:8470"


def test_serve_ignores_environment_variables_of_clients() -> None:
    variables = [name for constant, name in vars(connection).items() if constant.endswith("_VARIABLE")]
    assert "GRADRULE_TARGET" in variables
    assert len(variables) == 7
    Settings.load([], dict.fromkeys(variables, "1"))


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("pydantic", ("serve",), "gradrule[server]"),
        ("matplotlib", ("demo",), "gradrule[demo]"),
        ("matplotlib", ("rules", "plot", "ste", "--output", "ste.png"), "gradrule[plot]"),
        ("matplotlib", ("compare", "g.pb", "--map", "a=Sign=ste", "--output", "a.png"), "gradrule[plot]"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_to_install(
    module: str, arguments: tuple[str, ...], extra: str
) -> None:
    done = without(module, *arguments)
    assert done.returncode == (1 if arguments == ("serve",) else FAILED)
    assert extra in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_rule_of_an_override_may_have_been_a_formula() -> None:
    detail = errors.Detail("UNKNOWN_RULE", "there is no rule 'dy'.", field="overrides[0].rule")
    assert "expr:FORMULA" in describe(errors.UnknownRuleError("there is no rule 'dy'.", details=[detail]))
    assert "expr:" not in describe(errors.UnknownRuleError("there is no rule 'dy'."))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("unknown name 'a'. … declare a param: params={'a': 1.0}", "declare a param: --param a=1.0"),
        ("give the file of its authority: credentials=gradrule.tls('ca.pem')", "authority: --tls-ca ca.pem"),
        ("does not use TLS; connect without credentials", "does not use TLS; leave out the flags for TLS"),
        ("if it uses TLS, connect with credentials=gradrule.tls(…)", "give --tls, or --tls-ca FILE"),
        (
            "no server listens at h:1; start one (gradrule serve --port 1), or connect to the address of another",
            "serve --port 1), or name the address of another: --target HOST:PORT",
        ),
        ("cut the path with stop_gradients=['a/b'], or choose", "cut the path with --stop-gradient a/b, or choose"),
    ],
)
def test_errors_advise_flags_instead_of_arguments_of_python(message: str, says: str) -> None:
    assert says in describe(errors.InvalidExpressionError(message))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("rules list --target 'a b'", "the target 'a b' is not host:port"),
        ("rules list --target h:1 --token a", "give --tls, or --tls-ca FILE, or set --insecure-token"),
        ("rules list --tls-ca missing.pem", "missing.pem cannot be read"),
        ("health h:99999", "the target 'h:99999' is not host:port"),
        # Supervisors start it again after other codes.
        ("gateway --port 0 --server 'a b'", "the target 'a b' is not host:port"),
    ],
)
def test_values_that_the_client_refuses_are_wrong_usage(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == USAGE
    assert says in capsys.readouterr().err


def test_a_missing_feed_names_the_flag() -> None:
    assert "--feed NAME=VALUE" in describe(errors.MissingFeedError("a rule needs a value of x: give x"))


def test_values_of_a_sampled_rule_are_feeds() -> None:
    parsed = [build_parser().parse_args(["rules", "sample", "ste", flag, "x=[1]"]) for flag in ("--feed", "--value")]
    assert [options.feed for options in parsed] == [[{"x": [1]}]] * 2


def test_a_range_may_start_with_a_minus() -> None:
    done = without("rich", "rules", "plot", "ste", "--range", "-3:3", "--target", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == UNREACHABLE
    assert "UNAVAILABLE" in done.stderr


def test_health_works_without_rich() -> None:
    done = without("rich", "health", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == UNREACHABLE
    assert "UNAVAILABLE: no server listens at 127.0.0.1:1" in done.stderr


def test_the_command_line_starts_without_tensorflow_or_matplotlib() -> None:
    code = """
import sys
from gradrule.cli.main import main
main([])
print(sorted({"tensorflow", "matplotlib", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_gateway_without_its_extra_says_which_one() -> None:
    ended = without("uvicorn", "gateway")
    assert ended.returncode == 1
    assert "pip install 'gradrule[gateway]'" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "x"], "a port from 0 to 65535"),
        (["--max-body-bytes", "1X"], "64M"),
        (["--max-requests", "0"], "positive"),
        (["--tls-cert", "c"], "--tls-key"),
    ],
)
def test_wrong_flags_of_the_gateway(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", *flags]) == 2
    assert said in capsys.readouterr().err


def test_help_of_every_command_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    commands = dict(examples.leaves(build_parser()))
    assert set(examples.EXAMPLES) == {words for words in commands if words[0] not in serve.COMMANDS}
    for command, lines in examples.EXAMPLES.items():
        assert main([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        for line in lines:
            assert line in shown
            words = shlex.split(re.split(r" [<>] ", line.rpartition(" | ")[2])[0])
            assert words[: len(command) + 1] == ["gradrule", *command]
            # Files of examples do not exist.
            words = ["x=[1]" if word.endswith(".npy") else "2 * dy" if word == "-" else word for word in words[1:]]
            build_parser().parse_args(words)


def test_help_and_guide_have_all_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    guide = (Path(__file__).resolve().parents[3] / "docs/guide/command-line.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:<4} {meaning}" in shown
        assert f"| {code} | {meaning} |" in guide


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("gradrule", "evaluate", "presets", "override", "no-gradient"))
    checker = shutil.which(shell)
    if checker is not None:
        subprocess.run([checker, "-n"], input=script, text=True, timeout=60, check=True)


COMPLETIONS = {
    "gradrule ev": ["evaluate"],
    "gradrule rules pr": ["presets"],
    "gradrule rules list --ki": ["--kind"],
    "gradrule rules list --kind b": ["builtin"],
    "gradrule evaluate gra": ["graph.pb"],
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_bash_completes(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (tmp_path / "graph.pb").touch()
    assert main(["completion", "bash"]) == 0
    words = line.split()
    run = f"""
COMP_WORDS=({" ".join(words)})
COMP_CWORD={len(words) - 1}
COMP_LINE='{line}'
{chr(10).join(["_shtab_gradrule gradrule " + words[-1] + " " + words[-2]])}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        [bash, "--norc", "-c", capsys.readouterr().out + run],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert [word.strip() for word in done.stdout.split()] == COMPLETIONS[line], done.stderr


def test_completion_without_shtab_names_the_extra() -> None:
    done = without("shtab", "completion", "bash")
    assert done.returncode == FAILED
    assert "pip install 'gradrule[cli]'" in done.stderr
