from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradrule_server.commands import registry
from gradrule_server.limits import GRAPH_LIMIT_FLAGS, TENANT_RESOURCES
from gradrule_server.settings import (
    Settings,
    SettingsError,
    default_data_dir,
    environment_name,
    flag_name,
    kubernetes_service_variables,
)

OTHER_VALUES: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 0,
    "device": "gpu:1",
    "data_dir": Path("/srv/rules"),
    "registry": "postgresql://gradrule@database/rules",
    "blobs": "s3://weights/team",
    "blob_cache_bytes": 8192,
    "http_port": 0,
    "http_allowed_hosts": "gradrule.example.org",
    "max_message_bytes": 2048,
    "default_deadline_s": 1.5,
    "max_deadline_s": 40.0,
    "engine_threads": 2,
    "max_batch_size": 16,
    "max_batch_delay_ms": 2.5,
    "disabled_fast_paths": "known-calls,sessions",
    "engines": 18,
    "max_engines": 99,
    "spares": 0,
    "memory_limit": 2**30,
    "heartbeat_s": 19.5,
    "quarantine_s": 20.5,
    "program_cache": 5,
    "program_cache_bytes": 4096,
    "handle_ttl_s": 16.5,
    "session_idle_s": 17.5,
    "drain_s": 0.0,
    "trust": "full",
    "sandbox": "off",
    "tenant_share": 0.5,
    "tls_cert": Path("/run/tls.crt"),
    "tls_key": Path("/run/tls.key"),
    "tls_client_ca": Path("/run/ca.crt"),
    "tokens": Path("/run/tokens"),
    "jwt_key": Path("/run/jwt.pem"),
    "jwt_jwks": Path("/run/jwks.json"),
    "jwt_issuer": "https://issuer",
    "jwt_audience": "gradrule",
    "jwt_tenant_claim": "team",
    "tls_client_name": "uri",
    "admin_tenants": "ada,grace",
    "insecure_tokens": True,
    "max_connections": 31,
    "max_unauthenticated_connections": 7,
    "unauthenticated_idle_s": 11.0,
    "max_connection_streams": 32,
    "max_metadata_bytes": 2048,
    "handshake_timeout_s": 1.25,
    "keepalive_s": 2.25,
    "keepalive_timeout_s": 3.25,
    "max_connection_age_s": 4.25,
    "max_connection_age_grace_s": 5.25,
    "stall_s": 6.25,
    "reflection": False,
    "admin": False,
    "metrics_port": 9470,
    "metrics_host": "0.0.0.0",
    "otel_endpoint": "http://collector:4317",
    "audit_log": "/var/log/audit.jsonl",
    "log_format": "json",
    "log_level": "debug",
}

# The settings of `limits.py` accept any number.
_LIMITS = (
    *(f"max_{name}" for name in GRAPH_LIMIT_FLAGS),
    *(resource.max_setting for resource in TENANT_RESOURCES),
    *(resource.tenant_setting for resource in TENANT_RESOURCES),
)
OTHER_VALUES |= {name: number for number, name in enumerate(_LIMITS, 3001)}

SWITCHES = {name for name, value in OTHER_VALUES.items() if isinstance(value, bool)}

NEEDS: dict[str, dict[str, str]] = {
    "tls_cert": {"tls_key": "/k"},
    "tls_key": {"tls_cert": "/c"},
    "tls_client_ca": {"tls_cert": "/c", "tls_key": "/k"},
    "http_allowed_hosts": {"http_port": "0"},
    "jwt_key": {"jwt_issuer": "i", "jwt_audience": "a"},
    "jwt_jwks": {"jwt_issuer": "i", "jwt_audience": "a"},
    "jwt_issuer": {"jwt_key": "/k", "jwt_audience": "a"},
    "jwt_audience": {"jwt_key": "/k", "jwt_issuer": "i"},
}
"""Settings that say nothing, or too little, without others."""


def switch(name: str, on: bool) -> str:
    """`--reflection` or `--no-reflection`."""
    return flag_name(name) if on else flag_name(name).replace("--", "--no-")


