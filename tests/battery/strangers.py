"""Sends the most expensive requests of one tenant, while calls of another tenant must not be delayed.

Target: tenant B sees no failure; its small calls take at most a second (p99), its new programs at most 5 s; the front
end's memory grows by no more than each attack allows.
`python -m tests.battery.strangers ATTACK TARGET SECONDS` is tenant A, with its token in GRADRULE_TOKEN.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import gradrule as gr
from gradrule.v1 import evaluate_pb2, program_pb2, rule_pb2
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.known_answers import EVALUATE
from tests.battery.serving import data_folder, served
from tests.benchmarks import attacks, work
from tests.benchmarks.attacks import Answers
from tests.benchmarks.usage import usage
from tests.processes import peak_bytes, reset_peak, resources
from tests.service import raw
from tests.service.expensive_requests import chain, nested_calls, slow_to_select, tiny_fields
from tests.service.servers import RunningServer

TARGET = "tenant B beside each: no failure, tiny calls p99 ≤ 1 s, new programs p99 ≤ 5 s; front end's memory bounded"
P99_S = 1.0
NEW_P99_S = 5.0
LONG_S = 60.0
_SHORT_S = 2.0
_ALONE_S = 2.0
_ROOT = Path(__file__).resolve().parents[2]
_MIB = 1 << 20
_GRAPH_BYTES = 192 * _MIB
_LARGE_BYTES = 60 * _MIB
_HELD_BYTES = 600 * _MIB
# Two calls of tenant A nearly fill one engine.
_MEMORY_LIMIT = 2048 * _MIB
_DEADLINE_S = 20.0
_PAUSE_S = 0.01
_READY = "attacks"
_RULE_NODES = 14_000
_CREATE_RULE = "/gradrule.v1.RuleService/CreateRule"
_LONG_CHAIN = 25_000

Requests = Iterator[bytes]
"""The bytes of one request after the other."""


@dataclass(frozen=True)
class Attack:
    """Describes calls of tenant A.

    finding: its number in the list of findings. at_once: concurrent calls. requests: yields the bytes of requests; gets
    a
    client to prepare what they need. beside: what tenant B calls. succeeds: whether calls return OK; a call that starts
    during the attack may then run to its end. front_mib: MiB by which the front end may grow; infinite where the attack
    keeps many large messages in flight.
    """

    finding: str
    what: str
    at_once: int
    requests: Callable[[gr.Client], Requests]
    beside: Callable[[], work.Work] = work.tiny
    compression: grpc.Compression = grpc.Compression.NoCompression
    method: str = EVALUATE
    succeeds: bool = True
    front_mib: float = math.inf


@dataclass
class AttackResult:
    """Counts the calls of tenant A by status, and what they cost the front end."""

    codes: Counter[str] = field(default_factory=Counter)
    front_cpu_s: float = 0.0
    front_mib: float = 0.0


def _inline(spec: Callable[[], program_pb2.ProgramSpec]) -> Callable[[gr.Client], Requests]:
    return lambda client: itertools.repeat(evaluate_pb2.EvaluateRequest(spec=spec()).SerializeToString())


def _large_graph(client: gr.Client) -> Requests:
    """Yields requests that name a blob with a graph of 192 MiB."""
    graph = chain(2)
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
    return itertools.repeat(request.SerializeToString())


def _large_calls(client: gr.Client) -> Requests:
    what = work.large(_LARGE_BYTES // 4)
    return itertools.repeat(what.named_request(what.compile(client)))


def _tiny_calls(client: gr.Client) -> Requests:
    what = work.tiny()
    return itertools.repeat(what.named_request(what.compile(client)))


def _endless_loops(client: gr.Client) -> Requests:
    from tests.service import loop_graphs

    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.serialized = loop_graphs.endless().SerializeToString()
    request.spec.fetches.append("y")
    request.feeds.add(name="x").value.inline_tensor.CopyFrom(raw.tensor(loop_graphs.ENDLESS))
    return itertools.repeat(request.SerializeToString())


def _long_chains(client: gr.Client) -> Requests:
    """Yields chains that no cache contains: the name of the last node is new each time."""
    for number in itertools.count():
        graph = chain(_LONG_CHAIN)
        graph.node.add(name=f"y{number}", op="Tanh", input=[graph.node[-1].name])
        request = evaluate_pb2.EvaluateRequest()
        request.spec.graph.serialized = graph.SerializeToString()
        request.spec.fetches.append(f"y{number}")
        request.spec.vjp.ys.append(f"y{number}")
        request.spec.vjp.xs.append("n0")
        request.feeds.add(name="n0").value.inline_tensor.CopyFrom(raw.tensor(1.0))
        yield request.SerializeToString()


def _filling(client: gr.Client) -> Requests:
    """Makes a tensor of 600 MiB and returns its sum."""
    g = gr.Graph()
    sizes = g.constant(np.array([_HELD_BYTES // 4], np.int32))
    filled = g.op_output("Fill", sizes, g.placeholder("x", "float32", []))
    g.reduce_sum(filled, axis=[0], name="y")
    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.serialized = g.to_bytes()
    request.spec.fetches.append("y")
    request.feeds.add(name="x").value.inline_tensor.CopyFrom(raw.tensor(1.0))
    return itertools.repeat(request.SerializeToString())


def _large_rules(client: gr.Client) -> Requests:
    """Registers a hundred rules, each a graph of half a megabyte."""
    g = gr.Graph()
    last = g.placeholder("dy", "float32", None)
    for _ in range(_RULE_NODES):
        last = g.op_output("Tanh", last)
    g.op_output("Identity", last, name="dx")
    definition = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=g.to_bytes()))
    for number in range(100):
        rule = rule_pb2.Rule(name=f"rules/large{number}", definition=definition)
        yield rule_pb2.CreateRuleRequest(rule=rule).SerializeToString()


ATTACKS = {
    "selections": Attack("S2", "300 overrides on 30,000 nodes", 8, _inline(slow_to_select), succeeds=False),
    "nested calls": Attack(
        "S3", "10 KB of functions that call each other", 12, _inline(nested_calls), succeeds=False, front_mib=512
    ),
    "tiny fields": Attack(
        "S5",
        "messages of four million fields",
        60,
        lambda client: itertools.repeat(tiny_fields()),
        compression=grpc.Compression.Gzip,
        succeeds=False,
        front_mib=1024,
    ),
    "endless loops": Attack("S6", "loops that never end", 8, _endless_loops, succeeds=False, front_mib=256),
    "long chains": Attack("S6", "chains of 25,000 nodes with a gradient", 4, _long_chains, succeeds=False),
    "near the limit": Attack("S9", "calls that take 600 MiB each", 2, _filling, lambda: work.large(20 * _MIB // 4)),
    "large graph": Attack(
        "S11", "105 bytes that name a graph of 192 MiB", 24, _large_graph, succeeds=False, front_mib=512
    ),
    "large calls": Attack("S16", "calls of 60 MiB", 8, _large_calls),
    "wide": Attack("S16", "tiny calls", 600, _tiny_calls, front_mib=512),
    "large rules": Attack(
        "S17", "100 graph rules of half a megabyte", 2, _large_rules, method=_CREATE_RULE, front_mib=128
    ),
}


def run(scale: Scale) -> Figures:
    """Runs each attack for a minute at full scale."""
    seconds = max(_SHORT_S, LONG_S * scale.share)
    with two_tenants(scale) as (server, tokens):
        return run_attacks(server, tokens, scale, seconds)


@contextlib.contextmanager
def two_tenants(scale: Scale) -> Iterator[tuple[RunningServer, list[str]]]:
    """Starts a server and returns the tokens of its tenants A and B."""
    file = data_folder(scale, "strangers").with_suffix(".tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = attacks.make_tokens(file, ("a", "b"))
    with served(scale, "strangers", tokens=file, memory_limit=_MEMORY_LIMIT) as server:
        yield server, tokens


def run_attacks(
    server: RunningServer,
    tokens: Sequence[str],
    scale: Scale,
    seconds: float,
    names: Sequence[str] = tuple(ATTACKS),
    *,
    p99_s: float = P99_S,
    new_p99_s: float = NEW_P99_S,
) -> Figures:
    """Runs each attack of tenant A for that many seconds beside calls of tenant B."""
    findings, clock = Findings(), scale.clock()
    alone = attacks.tiny_calls(server.target, tokens[1], _ALONE_S)
    details: dict[str, object] = {"calls alone": _told(alone)}
    calls = done = 0
    for name in names:
        if clock.is_over:
            break
        attack = ATTACKS[name]
        tiny, new, did = _beside(server, tokens, name, seconds)
        calls, done = calls + tiny.calls + new.calls, done + 1
        codes = ", ".join(f"{count} × {code}" for code, count in did.codes.items())
        details[f"{name} ({attack.finding})"] = {
            "did": f"{attack.what}, {attack.at_once} at a time: {codes}",
            "calls": _told(tiny),
            "new_programs": _told(new),
            "front_cpu_s": round(did.front_cpu_s, 2),
            "front_grew_mib": round(did.front_mib, 1),
        }
        for line in judge(attack, did, tiny, new, p99_s=p99_s, new_p99_s=new_p99_s):
            findings.add(f"{name}: {line}")
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


def judge(
    attack: Attack,
    did: AttackResult,
    tiny: Answers,
    new: Answers,
    *,
    p99_s: float = P99_S,
    new_p99_s: float = NEW_P99_S,
) -> list[str]:
    """Returns the faults during one attack, and reports an attack that did nothing."""
    found = []
    for what, answers, most_s in (("calls", tiny, p99_s), ("new programs", new, new_p99_s)):
        found += [
            f"{count} of {answers.calls} {what} of tenant B failed with {reason}"
            for reason, count in answers.failures.items()
        ]
        if not answers.calls:
            found.append(f"tenant B made no {what}")
        if answers.p99_ms > most_s * 1e3:
            found.append(f"{what} of tenant B took {answers.p99_ms / 1e3:.2f} s (p99)")
    if not did.codes:
        found.append("nothing was done")
    elif attack.succeeds and not did.codes["OK"]:
        found.append("no call of tenant A was answered, so none weighed what it should")
    if did.front_mib > attack.front_mib:
        found.append(f"the front end grew by {did.front_mib:.0f} MiB, and may by {attack.front_mib:g}")
    return found


def _told(found: Answers) -> dict[str, object]:
    return {
        "count": found.calls,
        "p50_ms": round(found.p50_ms, 1),
        "p99_ms": round(found.p99_ms, 1),
        "failures": dict(found.failures),
    }


def _beside(
    server: RunningServer, tokens: Sequence[str], name: str, seconds: float
) -> tuple[Answers, Answers, AttackResult]:
    """Returns the times of tenant B's calls and new programs during the attack, and what tenant A did."""
    theirs, mine = tokens
    command = [sys.executable, "-m", "tests.battery.strangers", name, server.target, str(seconds)]
    environment = os.environ | {"GRADRULE_TOKEN": theirs}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            if attacker.stdout.readline().strip() != _READY:
                return Answers(), Answers(), AttackResult()
            front = server.process.pid
            before, cpu_ns = resources(front).resident_bytes, usage(front).cpu_ns
            reset_peak(front)
            with ThreadPoolExecutor(2) as threads:
                tiny = threads.submit(attacks.program_calls, server.target, mine, seconds, ATTACKS[name].beside())
                new = threads.submit(attacks.new_programs, server.target, mine, seconds)
                found = tiny.result(), new.result()
            codes = Counter[str](json.loads(attacker.stdout.read() or "{}"))
            grew = (peak_bytes(front) - before) / _MIB
            return *found, AttackResult(codes, (usage(front).cpu_ns - cpu_ns) / 1e9, grew)
        finally:
            attacker.kill()


