"""Provides servers that the short rows share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.battery.figures import Scale
from tests.battery.serving import served
from tests.service.servers import RunningServer

SHORT = 0.01


@pytest.fixture(scope="session")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    """Returns a hundredth of full scale."""
    folder: Path = tmp_path_factory.mktemp("battery")
    return Scale(SHORT, seed=1, folder=folder)


@pytest.fixture(scope="session")
def shared_server(scale: Scale) -> Iterator[RunningServer]:
    """Returns a server with default settings, for rows that do not harm it."""
    with served(scale, "shared") as running:
        yield running
