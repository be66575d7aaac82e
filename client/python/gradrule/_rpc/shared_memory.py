"""Shares memory with a server on the same host, so that large tensors are not sent over the connection.

The memory is a file descriptor that is passed over a Unix socket (docs/guide/shared-memory.md), which fails on another
host. If anything fails here, the call sends its tensors inline.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import sys
import threading
import time
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from gradrule._messages.error_status import AnswerLostError
from gradrule._messages.request_encoding import EncodedRequest
from gradrule._messages.rpc_calls import EVALUATE, Call
from gradrule._results.answers import Answer
from gradrule.common import wire_format
from gradrule.common.memory_regions import Memory, Region, rounded_to_pages
from gradrule.errors import GradruleError, SharedMemoryLostError, UnavailableError
from gradrule.v1 import evaluate_pb2

_log = logging.getLogger(__name__)

METHOD = "/gradrule.v1.GradientService/ShareMemory"

MIN_SHARED_BYTES = 1 << 20
"""Smaller requests and answers take as little time inline."""

_MIN_MEMORY_BYTES = 256 << 20
# The memory holds this many calls, because results of earlier calls may still be in use.
_CALLS_IN_MEMORY = 4
_HANDSHAKE_S = 5.0
# A timeout of zero would make the socket non-blocking.
_MIN_WAIT_S = 0.001
OFFER_TIMEOUT_S = 5.0
"""Timeout in seconds of the call in which the server names the socket."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_TRIM_AFTER_S = 30.0
_MAX_MESSAGE_BYTES = 4096
_ACCEPTED = b"\x00"
# After these codes the server has finished the call. After all others an engine may still write its answer.
_CODES_OF_ENDED_CALLS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

R = TypeVar("R")


class NotSharedError(Exception):
    """Reports that the server refuses the memory of this client."""


class _Attached:
    """Holds memory that the server has mapped; the server unmaps it when the socket connection ends."""

    def __init__(self, memory: Memory, name: bytes, connection: socket.socket) -> None:
        self.memory = memory
        self.name = name
        self._connection = connection

    @property
    def is_alive(self) -> bool:
        """Whether the server still maps the memory."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        # The server sends nothing, so the connection has ended.
        return False

    def close(self) -> None:
        """Ends the connection, so that the server unmaps the memory. Arrays in it stay valid."""
        self._connection.close()


class AnswerRegion:
    """Gives access to the region into which the server wrote the tensors of one answer."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def array(self, offset: int, dtype: Any, shape: tuple[int, ...], size: int) -> Any:
        """Returns the array at an offset of the memory. Raises `ValueError` if it does not lie in the region."""
        start = self._region.offset
        if not start <= offset <= offset + size <= start + self._region.size:
            raise ValueError(f"{size} bytes at {offset} do not lie in the region of the answer")
        return self._region.array(offset, dtype, shape)


class SharedCall(NamedTuple, Generic[R]):
    """Holds a call whose large tensors are in shared memory."""

    call: Call[R]
    parts: wire_format.Parts
    attached: _Attached
    regions: tuple[Region, ...]


