"""Decides whether calls of a program may run together: the analysis proves it, and a trial confirms it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradrule_server.engine.batching.analysis import Layout, Refusal, analyse
from gradrule_server.engine.batching.merging import BatchedCall, allowed_size, run_together
from gradrule_server.engine.comparison import is_close, magnitude
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.errors import GradruleError

_log = logging.getLogger(__name__)

# Kernels for other sizes add in another order. Allowed difference, in units of the last place of the tensor's largest
# element.
_MOST_UNITS = 1024
_MOST_UNITS_AMONG_OTHERS = 16
# The largest element counts as at least this part of the call's largest number: small differences of large numbers have
# the rounding errors of these.
_FLOOR = 0.01


@dataclass(slots=True)
class BatchingProof:
    """State of the decision for one program. Thread-safe.

    layout: how its calls are merged; None: not analysed yet, or refused. refusal: why its calls never run together;
    empty if there is no reason. is_proven: whether they run together.
    """

    layout: Layout | None = None
    refusal: str = ""
    is_proven: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def analyse(self, built: BuiltProgram) -> Layout | None:
        """Returns how calls are merged, None if they may not be. Analyses the program at the first call."""
        with self.lock:
            if self.layout is None and not self.refusal:
                try:
                    found = analyse(built)
                except Exception:
                    # The call is answered even if the analysis fails.
                    _log.exception("the analysis of a program failed; its calls do not run together")
                    found = Refusal("the analysis failed")
                if isinstance(found, Layout):
                    self.layout = found
                else:
                    self.refuse(found.reason)
            return self.layout

    def refuse(self, reason: str) -> None:
        """Stops running calls together."""
        self.layout, self.is_proven, self.refusal = None, False, reason

    def attempt(
        self, built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], alone: Sequence[Arrays]
    ) -> None:
        """Runs calls together that have run alone, and compares: sets `is_proven` or `refusal`.

        The first call also runs among rows of other values, and must give the same results up to the last four bits: a
        result that mixes rows is found even if all calls are equal.
        """
        try:
            found = _difference(built, layout, calls, alone)
        except GradruleError as cause:
            found = f"calls that succeed alone fail together: {cause.message}"
        except Exception:
            # These calls are answered; other calls of the frame still have to run.
            _log.exception("the trial of a program failed; its calls do not run together")
            found = "the trial failed"
        if found:
            self.refuse(found)
        elif not self.refusal:
            self.is_proven = True


def _difference(built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], alone: Sequence[Arrays]) -> str:
    """Returns which results differ between calls that ran together and alone; empty if none does."""
    examples = sum(call.examples for call in calls)
    size = allowed_size(examples + 1, 2 * examples)
    together = run_together(built, layout, calls, size)
    (among_others,) = _among_others(built, layout, calls[:1], size)
    for call, ours, theirs in zip(calls, alone, together, strict=True):
        least = _FLOOR * max(map(magnitude, (*call.arguments, *ours)), default=0.0)
        pairs = [(ours, theirs, _MOST_UNITS)]
        if call is calls[0]:
            pairs.append((theirs, among_others, _MOST_UNITS_AMONG_OTHERS))
        for one, other, units in pairs:
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                if not is_close(a, b, units, least):
                    return f"result {number} is another when calls run together"
    return ""


def _among_others(built: BuiltProgram, layout: Layout, calls: Sequence[BatchedCall], size: int) -> list[Arrays]:
    try:
        return run_together(built, layout, calls, size, other_values=True)
    except GradruleError:
        # The program may check its values and refuse these.
        return run_together(built, layout, calls, size)
