"""Attacks the HTTP gateway, while another tenant's calls and probes of health must not be delayed.

Target: tenant B and the probes see no failure; calls, bodies of 80 KB and probes take at most 1 s (p99).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from tests.battery.figures import Figures, Findings, Scale
from tests.battery.gateway_attacks import ATTACKS, READY, evaluation
from tests.battery.serving import data_folder, served
from tests.benchmarks import attacks
from tests.processes import resources
from tests.service.certificates import Authority
from tests.service.gateways import RunningGateway, running_gateway
from tests.service.test_gateway import SIGN

TARGET = "tenant B and probes of health beside each: no failure, p99 ≤ 1 s"
P99_S = 1.0
LONG_S = 20.0
_SHORT_S = 2.0
_ALONE_S = 2.0
_TIMEOUT_S = 60.0
_ADDRESS = "127.0.0.9"
_PAUSE_S = 0.05
_ROOT = Path(__file__).resolve().parents[2]
_SMALL = evaluation([-2.0, 0.5, 3.0], "programs/b")
_BODY = evaluation([-2.0, 0.5, 3.0, 1.0] * 4_000, "programs/b")


@dataclass
class Times:
    """How long requests of one kind took, seconds, and which failed."""

    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def quantile_ms(self, share: float) -> float:
        found = sorted(self.seconds)
        return 1e3 * found[min(len(found) - 1, math.floor(share * len(found)))] if found else math.nan

    def told(self) -> dict[str, object]:
        return {
            "count": len(self.seconds),
            "p50_ms": round(self.quantile_ms(0.5), 1),
            "p99_ms": round(self.quantile_ms(0.99), 1),
            "failures": dict(self.failures),
        }


@dataclass(frozen=True)
class Gateways:
    """Two gateways before one server: without TLS, and with it.

    tokens: of the tenants A and B. authority: file of the certificate of the second one.
    """

    plain: RunningGateway
    tls: RunningGateway
    tokens: Sequence[str]
    authority: Path


@contextlib.contextmanager
def gateways(scale: Scale) -> Iterator[Gateways]:
    """Starts a server for two tenants, and two gateways."""
    folder = data_folder(scale, "gateway")
    folder.mkdir(parents=True)
    tokens = attacks.make_tokens(folder / "tokens", ("a", "b"))
    authority = Authority(folder, "authority")
    files = authority.server("localhost")
    with (
        served(scale, "gateway", tokens=folder / "tokens") as server,
        running_gateway(server.target) as plain,
        running_gateway(server.target, "--tls-cert", str(files.certificate), "--tls-key", str(files.key)) as tls,
    ):
        for token, name in zip(tokens, ("attacked", "b"), strict=True):
            answer = plain.post("/v1/programs", {"spec": SIGN, "programId": name}, Authorization=f"Bearer {token}")
            assert answer.status == 200, answer.body
        yield Gateways(plain, tls, tokens, authority.file)


def run(scale: Scale) -> Figures:
    """Runs each attack for 20 s at full scale."""
    seconds = max(_SHORT_S, LONG_S * scale.share)
    with gateways(scale) as found:
        return run_attacks(found, scale, seconds)


def run_attacks(
    found: Gateways,
    scale: Scale,
    seconds: float,
    names: Sequence[str] = tuple(ATTACKS),
    *,
    p99_s: float = P99_S,
    share: float = 1.0,
) -> Figures:
    """Runs each attack for that many seconds beside calls of tenant B. `share`: of each attack's connections."""
    findings, clock = Findings(), scale.clock()
    alone = _witness(found, has_tls=False, seconds=_ALONE_S)
    details: dict[str, object] = {"alone": {kind: times.told() for kind, times in alone.items()}}
    cases = done = 0
    for name in names:
        if clock.is_over:
            break
        beside, codes, gateway = _beside(found, name, seconds, share)
        done += 1
        cases += sum(len(times.seconds) for times in beside.values())
        attacked = ", ".join(f"{count} × {code}" for code, count in codes.items())
        details[name] = {"did": f"{ATTACKS[name].what}: {attacked}"} | {
            kind: times.told() for kind, times in beside.items()
        }
        for line in judge(beside, codes, p99_s):
            findings.add(f"{name}: {line}")
        if gateway.process.poll() is not None:
            findings.add(f"{name}: the gateway ended with {gateway.process.returncode}")
            break
        details[name]["gateway_mib"] = resources(gateway.process.pid).resident_bytes >> 20  # type: ignore[index]
    return Figures(
        target=TARGET,
        cases=cases,
        failures=findings.count,
        met=not findings.count and (done == len(names) or clock.ends_at is not None),
        details=details,
        findings=findings.lines,
    )


