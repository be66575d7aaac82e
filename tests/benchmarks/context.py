"""What the rows share: how much is measured, and the servers and drivers, each started when a row first needs it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.benchmarks import peers, training
from tests.benchmarks.measure import Row, Samples, in_turns_of
from tests.benchmarks.peers import ROOT, Driver, Server
from tests.benchmarks.usage import Usage, roles, tree, usage
from tests.service.servers import RunningServer, started_server

MIB = 2**20
MAX_MESSAGE = "512MiB"
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""The environment of the peers that are libraries of their own."""
PEERS = ("tesseract-core", "umbridge", "pytriton")


@dataclass(frozen=True)
class Counts:
    """How much is measured. No further round begins after `budget_s` seconds of a group of contenders."""

    rounds: int
    tiny_calls: int
    rate_calls: int
    large_calls: int
    large_bytes: int
    huge_bytes: int
    inline_calls: int
    inline_nodes: int
    rule_calls: int
    compute_size: int
    compile_nodes: tuple[int, int]
    deep_nodes: int
    programs: int
    requests: tuple[int, int]
    examples: int
    batched_network: tuple[int, int, int]
    fairness_s: float
    starts: int
    map_rounds: int
    maps: int
    map_programs: int
    profile_calls: int
    profile_s: float
    budget_s: float


DEFAULT = Counts(
    rounds=5,
    tiny_calls=200,
    rate_calls=1500,
    large_calls=5,
    large_bytes=16 * MIB,
    huge_bytes=100 * MIB,
    inline_calls=15,
    inline_nodes=5000,
    rule_calls=40,
    compute_size=1024,
    compile_nodes=(1000, 10_000),
    deep_nodes=5000,
    programs=32,
    requests=(64, 1280),
    examples=800,
    batched_network=(128, 100, 2048),
    fairness_s=10.0,
    starts=2,
    map_rounds=3,
    maps=200,
    map_programs=300,
    profile_calls=300,
    profile_s=4.0,
    budget_s=20.0,
)
"""What `make bench` does unless told otherwise."""


@dataclass(frozen=True)
class Sample:
    """What one contender took in one round.

    value: µs or requests per second. used: by part of the system, for one call.
    """

    value: float
    p99_us: float
    used: dict[str, Usage]

    @property
    def cpu_us(self) -> float:
        """Processor time of one call, in all processes."""
        return sum(item.cpu_ns for item in self.used.values()) / 1e3


class Contender:
    """A driver and the server that it calls, measured together."""

    def __init__(self, driver: Driver, parts: Callable[[], Mapping[int, str]], driver_is: str = "client") -> None:
        self._driver, self._parts, self._driver_is = driver, parts, driver_is

    @property
    def pids(self) -> dict[int, str]:
        """The processes that a call passes through, each with its part."""
        return {**self._parts(), self._driver.pid: self._driver_is}

    def sample(self, calls: int, in_flight: int = 0) -> Sample:
        """Makes calls; counts what they use. in_flight: requests under way at a time; 0 is one call after the other."""
        before = {pid: usage(pid) for pid in self.pids}
        p99 = 0.0
        if in_flight:
            value = self._driver.rate(calls, in_flight)
        else:
            found = self._driver.latency(calls)
            value, p99 = found["p50_us"], found["p99_us"]
        used: dict[str, Usage] = {}
        for pid, part in self.pids.items():
            used[part] = used.get(part, Usage()) + (usage(pid) - before.get(pid, Usage())) / calls
        return Sample(value, p99, used)


Start = Callable[..., Contender]


