"""Records which graphs have crashed engines, and refuses such graphs for a while (quarantine)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import error
from gradrule_server.recovery.endings import EndReason, EngineLost

# Workloads in each table; the one that was recorded least recently is dropped.
_MAX_ENTRIES = 4096

# Two crashes put a workload into quarantine if they happen within this many times the length of a quarantine.
_CRASHES_COUNT_FOR = 10
_MAX_CRASHES = 2

# A run counts as an overrun only if it takes this many times the longest request of its workload, which is that of
# building it before the first run, and longer than `_MIN_OVERRUN_S`.
_OVERRUN_FACTOR = 5
_MIN_OVERRUN_S = 1.0

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Workload(NamedTuple):
    """What is blamed for a crash: a tenant's graph and what is computed of it.

    The values and names of feeds are not part of it.
    """

    owner: str
    graph: str
    derivative: evaluate_pb2.Derivative.ValueType


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A workload that is refused. `cause`: for people. `until`: CLOCK_MONOTONIC, seconds."""

    workload: Workload
    cause: str
    until: float

    @property
    def left_s(self) -> float:
        """Seconds until the workload is accepted again."""
        return max(0.0, self.until - time.monotonic())


class CrashHistory:
    """The crash history of all workloads. Each table is bounded.

    Args:
        quarantine_s: Length of a quarantine, seconds; 0 disables quarantine.
        on_quarantine: Called with each new quarantine.
    """

    def __init__(
        self, quarantine_s: float = 0.0, on_quarantine: Callable[[Quarantine], None] = lambda quarantine: None
    ) -> None:
        self._quarantine_s = quarantine_s
        self._on_quarantine = on_quarantine
        self._recorders: WeakValueDictionary[Workload, OutcomeRecorder] = WeakValueDictionary()
        self._crashes: OrderedDict[Workload, list[float]] = OrderedDict()
        self._quarantines: OrderedDict[Workload, Quarantine] = OrderedDict()

    def check(self, workload: Workload) -> None:
        """Raises QUARANTINED if the workload is in quarantine."""
        if not self._quarantines:
            return
        found = self._quarantines.get(workload)
        if found is None:
            return
        left_s = found.until - time.monotonic()
        if left_s <= 0:
            del self._quarantines[workload]
            return
        raise error(
            errors_pb2.ERROR_REASON_QUARANTINED,
            f"the graph is refused for another {left_s:.0f} s, because it ended engines ({found.cause}); "
            f"it can be sent again then, or changed",
            retry_after_s=left_s,
        )

    def recorder(self, workload: Workload) -> OutcomeRecorder:
        """Returns what records the outcomes of a workload's requests, the same one as long as anything refers to it."""
        found = self._recorders.get(workload)
        if found is None:
            found = self._recorders[workload] = OutcomeRecorder(self, workload)
        return found

    def record_crash(self, workload: Workload, cause: str) -> None:
        """Records that the workload ended an engine. The second crash puts it into quarantine."""
        # CLOCK_MONOTONIC, seconds.
        now = time.monotonic()
        since = now - _CRASHES_COUNT_FOR * self._quarantine_s
        times = [at for at in self._crashes.get(workload, []) if at > since] + [now]
        _remember(self._crashes, workload, times)
        if len(times) >= _MAX_CRASHES:
            self.quarantine(workload, cause)

    def quarantine(self, workload: Workload, cause: str) -> None:
        """Refuses the workload from now on, and forgets its other records."""
        self._crashes.pop(workload, None)
        if self._quarantine_s:
            found = Quarantine(workload, cause, time.monotonic() + self._quarantine_s)
            _remember(self._quarantines, workload, found)
            self._on_quarantine(found)

    def quarantines(self) -> list[Quarantine]:
        """Returns the quarantines that hold now."""
        now = time.monotonic()
        return [found for found in self._quarantines.values() if found.until > now]


@dataclass(slots=True, eq=False, weakref_slot=True)
class OutcomeRecorder:
    """Records what the requests of one workload do to engines, even if no caller waits for them any more.

    `longest_s`: How long an engine worked on one of its requests at most, seconds; one of them builds the program.
    """

    crash_history: CrashHistory
    workload: Workload
    longest_s: float = 0.0

    def record_completion(self, seconds: float) -> None:
        """Records that the engine completed a request, and how long it worked on it."""
        if seconds > self.longest_s:
            self.longest_s = seconds

    def record_overrun(self, seconds: float) -> None:
        """Records that a run went on past its deadline, for `seconds` in all, and that its engine was ended.

        It counts as a crash if it ran for much longer than the workload ever did: deadlines can be short, and machines
        busy.
        """
        if seconds > max(_MIN_OVERRUN_S, _OVERRUN_FACTOR * self.longest_s):
            self.crash_history.record_crash(self.workload, "it went on after its deadline")

    def record_engine_loss(self, lost: EngineLost) -> None:
        """Records that the engine ended while a request ran in it that will not run again.

        It counts as a crash if the request ran alone. Lack of memory is no crash: it depends on the batch, and on what
        else the engine holds.
        """
        if lost.is_blamable and lost.engine_end.reason is not EndReason.MEMORY and lost.ran_alone:
            self.crash_history.record_crash(self.workload, str(lost.engine_end))


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > _MAX_ENTRIES:
        table.popitem(last=False)
