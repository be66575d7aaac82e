"""Attacks the HTTP gateway from several addresses of loopback: tenant A, or somebody without a credential.

`python -m tests.battery.gateway_attacks ATTACK HOST:PORT SECONDS SHARE` runs one, with tenant A's token in
GRADRULE_TOKEN, and prints the number of each status.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

ADDRESSES = tuple(f"127.0.0.{number}" for number in range(2, 6))
READY = "attacks"
_PAUSE_S = 0.02
_TRICKLE_S = 1.0
_TIMEOUT_S = 60.0
_CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"
_MIB = 1 << 20


@dataclass
class Attacker:
    """Sends the requests of one attack, and counts what became of them."""

    host: str
    port: int
    seconds: float
    share: float
    token: str
    codes: Counter[str]
    bodies: list[bytes]

    def __post_init__(self) -> None:
        self._ends_at = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def count(self, full: int) -> int:
        """Returns the number of connections for a number at full scale."""
        return max(4, round(full * self.share))

    async def open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        found = await asyncio.open_connection(self.host, self.port, local_addr=(address, 0))
        self.codes["connected"] += 1
        return found

    async def hold(self, address: str, first: bytes, then: bytes = b"", *, reads: bool = True) -> None:
        """Opens a connection again and again, sends `first`, then `then` each second, and never more."""
        while not self.is_over:
            writer = None
            try:
                reader, writer = await self.open(address)
                if not reads:
                    transport: Any = writer.transport
                    transport.pause_reading()
                writer.write(first)
                await asyncio.wait_for(writer.drain(), self.seconds)
                while not self.is_over and not writer.is_closing():
                    if then:
                        writer.write(then)
                    with contextlib.suppress(TimeoutError):
                        answer = await asyncio.wait_for(reader.read(65536), _TRICKLE_S)
                        if not answer:
                            break
                        if answer.startswith(b"HTTP/1.1 "):
                            self.codes[answer[9:12].decode()] += 1
                self.codes["held to the end" if self.is_over else "closed"] += 1
                await asyncio.sleep(_TRICKLE_S)
            except OSError as failure:
                self.codes[type(failure).__name__] += 1
                await asyncio.sleep(_PAUSE_S)
            finally:
                if writer is not None:
                    writer.close()

    async def hold_many(self, count: int, first: bytes, then: bytes = b"", *, reads: bool = True) -> None:
        """Holds connections from each address."""
        holders = [self.hold(address, first, then, reads=reads) for address in ADDRESSES for _ in range(count)]
        await asyncio.gather(*holders)

    async def send_many(self, at_once: int, requests: Iterator[bytes]) -> None:
        """Sends requests, so many at a time, one after the other over each connection."""

        async def send(address: str) -> None:
            while not self.is_over:
                try:
                    reader, writer = await self.open(address)
                    try:
                        while not self.is_over:
                            writer.write(next(requests))
                            await writer.drain()
                            self.codes[await asyncio.wait_for(_read_answer(reader), _TIMEOUT_S)] += 1
                    finally:
                        writer.close()
                except (OSError, TimeoutError, asyncio.IncompleteReadError) as failure:
                    self.codes[type(failure).__name__] += 1
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(send(ADDRESSES[number % len(ADDRESSES)]) for number in range(at_once)))

    def post(self, body: bytes, token: str | None = None) -> bytes:
        return head(len(body), self.token if token is None else token) + body


async def _read_answer(reader: asyncio.StreamReader) -> str:
    text = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in text.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    if b"connection: close" in text.lower():
        await reader.read()
    return text[9:12].decode()


def head(length: int, token: str, path: str = "/v1/evaluate") -> bytes:
    """Returns the headers of a request with a body."""
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{authorization}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def evaluation(feed: object, program: str = "programs/attacked") -> bytes:
    """Returns the body of a call."""
    return json.dumps({"program": program, "feeds": {"x": feed}}).encode()


def _floats() -> list[float]:
    return [0.125 * (number % 64) - 4.0625 for number in range(4 * _MIB // 9)]


def natural() -> Iterator[bytes]:
    """Yields 4 MB of numbers."""
    yield evaluation(_floats())


def float_val() -> Iterator[bytes]:
    """Yields 4 MB of numbers in protobuf's mapping."""
    values = _floats()
    shape = {"dim": [{"size": len(values)}]}
    yield evaluation({"inlineTensor": {"dtype": "DT_FLOAT", "tensorShape": shape, "floatVal": values}})