class SharedMemory:
    """Shares memory between a client and its server. Thread-safe.

    The memory is opened at the first call that is large enough. After a failure, the next attempt waits for a time that
    doubles with each failure.

    Args:
        is_enabled: False never shares memory.
    """

    def __init__(self, *, is_enabled: bool = True) -> None:
        # Reentrant: a finalizer or signal handler may call the client while this thread holds the lock.
        self._lock = threading.RLock()
        self._attached: _Attached | None = None
        self._pause_s = 0.0
        self.refusal = _reason_against(is_enabled=is_enabled)
        """Reason why no memory is shared at the moment; empty if it is shared or was not needed yet."""
        self._not_before = float("inf") if self.refusal else 0.0
        self._max_bytes = sys.maxsize
        # Minimum size of the next memory.
        self._next_bytes = 0
        self._is_closed = False
        self._last_answer_bytes = 0
        self._used_at = 0.0
        self._trimmer: threading.Timer | None = None
        _ALL.add(self)

    @property
    def is_shared(self) -> bool:
        """Whether the server maps memory of this client."""
        return self._attached is not None

    def is_worth(self, call: Call[Any], size: int) -> bool:
        """Returns whether a call with a request of this size, in bytes, should use shared memory."""
        if size < MIN_SHARED_BYTES and (call.reader is None or call.reader.room_bytes < MIN_SHARED_BYTES):
            return False
        if not call.may_share:
            return False
        return call.method == EVALUATE and (self._attached is not None or time.monotonic() >= self._not_before)

    def must_open(self) -> bool:
        """Returns whether memory must be passed to the server before the next call."""
        attached = self._attached
        if attached is not None and not attached.is_alive:
            self._retire(attached)
        return self._attached is None and time.monotonic() >= self._not_before

    def open(self, call: Call[Any], size: int, offer: bytes, seconds: float) -> None:
        """Passes memory to the server that is large enough for a call.

        Args:
            call: The call.
            size: Bytes of its request.
            offer: The bytes of a `ShareMemoryResponse`.
            seconds: Seconds until the call's deadline.
        """
        try:
            response = evaluate_pb2.ShareMemoryResponse.FromString(offer)
            needed = _CALLS_IN_MEMORY * (rounded_to_pages(size) + self._answer_bytes(call))
            self._max_bytes = response.max_bytes
            wanted = max(_MIN_MEMORY_BYTES, self._next_bytes, 1 << (needed - 1).bit_length())
            memory = Memory(min(wanted, response.max_bytes))
            attached = _Attached(memory, *_pass_to_server(memory, response, min(seconds, _HANDSHAKE_S)))
        except (NotSharedError, OSError, ValueError) as cause:
            self.refuse(cause)
            return
        with self._lock:
            if self._is_closed:
                # The client was closed meanwhile.
                unused: _Attached | None = attached
            else:
                unused, self._attached = self._attached, attached
                self._pause_s, self.refusal = 0.0, ""
        if unused is not None:
            unused.close()
        _log.debug("sharing %d bytes of memory with the server", memory.size)

    def refuse(self, cause: object) -> None:
        """Records that no memory can be shared for now."""
        with self._lock:
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            if not self._is_closed:
                self._not_before = time.monotonic() + self._pause_s
            self._next_bytes = 0
            self.refusal = str(cause)
        _log.debug("no memory is shared with the server: %s; tensors are sent inline", cause)

    def place(self, call: Call[R]) -> SharedCall[R] | None:
        """Copies large tensors of a call of Evaluate into the memory; returns None if they do not fit."""
        attached = self._attached
        if attached is None:
            return None
        memory = attached.memory
        assert isinstance(call.request, EncodedRequest)
        contents = call.request.sharable_contents()
        sizes = [len(content) for content in contents.values()]
        request = memory.reserve(sum(map(rounded_to_pages, sizes))) if contents else None
        answer_bytes = self._answer_bytes(call)
        if not (contents or answer_bytes):
            return None
        answer_region = memory.reserve(answer_bytes) if answer_bytes and (request is not None or not contents) else None
        if (contents and request is None) or (answer_bytes and answer_region is None):
            self._grow(attached)
            return None
        offsets, start = dict[int, int](), 0
        for index, content in contents.items():
            assert request is not None
            request.write(start, content)
            offsets[index] = request.offset + start
            start += rounded_to_pages(len(content))
        use = evaluate_pb2.SharedMemoryUse(memory=attached.name, request_bytes=sum(sizes))
        if answer_region is not None:
            use.answer_offset, use.answer_bytes = answer_region.offset, answer_region.size
        parts = call.request.parts_in_memory(use, offsets)
        self._used_at = time.monotonic()
        self._trim_later()
        regions = tuple(region for region in (request, answer_region) if region is not None)
        return SharedCall(self._with_region(call, answer_region), parts, attached, regions)

    def end(self, shared: SharedCall[Any], failure: BaseException | None = None) -> None:
        """Records that a call has ended. Memory that an engine may still write to is not used again."""
        if failure is None:
            return
        is_ended = isinstance(failure, GradruleError) and failure.code in _CODES_OF_ENDED_CALLS
        is_lost = isinstance(failure, SharedMemoryLostError)
        if is_lost and shared.attached.is_alive:
            self.refuse("the calls of this client reach several servers, and memory is shared with one of them")
        if is_lost or not (is_ended and shared.attached.is_alive):
            self._retire(shared.attached)

    def close(self) -> None:
        """Closes the memory for good. Arrays in it stay valid."""
        with self._lock:
            self._is_closed = True
            self._not_before = float("inf")
            attached, self._attached = self._attached, None
            trimmer, self._trimmer = self._trimmer, None
        if trimmer is not None:
            trimmer.cancel()
        if attached is not None:
            attached.close()

    def forget(self) -> None:
        """Stops using the memory. Called before a fork: parent and child would use the same regions."""
        attached = self._attached
        if attached is not None:
            self._retire(attached)

    def _retire(self, attached: _Attached) -> None:
        with self._lock:
            if self._attached is attached:
                self._attached = None
        attached.close()

    def _grow(self, attached: _Attached) -> None:
        """Lets the next call open larger memory, if the server allows it."""
        if attached.memory.size < self._max_bytes:
            self._next_bytes = 2 * attached.memory.size
            self._retire(attached)

    def _answer_bytes(self, call: Call[Any]) -> int:
        """Returns the bytes to reserve for the answer: as many as the previous answer took."""
        if call.reader is None:
            return 0
        return call.reader.room_bytes if call.reader.was_used else self._last_answer_bytes

    def _with_region(self, call: Call[R], answer_region: Region | None) -> Call[R]:
        """Returns the call, changed to read the answer's tensors from the region."""

        def read(data: bytes) -> Any:
            answer = call.answer(data)
            if isinstance(answer, Answer):
                answer.room = None if answer_region is None else AnswerRegion(answer_region)
                if call.reader is not None:
                    self._last_answer_bytes = call.reader.room_bytes
            return answer

        return call._replace(answer=read)

    def _trim_later(self) -> None:
        with self._lock:
            if self._trimmer is None and not self._is_closed:
                self._trimmer = threading.Timer(_TRIM_AFTER_S, _trim, (weakref.ref(self),))
                self._trimmer.daemon = True
                self._trimmer.start()

    def trim(self) -> None:
        """Returns free memory to the system, unless it was used recently."""
        with self._lock:
            self._trimmer = None
            attached = self._attached
        if attached is None:
            return
        if time.monotonic() - self._used_at >= _TRIM_AFTER_S:
            attached.memory.trim()
        if attached.memory.is_backed:
            self._trim_later()


