"""Runs calls of stored programs whose structure is known: they are not parsed, and nothing is decided again.

The structure of a call is read from its bytes. Calls whose structure is not known yet are parsed.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.message import DecodeError

from gradrule.common.wire_format import MalformedError, fields, read_varint, varint
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import NoMemoryLeft, error
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import CallShape, RunTemplate, canonical
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import CallPath, record_known_call, record_path
from gradrule_server.policy import SMALL_BYTES
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Load, LoadedPrograms
from gradrule_server.programs.runner import may_batch, run_limit_error, run_limit_s
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded

CallStructure: TypeAlias = tuple[bytes, ...]
"""The program's name, the names of all tensors and all other fields of a request, each with its tag.

Requests of one structure differ only in the values of their tensors, which are inline or in shared memory, and in the
shared memory that they use.
"""

# An output number with leading zeros: the engine knows the tensor by another name.
_PADDED_OUTPUT = re.compile(r"(.*):0+([0-9]+)")

_NUMBER, _LENGTH = 0, 2
_FIELDS = evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields_by_name
_TENSORS = frozenset(_FIELDS[name].number << 3 | _LENGTH for name in ("feeds", "grad_ys", "tangents", "vectors"))
_PROGRAM = _FIELDS["program"].number << 3 | _LENGTH
_SPEC = _FIELDS["spec"].number << 3 | _LENGTH
_MEMORY = _FIELDS["shared_memory"].number << 3 | _LENGTH
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER << 3 | _LENGTH
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER << 3 | _LENGTH
_INLINE = tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER << 3 | _LENGTH
_SHARED = tensor_pb2.TensorSource.SHARED_MEMORY_FIELD_NUMBER << 3 | _LENGTH
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER << 3 | _LENGTH
_PACKED = varint(tensor_pb2.Tensor.PACKED_FIELD_NUMBER << 3 | _LENGTH)
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER << 3 | _LENGTH
_VALUES, _SOURCES = (_VALUE,), (_INLINE, _SHARED)
# Structures are keys of a cache. Larger ones are rare and must not fill it.
_MOST_FIELDS = 256
USES_MEMORY = bytes([_MEMORY])
"""The part of a structure that says that the call uses a client's shared memory."""
# Bytes of one tensor besides its content. Their size after parsing is not checked before, so all tensors of a request
# have at most as many as a message whose parsed size is not checked.
_MOST_PARSED_BYTES = SMALL_BYTES // _MOST_FIELDS
_MOST_BYTES = 16 << 10

# Structures of calls, of at most 16 KiB each and mostly of a hundred bytes.
_MAX_CALLS = 1024
# Each known call is marked as used at most this often.
_MARK_INTERVAL_S = 0.5


def read_structure(raw: bytes) -> CallStructure | None:
    """Returns the structure of an `EvaluateRequest`.

    Fields without a rule of their own, also those of newer clients, are part of the structure with their bytes.
    Returns None if the request must be parsed to know its structure: it holds its program, names a blob, has an unusual
    encoding or very many fields, or is damaged.
    """
    parts: list[bytes] = []
    has_program = False
    position, end, kept = 0, len(raw), 0
    try:
        while position < end:
            start = position
            tag = raw[position]
            size = raw[position + 1]
            position += 2
            if tag > 0x7F:
                # A field with a number above 15.
                tag, position = read_varint(raw, start)
                size = raw[position]
                position += 1
            if size > 0x7F:
                size, position = read_varint(raw, position - 1)
            if tag in _TENSORS:
                stop = position + size
                name_end = position + 2 + raw[position + 1]
                if raw[position] != _NAME or raw[position + 1] > 0x7F or not _is_inline(raw, name_end, stop):
                    return None
                # Include the tag: it says which list the name is in.
                parts.append(raw[start : start + 1] + raw[position:name_end])
                position = stop
            elif tag == _MEMORY:
                if size > 0x7F or USES_MEMORY in parts:
                    return None
                position += size
                parts.append(USES_MEMORY)
            elif tag == _SPEC or (tag == _PROGRAM and has_program) or tag & 7 not in (_NUMBER, _LENGTH):
                return None
            else:
                has_program = has_program or tag == _PROGRAM
                if tag & 7 == _LENGTH:
                    position += size
                parts.append(raw[start:position])
            kept += len(parts[-1])
            if len(parts) > _MOST_FIELDS or kept > _MOST_BYTES:
                return None
    except (IndexError, MalformedError):
        return None
    return tuple(parts) if has_program and position == end else None


