"""The first cases of tests/generated: graphs and overrides at random, against an interpreter of both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generated.comparing import compare_cases, registered

__all__ = ["registered"]

CASES, CHUNK = 120, 30


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_overrides(client: Any, first: int) -> None:
    compare_cases(client, range(first, first + CHUNK))
