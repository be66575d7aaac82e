"""Hostile and wrong requests: each is a problem with a reason, and the gateway goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gradrule.common.status_codes import STATUS_CODES
from gradrule.errors import BY_REASON
from gradrule_gateway.problems import HTTP_STATUS, Problem
from tests.service.certificates import Authority
from tests.service.gateways import RunningGateway, read, running_gateway
from tests.service.guarded import Guarded, token_command
from tests.service.servers import RunningServer, running_server
from tests.service.test_gateway import SIGN
from tests.waiting import wait_until

JSON = {"Content-Type": "application/json"}
HEAD = b"\r\n".join(
    [
        b"POST /v1/evaluate HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: 9",
        b"",
        b"",
    ]
)


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    """Returns a gateway with small limits before the shared server."""
    flags = (
        "--max-body-bytes",
        "256k",
        "--idle-s",
        "3",
        "--allowed-host",
        "gradrule.example.org",
        "--max-requests",
        "3",
    )
    with running_gateway(server.target, *flags, "--cors-origin", "https://app.example.org") as running:
        yield running


DEEP = b'{"spec":' * 2000 + b"1" + b"}" * 2000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"feeds": {"x": 1}, "feeds": {"x": 2}}', "'feeds' occurs twice"),
        (b'{"feeds": {"x": NaN}}', 'write the string "NaN"'),
        (b'{"feeds": {"x": [Infinity]}}', 'write the string "Infinity"'),
        (b'{"feeds": {"x": 1e999}}', "too large"),
        (b'{"feeds": {"x": ' + b"9" * 5000 + b"}}", "too many digits"),
        (b'{"feeds": {"x": [1, ' + b"9" * 40 + b"]}}", "feeds.x"),
        (b'{"feeds": {"x": "\xff"}}', "not UTF-8"),
        (b'{"program": "\\ud800"}', "lone surrogate"),
        (DEEP, "nested too deeply"),
        (b'{"feeds": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}}", "nested too deeply"),
        (b'{"feeds": {"x": ' + b"[" * 50 + b"]" * 50 + b"}}", "deep"),
        (b'{"feeds": {"x": [[1, 2], [3]]}}', "ragged"),
        (b'{"feeds": {"x": {"dtype": "float32", "shape": [1000000000000], "values": [1]}}}', "do not have the shape"),
        (b'{"feeds": {"x": {"dtype": "float33", "values": [1]}}}', "is no element type"),
        (b'{"feeds": {"x": {"dtype": "float32", "base64": "A"}}}', "the text is not base64"),
        (b'{"feeds": {"x": {"values": [1], "vals": 1}}}', "no key 'vals'"),
        (b'{"spec": {"vjp": {"ys": ["y"]}, "jvp": {"ys": ["y"]}}}', "spec.jvp: 'vjp' is given too"),
        (b'{"programm": "programs/p"}', "Did you mean 'program'?"),
        (b'{"stackedGradYs": 1}', "expected true or false"),
        (b'{"runTimeout": 5}', "runTimeout"),
        (b'{"derivative": "DERIVATIVE_VPJ"}', "Did you mean"),
    ],
    ids=lambda value: value[:24].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_bad_bodies(gateway: RunningGateway, body: bytes, said: str) -> None:
    answer = gateway.send("POST", "/v1/evaluate", body, JSON)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json"), answer.body
    assert said in answer.json["detail"]
    assert answer.json["code"] == "INVALID_ARGUMENT"
    assert "Traceback" not in answer.body.decode()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "reason"),
    [
        ("GET", "/nothing", {}, 404, "UNSUPPORTED"),
        ("GET", "/v1/evaluate", {}, 405, "UNSUPPORTED"),
        ("PATCH", "/v1/rules", {}, 405, "UNSUPPORTED"),
        ("POST", "/v1/evaluate", {"Content-Type": "text/plain"}, 415, "UNSUPPORTED"),
        ("POST", "/v1/evaluate", {"Content-Type": "application/json; charset=latin-1"}, 415, "UNSUPPORTED"),
        ("POST", "/v1/evaluate", {"Content-Type": 'application/json; a=b; charset="UTF-8"'}, 400, "MALFORMED_REQUEST"),
        ("POST", "/v1/evaluate", JSON | {"Content-Encoding": "gzip"}, 415, "UNSUPPORTED"),
        ("GET", "/v1/rules", {"Host": "attacker.example.com"}, 403, "PERMISSION_DENIED"),
        ("GET", "/v1/rules", {"Host": "localhost.example.com:8480"}, 403, "PERMISSION_DENIED"),
        ("GET", "/v1/rules", {"Host": "gradrule.example.org"}, 200, ""),
        ("GET", "/v1/rules?pageSize=x", {}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/rules?page_size=1&pageSize=2", {}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/rules?color=1", {}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/rules?format=xml", {}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/rules", {"Grpc-Timeout": "soon"}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/rules", {"Grpc-Timeout": "99999999H"}, 200, ""),
        ("GET", "/v1/rules?kind=77", {}, 200, ""),
        ("GET", "/v1/rules", {"Grpc-Timeout": "1n"}, 504, "DEADLINE_EXCEEDED"),
        ("GET", "/v1/rules", {"Authorization": "Bearer \xe9"}, 400, "MALFORMED_REQUEST"),
        ("GET", "/v1/programs/none", {}, 404, "PROGRAM_NOT_FOUND"),
        ("DELETE", "/v1/rules/ste", {}, 400, "RULE_READ_ONLY"),
        ("GET", "/../../etc/passwd", {}, 404, "UNSUPPORTED"),
        ("GET", "/assets/..%2f..%2fopenapi.json", {}, 404, "UNSUPPORTED"),
    ],
)
def test_bad_requests(
    gateway: RunningGateway, method: str, path: str, headers: dict[str, str], status: int, reason: str
) -> None:
    answer = gateway.send(method, path, b"{}" if method == "POST" else None, headers)
    assert answer.status == status, answer.body
    assert not reason or answer.json["reason"] == reason


def test_long_bodies_are_refused_before_and_while_they_arrive(gateway: RunningGateway) -> None:
    body = b'{"program": "' + b"x" * 300_000 + b'"}'
    assert gateway.send("POST", "/v1/evaluate", body, JSON).json["reason"] == "MESSAGE_TOO_LARGE"
    with contextlib.closing(gateway.connect()) as connection:
        # In chunks, without a length.
        connection.request("POST", "/v1/evaluate", iter([body[:100_000]] * 4), JSON, encode_chunked=True)
        answer = read(connection.getresponse())
    assert (answer.status, answer.json["reason"]) == (413, "MESSAGE_TOO_LARGE")


def test_long_headers_are_refused(gateway: RunningGateway) -> None:
    answer = gateway.send("GET", "/v1/rules", None, {"X-Long": "x" * 40_000})
    assert (answer.status, answer.json["reason"]) == (431, "MALFORMED_REQUEST")


def test_a_body_that_does_not_arrive_is_given_up(gateway: RunningGateway) -> None:
    with socket.create_connection(gateway.address, timeout=20) as client:
        client.sendall(HEAD + b"{")
        text = b""
        while part := client.recv(65536):
            text += part
    assert text.startswith(b"HTTP/1.1 408 ")


def test_an_upload_that_does_not_arrive_is_given_up(gateway: RunningGateway) -> None:
    with socket.create_connection(gateway.address, timeout=20) as client:
        client.sendall(f"PUT /v1/blobs/{'0' * 64} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1".encode())
        text = b""
        while part := client.recv(65536):
            text += part
    assert text.startswith(b"HTTP/1.1 408 ")


def hold(gateway: RunningGateway, count: int, first: bytes = b"", addresses: int = 1) -> list[socket.socket]:
    """Opens connections from other addresses of loopback, which send `first` and nothing else."""
    held = []
    for number in range(count * addresses):
        source = f"127.0.0.{2 + number % addresses}", 0
        held.append(socket.create_connection(gateway.address, 20, source_address=source))
        held[-1].sendall(first)
    return held


def test_unfinished_bodies_of_four_addresses_keep_nobody_out(server: RunningServer) -> None:
    with running_gateway(server.target, "--max-connections", "16") as gateway:
        held = hold(gateway, 4, HEAD + b"{", addresses=4)
        for path in ("/healthz", "/v1/health", "/v1/rules"):
            assert gateway.get(path).status == 200
        # The oldest one of them was closed for each.
        with contextlib.suppress(ConnectionResetError):
            assert held[0].recv(1) == b""
        for each in held:
            each.close()


def test_silent_connections_are_counted_when_they_are_accepted(server: RunningServer, tmp_path: Path) -> None:
    import ssl
    from http.client import HTTPSConnection

    authority = Authority(tmp_path, "authority")
    files = authority.server("localhost")
    flags = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--max-connections", "16")
    context = ssl.create_default_context(cafile=str(authority.file))
    with running_gateway(server.target, *flags) as gateway:
        held = hold(gateway, 12)
        with contextlib.suppress(ConnectionResetError):
            assert held[7].recv(1) == b""
        with contextlib.closing(HTTPSConnection(*gateway.address, context=context)) as connection:
            connection.request("GET", "/metrics")
            metrics = read(connection.getresponse()).body.decode().splitlines()
        assert 'gradrule_gateway_connections_closed_total{limit="address"} 8' in metrics
        wait_until(
            lambda: any("4 connections of 127.0.0.2" in line for line in list(gateway.log)) or None, "a log line"
        )
        for each in held:
            each.close()


def test_no_body_is_awaited_without_a_valid_credential(guarded: Guarded) -> None:
    with running_gateway(guarded.running.target, "--tls-ca", str(guarded.authority.file)) as gateway:
        for wrong in (b"", b"Authorization: Bearer wrong\r\n"):
            with socket.create_connection(gateway.address, timeout=20) as client:
                client.sendall(HEAD.replace(b"Content-Length", wrong + b"Content-Length"))
                assert client.recv(13) == b"HTTP/1.1 401 "
        assert gateway.get("/metrics").status == 401


def test_only_listed_origins_may_use_the_api_from_a_browser(gateway: RunningGateway) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    listed = gateway.send("OPTIONS", "/v1/evaluate", None, {"Origin": "https://app.example.org", **preflight})
    assert (listed.status, listed.headers["access-control-allow-origin"]) == (204, "https://app.example.org")
    other = gateway.send("OPTIONS", "/v1/evaluate", None, {"Origin": "https://evil.example.org", **preflight})
    assert other.status == 405
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in gateway.get("/v1/rules", Origin="https://evil.example.org").headers


def test_a_client_that_goes_away_cancels_its_call(tmp_path: Path) -> None:
    # A server of its own: an engine that keeps values of other tests is not ended while they are kept.
    with running_server(tmp_path) as server, running_gateway(server.target) as gateway:
        leave_during_a_call(gateway, server)


def leave_during_a_call(gateway: RunningGateway, server: RunningServer) -> None:
    """Sends a call that takes an hour, goes away, and waits until the server has stopped it."""
    loop = {
        "graph": {"serialized": slow_graph()},
        "fetches": ["y"],
    }
    body = json.dumps({"spec": loop, "feeds": {"n": {"dtype": "int32", "values": 2_000_000_000}}}).encode()
    with contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", "/v1/evaluate", body, JSON)
        server.wait_for_running_calls(1)
    server.wait_for_running_calls(0)
    wait_until(lambda: any("CANCELLED" in line for line in list(gateway.log)) or None, "the line of the access log")


def slow_graph() -> str:
    """Returns a graph in base64 that counts up to `n`."""
    import base64

    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, "n")])
    def count(n: Any) -> Any:
        (found,) = tf.while_loop(lambda i: i < n, lambda i: (i + 1,), (0,))
        return tf.identity(found, name="y")

    return base64.b64encode(count.get_concrete_function().graph.as_graph_def().SerializeToString()).decode()


def test_refusals_of_large_bodies_reach_the_client(gateway: RunningGateway, guarded: Guarded) -> None:
    """Python's client sends the whole body before it reads the answer."""
    body = bytes(30 << 20)
    assert gateway.send("POST", "/v1/evaluate", body, JSON).status == 413
    with running_gateway(guarded.running.target, "--tls-ca", str(guarded.authority.file)) as asking:
        assert asking.send("PUT", f"/v1/blobs/{'0' * 64}", body).status == 401
        # Not valid JSON, which nobody without a credential learns.
        assert asking.send("POST", "/v1/evaluate", body, JSON).status == 401


