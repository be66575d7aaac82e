"""Configuration files, presets, `--help` and `--print-config` of `gradrule serve`."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradrule_server import assembly
from gradrule_server.limits import GRAPH_LIMIT_FLAGS, HELD_PER_BYTE, MEMORY_SHARES, TENANT_RESOURCES
from gradrule_server.settings import (
    GROUPS,
    PRESETS,
    Settings,
    SettingsError,
    environment_name,
    file_key,
    flag_name,
    model,
)

HOME = {"HOME": "/home/ada"}
CREDENTIALS = ["--tokens", "/run/tokens"]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration file and returns the flags that name it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        return ["--config", str(path)]

    return write


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as refused:
        Settings.load(argv, HOME | (environ or {}))
    message = str(refused.value)
    assert "\n" not in message
    return message


def printed(capsys: pytest.CaptureFixture[str], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as end:
        Settings.load(argv, HOME | (environ or {}))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_flag_beats_environment_beats_file_beats_preset_beats_default(config: Any) -> None:
    preset, name = ["--for", "development"], "max_nodes"
    variable = {environment_name(name): "4"}
    file = config("max-nodes = 3")
    values = [
        Settings.load([], HOME),
        Settings.load(preset, HOME),
        Settings.load(preset + file, HOME),
        Settings.load(preset + file, HOME | variable),
        Settings.load([*preset, *file, "--max-nodes", "5"], HOME | variable),
    ]
    assert [settings.graph_limits()["nodes"] for settings in values] == [200_000, 1_000_000, 3, 4, 5]


def test_file_accepts_every_setting(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--print-config")
    settings = Settings.load(config(re.sub(r"^# (.*) is not set$", "", text, flags=re.MULTILINE)), {})
    assert settings == Settings.load([], HOME)
    keys = set(re.findall(r"^(?:# )?([\w-]+) (?:=|is not set)", text, re.MULTILINE))
    assert keys == {file_key(name) for name in Settings.model_fields}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = 8471", 8471),
        ('max-message-bytes = "16MiB"', 16 << 20),
        ("max-message-bytes = 4096", 4096),
        ("heartbeat-s = 2", 2.0),
        ("reflection = false", False),
        ('tokens = "/run/tokens"', Path("/run/tokens")),
        ("max-engines = 7", 7),
        ('max-engines = "7"', 7),
        ('max-engines = "auto"', "auto"),
    ],
)
def test_values_in_a_file(config: Any, text: str, expected: object) -> None:
    settings = Settings.load(config(text), HOME)
    assert getattr(settings, text.partition(" ")[0].replace("-", "_")) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["prot is not a setting", "Did you mean 'port'"]),
        ("max_rules = 1", ["max_rules is not a setting", "Did you mean 'max-rules'"]),
        ('config = "other.toml"', ["config is not a setting"]),
        ("[limits]\nmax-rules = 1", ["[limits] is a table", "top level"]),
        ('port = "http"', ["port 'http'", "valid integer"]),
        ("port = true", ["port is no switch", "true"]),
        ("port = 70000", ["port 70000", "65535"]),
        ("max-message-bytes = 1.5", ["max-message-bytes 1.5", "unit"]),
        ("max-rules = true", ["max-rules is no switch", "true"]),
        ("max-engines = false", ["max-engines is no switch", "false"]),
        ('reflection = "perhaps"', ["reflection 'perhaps'", "valid boolean"]),
        ("tokens = 3", ["tokens 3", "valid path"]),
        ('log-level = "loud"', ["log-level 'loud'", "'debug', 'info'"]),
        ("admin-tenants = ['ada']", ["admin-tenants ['ada']", "valid string"]),
        ("port = 2026-01-01", ["port datetime.date(2026, 1, 1)", "valid integer"]),
        ("port = ", ["is not valid TOML", "line 1"]),
        ('for = "friends"', ["for 'friends'", "development or strangers"]),
        ("for = ['strangers']", ["for ['strangers']", "development or strangers"]),
        ("for = true", ["for is no switch"]),
    ],
)
def test_wrong_content_of_a_file_is_refused(config: Any, text: str, parts: list[str]) -> None:
    argv = config(text + "\n")
    message = refusal(argv)
    for part in [argv[1], *parts]:
        assert part in message


def test_file_may_be_named_by_the_environment(config: Any, tmp_path: Path) -> None:
    _, path = config("port = 8471")
    assert Settings.load([], HOME | {"GRADRULE_CONFIG": path}).port == 8471
    missing = tmp_path / "missing.toml"
    assert f"{missing}: the file cannot be read: No such file" in refusal([], {"GRADRULE_CONFIG": str(missing)})
    assert Settings.load(["--config", path], HOME | {"GRADRULE_CONFIG": str(missing)}).port == 8471


@pytest.mark.parametrize(("argv", "variables"), [(["--config", ""], {}), ([], {"GRADRULE_CONFIG": ""})])
def test_empty_name_of_a_file_is_refused(argv: list[str], variables: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="the file cannot be read"):
        Settings.load(argv, HOME | variables)


def test_preset_may_come_from_the_environment_or_the_file(config: Any) -> None:
    assert Settings.load([], HOME | {"GRADRULE_FOR": "development"}).quarantine_s == 0
    assert Settings.load(config('for = "development"'), HOME).quarantine_s == 0
    assert "Did you mean 'strangers'" in refusal(["--for", "stranger"])


def test_presets_differ_from_the_defaults_in_every_value() -> None:
    default = Settings.load([], HOME)
    argv = {"development": [], "strangers": CREDENTIALS}
    for name, preset in PRESETS.items():
        settings = Settings.load(["--for", name, *argv[name]], HOME)
        changed = {field for field in preset.values if getattr(settings, field) != getattr(default, field)}
        # `strangers` also names a default that it needs.
        assert changed == set(preset.values) - {"trust"}


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        ([], {}, ["callers need credentials", "--tokens FILE", "gradrule token new", "--jwt-key", "--tls-client-ca"]),
        ([*CREDENTIALS, "--sandbox", "auto"], {}, ["--sandbox must be on", "--sandbox is auto"]),
        (CREDENTIALS, {"GRADRULE_SANDBOX": "off"}, ["--sandbox must be on", "GRADRULE_SANDBOX is off"]),
        ([*CREDENTIALS, "--trust", "full"], {}, ["--trust must be sandbox"]),
        ([*CREDENTIALS, "--memory-limit", "0"], {}, ["--memory-limit must not be 0"]),
        ([*CREDENTIALS, "--host", "0.0.0.0"], {}, ["unencrypted", "--tls-cert"]),
    ],
)
def test_what_contradicts_the_preset_for_strangers(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    message = refusal(["--for", "strangers", *argv], environ)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--host", "0.0.0.0"], ["this machine only", "--host is 0.0.0.0", "--for strangers"]),
        (CREDENTIALS, ["no credentials", "--tokens is set"]),
    ],
)
def test_what_contradicts_the_preset_for_development(argv: list[str], parts: list[str]) -> None:
    message = refusal(["--for", "development", *argv])
    for part in parts:
        assert part in message


def test_tenant_share_sets_all_tenant_limits_that_are_not_set(config: Any) -> None:
    settings = Settings.load(["--tenant-share", "0.5", *config("tenant-rules = 7")], HOME)
    for resource in TENANT_RESOURCES:
        expected = 7 if resource.name == "rules" else settings.server_limit(resource.name) // 2
        if resource.name == "bytes_in_flight":
            expected = max(expected, 2 * settings.max_message_bytes)
        assert settings.tenant_limit(resource.name) == expected
    assert "above 0 and at most 1" in refusal(["--tenant-share", "0"])


@pytest.mark.parametrize("gib", [4, 16])
def test_memory_of_a_container_is_divided_between_its_uses(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    memory = gib << 30
    monkeypatch.setattr(model, "available_memory", lambda: memory)
    settings = Settings.load([], HOME)
    assert sum(MEMORY_SHARES.values()) < 1
    held = settings.server_limit("bytes_in_flight") * HELD_PER_BYTE
    assert MEMORY_SHARES["bytes_in_flight"] * memory == pytest.approx(held, rel=0.01)
    assert settings.server_limit("shared_bytes") == int(MEMORY_SHARES["shared_bytes"] * memory)
    # One tenant of many can send a message of the largest size, and its connection may hold two unfinished.
    strict = Settings.load(["--tokens", "/t"], HOME)
    assert strict.tenant_limit("bytes_in_flight") > strict.max_message_bytes
    assert strict.unfinished_limits()[0] >= 2 * strict.max_message_bytes
    assert Settings.load(["--max-bytes-in-flight", "1GiB"], HOME).server_limit("bytes_in_flight") == 1 << 30


def test_operating_guide_has_the_shares_of_the_memory() -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/operating.md").read_text()
    shares = {name: f"{share:.0%}".replace("%", " %") for name, share in MEMORY_SHARES.items()}
    flags = {
        "bytes_in_flight": "--max-bytes-in-flight",
        "engines": "--memory-limit",
        "shared_bytes": "--max-shared-bytes",
    }
    for name, share in shares.items():
        assert f"| `{flags[name]}` | {share} |" in guide


def test_every_limit_on_graphs_reaches_the_graphs() -> None:
    flags = [
        word
        for number, name in enumerate(GRAPH_LIMIT_FLAGS, 100)
        for word in (f"--max-{name}".replace("_", "-"), str(number))
    ]
    loaded = SimpleNamespace(pool=SimpleNamespace(memory_limit=0))
    limits = assembly.graph_limits(Settings.load(flags, HOME), loaded)
    assert [getattr(limits, name) for name in GRAPH_LIMIT_FLAGS] == [*range(100, 100 + len(GRAPH_LIMIT_FLAGS))]


def test_help_shows_common_flags_first_and_each_setting_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    listed = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert listed[:10] == [
        "--for", "--config", "--host", "--port", "--data-dir", "--device", "--tls-cert", "--tls-key", "--tokens",
        "--log-level",
    ]  # fmt: skip
    assert sorted(listed) == sorted([*map(flag_name, Settings.model_fields), "--for", "--config", "--print-config"])
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == ["Common flags", *(group.title for group in GROUPS), "Other"]
    assert titles[-2] == "Tenant limits"


def test_help_shows_choices_units_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "--help").split())
    for part in (
        "--sandbox {auto,on,off}",
        "--for {development,strangers}",
        "--max-engines auto|N",
        "--device auto|cpu|gpu:N",
        "Engine health-check interval, seconds; 0 disables. [default: 1] [env: GRADRULE_HEARTBEAT_S]",
        "[default: 8KiB]",
        "[env: GRADRULE_FOR]",
        "[env: GRADRULE_CONFIG]",
    ):
        assert part in text
    assert " 0MiB" not in text
    for name in Settings.model_fields:
        assert text.count(f"[env: {environment_name(name)}]") == 1


def test_print_config_shows_where_values_come_from(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = config("max-rules = 7")
    text = printed(
        capsys, "--print-config", "--for", "development", *file, "--port", "0", environ={"GRADRULE_HOST": "::1"}
    )
    lines = text.splitlines()
    assert lines[0] == 'for = "development"'
    for line in (
        "port = 0  # --port",
        'host = "::1"  # GRADRULE_HOST',
        f"max-rules = 7  # {file[1]}: max-rules",
        "quarantine-s = 0.0  # --for development",
        "engines = 1  # default",
        "# tokens is not set",
    ):
        assert line in lines


def test_documented_presets_are_the_ones_in_the_code() -> None:
    page = Path(__file__).parents[2] / "docs/guide/settings.md"
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\S+) \|(.*)\|(.*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    default = Settings.load([], HOME)
    documented: dict[str, dict[str, str]] = {name: {} for name in PRESETS}
    for flag, shown, *values in rows:
        field = flag.removeprefix("--").replace("-", "_")
        # The value in the table is one that the flag accepts, and means the default.
        switch = {"true": [flag], "false": [flag.replace("--", "--no-")]}.get(shown, [flag, shown])
        assert getattr(Settings.load(switch, HOME), field) == getattr(default, field)
        for name, value in zip(documented, values, strict=True):
            documented[name] |= {field: value.strip()} if value.strip() else {}
    for name, preset in PRESETS.items():
        shown_values = {
            field: f"{value:g}" if isinstance(value, float) else str(value).lower() if value is False else str(value)
            for field, value in preset.values.items()
        }
        assert documented[name] == shown_values
