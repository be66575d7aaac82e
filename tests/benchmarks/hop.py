"""The hop between front end and engine: p50 of a payload there and back, by its size and by the way that it takes.

`python tests/benchmarks/hop.py --json hop.json`. The other process sends back what it gets. Ways: through the socket;
through arenas that both map, as the server does it; and in memory made for each message, whose descriptor is sent.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gradrule_server.link.arena import MIN_PLACED_BYTES, Arenas
from gradrule_server.link.connection import Connection
from gradrule_server.link.framing import Frame, FrameSocket, Kind, serve_frames

_MEBIBYTE = 1024 * 1024
_SIZES = {"1 KiB": 1024, "256 KiB": MIN_PLACED_BYTES, "1 MiB": _MEBIBYTE, "16 MiB": 16 * _MEBIBYTE}
_SIZES["100 MiB"] = 100 * _MEBIBYTE
_CALLS = {"1 KiB": 300, "256 KiB": 60, "1 MiB": 40, "16 MiB": 8, "100 MiB": 3}

Echo = Callable[[bytes], Awaitable[int]]


def _serve(way: str, fd: int, shared: list[int]) -> None:
    sock = socket.socket(fileno=fd)
    if way == "memory per message":
        while (payload := _receive_memory(sock)) is not None:
            _send_memory(sock, payload)
        return
    frames = FrameSocket(sock, Arenas.from_descriptors(shared[0], shared[1]) if shared else None)

    def answer(frame: Frame) -> None:
        frames.send(Kind.RAN, frame.request_id, bytes(frame.payload))

    def refuse(request_id: int) -> None:
        frames.send(Kind.FAULT, request_id, b"")

    serve_frames(frames, answer, refuse, threads=1)


def _send_memory(sock: socket.socket, payload: bytes) -> None:
    fd = os.memfd_create("hop")
    try:
        os.write(fd, payload) if len(payload) < _MEBIBYTE else _fill(fd, payload)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sock.sendmsg([len(payload).to_bytes(8, "little")], rights)
    finally:
        os.close(fd)


def _fill(fd: int, payload: bytes) -> None:
    os.ftruncate(fd, len(payload))
    with mmap.mmap(fd, len(payload)) as mapped:
        mapped[:] = payload


def _receive_memory(sock: socket.socket) -> bytes | None:
    head, rights, _, _ = sock.recvmsg(8, socket.CMSG_SPACE(4))
    if not head:
        return None
    fd = array.array("i", rights[0][2])[0]
    try:
        with mmap.mmap(fd, int.from_bytes(head, "little"), prot=mmap.PROT_READ) as mapped:
            return mapped[:]
    finally:
        os.close(fd)


def _start(way: str, theirs: socket.socket, shared: list[int]) -> subprocess.Popen[bytes]:
    fds = [theirs.fileno(), *shared]
    command = [sys.executable, __file__, "--serve", way, *map(str, fds)]
    return subprocess.Popen(command, pass_fds=fds)


async def exchange(way: str) -> tuple[Echo, Callable[[], Awaitable[None]]]:
    """Starts the other process; returns what sends a payload there and back, and what ends the process."""
    ours, theirs = socket.socketpair()
    arenas, shared = Arenas.make() if way == "arenas" else (None, [])
    with theirs:
        process = _start(way, theirs, shared)
    if way == "memory per message":

        async def echo_memory(payload: bytes) -> int:
            _send_memory(ours, payload)
            return len(_receive_memory(ours) or b"")

        async def end() -> None:
            ours.close()
            await asyncio.to_thread(process.wait)

        return echo_memory, end
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(1, arenas), sock=ours)

    async def echo(payload: bytes) -> int:
        return len(await connection.submit(Kind.RUN, payload).answer)

    async def close() -> None:
        connection.close()
        await asyncio.to_thread(process.wait)

    return echo, close


async def measure(rounds: int) -> dict[str, dict[str, float]]:
    """p50 in milliseconds by size and way; the ways take turns."""
    ways = {way: await exchange(way) for way in ("socket", "arenas", "memory per message")}
    found: dict[str, dict[str, list[float]]] = {size: {way: [] for way in ways} for size in _SIZES}
    for size, length in _SIZES.items():
        payload = os.urandom(min(length, _MEBIBYTE)) * max(1, length // _MEBIBYTE)
        for turn in range(rounds + 1):
            for way, (echo, _) in ways.items():
                for _ in range(_CALLS[size]):
                    began = time.perf_counter()
                    if await echo(payload) != length:
                        raise AssertionError(f"{way}: not everything came back")
                    if turn:
                        found[size][way].append((time.perf_counter() - began) * 1e3)
    for _, close in ways.values():
        await close()
    return {
        size: {way: round(statistics.median(times), 3) for way, times in row.items()} for size, row in found.items()
    }


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        way, fd, *shared = options.serve
        _serve(way, int(fd), [int(item) for item in shared])
        return
    table = asyncio.run(measure(options.rounds))
    for size, row in table.items():
        print(f"{size:>8}  " + "  ".join(f"{way}: {value:9.3f} ms" for way, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
