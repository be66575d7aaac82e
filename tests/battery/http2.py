"""Sends raw HTTP/2 from a seed: frames, header blocks, prefaces, windows, floods, with and without a credential.

Target: the server survives and always answers a healthy client beside it; closed connections leave no descriptors and
no memory; statuses are typed; no log line is forged or contains what a client sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field

from gradrule_server.identity.token_file import add_token, new_token
from tests.battery import wire
from tests.battery.figures import Clock, Figures, Findings, Scale
from tests.battery.fuzz import HealthPoller
from tests.battery.http2_cases import SECRET, Case, Cases
from tests.battery.known_answers import HealthyClient
from tests.battery.serving import data_folder, growth_faults, served, settled
from tests.processes import resources
from tests.service.servers import RunningServer

TARGET = "the server stays up and answers others; 0 untyped statuses, 0 forged lines; memory and descriptors return"
LONG = 1_000_000
CONNECTIONS = 12
# The front end shares the processor with the fuzzer.
STALL_S = 30.0
# A silent connection is closed after the handshake timeout of 10 s.
_SETTLE_S = 30.0
_ANSWER_S = 20.0
_CLOSE_S = 20.0
_UNKNOWN, _INTERNAL = 2, 13
# gRPC's own answer to a path that is not UTF-8, before any code of the server runs.
_OF_GRPC = "Unexpected <class 'UnicodeDecodeError'>"


@dataclass
class Sent:
    """Counts what was sent and what came back."""

    cases: int = 0
    sent_bytes: int = 0
    closed_by_server: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)


def run(scale: Scale) -> Figures:
    """Sends half of the cases to an open server and half to one that requires tokens; 10⁶ at full scale."""
    count = scale.count(LONG)
    half = Scale(scale.share, scale.seed, scale.folder, None if scale.seconds is None else scale.seconds / 2)
    with served(scale, "http2") as server:
        found = asyncio.run(fuzz(server, half, count - count // 2))
    file = data_folder(scale, "http2-tokens").with_suffix(".tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    text, token = new_token("ada", is_admin=False, expires=None)
    add_token(file, token)
    with served(scale, "http2", tokens=file) as server:
        other = asyncio.run(fuzz(server, half, count // 2, text))
    return Figures(
        target=TARGET,
        cases=found.cases + other.cases,
        failures=found.failures + other.failures,
        met=found.met and other.met,
        findings=[*found.findings, *other.findings],
        details={"open": found.details, "with tokens": other.details},
    )


async def fuzz(server: RunningServer, scale: Scale, count: int, token: str | None = None) -> Figures:
    """Sends that many cases beside a healthy client."""
    findings, sent, clock = Findings(), Sent(), scale.clock()
    authorization = None if token is None else f"Bearer {token}".encode()
    cases = Cases(scale.seed, authorization)
    healthy, pulse = HealthyClient(server.target, token=token), HealthPoller(server.target)
    beside = [asyncio.ensure_future(healthy.run()), asyncio.ensure_future(pulse.run())]
    await _first_answer(healthy)
    before, log_before = resources(server.process.pid), server.log.stat().st_size
    started = time.monotonic()
    await _send_all(server, cases, count, clock, findings, sent)
    seconds = time.monotonic() - started
    healthy.stop()
    pulse.stop()
    await asyncio.gather(*beside)
    details: dict[str, object] = {}
    if server.process.poll() is None:
        after = await settled(server, before, _SETTLE_S)
        details = {
            "descriptors": [before.descriptors, after.descriptors],
            "grew_mib": round((after.resident_bytes - before.resident_bytes) / 2**20, 1),
        }
        for fault in growth_faults(before, after):
            findings.add(fault)
    else:
        findings.add(f"the front end ended with {server.process.returncode}")
    seen = healthy.seen
    for fault in seen.wrong:
        findings.add(f"the healthy client got a wrong answer: {fault}")
    if seen.failed or not seen.answered:
        findings.add(f"{seen.failed} of {seen.asked} requests of the healthy client failed: {seen.errors}")
    if pulse.longest_s > STALL_S:
        findings.add(f"the front end told of no health for {pulse.longest_s:.1f} s")
    lines = log_faults(server.log.read_bytes()[log_before:], findings)
    return Figures(
        target=TARGET,
        cases=sent.cases,
        failures=findings.count,
        met=not findings.count and (sent.cases >= count or clock.is_over),
        findings=findings.lines,
        details={
            "cases_per_s": round(sent.cases / seconds, 1),
            "sent_mib": round(sent.sent_bytes / 2**20, 1),
            "kinds": dict(sent.kinds.most_common()),
            "statuses": {str(status): number for status, number in sorted(sent.statuses.items())},
            "closed_by_server": sent.closed_by_server,
            "log_lines": lines,
            "longest_pause_s": round(pulse.longest_s, 2),
            "healthy_asked": seen.asked,
            "healthy_errors": seen.errors,
            "healthy_p99_s": round(seen.quantile(0.99), 3),
            **details,
        },
    )


def log_faults(written: bytes, findings: Findings) -> int:
    """Checks the server's log of this time; returns the number of lines."""
    lines = written.splitlines()
    for line in lines:
        if SECRET in line:
            findings.add(f"a line of the log holds what a client sent: {line[:300]!r}")
        try:
            told = json.loads(line)
        except ValueError:
            findings.add(f"a line of the log is no JSON: {line[:300]!r}")
            continue
        if told.get("message") == "forged":
            findings.add("a line of the log is forged")
        elif told.get("level") == "error" and told.get("logger") != "gradrule_server.grpc":
            findings.add(f"the server logged an error: {line[:500]!r}")
    return len(lines)