def refused(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as refusal:
        Settings.load(argv, environ)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_cases_cover_every_setting() -> None:
    assert OTHER_VALUES.keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_flag_beats_environment_beats_default(name: str) -> None:
    value = OTHER_VALUES[name]
    default = getattr(Settings.load([], {}), name)
    assert default != value
    others = {environment_name(other): given for other, given in NEEDS.get(name, {}).items()}
    environ = others | {environment_name(name): str(value)}
    assert getattr(Settings.load([], environ), name) == value
    if name in SWITCHES:
        flag, opposite = [switch(name, value)], [switch(name, default)]
    else:
        flag = [flag_name(name), str(value)]
        opposite = flag if default in (None, "") else [f"{flag_name(name)}={default}"]
        default = value if default in (None, "") else default
        environ |= {environment_name(name): "3"} if opposite == flag and not isinstance(value, str | Path) else {}
    assert getattr(Settings.load(flag, others), name) == value
    assert getattr(Settings.load(opposite, environ), name) == default


@pytest.mark.parametrize("name", ["requests", "rules", "blob_bytes"])
def test_share_of_a_tenant_is_a_quarter_with_credentials(name: str) -> None:
    whole = {"requests": 256, "rules": 10_000, "blob_bytes": 8 << 30}[name]
    assert Settings.load([], {}).tenant_limit(name) == whole
    assert Settings.load(["--tokens", "/t"], {}).tenant_limit(name) == whole // 4
    assert Settings.load(["--tokens", "/t", f"--tenant-{name.replace('_', '-')}", "9"], {}).tenant_limit(name) == 9
    assert Settings.load(["--tokens", "/t", "--max-rules", "3"], {}).tenant_limit("rules") == 1


@pytest.mark.parametrize(
    ("host", "address"),
    [("::", "[::]:1"), ("[::1]", "[::1]:1"), ("0.0.0.0", "0.0.0.0:1"), ("localhost", "localhost:1")],
)
def test_ipv6_addresses_may_have_brackets(host: str, address: str) -> None:
    found = Settings.load(["--host", host, "--metrics-host", host], {})
    assert found.address(1) == address
    assert found.host == found.metrics_host == host.strip("[]")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_tokens_may_be_sent_unencrypted_on_this_machine(host: str) -> None:
    assert Settings.load(["--tokens", "/t", "--host", host], {}).takes_tokens


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


def test_data_dir_is_required_without_home_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    with pytest.raises(SettingsError, match="--data-dir"):
        Settings.load([], {})
    assert Settings.load(["--data-dir", "/data"], {}).data_dir == Path("/data")
    assert Settings.load([], {"GRADRULE_DATA_DIR": "/data"}).data_dir == Path("/data")
    with pytest.raises(SystemExit):
        Settings.load(["--help"], {})
    assert registry.run(["check"]) == 2
    assert "required: --data-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--prot", "1"], {}, ["'--prot'", "Did you mean '--port'"]),
        (["--por=1"], {}, ["'--por'", "Did you mean '--port'"]),
        (["extra"], {}, ["'extra' belongs to no flag"]),
        (["--port"], {}, ["--port", "expected one argument"]),
        ([], {"GRADRULE_PROT": "1"}, ["GRADRULE_PROT is not a setting", "Did you mean 'GRADRULE_PORT'"]),
        ([], {"GRADRULE_port": "1"}, ["GRADRULE_port is not a setting", "Did you mean 'GRADRULE_PORT'"]),
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
        (["--max-deadline-s", "3"], {}, ["--default-deadline-s (30) is more than --max-deadline-s (3)"]),
        (["--tokens", "/t", "--host", "0.0.0.0"], {}, ["unencrypted to 0.0.0.0", "--tls-cert", "--insecure-tokens"]),
        (["--jwt-key", "/k", "--jwt-issuer", "i"], {}, ["--jwt-audience"]),
        (["--jwt-issuer", "i"], {}, ["have no effect without --jwt-key"]),
        (["--tls-cert", "/c"], {}, ["--tls-cert and --tls-key go together"]),
        (["--tls-client-ca", "/c"], {}, ["--tls-client-ca", "needs TLS"]),
        (["--port", "x"], {"GRADRULE_DEVICE": "tpu"}, ["--port 'x'", "GRADRULE_DEVICE 'tpu'"]),
    ],
)
def test_wrong_settings_are_refused(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    message = refused(argv, environ)
    for part in parts:
        assert part in message


def test_variables_of_clients_and_others_are_ignored() -> None:
    others = {"GRADRULER": "1", "PORT": "2", "MY_GRADRULE_PORT": "3", "GRADRULE_TOKEN": "t", "GRADRULE_TLS_CA": "/ca"}
    assert Settings.load([], others).port == 8470


KUBERNETES = {
    # Of a Service named gradrule with a port named grpc, and of one named gradrule-metrics.
    "GRADRULE_SERVICE_HOST": "10.0.0.7",
    "GRADRULE_SERVICE_PORT": "8470",
    "GRADRULE_SERVICE_PORT_GRPC": "8470",
    "GRADRULE_PORT": "tcp://10.0.0.7:8470",
    "GRADRULE_PORT_8470_TCP": "tcp://10.0.0.7:8470",
    "GRADRULE_PORT_8470_TCP_PROTO": "tcp",
    "GRADRULE_PORT_8470_TCP_PORT": "8470",
    "GRADRULE_PORT_8470_TCP_ADDR": "10.0.0.7",
    "GRADRULE_METRICS_SERVICE_HOST": "10.0.0.8",
    "GRADRULE_METRICS_PORT": "tcp://10.0.0.8:9470",
    "GRADRULE_METRICS_PORT_9470_UDP": "udp://10.0.0.8:9470",
}


def test_variables_of_kubernetes_services_are_ignored() -> None:
    settings = Settings.load([], KUBERNETES | {"GRADRULE_ENGINES": "3", "HOME": "/root"})
    assert settings == Settings.load(["--engines", "3"], {})
    assert kubernetes_service_variables(KUBERNETES | {"GRADRULE_ENGINES": "3", "SERVICE_HOST": "x"}) == sorted(
        KUBERNETES
    )
    # Values that a person may have set are still read, or refused.
    assert kubernetes_service_variables({"GRADRULE_PORT": "8471", "GRADRULE_METRICS_PORT": "1"}) == []
    assert Settings.load([], {"GRADRULE_PORT": "8471"}).port == 8471
    assert "GRADRULE_SERVICE" in refused([], {"GRADRULE_SERVICE": "x"})
    assert "GRADRULE_PORT 'http://a'" in refused([], {"GRADRULE_PORT": "http://a"})


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        Settings.load(["--help"], {"HOME": "/home/100%s"})
    assert end.value.code == 0
    # argparse wraps lines; compare words only.
    text = " ".join(capsys.readouterr().out.split())
    for name, info in Settings.model_fields.items():
        assert flag_name(name) in text
        assert environment_name(name) in text
        assert info.description
        assert info.description in text
    assert "[default: 64MiB]" in text
    assert "[default: /home/100%s/.local/share/gradrule]" in text


def test_max_engines_must_exceed_engines() -> None:
    assert Settings.load(["--engines", "2", "--max-engines", "3"], {}).max_engines == 3
    for flags, said in (
        (["--engines", "2", "--max-engines", "2"], "--engines (2)"),
        (["--max-engines", "0"], "from 2"),
    ):
        assert said in refused(flags, {})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hun/ter@host/rules",
        "postgresql://me:hun@ter@host/rules",
        "postgresql://me:hun#ter@host/rules",
        "postgresql://me:hunter@host:port/rules",
        "mysql://me:hunter@host/rules",
        "hunter",
    ],
)
def test_invalid_registry_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(SettingsError, match=r"--registry: .*expected postgresql://USER@HOST") as refusal:
        Settings.load(["--registry", url], {})
    assert not any(part in str(refusal.value) for part in ("hun", "ter@"))


def test_printed_settings_hold_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql://me:hunter@one:1,two:2/rules?password=hunter&sslmode=require"
    with pytest.raises(SystemExit):
        Settings.load(["--registry", url, "--print-config"], {})
    assert 'registry = "postgresql://me@one:1,two:2/rules"' in capsys.readouterr().out
    assert "hunter" not in repr(Settings.load(["--registry", url], {}))