def judge(beside: dict[str, Times], codes: Counter[str], p99_s: float) -> list[str]:
    """Returns the faults during one attack, and reports an attack that did nothing."""
    lines = []
    for kind, times in beside.items():
        lines += [f"{count} {kind} failed with {why}" for why, count in times.failures.items()]
        if not times.seconds:
            lines.append(f"no {kind} were sent")
        elif times.quantile_ms(0.99) > 1e3 * p99_s:
            lines.append(f"{kind} took {times.quantile_ms(0.99) / 1e3:.2f} s (p99)")
    if not codes:
        lines.append("nothing was done")
    if codes["500"]:
        lines.append(f"{codes['500']} requests of the attack were answered with 500")
    return lines


def _beside(
    found: Gateways, name: str, seconds: float, share: float
) -> tuple[dict[str, Times], Counter[str], RunningGateway]:
    """Returns the times of tenant B and of probes during an attack, what it did, and the gateway."""
    has_tls = ATTACKS[name].has_tls
    gateway = found.tls if has_tls else found.plain
    host, port = gateway.address
    command = [sys.executable, "-m", "tests.battery.gateway_attacks", name, f"{host}:{port}", str(seconds), str(share)]
    environment = os.environ | {"GRADRULE_TOKEN": found.tokens[0]}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            if attacker.stdout.readline().strip() != READY:
                return {}, Counter(), gateway
            beside = _witness(found, has_tls=has_tls, seconds=seconds)
            return beside, Counter(json.loads(attacker.stdout.read() or "{}")), gateway
        finally:
            attacker.kill()


def _witness(found: Gateways, *, has_tls: bool, seconds: float) -> dict[str, Times]:
    """Sends requests of tenant B and probes for so long, each over a new connection from an address of its own."""
    gateway = found.tls if has_tls else found.plain
    context = ssl.create_default_context(cafile=str(found.authority)) if has_tls else None
    headers = {"Authorization": f"Bearer {found.tokens[1]}", "Content-Type": "application/json", "Host": "localhost"}
    requests: dict[str, tuple[Any, ...]] = {
        "probes": ("GET", "/healthz", None, {"Host": "localhost"}),
        "probes of readiness": ("GET", "/v1/health", None, {"Host": "localhost"}),
        "calls": ("POST", "/v1/evaluate", _SMALL, headers),
        "bodies of 80 KB": ("POST", "/v1/evaluate", _BODY, headers),
    }

    def connect() -> HTTPConnection:
        words: dict[str, Any] = {"timeout": _TIMEOUT_S, "source_address": (_ADDRESS, 0)}
        host, port = gateway.address
        return (
            HTTPConnection(host, port, **words)
            if context is None
            else HTTPSConnection(host, port, context=context, **words)
        )

    with ThreadPoolExecutor(len(requests)) as threads:
        running = {kind: threads.submit(_repeat, connect, request, seconds) for kind, request in requests.items()}
        return {kind: times.result() for kind, times in running.items()}


def _repeat(connect: Callable[[], HTTPConnection], request: tuple[Any, ...], seconds: float) -> Times:
    times, ends_at = Times(), time.monotonic() + seconds
    while time.monotonic() < ends_at:
        started = time.monotonic()
        with contextlib.closing(connect()) as connection:
            try:
                connection.request(*request)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    times.failures[f"{answer.status} {json.loads(text)['reason']}"] += 1
            except (OSError, HTTPException) as failure:
                times.failures[type(failure).__name__] += 1
        times.seconds.append(time.monotonic() - started)
        time.sleep(_PAUSE_S)
    return times