async def _attack(attack: Attack, target: str, token: str, requests: Requests, seconds: float) -> Counter[str]:
    """Sends requests one after the other; returns the number of each status."""
    ends_at, codes = time.monotonic() + seconds, Counter[str]()
    metadata = (("authorization", f"Bearer {token}"),)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options, compression=attack.compression) as channel:
        evaluate: Any = channel.unary_unary(attack.method)

        async def send() -> None:
            while (left_s := ends_at - time.monotonic()) > 0:
                request = next(requests, None)
                if request is None:
                    return
                timeout_s = _DEADLINE_S if attack.succeeds else min(_DEADLINE_S, left_s)
                try:
                    await evaluate(request, timeout=timeout_s, metadata=metadata)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as failure:
                    codes[failure.code().name] += 1
                    # Send a refused call again at once.
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(send() for _ in range(attack.at_once)))
    return codes


def main(name: str, target: str, seconds: float) -> None:
    """Is tenant A: prints a line when it starts, and the number of each status at the end."""
    token, attack = os.environ["GRADRULE_TOKEN"], ATTACKS[name]
    with gr.connect(target, token=token, timeout=120.0) as client:
        requests = attack.requests(client)
    print(_READY, flush=True)
    codes = asyncio.run(_attack(attack, target, token, requests, seconds))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
