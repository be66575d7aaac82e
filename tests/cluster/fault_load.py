"""Runs three servers with one registry and one object store, and calls them all the time with known answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import gradrule as gr
from gradrule._messages.error_status import AnswerLostError
from gradrule._rpc import channels
from tests.cluster.s3 import S3Server
from tests.service.graph_defs import SIGN_FEEDS, sign_graph
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

SERVERS = 3
WRITERS = 2
REGISTRY_KINDS = ("program by name", "create", "delete")
"""Kinds of calls that need the database."""
_LARGE_ROWS = 4096
# Between the calls of a thread. Without pauses the load takes all cores, and servers need minutes to start.
_PAUSE_S = 0.02
_NUMBERS = itertools.count(1)
# Whole numbers, so that NumPy and TensorFlow compute the same to the last bit.
WEIGHTS = np.random.default_rng(1).integers(-8, 9, (64, 128)).astype(np.float32)
NAMES: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"]}


def model(weights: np.ndarray[Any, Any] = WEIGHTS) -> gr.Graph:
    """Returns y = sign(x · w), with weights that clients upload as a blob."""
    g = gr.Graph()
    w = g.variable("w", weights)
    g.op("Sign", g.op("MatMul", g.placeholder("x", "float32", [None, len(weights)]), w), name="y")
    return g


def gradient(factor: int, rows: int) -> np.ndarray[Any, Any]:
    """Returns the gradient of `model` with respect to x, if the gradient of Sign is `factor` times the upstream one."""
    return np.tile(factor * WEIGHTS.sum(1), (rows, 1))


class Cluster:
    """Three servers that can be ended and started, always on the same port.

    Attributes:
        target: The addresses of all servers.
        running: The running servers, by number.
    """

    def __init__(self, folder: Path, database_url: str, s3: S3Server, bucket: str) -> None:
        self._folder = folder
        self._environment = s3.environment | {"GRADRULE_REGISTRY": database_url, "GRADRULE_BLOBS": f"s3://{bucket}"}
        self._stacks = [ExitStack() for _ in range(SERVERS)]
        self._ports = ["0"] * SERVERS
        self.running: dict[int, RunningServer] = {}
        self.logs: list[Path] = []
        with ThreadPoolExecutor(SERVERS) as threads:
            list(threads.map(self.start, range(SERVERS)))
        self.targets = [self.running[number].target for number in range(SERVERS)]
        self.target = "ipv4:" + ",".join(self.targets)

    def start(self, number: int) -> None:
        """Starts a server, and returns as soon as it says that it listens."""
        # Clients may then ping every 2 s.
        flags = ("--port", self._ports[number], "--drain-s", "10", "--keepalive-s", "4")
        started = running_server(self._folder / str(number), flags, self._environment)
        self.running[number] = self._stacks[number].enter_context(started)
        self._ports[number] = self.running[number].target.rpartition(":")[2]
        self.logs.append(self.running[number].log)

    def kill(self, number: int, load: Load) -> None:
        """Ends a server by SIGKILL while it has calls that it does not answer."""
        server = self.running.pop(number)
        server.process.send_signal(signal.SIGSTOP)
        load.wait_for_unanswered_call()
        server.kill()
        self._stacks[number].close()

    def terminate(self, number: int) -> None:
        """Ends a server by SIGTERM; calls that it runs get 10 s to end."""
        assert self.running.pop(number).terminate() == 0
        self._stacks[number].close()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@contextlib.contextmanager
def options_of_clients(**changes: Any) -> Iterator[None]:
    """Changes gRPC's options of clients that are made within this context; `_` in a name stands for a dot or `_`."""
    before = list(channels.OPTIONS)
    channels.OPTIONS[:] = [(name, changes.get(name.replace(".", "_"), value)) for name, value in before]
    try:
        yield
    finally:
        channels.OPTIONS[:] = before


@contextlib.contextmanager
def without_retries() -> Iterator[None]:
    """Lets clients that are made within this context repeat no calls, so that they show what a fault does."""
    config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    with options_of_clients(grpc_service_config=config, grpc_enable_retries=0):
        yield


