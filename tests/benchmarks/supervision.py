"""What supervision costs a tiny call: heartbeats, spares, bounds and quarantine on, beside none of them.

Two servers take turns in every round.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.benchmarks.measure import Row

NONE = ("--spares", "0", "--heartbeat-s", "0", "--memory-limit", "0", "--quarantine-s", "0")
ALL = ("--spares", "1")
"""The rest is on unless flags say other."""


def supervision(*, rounds: int, calls: int, budget_s: float) -> list[Row]:
    """A tiny program by name, one call after the other: as raw bytes, and by the Python client."""
    import gradrule as gr
    from tests.benchmarks import work
    from tests.benchmarks.contenders import Wire
    from tests.benchmarks.measure import Call, Row, latencies
    from tests.service.servers import running_server

    tiny = work.tiny()
    contenders: dict[str, Call] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, flags in (("on", ALL), ("off", NONE)):
            server = stack.enter_context(running_server(folder / name, flags))
            client = stack.enter_context(gr.connect(server.target))
            program = tiny.compile(client)
            wire = stack.enter_context(Wire.gradrule(server.target))
            contenders[f"wire {name}"] = wire.call(tiny.named_request(program))
            contenders[f"client {name}"] = lambda program=program: program.evaluate(tiny.feeds)  # type: ignore[misc]
        found = latencies(contenders, rounds=rounds, calls=calls, warm_up=max(calls // 4, 5), budget_s=budget_s)
    return [
        Row(
            f"tiny program by name, p50, {what}",
            "without supervision",
            "µs",
            found[f"{by} on"],
            found[f"{by} off"],
            None,
        )
        for by, what in (("wire", "raw bytes"), ("client", "Python client"))
    ]
