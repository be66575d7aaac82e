"""One deadline holds for a whole request."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from gradrule_gateway import deadlines
from gradrule_gateway.deadlines import Deadline, deadline_of
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES

BY_RPC = {route.rpc.partition("/")[2]: route for route in ROUTES}


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns a clock that tests turn."""
    found = Clock()
    monkeypatch.setattr(deadlines, "_now", lambda: found.now)
    return found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5S", 5), ("2M", 120), ("1H", 3600), ("20m", 0.02), ("7u", 7e-6), ("9n", 9e-9)],
)
def test_notation(clock: Clock, text: str, seconds: float) -> None:
    assert deadline_of(Headers({"Grpc-Timeout": text}), BY_RPC["Evaluate"]).remaining_s() == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["2562047H", "99999999H", "99999999M"])
def test_very_long_deadlines_do_not_overflow(clock: Clock, text: str) -> None:
    """gRPC has 64 bits for nanoseconds: 2562047 hours."""
    found = deadline_of(Headers({"Grpc-Timeout": text}), BY_RPC["Evaluate"]).remaining_s()
    assert found is not None
    assert 86400 < found < 2**63 / 1e9 / 2


@pytest.mark.parametrize("values", [["5s"], ["0S"], ["123456789S"], [" 5S"], ["٥S"], ["5S", "1S"], [""]])
def test_wrong_headers(values: list[str]) -> None:
    raw = [(b"grpc-timeout", value.encode()) for value in values]
    with pytest.raises(Problem, match="Grpc-Timeout"):
        deadline_of(Headers(raw=raw), BY_RPC["Evaluate"])


@pytest.mark.parametrize(
    ("rpc", "seconds"), [("ListRules", 30.0), ("Evaluate", 330.0), ("CompileProgram", 330.0), ("UploadBlob", None)]
)
def test_defaults(clock: Clock, rpc: str, seconds: float | None) -> None:
    found = deadline_of(Headers({}), BY_RPC[rpc])
    assert (found.remaining_s(), found.is_default) == (seconds, True)


async def test_work_ends_at_the_deadline(clock: Clock) -> None:
    work = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with Deadline(clock.now - 1).enforced():
            await work

    with pytest.raises(Problem) as caught:
        await run()
    assert (caught.value.reason, caught.value.status, work.cancelled()) == ("DEADLINE_EXCEEDED", 504, True)
