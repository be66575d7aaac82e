"""Rows of a server as a whole: its start, the cost of supervision, one tenant while another does its worst."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

from tests.benchmarks import attacks
from tests.benchmarks.context import Against, Bench, measured, rows
from tests.benchmarks.measure import Line, Row, Samples, in_turns_of
from tests.benchmarks.peers import module
from tests.benchmarks.usage import tree, usage
from tests.service.health import GRADIENTS, SERVING, health
from tests.service.servers import RunningServer
from tests.waiting import wait_until

_FAILED_MS = 30_000.0
"""What a call that fails counts for: the deadline of a plain server."""
_MOST_MS = 1000.0
_TIMEOUT_S = 60.0
"""How much longer than it is watched an attack would go on."""


def start(bench: Bench) -> list[Row]:
    """From `gradrule serve` to listening, and to ready after kill -9, against the import of TensorFlow alone."""
    listening: list[float] = []
    ready: list[float] = []
    cpu: list[float] = []

    def ours() -> None:
        began = time.perf_counter()
        with bench.own_server("--spares", "1") as server:
            listening.append(time.perf_counter() - began)
            _wait_until_ready(server)
            server.kill()
        began = time.perf_counter()
        with bench.own_server("--spares", "1", "--data-dir", str(server.data_dir / "registry")) as server:
            _wait_until_ready(server)
            ready.append(time.perf_counter() - began)
            cpu.append(sum(usage(pid).cpu_ns for pid in tree(server.process.pid)) / 1e9)

    alone = in_turns_of({"ours": ours, "alone": _import_tensorflow}, rounds=bench.counts.starts)["alone"]
    wall = Samples(tuple(item[0] for item in alone if item))
    theirs = Samples(tuple(item[1] for item in alone if item))
    peer = "import of TensorFlow alone"
    return [
        Row("start", "`gradrule serve` to listening", peer, "s", Samples(tuple(listening)), wall, 1.3),
        Row("start", "`gradrule serve` to ready after kill -9", peer, "s", Samples(tuple(ready)), wall, 1.3),
        Row("start", "processor time of a start up to ready", peer, "s", Samples(tuple(cpu)), theirs),
    ]


def _wait_until_ready(server: RunningServer) -> None:
    wait_until(lambda: True if health(server.target, GRADIENTS) == SERVING else None, "an engine", 120.0)


def _import_tensorflow() -> tuple[float, float]:
    """Returns seconds by the clock and of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tensorflow"], stderr=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def supervision(bench: Bench) -> list[Row]:
    """What heartbeats, spares, limits and quarantine cost a tiny call: a server with them beside one without."""
    without = ("--spares", "0", "--heartbeat-s", "0", "--memory-limit", "0", "--quarantine-s", "0")
    with bench.own_server(*without) as bare, bench.contenders() as begin:
        pair = {"with": begin("wire", "tiny"), "without": begin("wire", "tiny", bare)}
        found = measured(pair, bench.counts, calls=bench.counts.tiny_calls)
    what = "tiny program, unary Evaluate, p50, raw bytes"
    return rows("supervision", found, [Against("with", "without", what, "without supervision")])


def _beside(attack: str, target: str, attacker_token: str, token: str, seconds: float) -> attacks.Answers:
    """Returns how tiny calls went while an attack was under way, from its first call on."""
    command = module("attacks", attack, target, str(seconds + _TIMEOUT_S))
    environment = os.environ | {"GRADRULE_TOKEN": attacker_token}
    with subprocess.Popen(command, cwd=attacks.ROOT, env=environment, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            if attacker.stdout.readline().strip() != attacks.ATTACKING:
                raise RuntimeError(f"the attack {attack!r} did not begin")
            found = attacks.tiny_calls(target, token, seconds)
            if attacker.poll() is not None:
                raise RuntimeError(f"the attack {attack!r} ended by itself with code {attacker.returncode}")
            return found
        finally:
            attacker.kill()


def fairness(bench: Bench) -> list[Line]:
    """A tiny call of tenant B while tenant A does its worst: p99 at most a second, and no failure."""
    tokens = bench.folder / "tokens"
    mine, theirs = attacks.make_tokens(tokens, ("a", "b"))
    lines: list[Line] = []
    with bench.own_server("--tokens", str(tokens), "--spares", "1") as server:
        alone = attacks.tiny_calls(server.target, theirs, bench.counts.fairness_s)
        for attack, what in attacks.ATTACKS.items():
            found = _beside(attack, server.target, mine, theirs, bench.counts.fairness_s)
            failures = ", ".join(f"{count} × {reason}" for reason, count in found.failures.items())
            lines.append(
                Row(
                    "fairness",
                    f"a tiny call of tenant B, p99, while tenant A sends {what}",
                    "the same alone",
                    "ms",
                    Samples((_FAILED_MS if failures else found.p99_ms,)),
                    Samples((alone.p99_ms,)),
                    most=_MOST_MS,
                    note=f"{failures} of {found.calls} calls failed" if failures else "",
                )
            )
    return lines
