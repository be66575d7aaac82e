"""Measures what one call costs in an engine: processor time of the engine's process per call, by work and by pause.

`python -m tests.benchmarks.engine_call [--pause-ms 1] [--against CHECKOUT] [--json FILE]`. Feeds frames to an engine
over its socket, without a front end. Rounds alternate between this checkout and `--against`, another one. The row
"tensorflow" is the same function in the engine's kind of process, called without gradrule's frames.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.link.arena import Arenas
from gradrule_server.link.fork_server import engine_environment
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.preparation.prepare import Prepared, prepare
from tests.benchmarks import work as works
from tests.call_payloads import call_payload
from tests.stores import no_blobs
from tests.unit.engine.building import Builtins

_WORKS: dict[str, tuple[Callable[[], works.Work], int]] = {
    "tiny": (works.tiny, 300),
    "1 MiB": (lambda: works.large(1 << 18), 40),
    "16 MiB": (lambda: works.large(1 << 22), 8),
}
_MEMORY_LIMIT = 4 << 30
_ROOT = Path(__file__).resolve().parents[2]


def _prepared(work: works.Work) -> Prepared:
    spec = program_pb2.ProgramSpec(fetches=work.fetches)
    spec.graph.serialized = work.graph.to_bytes()
    spec.vjp.ys.extend(work.ys)
    spec.vjp.xs.extend(work.xs)
    for op_type, rule in works.RULE.items():
        spec.overrides.add(rule=rule).selector.op_type = op_type
    return prepare(spec, CallShape(), Builtins(), Limits(), no_blobs())


class Engine:
    """An engine of one checkout, with the programs of all works."""

    def __init__(self, checkout: Path, flags: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        arenas, shared = Arenas.make()
        # Clients' shared memory would come over this socket.
        _, memories = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shared = [*shared, memories.fileno()]
        environment = engine_environment()
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in ("client/python", "server"))
        environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
        code = (
            "import sys, tempfile, os; tempfile.tempdir = os.devnull\n"
            "from gradrule_server.engine.process import run_engine\n"
            f"run_engine({list(flags)!r}, {theirs.fileno()}, {shared!r}); os._exit(0)"
        )
        descriptors = [theirs.fileno(), *shared]
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=descriptors)
        theirs.close()
        self._frames = FrameSocket(ours, arenas)
        self._calls = 0
        self._clock = (~self._process.pid << 3) | 2
        self._ask(Kind.PING, b"", greeted=False)

    def compile(self, key: str, work: works.Work) -> None:
        """Has the engine compile a work's program."""
        request = link_pb2.CompileRequest()
        request.CopyFrom(_prepared(work).request)
        request.key, request.memory_limit, request.max_rank = key, _MEMORY_LIMIT, 8
        self._ask(Kind.COMPILE, request.SerializeToString())

    def request(self, key: str, work: works.Work) -> bytes:
        """The payload of a RUN."""
        call = work.request()
        settings = [
            link_pb2.ParamSetting(rule=item.rule, name=item.name, value=item.value)
            for item in _prepared(work).table.params.call_settings({}, range(1000))
        ]
        request = evaluate_pb2.EvaluateRequest.FromString(call)
        return call_payload(link_pb2.RunRequest(key=key, params=settings), request, time.monotonic_ns())

    def processor_time(self, payload: bytes, calls: int, pause_s: float) -> float:
        """Seconds of the engine's processor time per call. The pause lets the processor's caches cool down."""
        before = time.clock_gettime(self._clock)
        for _ in range(calls):
            self._ask(Kind.RUN, payload)
            if pause_s:
                time.sleep(pause_s)
        return (time.clock_gettime(self._clock) - before) / calls

    def close(self) -> None:
        """Ends the engine."""
        self._frames.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, kind: Kind, payload: bytes, *, greeted: bool = True) -> bytes:
        self._calls += 1
        self._frames.send(kind, self._calls, payload)
        if not greeted:
            self._frames.receive()
        answer = self._frames.receive()
        if answer is None:
            raise SystemExit("the engine ended")
        placed = answer.kind
        content = bytes(answer.payload[:1024])
        if placed is Kind.FAULT:
            raise SystemExit(str(link_pb2.Fault.FromString(content)))
        if len(answer.payload) >= 256 * 1024:
            self._frames.send(Kind.ACK, self._calls, b"")
        return content


def tensorflow_alone(pause_s: float, calls: int) -> float:
    """Seconds of processor time per call of the tiny program's function, feeds and results as NumPy arrays."""
    import tensorflow as tf

    from gradrule_server.engine import tf_private
    from gradrule_server.engine.build import build

    work = works.tiny()
    request = link_pb2.CompileRequest()
    request.CopyFrom(_prepared(work).request)
    built = build(request)
    # Rules' own params, if any, are constants here.
    params = [tf.constant(1.0, tf.float64) for _ in built.params]
    feeds = [work.feeds[item.name] for item in built.inputs]

    def run() -> None:
        arguments = [tf.constant(value) for value in feeds]
        for result in built.function.inference_fn.call_flat(*arguments, *params):
            result.numpy()

    with tf_private.on_calling_thread():
        for _ in range(50):
            run()
        before, slept = time.process_time(), time.sleep
        for _ in range(calls):
            run()
            if pause_s:
                slept(pause_s)
        return (time.process_time() - before) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--pause-ms", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--works", default=",".join(_WORKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tensorflow", action="store_true", help="measure TensorFlow alone, in this process")
    options = parser.parse_args()
    pause_s = options.pause_ms / 1000
    if options.tensorflow:
        print(tensorflow_alone(pause_s, _WORKS["tiny"][1]))
        return
    checkouts = {"this": _ROOT} | ({"other": options.against} if options.against else {})
    flags = ["--device", "cpu", "--threads", "2", "--sandbox", "off"]
    engines = {name: Engine(path, flags) for name, path in checkouts.items()}
    result: dict[str, dict[str, float]] = {}
    for key in options.works.split(","):
        make, calls = _WORKS[key]
        work = make()
        payloads = {}
        for name, engine in engines.items():
            engine.compile(key, work)
            payloads[name] = engine.request(key, work)
            engine.processor_time(payloads[name], calls // 4, 0)
        samples: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                samples[name].append(engine.processor_time(payloads[name], calls, pause_s) * 1000)
        result[key] = {name: round(statistics.median(values), 4) for name, values in samples.items()}
        print(key, "ms per call:", result[key], flush=True)
    for engine in engines.values():
        engine.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
