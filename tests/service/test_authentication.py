"""Authentication by tokens, JSON Web Tokens and certificates, and what unauthenticated callers see."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from grpc_health.v1 import health_pb2, health_pb2_grpc

import gradrule as gr
from tests.service import raw
from tests.service.answers import provokes, refused, refused_raw
from tests.service.certificates import Authority
from tests.service.graph_defs import SIGN_FEEDS, sign_graph
from tests.service.guarded import Guarded, token_command, unsigned_web_token
from tests.service.servers import running_server
from tests.waiting import wait_until

HOUR = datetime.timedelta(hours=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def is_accepted(guarded: Guarded, token: str | None) -> bool:
    with guarded.connect(token=token) as client:
        try:
            client.get_rule("ste")
        except gr.errors.UnauthenticatedError:
            return False
    return True


# Tokens.


def test_valid_token_is_accepted(guarded: Guarded) -> None:
    token = guarded.new_token("ada")
    with guarded.connect(token=token) as client:
        assert client.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"]).outputs["y"].tolist() == [1.0, -1.0]
    assert token not in guarded.tokens.read_text()


def test_async_client_sends_its_token(guarded: Guarded) -> None:
    async def call() -> Any:
        client = gr.aio.connect(
            guarded.running.target, credentials=gr.tls(guarded.authority.file), token=guarded.web_token("ada")
        )
        async with client:
            return await client.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"])

    assert asyncio.run(call()).outputs["y"].tolist() == [1.0, -1.0]


@provokes("UNAUTHENTICATED")
def test_all_calls_without_credentials_get_the_same_error(guarded: Guarded) -> None:
    token = guarded.new_token("ada", "--expires", "2020-01-01T00:00:00Z")
    said = set()
    for wrong in (None, "gr_" + "x" * 43, token, "a.b.c", guarded.web_token("ada", exp=now() - HOUR)):
        with guarded.connect(token=wrong) as client:
            calls: list[Callable[[gr.Client], object]] = [
                lambda client: client.get_rule("ste"),
                lambda client: client.get_rule("nothing"),
                lambda client: client.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"]),
                lambda client: client.upload(b"bytes"),
                lambda client: client.session(sign_graph()).__enter__(),
            ]
            for call in calls:
                with refused("UNAUTHENTICATED") as refusal:
                    call(client)
                said.add(refusal.message)
    assert len(said) == 1
    with guarded.connect("ada") as client:
        assert client.find_missing_blobs([raw_sha(b"bytes")])


def raw_sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic {}")],
        [("authorization", "{}")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer {}")],
        [("x-authorization", "Bearer {}")],
    ],
)
def test_headers_without_a_bearer_token_are_refused(guarded: Guarded, headers: list[tuple[str, str]]) -> None:
    metadata = [(key, value.format(guarded.web_token("ada"))) for key, value in headers]
    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        method: Any = channel.unary_unary("/gradrule.v1.RuleService/ListRules")
        assert method(b"", metadata=[("authorization", f"bearer {guarded.web_token('ada')}")], timeout=20)
        with refused_raw("UNAUTHENTICATED"):
            method(b"", metadata=metadata, timeout=20)


def test_large_request_without_credential_is_not_read(guarded: Guarded) -> None:
    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        started = time.monotonic()
        with refused_raw("UNAUTHENTICATED"):
            # It exceeds the message limit: reading it would give another error.
            raw.send(channel, "GradientService/Evaluate", bytes(80 << 20))
        assert time.monotonic() - started < 60


def test_revoked_token_is_refused_and_ends_its_streams(guarded: Guarded) -> None:
    token, other = guarded.new_token("brief"), guarded.new_token("lasting")
    assert wait_until(lambda: is_accepted(guarded, token) or None, "the new token")
    with guarded.connect(token=token) as client, client.session(variables_graph()) as session:
        shown = token_command("list", "--file", str(guarded.tokens))
        number = next(line.split()[0] for line in shown.splitlines() if line.split()[1] == "brief")
        assert "brief" in token_command("revoke", number, "--file", str(guarded.tokens))
        wait_until(lambda: None if is_accepted(guarded, token) else True, "the token's end")
        # A stream opened with the token ends when the token is revoked.
        with refused("UNAUTHENTICATED"):
            session.read(["w"])
    assert is_accepted(guarded, other)


@pytest.mark.parametrize("path", ["GradientService/StreamEvaluate", "SessionService/RunSession"])
def test_idle_streams_end_when_their_credential_expires(guarded: Guarded, path: str) -> None:
    taken, staying = guarded.new_token("brief"), guarded.new_token("lasting")
    # The file is read as a whole: when the last written token is accepted, all are known.
    assert wait_until(lambda: is_accepted(guarded, staying) or None, "the new tokens")
    # The clock tolerance of the server is ten seconds.
    expiring = guarded.web_token("brief", exp=now() - datetime.timedelta(seconds=5))
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        method: Any = channel.stream_stream(f"/gradrule.v1.{path}")
        calls = [
            method(nothing(), metadata=[("authorization", f"Bearer {token}")], timeout=60)
            for token in (taken, expiring, staying)
        ]
        try:
            time.sleep(0.5)
            token_command("revoke", hashlib.sha256(taken.encode()).hexdigest(), "--file", str(guarded.tokens))
            for call in calls[:2]:
                with refused_raw("UNAUTHENTICATED"):
                    next(call)
            assert calls[2].is_active()
        finally:
            over.set()


def variables_graph() -> gr.Graph:
    g = gr.Graph()
    w = g.op("VarHandleOp", name="w", dtype="float32", shape=[2], shared_name="w")
    g.op("AssignVariableOp", w, g.constant([1.0, 2.0]), name="w/Assign", dtype="float32")
    g.op("ReadVariableOp", w, name="read", dtype="float32")
    return g


def test_broken_token_file_refuses_all_tokens(guarded: Guarded) -> None:
    token = guarded.new_token("ada")
    assert wait_until(lambda: is_accepted(guarded, token) or None, "the new token")
    good = guarded.tokens.read_text()
    guarded.tokens.write_text("nonsense\n")
    try:
        wait_until(lambda: not is_accepted(guarded, token) or None, "no token")
        wait_until(lambda: "lines are no valid tokens" in guarded.running.log.read_text() or None, "a line in the log")
    finally:
        guarded.tokens.write_text(good)
    wait_until(lambda: is_accepted(guarded, token) or None, "the token")


def test_token_commands(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    first = token_command("new", "--tenant", "ada", "--file", str(file)).strip()
    second = token_command("new", "--tenant", "ada", "--admin", "--expires", "30d", "--file", str(file)).strip()
    assert first != second
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in token_command("list", "--json", "--file", str(file)).splitlines()]
    assert [line["tenant"] for line in lines] == ["ada", "ada"]
    assert [line.get("admin", False) for line in lines] == [False, True]
    assert lines[0]["sha256"] == raw_sha(first.encode())
    assert "admin" in token_command("revoke", lines[1]["id"], "--file", str(file))
    assert "no token" in token_command("revoke", lines[1]["id"], "--file", str(file), code=1)
    assert "ada" in token_command("revoke", "ada", "--file", str(file))
    assert token_command("list", "--file", str(file)) == ""
    assert "--file" in token_command("list", code=2)
    assert "expected a period" in token_command("new", "--tenant", "a", "--expires", "soon", "--file", "x", code=2)
    assert "tenant's name" in token_command("new", "--tenant", "", "--file", str(file), code=1)
    file.write_text('{"sha256": "short", "tenant": "a"}\n')
    assert "line 1" in token_command("list", "--file", str(file), code=1)


@provokes("PERMISSION_DENIED")
def test_only_administrators_may_administrate(guarded: Guarded) -> None:
    for token in (guarded.new_token("ops", "--admin"), guarded.web_token("root")):
        with guarded.connect(token=token) as client:
            assert "default" in {tenant.name for tenant in client.server_status().tenants}
    said = set()
    for token in (guarded.new_token("ops"), guarded.web_token("ops")):
        with guarded.connect(token=token) as client, refused("PERMISSION_DENIED") as refusal:
            client.server_status()
        said.add(refusal.message)
    assert len(said) == 1


# JSON Web Tokens.


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "EdDSA"])
def test_valid_web_token_is_accepted(guarded: Guarded, algorithm: str) -> None:
    assert is_accepted(guarded, guarded.web_token("ada", algorithm=algorithm))


@pytest.mark.parametrize(
    "changed",
    [
        {"exp": now() - HOUR},
        {"exp": None},
        {"nbf": now() + HOUR},
        {"iss": "https://somebody.else"},
        {"iss": None},
        {"aud": "something.else"},
        {"aud": None},
        {"sub": None},
        {"sub": ""},
        {"sub": "a" * 129},
        {"sub": "new\nline"},
    ],
    ids=[
        "expired",
        "no exp",
        "not yet",
        "iss",
        "no iss",
        "aud",
        "no aud",
        "no sub",
        "empty sub",
        "long sub",
        "sub of two lines",
    ],
)
def test_web_tokens_for_other_servers_are_refused(guarded: Guarded, changed: dict[str, Any]) -> None:
    assert not is_accepted(guarded, guarded.web_token("ada", **changed))


def test_web_tokens_with_invalid_signatures_are_refused(guarded: Guarded) -> None:
    claims = jwt.decode(guarded.web_token("ada"), options={"verify_signature": False})
    assert not is_accepted(guarded, unsigned_web_token(claims))
    assert not is_accepted(guarded, jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256"))
    # The algorithm-confusion attack: the public key used as an HMAC secret.
    public = guarded.keys["RS256"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head, body, _ = guarded.web_token("ada", algorithm="RS256").split(".")
    head = unsigned_web_token({}).split(".")[0] if not head else jwt.utils.base64url_encode(b'{"alg":"HS256"}').decode()
    signature = hmac.new(public, f"{head}.{body}".encode(), hashlib.sha256).digest()
    assert not is_accepted(guarded, f"{head}.{body}.{jwt.utils.base64url_encode(signature).decode()}")
    # The signed part stays unchanged.
    head, body, end = guarded.web_token("ada").split(".")
    other = jwt.utils.base64url_encode(json.dumps(claims | {"sub": "grace"}).encode()).decode()
    assert not is_accepted(guarded, f"{head}.{other}.{end}")


# TLS.


def test_plaintext_is_refused_on_a_tls_port(guarded: Guarded) -> None:
    token = guarded.web_token("ada")
    with gr.connect(guarded.running.target, token=token, timeout=3) as client, refused("UNAVAILABLE"):
        client.get_rule("ste")


def test_untrusted_server_gets_no_token(guarded: Guarded, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    words = {"credentials": gr.tls(other.file), "token": guarded.web_token("ada"), "timeout": 3.0}
    with gr.connect(guarded.running.target, **words) as client, refused("UNAVAILABLE"):
        client.get_rule("ste")


def test_health_needs_no_credential(guarded: Guarded) -> None:
    with grpc.secure_channel(guarded.running.target, gr.tls(guarded.authority.file)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="gradrule.v1.GradientService"), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_command_line_with_tls_and_token(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradrule.cli.main import main

    target, ca = guarded.running.target, str(guarded.authority.file)
    assert main(["health", target, "--tls-ca", ca]) == 0
    assert main(["health", target, "--timeout", "2"]) == 4
    capsys.readouterr()
    assert main(["rules", "show", "ste", "--target", target, "--tls-ca", ca, "--timeout", "20"]) == 3
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    monkeypatch.setenv("GRADRULE_TARGET", target)
    monkeypatch.setenv("GRADRULE_TLS_CA", ca)
    monkeypatch.setenv("GRADRULE_TOKEN", guarded.web_token("ada"))
    assert main(["rules", "show", "ste"]) == 0
    assert "ste" in capsys.readouterr().out
    assert main(["rules", "list", "--target", "gradrule.example:8470", "--tls-ca", "/nowhere/ca.crt"]) == 2
    assert "/nowhere/ca.crt" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["gradrule.example:8470", "dns:///10.0.0.1:8470", "ipv4:127.0.0.1:1,10.0.0.1:2"])
def test_token_is_not_sent_to_other_hosts_unencrypted(target: str) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="unencrypted"):
        gr.connect(target, token="t")
    gr.connect(target, token="t", insecure_token=True).close()
    gr.connect(target, token="t", credentials=gr.tls()).close()
    gr.connect(target).close()
    with pytest.raises(gr.errors.InvalidParamError, match="unencrypted"):
        gr.aio.connect(target, token="t")


@pytest.mark.parametrize(
    "target", ["localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1", "::1"]
)
def test_token_may_be_sent_unencrypted_on_this_host(target: str) -> None:
    gr.connect(target, token="t").close()


@pytest.mark.parametrize("token", ["", "two words", "line\n", "\N{SNOWMAN}"])
def test_malformed_tokens_are_refused_by_the_client(token: str) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="token"):
        gr.connect("localhost:1", token=token)


def test_client_certificates_name_tenants_and_server_certificate_is_reloaded(tmp_path: Path) -> None:
    """The server requires client certificates, and its own certificate is replaced while it runs."""
    old, new, clients = (Authority(tmp_path, name) for name in ("old", "new", "clients"))
    first, second = old.server("first"), new.server("second")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(first.certificate, certificate)
    shutil.copy(first.key, key)
    ada = clients.client("ada")
    spiffe = clients.client("spiffe", alternative="spiffe://example/ada")
    cut_off = clients.client("cut-off", alternative="ada\0.evil")
    stranger = Authority(tmp_path, "strangers").client("stranger")
    flags = [f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={clients.file}", "--no-reflection"]
    with running_server(tmp_path, flags) as running:

        def connect(root: Authority, signed: Any) -> Any:
            own = {} if signed is None else {"certificate": signed.certificate, "key": signed.key}
            return gr.connect(running.target, credentials=gr.tls(root.file, **own), timeout=20.0)

        with connect(old, ada) as client:
            client.create_rule("Mine", "3 * dy")
        with connect(old, spiffe) as client:
            assert client.list_rules("user") == []
            assert client.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"]).outputs["y"].tolist() == [1.0, -1.0]
        with connect(old, cut_off) as client, refused("UNAUTHENTICATED"):
            client.list_rules("user")
        for nobody in (None, stranger):
            with connect(old, nobody) as client, refused("UNAVAILABLE"):
                client.get_rule("ste", timeout=3)

        with connect(old, ada) as before:
            before.get_rule("Mine")
            # The files are replaced one after the other: a certificate without its key is not loaded.
            shutil.copy(second.certificate, certificate)
            running.process.send_signal(signal.SIGHUP)
            with connect(old, ada) as client:
                assert client.get_rule("Mine").name == "Mine"
            wait_until(lambda: "previous certificate stays" in running.log.read_text() or None, "a line in the log")
            shutil.copy(second.key, key)
            running.process.send_signal(signal.SIGHUP)
            wait_until(lambda: answers(connect(new, ada)), "the new certificate")
            with connect(old, ada) as client, refused("UNAVAILABLE"):
                client.get_rule("Mine", timeout=3)
            # Open connections stay open.
            before.get_rule("Mine")
        assert running.terminate() == 0


def test_connections_are_limited(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    signed = authority.server("server")
    flags = [f"--tls-cert={signed.certificate}", f"--tls-key={signed.key}", "--handshake-timeout-s=1"]
    with running_server(tmp_path, [*flags, "--max-connection-age-s=1"]) as running:
        host, _, port = running.target.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            assert silent.recv(1) == b""

        with grpc.secure_channel(running.target, gr.tls(authority.file)) as channel:
            method: Any = channel.unary_unary("/gradrule.v1.RuleService/ListPresets")
            method(b"", metadata=[("x", "y" * 4_000)], timeout=20)

            def refusal() -> grpc.StatusCode | None:
                # Below gRPC's own limit of 16 KiB.
                with pytest.raises(grpc.RpcError) as caught:
                    method(b"", metadata=[("x", "y" * 12_000)], timeout=20)
                # The connection's age may end it during the call.
                code: grpc.StatusCode = caught.value.code()
                return None if code is grpc.StatusCode.UNAVAILABLE else code

            assert wait_until(refusal, "answer to metadata that is too large") is grpc.StatusCode.RESOURCE_EXHAUSTED
            seen: list[grpc.ChannelConnectivity] = []
            channel.subscribe(seen.append)
            # Clients reconnect after GOAWAY, and no call is lost.

            def is_reconnected() -> bool | None:
                method(b"", timeout=20)
                return seen.count(grpc.ChannelConnectivity.READY) > 1 or None

            wait_until(is_reconnected, "a second connection")


def test_unresponsive_connection_is_closed_and_frees_its_place(tmp_path: Path) -> None:
    flags = ["--max-connections=1", "--max-connection-streams=7", "--keepalive-s=1", "--keepalive-timeout-s=1"]
    with running_server(tmp_path, flags) as running:
        host, _, port = running.target.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            # It sends the connection preface and never answers a PING.
            silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS + _SETTINGS_TAKEN)
            with silent.makefile("rb") as sent:
                length, kind, _, _ = struct.unpack(">xHBBI", sent.read(9))
                assert kind == 4
                assert dict(struct.iter_unpack(">HI", sent.read(length)))[_STREAMS] == 7
                with socket.create_connection((host, int(port)), timeout=20) as second:
                    assert second.recv(1) == b""
                sent.read()
        # The connection's place is freed a moment after its socket is closed.
        wait_until(lambda: answers(gr.connect(running.target)), "a connection in the freed place")


# Constants of HTTP/2: frame types, and the SETTINGS id of MAX_CONCURRENT_STREAMS.
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_SETTINGS_TAKEN = b"\0\0\0\4\1\0\0\0\0"
_STREAMS = 3


def answers(client: gr.Client) -> bool | None:
    with client:
        try:
            client.get_rule("ste", timeout=20)
        except gr.errors.UnavailableError:
            return None
    return True
