from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gradrule_server.settings import Settings, SettingsError, default_data_dir, environment_name, flag_name

OTHER_VALUES = {
    "host": "0.0.0.0",
    "port": 0,
    "device": "gpu:1",
    "data_dir": Path("/srv/rules"),
    "max_message_bytes": 2048,
    "max_concurrent_requests": 3,
    "default_deadline_s": 1.5,
    "max_deadline_s": 40.0,
    "engine_threads": 2,
    "program_cache": 5,
    "program_cache_bytes": 4096,
    "max_handle_bytes": 14,
    "max_handles": 15,
    "handle_ttl_s": 16.5,
    "drain_s": 0.0,
    "max_nodes": 7,
    "max_inlined_nodes": 8,
    "max_call_depth": 9,
    "max_rules": 10,
    "max_programs": 11,
    "max_blob_bytes": 12,
    "max_graph_bytes": 13,
    "max_sessions": 17,
    "max_session_bytes": 18,
    "memory_limit": 19,
    "trust": "full",
    "max_node_outputs": 20,
    "max_constant_bytes": 21,
    "max_unpacking": 22,
    "reflection": False,
    "log_level": "debug",
}


def refused(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as refusal:
        Settings.load(argv, environ)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_the_cases_here_cover_every_setting() -> None:
    assert OTHER_VALUES.keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_flag_beats_environment_beats_default(name: str) -> None:
    value = OTHER_VALUES[name]
    default = getattr(Settings.load([], {}), name)
    assert default != value
    environ = {environment_name(name): str(value)}
    assert getattr(Settings.load([], environ), name) == value
    flag = ["--no-reflection"] if name == "reflection" else [flag_name(name), str(value)]
    assert getattr(Settings.load(flag, {}), name) == value
    flag = ["--reflection"] if name == "reflection" else [f"{flag_name(name)}={default}"]
    assert getattr(Settings.load(flag, environ), name) == default


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings.load([], {}).port = 1  # type: ignore[misc]


def test_sizes_may_have_units() -> None:
    assert Settings.load(["--max-message-bytes", "16MiB"], {}).max_message_bytes == 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.local/share/gradrule"),
        ({"HOME": "/home/ada", "XDG_DATA_HOME": "/data"}, "/data/gradrule"),
        ({"HOME": "/home/ada", "XDG_DATA_HOME": "data"}, "/home/ada/.local/share/gradrule"),
    ],
)
def test_default_data_dir(environ: dict[str, str], folder: str) -> None:
    assert default_data_dir(environ) == Path(folder)
    assert Settings.load([], environ).data_dir == Path(folder)


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--prot", "1"], {}, ["'--prot'", "Did you mean '--port'"]),
        (["--por=1"], {}, ["'--por'", "Did you mean '--port'"]),
        (["extra"], {}, ["'extra' belongs to no flag"]),
        (["--port"], {}, ["--port", "expected one argument"]),
        ([], {"GRADRULE_PROT": "1"}, ["GRADRULE_PROT is no setting", "Did you mean 'GRADRULE_PORT'"]),
        ([], {"GRADRULE_port": "1"}, ["GRADRULE_port is no setting", "Did you mean 'GRADRULE_PORT'"]),
        (["--port", "70000"], {}, ["--port '70000'", "65535"]),
        (["--port", "x"], {}, ["--port 'x'", "integer"]),
        ([], {"GRADRULE_PORT": "-1"}, ["GRADRULE_PORT '-1'"]),
        (["--device", "gpu"], {}, ["--device 'gpu'", "auto, cpu or gpu:N"]),
        (["--device", "cpu\n"], {}, ["--device", "auto, cpu or gpu:N"]),
        (["--drain-s", "inf"], {}, ["--drain-s 'inf'", "finite"]),
        (["--drain-s", "nan"], {}, ["--drain-s 'nan'"]),
        (["--max-rules", "0"], {}, ["--max-rules '0'", "greater than 0"]),
        (["--max-message-bytes", "2GiB"], {}, ["--max-message-bytes '2GiB'", "2147483648"]),
        (["--log-level", "loud"], {}, ["--log-level 'loud'", "'warning'"]),
        ([], {"GRADRULE_REFLECTION": "maybe"}, ["GRADRULE_REFLECTION 'maybe'", "boolean"]),
        (["--max-deadline-s", "3"], {}, ["default_deadline_s (30) is more than max_deadline_s (3)"]),
        (["--port", "x"], {"GRADRULE_DEVICE": "tpu"}, ["--port 'x'", "GRADRULE_DEVICE 'tpu'"]),
    ],
)
def test_what_is_refused(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    message = refused(argv, environ)
    for part in parts:
        assert part in message


def test_other_variables_are_not_ours() -> None:
    assert Settings.load([], {"GRADRULER": "1", "PORT": "2", "MY_GRADRULE_PORT": "3"}).port == 8470


def test_help_tells_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        Settings.load(["--help"], {"HOME": "/home/100%s"})
    assert end.value.code == 0
    # argparse wraps where it likes; words do not care.
    text = " ".join(capsys.readouterr().out.split())
    for name, info in Settings.model_fields.items():
        assert flag_name(name) in text
        assert environment_name(name) in text
        assert info.description
        assert info.description in text
    assert "[default: 64MiB]" in text
    assert "[default: /home/100%s/.local/share/gradrule]" in text
