"""Limits on requests: how many, how many bytes, how slowly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gradrule_gateway import guard as guard_module
from gradrule_gateway.budget import Budget, Share
from gradrule_gateway.guard import Guard, Limits

PART = {"type": "http.request", "body": b"x" * 10, "more_body": True}
LAST = {"type": "http.request", "body": b"x" * 10, "more_body": False}


class Exchange:
    """One request to a guard: `give` sends its body, `sent` has the answer."""

    def __init__(self, guard: Guard, method: str = "GET", path: str = "/v1/rules", **headers: str) -> None:
        self.sent: list[Any] = []
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._began = asyncio.Event()
        found = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"localhost"), *found]}
        self.task = asyncio.ensure_future(guard({**scope, "client": ("127.0.0.1", 1)}, self._messages.get, self._send))

    def give(self, *messages: Any) -> Exchange:
        for message in messages:
            self._messages.put_nowait(message)
        return self

    @property
    def waiting(self) -> int:
        return self._messages.qsize()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._began.set()

    async def began(self) -> Exchange:
        await asyncio.wait_for(self._began.wait(), 30)
        return self

    async def answer(self) -> tuple[int, Any]:
        await asyncio.wait_for(self.task, 60)
        text = b"".join(message.get("body", b"") for message in self.sent)
        return self.sent[0]["status"], json.loads(text) if text else None


class App:
    """An application that reads the body, begins its answer, and ends it when it may."""

    def __init__(self, work: Callable[[Any], None] = lambda share: None) -> None:
        self.may_end = asyncio.Event()
        self.running = 0
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        self._work(scope["state"]["share"])
        self.running += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b""})


def guarded(app: Any, **limits: Any) -> Guard:
    """Returns a guard around an application."""
    found = Limits(**limits)
    return Guard(app, found, Budget(found.max_requests, found.max_bytes_in_flight))


async def test_the_oldest_body_that_has_not_arrived_is_given_up_for_other_bytes() -> None:
    app = App()
    app.may_end.set()
    guard = guarded(app, max_bytes_in_flight=46)
    slow = [Exchange(guard, "POST", content_length="100").give(PART) for _ in range(2)]
    while any(each.waiting for each in slow):
        await asyncio.sleep(0)
    assert (await Exchange(guard, "POST", content_length="20").give(PART, LAST).answer())[0] == 200
    status, problem = await slow[0].give(LAST).answer()
    assert (status, problem["reason"], problem["retryAfterSeconds"]) == (503, "OVERLOADED", 1.0)
    assert (await slow[1].give(LAST).answer())[0] == 200
    assert guard._budget.used == 0


async def test_a_body_is_given_up_although_its_end_arrives_at_the_same_time() -> None:
    app = App()
    guard = guarded(app, max_bytes_in_flight=30)
    given_up = Exchange(guard, "POST", content_length="15").give(PART)
    while not guard._budget.used:
        await asyncio.sleep(0)
    given_up.give({**LAST, "body": b"x" * 5})
    other = Share(guard._budget)
    other.caller = "other"
    other.take(22)
    status, problem = await given_up.answer()
    assert (status, problem["reason"], app.running, guard._budget.used) == (503, "OVERLOADED", 0, 22)
    assert "the oldest" in problem["detail"]


async def test_all_bytes_of_all_requests_count() -> None:
    """Bodies and what the application keeps, until the last byte of the answer is sent."""
    app = App(lambda share: share.take(60))
    guard = guarded(app, max_bytes_in_flight=100)
    first = await Exchange(guard, "POST", content_length="20").give(PART, LAST).began()
    status, problem = await Exchange(guard, "POST", content_length="20").give(PART, LAST).answer()
    assert (status, problem["reason"]) == (503, "OVERLOADED")
    app.may_end.set()
    assert (await first.answer())[0] == 200
    assert (await Exchange(guard, "POST", content_length="20").give(PART, LAST).answer())[0] == 200
    # No later try can succeed.
    status, problem = await Exchange(guard, "POST", content_length="50").give(*[PART] * 4, LAST).answer()
    assert (status, problem["reason"]) == (413, "MESSAGE_TOO_LARGE")
    assert guard._budget.used == 0


async def test_a_trickling_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(guard_module, "_now", lambda: now)
    slow = Exchange(guarded(App(), idle_s=30), "POST", content_length="100000")
    for _ in range(4):
        slow.give({**PART, "body": b"x"})
        while slow.waiting:
            await asyncio.sleep(0)
        now += 10
    # Four bytes in 30 s, each after a pause that is short enough.
    assert (await slow.answer())[0] == 408


async def test_a_fast_body_may_pause_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(guard_module, "_now", lambda: now)
    app = App()
    app.may_end.set()
    exchange = Exchange(guarded(app, idle_s=30), "POST", content_length="100000")
    for _ in range(10):
        exchange.give({**PART, "body": b"x" * 25 * 4096})
        while exchange.waiting:
            await asyncio.sleep(0)
        now += 25
    assert (await exchange.give(LAST).answer())[0] == 200


async def test_a_refused_body_is_read_after_the_answer() -> None:
    """Otherwise the client's system reports a reset connection, and drops the answer."""
    guard = guarded(App(), max_body_bytes=15)
    exchange = await Exchange(guard, "POST", content_length="1000").give(PART, PART).began()
    assert not exchange.task.done()
    status, problem = await exchange.give(PART, LAST).answer()
    assert (status, problem["reason"], exchange.waiting) == (413, "MESSAGE_TOO_LARGE", 0)
    assert (b"connection", b"close") in exchange.sent[0]["headers"]
    assert [len(message["body"]) > 0 for message in exchange.sent[1:] if "body" in message] == [True]


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"content_length": "5", "transfer_encoding": "chunked"}, 400, "either Content-Length or Transfer-Encoding"),
        ({"content_length": "10", "content_encoding": "gzip"}, 415, "no Content-Encoding, not 'gzip'"),
        ({"content_length": "10", "content_encoding": "identity"}, 200, ""),
    ],
)
async def test_headers_of_bodies(headers: dict[str, str], status: int, said: str) -> None:
    app = App()
    app.may_end.set()
    found, problem = await Exchange(guarded(app), "POST", **headers).give(LAST).answer()
    assert found == status
    assert not said or said in problem["detail"]
