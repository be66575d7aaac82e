from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradrule_server.registry.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "data")
    yield opened
    opened.close()
