"""The server is asked once whether it accepts a credential, and guesses of one client delay no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradrule_gateway import callers as callers_module
from gradrule_gateway.callers import Callers, network_of
from gradrule_gateway.problems import Problem

GOOD = [("authorization", "Bearer good"), ("traceparent", "00-1-2-00")]
BAD = [("authorization", "Bearer bad")]


class Server:
    """Accepts one token, or all calls."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.asked: list[Any] = []
        self.is_frozen = False

    async def check_credential(self, metadata: Any, timeout_s: float | None) -> None:
        self.asked.append([*metadata])
        if self.is_frozen:
            await asyncio.Event().wait()
        if not self.is_open and [*metadata] != GOOD[:1]:
            raise Problem("UNAUTHENTICATED", "no credential")


def callers(server: Any) -> Callers:
    return Callers(server)


async def test_a_credential_is_asked_for_once() -> None:
    server = Server(is_open=False)
    found = callers(server)
    names = {await found.find(GOOD, host, 1) for host in ("192.0.2.1", "192.0.2.2")}
    # Calls of one credential are those of one caller, wherever they come from.
    assert len(names) == 1
    assert server.asked == [[], GOOD[:1]]
    for wrong in (BAD, []):
        with pytest.raises(Problem, match="no credential"):
            await found.find(wrong, "192.0.2.1", 1)


async def test_all_spellings_of_a_credential_are_one_caller() -> None:
    found = callers(Server(is_open=False))
    spellings = ("Bearer good", "bearer good", "BEARER   good")
    assert len({await found.find([("authorization", text)], "192.0.2.1", 1) for text in spellings}) == 1


async def test_an_accepted_credential_is_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(is_open=False)
    found = callers(server)
    await found.find(GOOD, "192.0.2.1", 1)
    now = callers_module._now()
    monkeypatch.setattr(callers_module, "_now", lambda: now + 60)
    await found.find(GOOD, "192.0.2.1", 1)
    # A check without a credential is a refusal in the server's audit log.
    assert server.asked[2:] == [GOOD[:1]]
    monkeypatch.setattr(callers_module, "_now", lambda: now + 4000)
    await found.find(GOOD, "192.0.2.1", 1)
    assert server.asked[3:] == [[], GOOD[:1]]


async def test_callers_of_a_server_without_credentials_are_addresses() -> None:
    server = Server(is_open=True)
    found = callers(server)
    # A client that invents credentials stays one caller.
    assert [await found.find(given, "192.0.2.1", 1) for given in (GOOD, BAD, [])] == ["192.0.2.1"] * 3
    assert server.asked == [[]]


async def test_guesses_of_one_address_leave_questions_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(is_open=False)
    found = callers(server)
    await found.find(GOOD, "192.0.2.1", 1)
    server.is_frozen = True

    def guess(number: int) -> Any:
        return found.find([("authorization", f"Bearer {number}")], "192.0.2.66", 1)

    guesses = [asyncio.ensure_future(guess(number)) for number in range(200)]
    await asyncio.sleep(0)
    refused = sum(task.done() for task in guesses)
    assert refused == 200 - callers_module._MAX_WAITING - callers_module._CHECKS // 2
    server.is_frozen = False
    with pytest.raises(Problem, match="no credential"):
        await asyncio.wait_for(found.find(BAD, "192.0.2.1", 1), 60)
    for task in guesses:
        task.cancel()
    await asyncio.gather(*guesses, return_exceptions=True)


def test_addresses_that_one_client_may_have_are_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"