def call_shape(request: link_pb2.RawEvaluateRequest) -> CallShape:
    """Returns what of a call its program depends on. Raises UNKNOWN_FEED for repeated or invalid names."""
    return CallShape(
        _names([item.name for item in request.feeds], "feeds"),
        _names([item.name for item in request.grad_ys], "grad_ys"),
        request.derivative,
        _names([item.name for item in request.tangents], "tangents"),
        _names([item.name for item in request.vectors], "vectors"),
        request.stacked_grad_ys,
    )


def memory_use(raw: bytes) -> evaluate_pb2.SharedMemoryUse:
    """Returns how a request uses a client's shared memory. `raw`: bytes whose structure has `USES_MEMORY`."""
    number = evaluate_pb2.EvaluateRequest.SHARED_MEMORY_FIELD_NUMBER
    start, end = next((start, end) for found, start, end in fields(raw, 0, len(raw)) if found == number)
    try:
        return evaluate_pb2.SharedMemoryUse.FromString(raw[start:end])
    except DecodeError as cause:
        message = f"shared_memory is not a valid {evaluate_pb2.SharedMemoryUse.DESCRIPTOR.full_name}"
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field="shared_memory") from cause


@dataclass(slots=True, eq=False)
class KnownCall:
    """What running a stored program for calls of one structure needs.

    Attributes:
        key: The program's key in the cache.
        program: The program.
        template: Builds the messages to engines.
        recorder: Records what the program does to engines.
        is_batched: Whether such calls may run together with others.
        run_limit_s: Seconds from the arrival of such a call until its run must end; infinity: only its deadline counts.
        used_at: Loop time at which the use was last recorded.
        load: The program in the engine that ran the last call; `template` and `batch_key` belong to it.
        batch_key: Key of the calls that it may run together with; None: it runs alone.
    """

    key: StoredKey
    program: RunnableProgram
    template: RunTemplate
    recorder: OutcomeRecorder
    is_batched: bool = False
    run_limit_s: float = math.inf
    used_at: float = 0.0
    load: Load | None = None
    batch_key: BatchKey | None = None

    def set_load(self, load: Load) -> None:
        """Sets the engine that runs the next calls."""
        self.load = load
        self.template.set_key(load.engine_key)
        self.batch_key = BatchKey(load.engine_key, self.template.settings) if self.is_batched else None