class Bench:
    """The servers of one run, each started when it is first needed; all are ended on leaving."""

    def __init__(self, counts: Counts = DEFAULT, device: str = "cpu", *, is_full: bool = False) -> None:
        self.counts, self.device, self.is_full = counts, device, is_full
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @functools.cached_property
    def folder(self) -> Path:
        """Logs and data of what is started."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gradrule-bench-")))

    @functools.cached_property
    def gradrule(self) -> RunningServer:
        """A server with the settings of a plain `gradrule serve`, save the size of messages."""
        return self._stack.enter_context(self.own_server("--spares", "1"))

    def own_server(
        self, *flags: str, environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[RunningServer]:
        """Starts another server, with these flags besides."""
        flags = ("--device", self.device, "--max-message-bytes", MAX_MESSAGE, *flags)
        return started_server(self.folder / f"server-{next(self._numbers)}", flags, environment)

    @functools.cached_property
    def echo_sync(self) -> Server:
        """A bare echo on grpcio's threads."""
        return self._server("echo_server", "sync")

    @functools.cached_property
    def echo_aio(self) -> Server:
        """A bare echo on grpcio's asyncio server."""
        return self._server("echo_server", "aio")

    @functools.cached_property
    def tensorflow(self) -> Server:
        """TensorFlow's own server."""
        return self._server("tf_server")

    @contextlib.contextmanager
    def contenders(self) -> Iterator[Start]:
        """Yields what starts contenders; they end on leaving."""
        with contextlib.ExitStack() as stack:
            yield functools.partial(self._contender, stack)

    def _contender(
        self,
        stack: contextlib.ExitStack,
        kind: str,
        work: str,
        server: RunningServer | None = None,
        token: str | None = None,
    ) -> Contender:
        """Starts a contender.

        kind, work: as `driver.contender` takes them. server: another gradrule server than the shared one. token: the
        credential of gradrule's Python client.
        """
        if kind in PEERS:
            return self._peer(stack, kind, work)
        settings = {"kind": kind, "work": work}
        parts: Callable[[], Mapping[int, str]]
        if kind == "function" or kind in training.LOCAL:
            parts = dict
        elif kind == "session":
            settings["target"] = self.tensorflow.target
            parts = functools.partial(dict, {self.tensorflow.pid: "server"})
        else:
            chosen = server or self.gradrule
            settings["target"] = chosen.target
            if token is not None:
                settings["token"] = token
            parts = functools.partial(roles, chosen.process.pid)
            if kind.startswith("echo"):
                echo = self.echo_aio if kind == "echo aio" else self.echo_sync
                settings |= {"kind": "echo", "echo": echo.target}
                parts = functools.partial(dict, {echo.pid: "server"})
        command = peers.driver_command(settings)
        driver = stack.enter_context(peers.driver(kind, command, self._log(kind), self._environment()))
        if kind == "hop":
            return Contender(driver, lambda: dict.fromkeys(tree(driver.pid), "engine"), "front end")
        return Contender(driver, parts)

    def _peer(self, stack: contextlib.ExitStack, name: str, work: str) -> Contender:
        """Starts a peer that is a library of its own, in its own environment."""
        size = 0 if work == "tiny" else int(work.removeprefix("large:"))
        settings = json.dumps({"peer": name, "size": size, "folder": str(self.folder)})
        command = peers.module("peer_driver", settings, python=str(PEERS_PYTHON))
        driver = stack.enter_context(peers.driver(name, command, self._log(name), {}))
        return Contender(driver, lambda: dict.fromkeys(tree(driver.pid), "server"))

    def _server(self, name: str, *arguments: str) -> Server:
        log = self._log("-".join((name, *arguments)))
        command = peers.module(name, *arguments)
        return self._stack.enter_context(peers.server(name, command, log, self._environment()))

    def _log(self, name: str) -> Path:
        return self.folder / f"{next(self._numbers)}-{name.replace(' ', '-')}.log"

    def _environment(self) -> dict[str, str]:
        """Hides GPUs from TensorFlow's own server where gradrule uses none, and keeps it from taking a whole one."""
        return {"CUDA_VISIBLE_DEVICES": "-1"} if self.device == "cpu" else {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def measured(
    contenders: Mapping[str, Contender],
    counts: Counts,
    *,
    calls: int,
    in_flight: int = 0,
    warm_up: int | None = None,
    steady: bool = False,
) -> dict[str, list[Sample]]:
    """Measures contenders in turns, after a warm-up. steady: all rounds, however long they take."""
    for contender in contenders.values():
        contender.sample(max(calls // 4, 2) if warm_up is None else warm_up, in_flight)
    steps = {name: functools.partial(item.sample, calls, in_flight) for name, item in contenders.items()}
    return in_turns_of(steps, rounds=counts.rounds, budget_s=math.inf if steady else counts.budget_s)


@dataclass(frozen=True)
class Against:
    """A comparison of two contenders, by their names, with the bar of the design."""

    ours: str
    theirs: str
    work: str
    peer: str
    bar: float | None = None


def rows(
    group: str,
    found: Mapping[str, Sequence[Sample]],
    comparisons: Sequence[Against],
    *,
    rates: bool = False,
    note: str = "",
) -> list[Row]:
    """Returns a row for each comparison: of times, or of requests per second."""
    made = []
    for item in comparisons:
        ours, theirs = found[item.ours], found[item.theirs]
        made.append(
            Row(
                group,
                item.work,
                item.peer,
                "1/s" if rates else "µs",
                _values(ours),
                _values(theirs),
                item.bar,
                more_is_better=rates,
                note=note,
                cpu_ratio=Samples(tuple(a.cpu_us / b.cpu_us for a, b in zip(ours, theirs, strict=True))),
            )
        )
    return made


def cpu_rows(
    group: str, found: Mapping[str, Sequence[Sample]], comparisons: Sequence[Against], *, note: str = ""
) -> list[Row]:
    """Returns a row for each comparison: of processor time per call in all processes."""
    return [
        Row(
            group,
            item.work,
            item.peer,
            "µs",
            Samples(tuple(sample.cpu_us for sample in found[item.ours])),
            Samples(tuple(sample.cpu_us for sample in found[item.theirs])),
            item.bar,
            note=note,
        )
        for item in comparisons
    ]


def used_by_part(samples: Sequence[Sample]) -> str:
    """Returns the processor time of one call in each part of the system, µs."""
    parts = dict.fromkeys(part for sample in samples for part in sample.used)
    return ", ".join(
        f"{part} {statistics.median(sample.used[part].cpu_ns / 1e3 for sample in samples if part in sample.used):,.0f}"
        for part in parts
    )


def _values(samples: Sequence[Sample]) -> Samples:
    return Samples(tuple(sample.value for sample in samples))
