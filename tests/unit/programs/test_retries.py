"""How often a call may lose its engine."""

from __future__ import annotations

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding
from gradrule_server.link.faults import EngineLost, NotLoaded
from gradrule_server.programs.retries import Retries
from tests.unit.link.fake_engine import FakeEngine

_LOST = [Finding(errors_pb2.ERROR_REASON_ENGINE_CRASHED, "gone")]


class Attempts:
    """Fails with each error in turn, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.made = 0

    async def __call__(self) -> int:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.made


async def test_once_where_it_may_be_to_blame() -> None:
    retries = Retries(FakeEngine())
    assert await retries.run(Attempts(EngineLost(_LOST))) == 2
    # Compiling and running are one call.
    second = Attempts(EngineLost(_LOST))
    with pytest.raises(EngineLost):
        await retries.run(second)
    assert second.made == 1


async def test_as_often_as_needed_for_what_others_did() -> None:
    lost = [EngineLost(_LOST, suspect=False) for _ in range(5)]
    assert await Retries(FakeEngine()).run(Attempts(*lost, EngineLost(_LOST))) == 7


async def test_once_for_a_program_that_is_not_there() -> None:
    retries = Retries(FakeEngine())
    assert await retries.run(Attempts(NotLoaded(_LOST))) == 2
    with pytest.raises(NotLoaded):
        await retries.run(Attempts(NotLoaded(_LOST)))
