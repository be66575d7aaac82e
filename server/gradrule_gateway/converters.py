"""Converts bodies without blocking the event loop: small ones at once, large ones in processes.

Parsing or writing JSON holds Python's lock until it ends, so a thread would not let other requests go on: a list of
four million numbers takes 0.4 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from gradrule_gateway import conversion
from gradrule_gateway.budget import FairSlots
from gradrule_gateway.conversion import DecodedRequest, Types
from gradrule_gateway.encoding import Format
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import Route

_R = TypeVar("_R")
MAX_INLINE = 64 << 10
"""Longest body that is converted in the event loop, and longest graph that is read in a thread."""
_MAX_INLINE_PARTS = 1000
_MAX_INLINE_ANSWER = 64 << 10
_MAX_INLINE_TENSORS = 100
# One caller may use half of them.
_PROCESSES = max(4, min(8, os.cpu_count() or 1))
# A conversion takes a few seconds at most, whatever deadline the client sets.
_MAX_S = 30.0
_PARENT_CHECK_S = 1.0
# A process that has converted a large body seldom gives its memory back to the system.
_MAX_KEPT_BYTES = 256 << 20


class Converters:
    """Converts requests and answers. The processes start when they are first needed."""

    def __init__(self) -> None:
        self.slots = FairSlots(_PROCESSES)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def decode(self, caller: str, route: Route, body: bytes) -> DecodedRequest:
        """Returns the request in a body. Raises `Problem`."""
        # Numbers are cheap: 64 KiB of them take 1 ms. Names, strings and objects take up to 15 µs each, lists half.
        parts = body.count(b'"') + body.count(b"{") + body.count(b"[") // 2
        if len(body) <= MAX_INLINE and parts <= _MAX_INLINE_PARTS:
            return conversion.decode_body(route, body)
        message, places = await self._in_process(caller, conversion.decode_to_bytes, route, body)
        return conversion.decoded_from_bytes(route, message, places)

    async def close_types(self, caller: str, route: Route, request: DecodedRequest, types: Types) -> None:
        """Sets the element types of a request's open tensors. Raises `Problem`."""
        if len(request.open) > _MAX_INLINE_TENSORS:
            given = request.message.SerializeToString()
            closed = await self._in_process(caller, conversion.close_bytes, route, given, request.open, types)
            request.message.ParseFromString(closed)
        elif request.message.ByteSize() > MAX_INLINE:
            # NumPy releases Python's lock.
            await self._in_thread(caller, request.close, types)
        else:
            request.close(types)

    async def encode(self, caller: str, route: Route, answer: bytes, form: Format) -> bytes:
        """Returns a response as JSON text. Raises `Problem`."""
        if len(answer) <= _MAX_INLINE_ANSWER:
            return conversion.encode_answer(route, answer, form)
        return await self._in_process(caller, conversion.encode_answer, route, answer, form)

    async def run(self, caller: str, function: Callable[..., _R], *arguments: Any) -> _R:
        """Returns the result of a function that reads a graph: in a thread if its bytes are few. Raises `Problem`."""
        if all(len(each) <= MAX_INLINE for each in arguments):
            return await self._in_thread(caller, function, *arguments)
        return await self._in_process(caller, function, *arguments)

    def stop(self) -> None:
        """Ends the processes, also those that convert."""
        for worker in (*self._idle, *self._busy):
            worker.kill()

    async def _in_thread(self, caller: str, function: Callable[..., _R], *arguments: Any) -> _R:
        async with self.slots.slot(caller):
            return await asyncio.to_thread(function, *arguments)

    async def _in_process(self, caller: str, function: Callable[..., _R], *arguments: Any) -> _R:
        async with self.slots.slot(caller):
            worker = self._idle.pop() if self._idle else _Worker()
            self._busy.add(worker)
            if not self._idle and len(self._busy) < _PROCESSES:
                # The next request need not wait for the start of a process.
                self._idle.append(_Worker())
            is_usable = True
            try:
                await worker.started()
                is_usable = False
                async with asyncio.timeout(_MAX_S):
                    result = await worker.run(function, *arguments)
                is_usable = True
                return result
            except Problem:
                is_usable = True
                raise
            except TimeoutError:
                raise Problem("DEADLINE_EXCEEDED", f"converting the body takes longer than {_MAX_S:g} s") from None
            except BrokenProcessPool:
                is_usable = False
                raise Problem("INTERNAL", "a process that converted the body ended, perhaps without memory") from None
            finally:
                self._busy.discard(worker)
                if is_usable and worker.memory() <= _MAX_KEPT_BYTES:
                    self._idle.append(worker)
                else:
                    # Its memory is too large to keep; or the request was cancelled: its bytes and processor time must
                    # be free when it counts as done.
                    worker.kill()


class _Worker:
    """A process that converts one body at a time, and that can be ended while it does."""

    def __init__(self) -> None:
        before = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_process, (os.getpid(),))
        self._starting = asyncio.get_running_loop().run_in_executor(self._pool, os.getpid)
        # The first job starts the process. It must be known while it starts: the gateway's end waits for it.
        (self._process,) = set(multiprocessing.active_children()) - before
        self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def started(self) -> None:
        """Waits for the start, which goes on for the next request if this one is cancelled."""
        await asyncio.shield(self._starting)

    async def run(self, function: Callable[..., _R], *arguments: Any) -> _R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def memory(self) -> int:
        """Returns the memory that the process keeps, bytes; 0 where the system does not tell."""
        try:
            resident = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        except OSError:
            return 0
        return int(resident) * resource.getpagesize()

    def kill(self) -> None:
        self._process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _prepare_process(parent: int) -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent has ended in any way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=watch, daemon=True).start()