class KnownCalls:
    """Runs calls of one tenant whose program is compiled and loaded, and whose settings are known.

    `ProgramService` runs all other calls; the answers are the same. A call is known until the cache drops its program.
    """

    def __init__(self, cache: ProgramCache, loaded: LoadedPrograms) -> None:
        self._cache = cache
        self._loaded = loaded
        self._calls: OrderedDict[CallStructure, KnownCall] = OrderedDict()
        self._structures: dict[StoredKey, set[CallStructure]] = {}
        cache.on_removed = self._remove_program

    def add(
        self,
        structure: CallStructure,
        key: StoredKey,
        program: RunnableProgram,
        template: RunTemplate,
        request: link_pb2.RawEvaluateRequest,
    ) -> None:
        """Adds the structure of a call that was run; drops the least recently used calls.

        Args:
            structure: The structure.
            key: The program's key in the cache.
            program: The program.
            template: The template of the run.
            request: The parsed request, for the settings of the run.
        """
        if self._cache.get(key, is_counted=False) is not program:
            return
        self._remove(structure)
        recorder = OutcomeRecorder(self._loaded.crash_history, program.loadable.workload)
        is_batched = may_batch(program, request)
        self._calls[structure] = KnownCall(key, program, template, recorder, is_batched, run_limit_s(request))
        self._structures.setdefault(key, set()).add(structure)
        if len(self._calls) > _MAX_CALLS:
            self._remove(next(iter(self._calls)))

    async def run(
        self, structure: CallStructure, raw: bytes, received_ns: int, ends_at: float, memory: MemoryUse | None = None
    ) -> bytes | EngineLost | None:
        """Runs a call; returns the bytes of an `EvaluateResponse`.

        Returns None if `ProgramService` must run the call, and `EngineLost` if the engine ended while the call ran, so
        that `ProgramService` must run it again.

        Args:
            structure: The request's structure.
            raw: The request's bytes.
            received_ns: When it was received, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
            memory: The client's shared memory that the call uses.

        Raises DEADLINE_EXCEEDED after the call's `run_timeout`.
        """
        call = self._calls.get(structure)
        now = asyncio.get_running_loop().time()
        if call is None or now >= ends_at:
            return None
        load = call.load
        if load is None or not load.is_available or not load.engine.has_room:
            load = self._loaded.find_loaded(call.program.loadable)
            if load is None:
                return None
            if load is not call.load:
                call.set_load(load)
        # The loop's clock is CLOCK_MONOTONIC, as that of `received_ns`.
        limit_at = received_ns / 1e9 + call.run_limit_s
        # The first run also compiles, so `ProgramRunner` limits it in another way.
        if not load.has_run or now >= limit_at:
            return None
        record_path(CallPath.KNOWN)
        self._loaded.crash_history.check(call.recorder.workload)
        payload = call.template.payload(received_ns, raw)
        # A held program is not dropped.
        load.holders += 1
        try:
            suffix = call.program.compiled.digests_tail
            work = load.engine.submit(Kind.RUN, payload, call.recorder, suffix, call.batch_key, memory)
            try:
                async with asyncio.timeout_at(limit_at if limit_at < ends_at else None):
                    answer = await work.answer
            except TimeoutError:
                load.engine.abandon(work, limit_at)
                raise run_limit_error(call.run_limit_s) from None
            except asyncio.CancelledError:
                load.engine.abandon(work, ends_at)
                raise
            except ConnectionLost as gone:
                return await load.engine.loss_error(work, gone)
        except EngineLost as lost:
            return lost
        except ProgramNotLoaded:
            self._loaded.forget(load)
            return None
        except NoMemoryLeft as full:
            self._loaded.make_room(load, full, now)
            return None
        finally:
            load.holders -= 1
        if now >= call.used_at + _MARK_INTERVAL_S:
            self._mark_used(structure, call, load, now)
        record_known_call(answer, received_ns)
        return answer

    def _mark_used(self, structure: CallStructure, call: KnownCall, load: Load, now: float) -> None:
        """Marks call, program and load as used, because the least recently used ones are dropped first."""
        call.used_at = now
        if self._calls.get(structure) is call:
            self._calls.move_to_end(structure)
            self._cache.mark_used(call.key)
        if load.is_available:
            self._loaded.mark_used(load)

    def _remove_program(self, key: StoredKey) -> None:
        """Removes the calls of a program."""
        for structure in list(self._structures.get(key, ())):
            self._remove(structure)

    def _remove(self, structure: CallStructure) -> None:
        call = self._calls.pop(structure, None)
        if call is not None:
            same = self._structures[call.key]
            same.remove(structure)
            if not same:
                del self._structures[call.key]


def _names(given: Sequence[str], field: str) -> frozenset[str]:
    """Returns canonical names. Raises UNKNOWN_FEED for repeated or invalid ones."""
    names = [canonical(name) for name in given]
    unique = frozenset(names)
    if len(names) != len(unique):
        twice = next(name for name in names if names.count(name) > 1)
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{field} name {twice!r} twice", node=twice, field=field)
    for name in unique:
        padded = _PADDED_OUTPUT.fullmatch(name)
        if padded is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{field} name {name!r}, which is not a valid tensor name; did you mean '{padded[1]}:{padded[2]}'?",
                field=field,
            )
    return unique


def _is_inline(raw: bytes, position: int, stop: int) -> bool:
    """Returns whether a tensor's value fills `raw[position:stop]`, is inline or in shared memory, and stays small when
    it is parsed.
    """
    tag = 0
    for tags in (_VALUES, _SOURCES):
        tag = raw[position]
        if tag not in tags:
            return False
        size, position = read_varint(raw, position + 1)
        if position + size != stop:
            return False
    if stop > len(raw) or size <= _MOST_PARSED_BYTES:
        return stop <= len(raw)
    if tag == _SHARED:
        # It has no content, so all of it grows when it is parsed.
        return False
    if raw.startswith(_PACKED, position):
        size, position = read_varint(raw, position + len(_PACKED))
        return position + size == stop and _is_content(raw, position, stop, _PACKED_CONTENT)
    return _is_content(raw, position, stop, _CONTENT)


def _is_content(raw: bytes, position: int, stop: int, content: int) -> bool:
    """Returns whether nearly all bytes of a tensor are its content; single numbers grow when they are parsed.

    content: The tag of the field with the content.
    """
    parsed = 0
    while position < stop:
        tag = raw[position]
        size = 0
        if tag & 7 == _LENGTH:
            size, after = read_varint(raw, position + 1)
        else:
            _, after = read_varint(raw, position + 1)
        parsed += after - position + (0 if tag == content else size)
        position = after + size
        if parsed > _MOST_PARSED_BYTES or tag > 0x7F or tag & 7 not in (_NUMBER, _LENGTH):
            return False
    return position == stop
