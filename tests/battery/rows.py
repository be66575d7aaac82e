"""The rows of the battery, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tests.battery.figures import Row

MODULES: Mapping[str, str] = {
    "fuzz": "tests.battery.fuzz",
    "kills": "tests.battery.kills",
    "interleavings": "tests.battery.interleavings",
    "soak": "tests.battery.soak",
    "overload": "tests.battery.overload",
    "rolling": "tests.battery.rolling",
    "hostile": "tests.battery.hostile",
    "amplification": "tests.battery.amplification",
}
"""Row → the module whose `run` it is."""


def row(name: str) -> Row:
    """A row by its name; `KeyError`."""
    found: Row = importlib.import_module(MODULES[name]).run
    return found
