"""Whole architectures: outputs and gradients equal to local TensorFlow's, plain, with rules of the catalogue and a
user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.architectures import ARCHITECTURES, Architecture
from tests.models.comparing import TOLERANCE, Row, compare


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.timeout(900)
def test_as_local_tensorflow(client: Any, architecture: Architecture, report: Callable[[Row], None]) -> None:
    row = compare(client, architecture)
    report(row)
    for variant, found in row.differences.items():
        assert found <= TOLERANCE, f"{variant}: {found:.1e} of the largest element"