class Load:
    """Evaluates programs and graphs, and creates and deletes rules and programs, in threads until `stop`.

    Attributes:
        prefix: How the names of its rules start.
        calls: Number of calls that have ended, by kind.
        wrong: Descriptions of wrong answers.
        failures: Errors of calls, by kind.
        shown: Calls that failed at the client that repeats none, by reason.
        lost: Names of rules whose creation was acknowledged and that a server does not have, or only without a program.
        kept: The factors of the rules whose creation was acknowledged, and their deletion not asked for, by name.
        gone: Names of rules whose deletion was acknowledged.
        unsure: The factors of the rules of other changes, which failed or have not ended, by name.
    """

    def __init__(self, target: str) -> None:
        self.prefix = f"R{next(_NUMBERS)}_"
        self.calls: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failures: list[tuple[str, gr.errors.GradruleError]] = []
        self.shown: Counter[str] = Counter()
        self.lost: set[str] = set()
        self.kept: dict[str, int] = {}
        self.gone: set[str] = set()
        self.unsure: dict[str, int] = {}
        self._stopping = threading.Event()
        self._stack = ExitStack()
        streaming = self._connect(target)
        unary = self._connect(target, stream=False, shared_memory=False)
        with without_retries():
            once: Any = self._connect(target, stream=False, shared_memory=False)
            once._sender._send_unary = once._sender._send_once
        kinds: list[tuple[str, Callable[[int], None]]] = [
            ("program, stream", self._program(streaming, 4)),
            ("program, unary", self._program(unary, 4)),
            ("large feeds", self._program(unary, _LARGE_ROWS)),
            ("large feeds, shared memory", self._program(streaming, _LARGE_ROWS)),
            ("program by name", self._program_by_name(unary)),
            ("graph in the call", self._graph(unary)),
            ("no retries", self._program(once, 4)),
        ]
        self.evaluations = [kind for kind, _ in kinds if kind not in REGISTRY_KINDS]
        self._threads = [
            threading.Thread(target=self._run, args=(kind, call, number)) for number, (kind, call) in enumerate(kinds)
        ]
        self._threads += [threading.Thread(target=self._write, args=(unary, number)) for number in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def _connect(self, target: str, **options: Any) -> gr.Client:
        return self._stack.enter_context(gr.connect(target, timeout=60.0, **options))

    def _program(self, client: gr.Client, rows: int) -> Callable[[int], None]:
        program = client.program("held")

        def call(seed: int) -> None:
            x = np.random.default_rng(seed).integers(-8, 9, (rows, len(WEIGHTS))).astype(np.float32)
            result = program.evaluate({"x": x})
            self._check(f"program, seed {seed}", result.outputs["y"], np.sign(x @ WEIGHTS))
            self._check(f"gradient, seed {seed}", result.gradients["x"], gradient(2, rows))

        return call

    def _program_by_name(self, client: gr.Client) -> Callable[[int], None]:
        def call(seed: int) -> None:
            self._program(client, 4)(seed)

        return call

    def _graph(self, client: gr.Client) -> Callable[[int], None]:
        def call(seed: int) -> None:
            result = client.evaluate(sign_graph(), feeds=SIGN_FEEDS, overrides={"Sign": "Held"}, **NAMES)
            self._check("graph", result.outputs["y"], np.sign(SIGN_FEEDS["x"]))
            self._check("gradient of a graph", result.gradients["x"], np.full(len(SIGN_FEEDS["x"]), 2))

        return call

    def _check(self, what: str, got: Any, expected: Any) -> None:
        if not np.array_equal(got, expected):
            self.wrong.append(f"{what}: {got} instead of {expected}")

    def _run(self, kind: str, call: Callable[[int], None], number: int) -> None:
        for seed in itertools.count(number << 32):
            if self._stopping.is_set():
                return
            try:
                call(seed)
            except AnswerLostError as lost:
                self.shown[lost.cause.reason] += 1
            except gr.errors.GradruleError as failure:
                if kind == "no retries":
                    self.shown[failure.reason] += 1
                else:
                    self.failures.append((kind, failure))
            self.calls[kind] += 1
            self._stopping.wait(_PAUSE_S)

    def _write(self, client: gr.Client, number: int) -> None:
        """Creates rules and programs that use them, and deletes every second pair."""
        for factor in itertools.count(3 + number, WRITERS):
            if self._stopping.wait(_PAUSE_S):
                return
            name = f"{self.prefix}{factor}"
            self.unsure[name] = factor
            if not self._write_one("create", create, client, name, factor):
                continue
            self.kept[name] = self.unsure.pop(name)
            if factor // WRITERS % 2:
                self.unsure[name] = self.kept.pop(name)
                if self._write_one("delete", delete, client, name):
                    del self.unsure[name]
                    self.gone.add(name)

    def _write_one(self, kind: str, write: Callable[..., None], *arguments: Any) -> bool:
        try:
            write(*arguments)
        except gr.errors.GradruleError as failure:
            self.failures.append((kind, failure))
            return False
        finally:
            self.calls[kind] += 1
        return True

    def wait_for_calls(self, count: int = WRITERS, kinds: Sequence[str] = ()) -> None:
        """Waits until every thread has ended calls that it has started after now."""
        kinds = kinds or (*self.evaluations, *REGISTRY_KINDS)
        before = Counter(self.calls)
        wait_until(lambda: all(self.calls[kind] > before[kind] + count for kind in kinds) or None, "calls", 120)

    def wait_for_unanswered_call(self) -> None:
        """Waits until the thread that repeats no calls has probably called a server that does not answer."""
        before = -1
        while before != self.calls["no retries"]:
            before = self.calls["no retries"]
            time.sleep(0.5)

    def stop(self) -> None:
        """Ends the threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self.stop()
        self._stack.close()

    def row(self, fault: str) -> str:
        """Returns the outcomes as a row of a table."""
        refused = sum(kind in REGISTRY_KINDS for kind, _ in self.failures)
        once = self.calls["no retries"]
        evaluations = sum(self.calls[kind] for kind in self.evaluations) - once
        registry = sum(self.calls[kind] for kind in REGISTRY_KINDS)
        return (
            f"| {fault} | {evaluations:,} | {len(self.failures) - refused} | {len(self.wrong)} | "
            f"{sum(self.shown.values())} of {once:,} | {registry:,} | {refused} | {len(self.lost)} |"
        )


HEADER = (
    "| fault | evaluations | failed | wrong answers | failed without retries | calls of the registry | refused | "
    "lost rules and programs |"
)


def create(client: gr.Client, name: str, factor: int) -> None:
    """Creates a rule, and a program that uses it."""
    client.create_rule(name, f"{factor} * dy")
    client.compile(model(), overrides={"Sign": name}, name=name.lower(), **NAMES)


def delete(client: gr.Client, name: str) -> None:
    """Deletes a program and its rule. What is gone already was deleted by an attempt whose answer was lost."""
    with contextlib.suppress(gr.errors.ProgramNotFoundError):
        client.delete_program(name.lower())
    with contextlib.suppress(gr.errors.UnknownRuleError):
        client.delete_rule(name)
