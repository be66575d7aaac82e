"""Prints what is found of large models as a table, and writes it to a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.comparing import Row
from tests.models.telling import page, table

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where this folder is named on the command line."""
    parser.addoption("--models-page", type=Path, help="Where to write the table of all models.")


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Takes what was found of a model."""
    return request.config.stash.setdefault(ROWS, []).append


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Prints the table, and writes it down where all went well."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("models")
    for line in table(rows):
        terminalreporter.write_line(line)
    target = config.getoption("--models-page", None)
    if target is not None and exitstatus == 0:
        target.write_text(page(rows))
        terminalreporter.write_line(f"written to {target}")