def may_resend(failure: BaseException) -> bool:
    """Returns whether a call that failed with shared memory should be sent again with its tensors inline.

    The memory may be lost because calls now reach another server. Evaluation changes nothing, so it may run twice.
    """
    return isinstance(failure, SharedMemoryLostError | UnavailableError | AnswerLostError)


def _trim(reference: weakref.ref[SharedMemory]) -> None:
    memory = reference()
    if memory is not None:
        memory.trim()


def _pass_to_server(
    memory: Memory, response: evaluate_pb2.ShareMemoryResponse, seconds: float
) -> tuple[bytes, socket.socket]:
    """Passes memory to the server; returns its name and the connection. Raises `NotSharedError` and `OSError`."""
    ends_at = time.monotonic() + seconds
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(seconds, _MIN_WAIT_S))
        connection.connect(b"\0" + response.address.encode())
        connection.send(response.client_key)
        if not hmac.compare_digest(connection.recv(_MAX_MESSAGE_BYTES), response.server_key):
            raise NotSharedError("the process at the socket address is not the server")
        socket.send_fds(connection, [b"\0"], [memory.fd])
        connection.settimeout(max(ends_at - time.monotonic(), _MIN_WAIT_S))
        answer = connection.recv(_MAX_MESSAGE_BYTES)
        if answer[:1] != _ACCEPTED:
            raise NotSharedError(answer[1:].decode(errors="replace") or "the server has closed the connection")
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return answer[1:], connection


def _reason_against(*, is_enabled: bool) -> str:
    """Returns why memory can never be shared; empty if it can."""
    if not is_enabled:
        return "the client was made with shared_memory=False"
    is_supported = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
    return "" if is_supported else "this system cannot share memory: it needs Linux"


# Parent and child of a fork would use the same regions.
_ALL: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _forget_all() -> None:
    for memory in list(_ALL):
        memory.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forget_all)
