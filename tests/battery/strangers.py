"""What costs most of what one tenant may send, and the calls of another tenant, which must not notice.

Target: tenant B sees no failure; its tiny calls take at most a second (p99), its new programs at most 5 s.
`python -m tests.battery.strangers ATTACK TARGET SECONDS` is tenant A, its token in GRADRULE_TOKEN.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import gradrule as gr
from gradrule.v1 import evaluate_pb2
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.known import EVALUATE
from tests.battery.serving import data_folder, served
from tests.benchmarks import attacks, work
from tests.benchmarks.attacks import Answers
from tests.service import costly, raw
from tests.service.servers import RunningServer

TARGET = "tenant B beside each: no failure, tiny calls p99 ≤ 1 s, new programs p99 ≤ 5 s"
P99_S = 1.0
NEW_P99_S = 5.0
LONG_S = 60.0
_SHORT_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_GRAPH_BYTES = 192 * _MIB
_HELD_BYTES = 600 * _MIB
# Two calls of tenant A nearly fill one of its engines.
_MEMORY_LIMIT = 2048 * _MIB
_DEADLINE_S = 20.0
_PAUSE_S = 0.01
_READY = "attacks"


@dataclass(frozen=True)
class Attack:
    """Calls of tenant A. `finding`: its number in the list of findings. `at_once`: calls at a time.

    `request`: makes a request's bytes, with a client to prepare what it needs. `beside`: what tenant B calls.
    """

    finding: str
    what: str
    at_once: int
    request: Callable[[gr.Client], bytes]
    beside: Callable[[], work.Work] = work.tiny
    compression: grpc.Compression = grpc.Compression.NoCompression


def _inline(spec: Any) -> Callable[[gr.Client], bytes]:
    return lambda client: bytes(evaluate_pb2.EvaluateRequest(spec=spec()).SerializeToString())


def _large_graph(client: gr.Client) -> bytes:
    """Names a graph of 192 MiB that is a blob."""
    graph = costly.chain(2)
    weights = graph.node.add(name="w", op="Const")
    weights.attr["dtype"].type = raw.DT_FLOAT
    weights.attr["value"].tensor.dtype = raw.DT_FLOAT
    weights.attr["value"].tensor.tensor_shape.dim.add(size=_GRAPH_BYTES // 4)
    weights.attr["value"].tensor.tensor_content = os.urandom(_MIB) * (_GRAPH_BYTES // _MIB)
    shape = graph.node.add(name="shape", op="Shape", input=["w"])
    shape.attr["T"].type = raw.DT_FLOAT
    data = graph.SerializeToString()
    client.upload(data)
    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.blob_sha256 = hashlib.sha256(data).hexdigest()
    request.spec.fetches.append("shape")
    return request.SerializeToString()


def _large_call(client: gr.Client) -> bytes:
    what = work.large(60 * _MIB // 4)
    return what.named_request(what.compile(client))


def _filling(client: gr.Client) -> bytes:
    """Makes a tensor of 600 MiB, and tells its sum."""
    g = gr.Graph()
    sizes = g.constant(np.array([_HELD_BYTES // 4], np.int32))
    filled = g.one("Fill", sizes, g.placeholder("x", "float32", []))
    g.reduce_sum(filled, axis=[0], name="y")
    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.serialized = g.to_bytes()
    request.spec.fetches.append("y")
    request.feeds.add(name="x").value.inline.CopyFrom(raw.tensor(1.0))
    return request.SerializeToString()


ATTACKS = {
    "selections": Attack("S2", "300 overrides on 30,000 nodes", 8, _inline(costly.slow_to_select)),
    "nested calls": Attack("S3", "10 KB of functions that call each other", 12, _inline(costly.nested_calls)),
    "tiny fields": Attack(
        "S5",
        "messages of four million fields",
        60,
        lambda client: costly.tiny_fields(),
        compression=grpc.Compression.Gzip,
    ),
    "large graph": Attack("S11", "105 bytes that name a graph of 192 MiB", 24, _large_graph),
    "large calls": Attack("S16", "calls of 60 MiB", 8, _large_call),
    "near the limit": Attack("S9", "calls that take 600 MiB each", 2, _filling, lambda: work.large(20 * _MIB // 4)),
}


def run(scale: Scale) -> Figures:
    """A minute of each in the long run."""
    seconds = max(_SHORT_S, LONG_S * scale.share)
    with two_tenants(scale) as (server, tokens):
        return endure(server, tokens, scale, seconds)


@contextlib.contextmanager
def two_tenants(scale: Scale) -> Iterator[tuple[RunningServer, list[str]]]:
    """A server, and the tokens of its tenants A and B."""
    file = data_folder(scale, "strangers").with_suffix(".tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = attacks.make_tokens(file, ("a", "b"))
    with served(scale, "strangers", tokens=file, memory_limit=_MEMORY_LIMIT) as server:
        yield server, tokens


def endure(
    server: RunningServer,
    tokens: Sequence[str],
    scale: Scale,
    seconds: float,
    names: Sequence[str] = tuple(ATTACKS),
    *,
    p99_s: float = P99_S,
    new_p99_s: float = NEW_P99_S,
) -> Figures:
    """Each attack of tenant A for so many seconds, with calls of tenant B beside it."""
    findings, clock = Findings(), scale.clock()
    details: dict[str, object] = {}
    calls = done = 0
    for name in names:
        if clock.is_over:
            break
        tiny, new, did = _beside(server.target, tokens, name, seconds)
        calls, done = calls + tiny.calls + new.calls, done + 1
        details[f"{name} ({ATTACKS[name].finding})"] = {
            "did": f"{ATTACKS[name].what}, {ATTACKS[name].at_once} at a time: {did}",
            "calls": _told(tiny),
            "new_programs": _told(new),
        }
        for what, found, most_s in (("calls", tiny, p99_s), ("new programs", new, new_p99_s)):
            for reason, count in found.failures.items():
                findings.add(f"{name}: {count} of {found.calls} {what} of tenant B failed with {reason}")
            if found.p99_ms > most_s * 1e3:
                findings.add(f"{name}: {what} of tenant B took {found.p99_ms / 1e3:.2f} s (p99)")
        if not did:
            findings.add(f"{name}: nothing was done")
        if server.process.poll() is not None:
            findings.add(f"{name}: the front end ended with {server.process.returncode}")
            break
    return Figures(
        target=TARGET,
        cases=calls,
        failures=findings.count,
        met=not findings.count and (done == len(names) or clock.ends_at is not None),
        details=details,
        findings=findings.lines,
    )


def _told(found: Answers) -> dict[str, object]:
    return {
        "count": found.calls,
        "p50_ms": round(found.p50_ms, 1),
        "p99_ms": round(found.p99_ms, 1),
        "failures": dict(found.failures),
    }


def _beside(target: str, tokens: Sequence[str], name: str, seconds: float) -> tuple[Answers, Answers, str]:
    """Returns how calls and new programs of tenant B went while tenant A attacked, and what tenant A came to do."""
    theirs, mine = tokens
    command = [sys.executable, "-m", "tests.battery.strangers", name, target, str(seconds)]
    environment = os.environ | {"GRADRULE_TOKEN": theirs}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            if attacker.stdout.readline().strip() != _READY:
                return Answers(), Answers(), ""
            with ThreadPoolExecutor(2) as threads:
                tiny = threads.submit(attacks.program_calls, target, mine, seconds, ATTACKS[name].beside())
                new = threads.submit(attacks.new_programs, target, mine, seconds)
                return tiny.result(), new.result(), attacker.stdout.read().strip()
        finally:
            attacker.kill()


async def _attack(attack: Attack, target: str, token: str, request: bytes, seconds: float) -> Counter[str]:
    """Sends the request again and again; returns how often each status came."""
    ends_at, codes = time.monotonic() + seconds, Counter[str]()
    metadata = (("authorization", f"Bearer {token}"),)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options, compression=attack.compression) as channel:
        evaluate: Any = channel.unary_unary(EVALUATE)

        async def send() -> None:
            while (left_s := ends_at - time.monotonic()) > 0:
                try:
                    await evaluate(request, timeout=min(_DEADLINE_S, left_s), metadata=metadata)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as failure:
                    codes[failure.code().name] += 1
                    # A refused call is sent again at once.
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(send() for _ in range(attack.at_once)))
    return codes


def main(name: str, target: str, seconds: float) -> None:
    """Is tenant A: prints a line when it begins, and what it came to do when it ends."""
    token, attack = os.environ["GRADRULE_TOKEN"], ATTACKS[name]
    with gr.connect(target, token=token, timeout=120.0) as client:
        request = attack.request(client)
    print(_READY, flush=True)
    codes = asyncio.run(_attack(attack, target, token, request, seconds))
    print(", ".join(f"{count} × {code}" for code, count in codes.items()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