async def _first_answer(healthy: HealthyClient) -> None:
    async with asyncio.timeout(60):
        while not healthy.seen.answered:
            await asyncio.sleep(0.05)


async def _send_all(
    server: RunningServer, cases: Cases, count: int, clock: Clock, findings: Findings, sent: Sent
) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            if clock.is_over or server.process.poll() is not None:
                return
            case = cases.case(number)
            for fault in await send(server.target, case, sent):
                findings.add(f"case {number} ({', '.join(case.kinds)}): {fault}")
            sent.cases += 1
            sent.kinds.update(case.kinds)

    await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))


async def send(target: str, case: Case, sent: Sent, answer_s: float = _ANSWER_S) -> list[str]:
    """Sends a case on its own connection; returns its faults."""
    try:
        async with wire.connected(target) as (reader, writer):
            return await _sent(reader, writer, case, sent, answer_s)
    except OSError as cause:
        # The server may close a connection it cannot read at any time; other checks see whether it accepts connections.
        return [] if isinstance(cause, ConnectionResetError | BrokenPipeError) else [repr(cause)]


async def _sent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, case: Case, sent: Sent, answer_s: float
) -> list[str]:
    heard = wire.ConnectionLog()
    hearing = asyncio.ensure_future(heard.listen(reader))
    for piece in case.pieces:
        writer.write(piece)
        with contextlib.suppress(OSError):
            await writer.drain()
        sent.sent_bytes += len(piece)
        await asyncio.sleep(0)
    faults = []
    if case.streams:
        ended = asyncio.ensure_future(heard.has_ended(case.streams))
        await asyncio.wait({hearing, ended}, timeout=answer_s, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if len(heard.ended) < case.streams:
            faults.append(f"{len(heard.ended)} of {case.streams} calls were answered within {answer_s:g} s")
    else:
        await asyncio.wait({hearing}, timeout=0.02)
    sent.closed_by_server += hearing.done()
    if case.ends_by_reset and not hearing.done():
        hearing.cancel()
        _reset(writer)
    elif writer.can_write_eof() and not hearing.done():
        with contextlib.suppress(OSError):
            writer.write_eof()
        done, _ = await asyncio.wait({hearing}, timeout=_CLOSE_S)
        if not done:
            hearing.cancel()
            faults.append(f"the server kept the connection for {_CLOSE_S:g} s after its client had closed it")
    for answer in heard.answers.values():
        if answer.status is not None:
            sent.statuses[answer.status] += 1
        if answer.status == _UNKNOWN and not answer.message.startswith(_OF_GRPC):
            faults.append(f"UNKNOWN: {answer.message:.200}")
        elif answer.status == _INTERNAL and "incident" in answer.message:
            faults.append(f"INTERNAL: {answer.message:.200}")
    return faults + heard.faults


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a TCP reset."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