def test_revoked_tokens_are_refused(guarded: Guarded) -> None:
    program = {"spec": SIGN, "programId": "revoked"}
    call = {"program": "programs/revoked", "feeds": {"x": [1]}}
    token = guarded.new_token("gateway-brief")
    with running_gateway(guarded.running.target, "--tls-ca", str(guarded.authority.file)) as gateway:

        def status(method: str, path: str, body: Any = None) -> int:
            return gateway.send(method, path, body, {"Authorization": f"Bearer {token}"}).status

        wait_until(lambda: status("POST", "/v1/programs", program) == 200 or None, "the new token")
        # Now the gateway keeps the program's types for this token.
        assert status("POST", "/v1/evaluate", call) == 200
        token_command("revoke", "gateway-brief", "--file", str(guarded.tokens))
        wait_until(lambda: status("GET", "/v1/rules") == 401 or None, "the token's end")
        assert status("POST", "/v1/evaluate", call) == 401


def test_credentials_are_passed_on_and_never_logged(guarded: Guarded, tmp_path: Any) -> None:
    with running_gateway(guarded.running.target, "--tls-ca", str(guarded.authority.file)) as gateway:
        refused = gateway.get("/v1/rules")
        assert (refused.status, refused.json["reason"]) == (401, "UNAUTHENTICATED")
        assert refused.headers["www-authenticate"] == "Bearer"
        token = guarded.new_token("gateway-caller")
        assert gateway.get("/v1/rules", Authorization=f"Bearer {token}").status == 200
        assert gateway.get("/v1/rules?kind=USER", Authorization="Bearer secret-that-is-wrong").status == 401
        wait_until(lambda: len(gateway.log) >= 3 or None, "three lines of the access log")
    text = "".join(gateway.log)
    assert token not in text
    assert "secret" not in text
    line = json.loads(gateway.log[0])
    assert (line["message"].split(":")[0], line["status"]) == ("GET /v1/rules UNAUTHENTICATED", 401)


