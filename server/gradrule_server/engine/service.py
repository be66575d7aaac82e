"""Handles the frames that the front end sends to an engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.batching import BatchRunner
from gradrule_server.engine.build import build
from gradrule_server.engine.client_memory import AttachedMemories
from gradrule_server.engine.description import describe
from gradrule_server.engine.memory import ProgramMemory, exhausted_error, memory_error
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.engine.run import ForwardRuns, run
from gradrule_server.engine.sessions import Sessions
from gradrule_server.engine.tensor_sources import BlobReader, VariableCache
from gradrule_server.errors import Finding, GradruleError, NoMemoryLeft, error, lacks_memory
from gradrule_server.link.framing import Buffer, Frame, FrameSocket, Kind
from gradrule_server.link.messages import fault_message, split_values
from gradrule_server.link.v1 import link_pb2
from gradrule_server.preparation.worker import PreparationService
from gradrule_server.recovery.endings import ProgramNotLoaded

_log = logging.getLogger(__name__)
_NOT_MEASURED = contextlib.nullcontext()
_WITH_VALUES = frozenset({Kind.RUN, Kind.FORWARD, Kind.PULL_BACK, Kind.SESSION})


class EngineService:
    """Holds an engine's programs, sessions and forward runs, and handles each kind of frame. Thread-safe.

    `memories`: shared memory of clients. `on_worker`: called at the first task of a compile worker.
    `disabled_fast_paths`: see `gradrule.common.fast_paths`.
    """

    def __init__(
        self,
        frames: FrameSocket,
        device: str,
        blobs: BlobReader,
        memories: AttachedMemories | None = None,
        on_worker: Callable[[], None] = lambda: None,
        disabled_fast_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._frames = frames
        self._memories = memories or AttachedMemories(None)
        self._reader = ArgumentReader(blobs, self._memories)
        self._variable_cache = VariableCache(blobs, device)
        self._device = device
        self._disabled_fast_paths = disabled_fast_paths
        self._programs: dict[str, BuiltProgram] = {}
        self._not_run: set[str] = set()
        self._memory = ProgramMemory(frames, device)
        self._forward_runs = ForwardRuns(self._reader)
        self._sessions = Sessions(self._reader, self._variable_cache, self._find_program, self._forward_runs)
        self._batches = BatchRunner(frames, self._reader, self._find_program, self._answering)
        self._on_worker = on_worker
        self._is_worker = False
        self._preparation = PreparationService(frames, blobs.for_folder)
        # Tracing holds the interpreter lock, so several threads would not make it faster.
        self._build_lock = threading.Lock()
        self._exhausted = fault_message(exhausted_error()).SerializeToString()

    def refuse(self, request_id: int) -> None:
        """Answers a request with MEMORY_EXCEEDED without allocating memory."""
        self._frames.send(Kind.FAULT, request_id, self._exhausted)

    def handle(self, frame: Frame) -> None:
        """Handles one frame; an error is sent as a FAULT. Raises `MemoryError` if there is no memory for the FAULT."""
        with self._answering(frame.request_id):
            if frame.kind is Kind.RUN_BATCH:
                self._batches.run(frame.request_id, frame.payload)
            else:
                self._answer(frame)

    @contextlib.contextmanager
    def _answering(self, request_id: int) -> Iterator[None]:
        """Sends each error that is raised within this context as a FAULT."""
        try:
            yield
            return
        except Exception as cause:
            failed, fault = cause, self._fault(request_id, cause)
        if isinstance(fault, NoMemoryLeft):
            # What was being built or run is garbage, and the next request may need its memory.
            _clear_frames(failed)
            self._memory.free()
            self._memory.report()
        self._send_fault(request_id, fault)

    def _fault(self, request_id: int, cause: Exception) -> GradruleError:
        """Returns what the caller gets for an exception."""
        short = cause.__cause__ if isinstance(cause, GradruleError) else cause
        if lacks_memory(short):
            return memory_error(f"{len(self._programs)} programs are loaded ({str(short) or 'an allocation failed'})")
        if isinstance(cause, GradruleError):
            return cause
        if isinstance(cause, DecodeError):
            # The front end passes on calls of stored programs without parsing their tensors.
            message = f"the bytes are no {evaluate_pb2.EvaluateRequest.DESCRIPTOR.full_name}"
            return error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message)
        # This is the boundary of the process: the caller gets a FAULT, the log the whole error.
        _log.error("request %d failed", request_id, exc_info=cause)
        return error(errors_pb2.ERROR_REASON_INTERNAL, type(cause).__name__)

    def _answer(self, frame: Frame) -> None:
        if frame.kind is Kind.PREPARE:
            if not self._is_worker:
                self._is_worker = True
                self._on_worker()
            self._frames.send(Kind.PREPARED, frame.request_id, self._preparation.prepare(frame))
            return
        if frame.kind is Kind.ANSWER:
            self._preparation.deliver_answer(frame)
            return
        if frame.kind in _WITH_VALUES:
            self._answer_values(frame)
            return
        payload = bytes(frame.payload)
        if frame.kind is Kind.DETACH:
            self._memories.detach(payload)
        elif frame.kind is Kind.COMPILE:
            reply = self._compile(link_pb2.CompileRequest.FromString(payload))
            self._frames.send(Kind.COMPILED, frame.request_id, reply.SerializeToString())
        elif frame.kind is Kind.UNLOAD:
            self._unload(link_pb2.UnloadRequest.FromString(payload).key)
        elif frame.kind is Kind.END_SESSION:
            self._sessions.end(link_pb2.ReleaseRequest.FromString(payload).handle)
        elif frame.kind is Kind.RELEASE:
            self._forward_runs.release(link_pb2.ReleaseRequest.FromString(payload).handle)
        else:
            raise DecodeError(f"an engine takes no {frame.kind.name}")

    def _answer_values(self, frame: Frame) -> None:
        """Answers a frame that has the tensors of a call."""
        received = split_values(frame.payload)
        answer: Buffer | Sequence[Buffer]
        if frame.kind is Kind.RUN:
            request = link_pb2.RunRequest.FromString(received.message)
            with self._measured(request.key):
                answer = run(self._find_program(request.key), request, received, self._reader)
        elif frame.kind is Kind.FORWARD:
            forward = link_pb2.ForwardRequest.FromString(received.message)
            with self._measured(forward.run.key):
                built = self._find_program(forward.run.key)
                answer = self._forward_runs.forward(built, forward, received).SerializeToString()
        elif frame.kind is Kind.PULL_BACK:
            pull_back = link_pb2.PullBackRequest.FromString(received.message)
            answer = self._forward_runs.pull_back(pull_back, received)
        else:
            action = link_pb2.SessionRequest.FromString(received.message)
            answer = self._sessions.handle(action, received).SerializeToString()
        self._frames.send(Kind.RAN, frame.request_id, answer)

    def _measured(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Measures the first run of a program, in which TensorFlow makes an optimized copy of its graph."""
        if key not in self._not_run:
            return _NOT_MEASURED
        self._not_run.discard(key)
        return self._memory.measured(key)

    def _unload(self, key: str) -> None:
        if key in self._programs:
            self._not_run.discard(key)
            del self._programs[key]
            self._memory.unloaded(key)

    def _find_program(self, key: str) -> BuiltProgram:
        built = self._programs.get(key)
        if built is None:
            message = f"the engine holds no program {key!r}"
            raise ProgramNotLoaded([Finding(errors_pb2.ERROR_REASON_INTERNAL, message)])
        return built

    def _compile(self, request: link_pb2.CompileRequest) -> link_pb2.CompileReply:
        if self._device.startswith("GPU"):
            # TensorFlow itself limits the memory of the device, which holds the tensors.
            request.memory_limit = 0
        # What is only described is not kept, so its memory is not counted.
        measured = contextlib.nullcontext() if request.describe_only else self._memory.measured(request.key)
        with self._build_lock, measured:
            values = self._variable_cache.tensors(request.variables, request.blob_folder)
            built = build(request, values, self._device, self._disabled_fast_paths)
            reply = describe(request, built, self._device)
        if not request.describe_only:
            self._programs[request.key] = built
            self._not_run.add(request.key)
        return reply

    def _send_fault(self, request_id: int, cause: GradruleError) -> None:
        self._frames.send(Kind.FAULT, request_id, fault_message(cause).SerializeToString())


def _clear_frames(cause: BaseException | None) -> None:
    """Clears the variables of the functions that an exception has left."""
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
