"""Instructions of a tiny call, counted by valgrind's callgrind: other work on the machine does not change them.

Counts client, front end and echo servers; not the engine, for TensorFlow takes minutes to start under valgrind.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.benchmarks import peers
from tests.benchmarks.context import Bench, Contender
from tests.benchmarks.measure import Line, Skipped, Table
from tests.benchmarks.usage import roles

_KINDS = ("wire", "client", "stream", "echo aio", "echo sync")
_CALLS = 50
_WARM_UP = 15
# valgrind runs a process tens of times slower.
_START_S = 900.0


def instructions(bench: Bench) -> list[Line]:
    """Counts for each contender, by process."""
    title = "instructions of a tiny call, thousands, without the kernel's"
    if shutil.which("valgrind") is None:
        return [Skipped("instructions", title, "", "valgrind is not installed")]
    cells = []
    with contextlib.ExitStack() as stack:
        folder = bench.folder / "callgrind"
        folder.mkdir()
        command = (*_callgrind(folder), "-m", "gradrule_server", "serve", "--port", "0", "--device", bench.device)
        data = str(bench.folder / "callgrind-data")
        flags = ("--data-dir", data, "--spares", "0")
        server = stack.enter_context(peers.server("gradrule", (*command, *flags), folder / "log", {}, _START_S))
        echo = {
            f"echo {kind}": stack.enter_context(
                peers.server(
                    kind,
                    (*_callgrind(folder), "-m", "tests.benchmarks.echo_server", kind),
                    folder / f"log-{kind}",
                    {},
                    _START_S,
                )
            )
            for kind in ("aio", "sync")
        }
        parts: Callable[[], Mapping[int, str]]
        for kind in _KINDS:
            settings = {"kind": kind.split()[0], "work": "tiny", "target": server.target}
            if kind in echo:
                settings["echo"] = echo[kind].target
                parts = functools.partial(dict, {echo[kind].pid: "server"})
            else:
                parts = functools.partial(roles, server.pid)
            driver_command = [*_callgrind(folder), *peers.driver_command(settings)[1:]]
            with peers.driver(kind, driver_command, folder / f"log-{kind}", {}, _START_S) as driver:
                counted = _count(Contender(driver, parts), folder)
            cells += [[kind, part, f"{count / _CALLS / 1e3:,.1f}"] for part, count in counted.items()]
    return [Table("instructions", title, ("contender", "process", "instructions"), cells)]


def _callgrind(folder: Path) -> tuple[str, ...]:
    tool = ("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--trace-children=no")
    return (*tool, f"--callgrind-out-file={folder}/out.%p", sys.executable)


def _count(contender: Contender, folder: Path) -> dict[str, int]:
    """Returns the instructions of `_CALLS` calls, by part; parts that do not run under valgrind are left out."""
    contender.sample(_WARM_UP)
    pids = [pid for pid, part in contender.pids.items() if part in ("client", "front end", "server")]
    for pid in pids:
        # It stays on: counts are wrong after it was turned off and on again.
        _control("--instr=on", pid)
        _control("--zero", pid)
    contender.sample(_CALLS)
    found: dict[str, int] = {}
    for pid in pids:
        before = set(folder.glob(f"out.{pid}.*"))
        _control("--dump", pid)
        for file in set(folder.glob(f"out.{pid}.*")) - before:
            match = re.search(r"^(?:totals|summary): (\d+)", file.read_text(), re.MULTILINE)
            if match is not None:
                part = contender.pids[pid]
                found[part] = found.get(part, 0) + int(match[1])
    return found


def _control(option: str, pid: int) -> None:
    subprocess.run(
        ["callgrind_control", option, str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