def test_a_gateway_without_its_server(tmp_path: Any) -> None:
    with running_gateway("localhost:1") as gateway:
        answer = gateway.get("/v1/presets")
        assert (answer.status, answer.json["reason"]) == (503, "UNAVAILABLE")
        assert "no server listens" in answer.json["detail"]
        assert gateway.get("/v1/health").status == 503
        assert gateway.get("/healthz").status == 200


def test_a_gateway_with_tls(server: RunningServer, tmp_path: Any) -> None:
    import ssl
    from http.client import HTTPSConnection

    authority = Authority(tmp_path, "authority")
    files = authority.server("localhost")
    flags = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    with running_gateway(server.target, *flags) as gateway:
        assert gateway.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(authority.file))
        connection = HTTPSConnection(*gateway.address, context=context)
        connection.request("GET", "/v1/health")
        assert read(connection.getresponse()).json == {"status": "SERVING"}
        connection.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tls-cert", "missing.pem", "--tls-key", "missing.pem"), "No such file"),
        (("--tls-cert", "cert.pem"), "--tls-key"),
        (("--server", "not a target"), "not a target"),
        (("--port", "99999"), "0 to 65535"),
    ],
)
def test_wrong_flags_end_the_gateway_with_a_message(flags: tuple[str, ...], said: str) -> None:
    import sys

    command = [sys.executable, "-m", "gradrule", "gateway", "--port", "0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_code_has_the_status_of_grpc_gateway() -> None:
    # https://github.com/grpc-ecosystem/grpc-gateway, runtime/errors.go
    expected = {"OK"} | set(HTTP_STATUS)
    assert {code.name for code in grpc.StatusCode} == expected
    numbers = [HTTP_STATUS[name] for name in ("NOT_FOUND", "ALREADY_EXISTS", "ABORTED", "UNIMPLEMENTED", "UNAVAILABLE")]
    assert numbers == [404, 409, 409, 501, 503]


@pytest.mark.parametrize("reason", sorted(BY_REASON))
def test_every_reason_has_a_status(reason: str) -> None:
    problem = Problem(reason, "said", retry_after_s=0.25)
    expected = HTTP_STATUS[STATUS_CODES.get(reason, "INVALID_ARGUMENT")] if reason != "MESSAGE_TOO_LARGE" else 413
    assert problem.status == expected
    assert problem.body()["reason"] == reason
    assert problem.all_headers()["retry-after"] == "1"


def test_all_findings_of_a_program_are_violations(gateway: RunningGateway) -> None:
    spec = SIGN | {
        "overrides": [{"selector": {"opType": "Sign"}, "rule": "nope"}, {"selector": {"node": "zz"}, "rule": "ste"}]
    }
    answer = gateway.post("/v1/evaluate", {"spec": spec, "feeds": {"x": [1.0]}})
    assert (answer.status, answer.json["reason"]) == (400, "UNMATCHED_OVERRIDE")
    found = {(entry["field"], entry.get("reason", answer.json["reason"])) for entry in answer.json["violations"]}
    assert ("overrides[0].rule", "UNKNOWN_RULE") in found
    assert len(found) == 2
