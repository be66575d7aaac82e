"""A stopping server stops all its parts, even if one of them fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradrule_server import app
from gradrule_server.front.server import GrpcServer
from gradrule_server.link.pool import EnginePool
from gradrule_server.operations.operations import Operations
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings


class StartError(Exception):
    """Raised to make the server stop."""


class StopError(Exception):
    """Raised by a part that fails to stop."""


_STOPS = ((GrpcServer, "drain"), (EnginePool, "stop"), (Operations, "stop"))


@pytest.mark.parametrize("broken", range(len(_STOPS)))
async def test_all_parts_stop_even_if_one_fails_to_stop(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def stopping(number: int, stop: Any) -> Any:
        async def stopped(*arguments: Any) -> None:
            asked.append(number)
            await stop(*arguments)
            if number == broken:
                raise StopError

        return stopped

    async def fail(*_: object) -> None:
        raise StartError

    monkeypatch.setattr(EnginePool, "start", fail)
    for number, (part, name) in enumerate(_STOPS):
        monkeypatch.setattr(part, name, stopping(number, getattr(part, name)))
    with pytest.raises(StopError) as failure:
        await app.serve(Settings.load(["--data-dir", str(tmp_path), "--port", "0", "--drain-s", "0"], {}))
    assert isinstance(failure.value.__context__, StartError)
    assert asked == [0, 1, 2]
    Store(tmp_path).close()