def many_messages() -> Iterator[bytes]:
    """Yields 4 MB of overrides, the most expensive text for its length."""
    yield json.dumps({"spec": {"overrides": [{"selector": {"opType": "x"}}] * (4 * _MIB // 33)}}).encode()


def small_names() -> Iterator[bytes]:
    """Yields bodies just below the length that is always converted elsewhere, with thousands of names."""
    yield json.dumps({"program": "programs/attacked", "feeds": {f"x{number}": 1 for number in range(5_000)}}).encode()


def bombs() -> Iterator[bytes]:
    """Yields bodies that are short and cost much, or that break parsers."""
    yield b"[" * (2 * _MIB)
    yield b'{"feeds":' * 200_000
    yield b'{"feeds": {"x": ' + b"[" * 60_000 + b"]" * 60_000 + b"}}"
    yield b'{"feeds": {"x": ' + b"9" * _MIB + b"}}"
    yield b'{"feeds": {"x": 1e' + b"9" * _MIB + b"}}"
    yield b"{" + b",".join(b'"k%d": 1' % number for number in range(200_000)) + b"}"
    yield b"{" + b'"a": 1,' * 300_000 + b'"a": 1}'
    yield b'{"program": "' + b"\\ud83d" * 200_000 + b'"}'
    yield json.dumps({"feeds": {f"x{number}": [] for number in range(10_001)}}).encode()
    yield evaluation({"dtype": "float32", "shape": [1 << 40], "values": [1]})
    yield evaluation({"dtype": "float32", "shape": [1, 0] * 40_000, "values": []})
    yield evaluation([[[[[[[[1.0]]]]]]]] * 60_000 + [1])
    yield evaluation(["NaN"] * 400_000 + [{}])
    yield json.dumps({"spec": {"overrides": [{}] * 300_000}}).encode()
    yield evaluation({"inlineTensor": {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{}] * 300_000}, "floatVal": [1]}})
    yield b"\xff" * _MIB


async def silent(attacker: Attacker) -> None:
    """Opens thousands of connections from one address."""
    count = attacker.count(5_300)
    await asyncio.gather(*(attacker.hold(ADDRESSES[0], b"") for _ in range(count)))


async def handshakes(attacker: Attacker) -> None:
    await attacker.hold_many(attacker.count(400), _CLIENT_HELLO, b"\0")


async def slow_headers(attacker: Attacker) -> None:
    await attacker.hold_many(attacker.count(256), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ", b"x")


async def bodies_of_strangers(attacker: Attacker) -> None:
    await attacker.hold_many(attacker.count(256), head(9, "") + b"{", b"")


async def bodies_of_a_tenant(attacker: Attacker) -> None:
    await attacker.hold_many(attacker.count(256), head(99, attacker.token) + b"{", b" ")


async def large_bodies(attacker: Attacker) -> None:
    """Sends all but the last bytes of more bodies than the gateway may keep."""
    size = 60 * _MIB
    first = head(size, attacker.token) + b" " * (size - (1 << 16))
    await attacker.hold_many(attacker.count(4), first, b" " * 5_000)


async def unread_answers(attacker: Attacker) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400
    await attacker.hold_many(attacker.count(256), asked, reads=False)


async def guesses(attacker: Attacker) -> None:
    requests = (attacker.post(b"{}", secrets.token_urlsafe(24)) for _ in iter(int, 1))
    await attacker.send_many(attacker.count(256), requests)


async def many_requests(attacker: Attacker) -> None:
    request = attacker.post(evaluation([1.0, 2.0]))
    await attacker.send_many(attacker.count(512), iter(lambda: request, None))


async def conversions(at_once: int, attacker: Attacker) -> None:
    """Sends the bodies of the attack again and again."""
    await attacker.send_many(at_once, itertools.cycle([attacker.post(body) for body in attacker.bodies]))


@dataclass(frozen=True)
class Attack:
    """Describes an attack: what it does, with which bodies, on the gateway with TLS or the one without."""

    what: str
    run: Callable[[Attacker], Awaitable[None]]
    bodies: Callable[[], Iterator[bytes]] = lambda: iter(())
    has_tls: bool = False


ATTACKS = {
    "silent": Attack("5,300 connections of one address that send nothing", silent, has_tls=True),
    "handshakes": Attack("400 unfinished handshakes of each of 4 addresses", handshakes, has_tls=True),
    "headers": Attack("256 unfinished headers of each of 4 addresses", slow_headers),
    "bodies, no credential": Attack("256 unfinished bodies of each of 4 addresses", bodies_of_strangers),
    "bodies": Attack("the same with a credential", bodies_of_a_tenant),
    "large bodies": Attack("16 bodies of 60 MiB without their last bytes", large_bodies),
    "unread answers": Attack("256 clients of each of 4 addresses that do not read", unread_answers),
    "guesses": Attack("256 clients that guess credentials", guesses),
    "requests": Attack("512 tiny calls at a time", many_requests),
    "numbers": Attack("6 bodies of 4 MB at a time", partial(conversions, 6), natural),
    "floatVal": Attack("the same in protobuf's mapping", partial(conversions, 6), float_val),
    "messages": Attack("6 bodies of 120,000 overrides", partial(conversions, 6), many_messages),
    "names": Attack("32 bodies of 60 KB with 5,000 feeds", partial(conversions, 32), small_names),
    "bombs": Attack("JSON bombs, 8 at a time", partial(conversions, 8), bombs),
}


def main(name: str, target: str, seconds: float, share: float) -> None:
    """Runs one attack."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = target.rpartition(":")
    codes: Counter[str] = Counter()
    bodies = [*ATTACKS[name].bodies()]
    attacker = Attacker(host, int(port), seconds, share, os.environ["GRADRULE_TOKEN"], codes, bodies)

    async def attack() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 1.0):
                await ATTACKS[name].run(attacker)

    print(READY, flush=True)
    asyncio.run(attack())
    print(json.dumps(codes), flush=True)
    # Thousands of connections take long to close one by one.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
