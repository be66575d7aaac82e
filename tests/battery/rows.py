"""Lists the rows of the battery in their order."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Mapping

from tests.battery.figures import Figures, Row, Scale
from tests.battery.report import MeasuredRow

MODULES: Mapping[str, str] = {
    "op_table": "tests.battery.op_table",
    "escapes": "tests.battery.escapes",
    "crashes": "tests.battery.crashes",
    "hangs": "tests.battery.hangs",
    "bombs": "tests.battery.bombs",
    "amplification": "tests.battery.amplification",
    "hostile": "tests.battery.hostile",
    "strangers": "tests.battery.strangers",
    "turns": "tests.battery.turns",
    "overload": "tests.battery.overload",
    "rolling": "tests.battery.rolling",
    "interleavings": "tests.battery.interleavings",
    "kills": "tests.battery.kills",
    "restarts": "tests.battery.restarts",
    "soak": "tests.battery.soak",
    "fuzz": "tests.battery.fuzz",
    "http2": "tests.battery.http2",
    "gateway": "tests.battery.gateway",
}
"""Row → the module whose `run` it is."""


def row(name: str) -> Row:
    """Returns a row by its name; raises `KeyError`."""
    found: Row = importlib.import_module(MODULES[name]).run
    return found


def measure(name: str, scale: Scale) -> MeasuredRow:
    """Runs a row. A row that cannot run has missed its target; the others run nevertheless."""
    started = time.monotonic()
    try:
        figures = row(name)(scale)
        if not figures.cases:
            figures.met = False
            figures.findings.append("nothing was tried")
    except Exception as failure:
        (scale.folder / f"{name}.traceback").write_text(traceback.format_exc())
        why = f"the row could not be run: {type(failure).__name__}: {failure}"
        figures = Figures(target="", cases=0, failures=1, met=False, findings=[why])
    return MeasuredRow(figures, time.monotonic() - started)
