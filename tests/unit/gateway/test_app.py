"""What requests ask of the server, with a server that only records."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from starlette.requests import ClientDisconnect, Request

from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_gateway import deadlines
from gradrule_gateway.app import Gateway
from gradrule_gateway.budget import Budget, Share
from gradrule_gateway.converters import MAX_INLINE, Converters
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES

BY_RPC = {route.rpc.partition("/")[2]: route for route in ROUTES}


class Server:
    """Records the deadlines of calls; each call takes a second."""

    may_send_tokens = True

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.timeouts: list[float | None] = []
        self.is_known = True
        self.answer = b""

    async def unary(self, path: str, request: bytes, metadata: Any, timeout_s: float | None) -> tuple[bytes, str]:
        self.timeouts.append(timeout_s)
        self.clock[0] += 1
        if path.endswith("GetProgram"):
            x = program_pb2.Program(inputs=[{"name": "x", "dtype": Dt.DT_FLOAT}])
            return program_pb2.GetProgramResponse(program=x).SerializeToString(), ""
        return self.answer, ""

    async def upload(self, path: str, requests: Any, metadata: Any, timeout_s: float | None) -> tuple[bytes, str]:
        self.timeouts.append(timeout_s)
        return b"", ""

    async def is_serving(self, timeout_s: float) -> bool:
        self.timeouts.append(timeout_s)
        return True

    async def check_credential(self, metadata: Any, timeout_s: float | None) -> None:
        self.timeouts.append(timeout_s)
        self.clock[0] += 1
        if not self.is_known:
            raise Problem("UNAUTHENTICATED", "no credential")


class Endless(Converters):
    """Never ends a conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = 0

    async def _in_process(self, caller: str, function: Any, *arguments: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


class Client:
    """Sends requests to a gateway without a network."""

    def __init__(
        self,
        server: Server,
        max_bytes: int = 1 << 30,
        converters: Converters | None = None,
        max_requests: int = 256,
    ) -> None:
        self.gateway = Gateway(server, converters or Converters(), insecure_tokens=False)
        self.budget = Budget(max_requests, max_bytes)
        self.bytes_read = 0

    async def send(self, rpc: str, body: bytes = b"", **headers: str) -> Any:
        return await self.gateway.call(BY_RPC[rpc], self.request(rpc, body, **headers))

    def request(self, rpc: str, body: bytes = b"", *, is_gone: bool = False, **headers: str) -> Request:
        """Returns a request; the client closes its connection after the body if it is to be gone."""
        route = BY_RPC[rpc]
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not messages:
                if is_gone:
                    return {"type": "http.disconnect"}
                await asyncio.Event().wait()
            self.bytes_read += len(body)
            return messages.pop()

        given = {"content-length": str(len(body)), "content-type": "application/json"} | headers
        scope = {
            "type": "http",
            "method": route.method,
            "path": route.path,
            "query_string": b"",
            "path_params": {route.path_field: "0" * 64} if route.path_field else {},
            "headers": [(name.replace("_", "-").encode(), text.encode()) for name, text in given.items()],
            "state": {"share": Share(self.budget)},
        }
        return Request(scope, receive)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Returns a server whose calls take a second of the clock of deadlines."""
    clock = [0.0]
    monkeypatch.setattr(deadlines, "_now", lambda: clock[0])
    return Server(clock)


CALL = {"program": "programs/p", "feeds": {"x": [1]}}


async def test_all_calls_of_a_request_share_its_deadline(server: Server) -> None:
    await Client(server).send("Evaluate", json.dumps(CALL).encode(), grpc_timeout="5S")
    assert server.timeouts == [5.0, 4.0, 3.0]


async def test_no_body_is_read_without_a_valid_credential(server: Server) -> None:
    client, server.is_known = Client(server), False
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(Problem, match="no credential"):
            await client.send("Evaluate", b"{}", **headers)
    assert client.bytes_read == 0


async def test_requests_count_from_the_end_of_their_body(server: Server) -> None:
    client = Client(server, max_requests=1)
    body = json.dumps(CALL).encode()
    running = Share(client.budget)
    running.start()
    with pytest.raises(Problem, match="--max-requests"):
        await client.send("Evaluate", body)
    assert client.bytes_read == len(body)
    # Uploads last as long as the network needs.
    await client.send("UploadBlob", b"bytes")
    running.release()
    await client.send("Evaluate", body)
    assert client.budget.requests == 1


async def test_questions_for_health_at_the_same_time_get_one_answer(server: Server) -> None:
    client = Client(server)
    answers = await asyncio.gather(*(client.gateway.server_health(client.request("ListRules")) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len(server.timeouts) == 1


@pytest.mark.parametrize("kind", ["decode", "encode", "picture", "graph"])
async def test_a_client_that_goes_away_cancels_conversions(server: Server, kind: str) -> None:
    converters = Endless()
    client = Client(server, converters=converters)
    server.answer = bytes(1 << 20)
    if kind == "encode":
        running = client.gateway.call(BY_RPC["ListPresets"], client.request("ListPresets", is_gone=True))
    elif kind == "graph":
        server.answer = b""
        body = b"\x0a\x00" * MAX_INLINE
        request = client.request("Evaluate", body, is_gone=True, **{"content-type": "application/octet-stream"})
        running = client.gateway.read_graph(request)
    else:
        request = client.request("Evaluate", b" " * (MAX_INLINE + 1), is_gone=True)
        is_call = kind == "decode"
        running = client.gateway.call(BY_RPC["Evaluate"], request) if is_call else client.gateway.draw_graph(request)
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(running, 30)
    assert converters.cancelled == 1


async def test_bytes_of_a_client_that_goes_away_are_given_back_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def exchange() -> None:
        request = client.request("CreateRule", b'{"rule": {"name": "rules/a"}}', is_gone=True)
        try:
            await client.gateway.call(BY_RPC["CreateRule"], request)
        finally:
            request.state.share.release()

    monkeypatch.setattr(server, "unary", never)
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(exchange(), 30)
    await asyncio.sleep(0)
    assert (client.budget.requests, client.budget.used, client.budget.bytes_of) == (0, 0, {})


async def test_uploads_have_no_deadline_of_their_own(server: Server) -> None:
    await Client(server).send("UploadBlob", b"bytes")
    await Client(server).send("UploadBlob", b"bytes", grpc_timeout="5S")
    # Each time, the first call finds the caller.
    assert server.timeouts == [None, None, 5.0, 4.0]


async def test_answers_count_until_they_are_sent(server: Server) -> None:
    answer = evaluate_pb2.EvaluateResponse()
    answer.outputs.add(name="y").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.zeros(1000, np.float32)))
    server.answer = answer.SerializeToString()
    client = Client(server, max_bytes=8000)
    text = await client.send("Evaluate", json.dumps(CALL).encode())
    assert client.budget.used == len(text.body) > 4000
    with pytest.raises(Problem) as caught:
        await client.send("Evaluate", json.dumps(CALL).encode())
    assert (caught.value.reason, caught.value.status) == ("OVERLOADED", 503)
    with pytest.raises(Problem) as caught:
        await Client(server, max_bytes=1000).send("Evaluate", json.dumps(CALL).encode())
    assert caught.value.status == 413
