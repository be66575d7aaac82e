"""Reads the arguments of a built function from calls. What the header of a call decides is decided once per header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec, tensor_packing
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine.client_memory import AnswerArea, AttachedMemories, CallMemory
from gradrule_server.engine.program import BuiltProgram, Input
from gradrule_server.engine.tensor_sources import BlobReader, check_tensor
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.call_parts import CallParts, find_parts
from gradrule_server.link.framing import Buffer
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import FREE_BYTES
from gradrule_server.rules import read_param_value

NO_STATE: Mapping[str, tf.Tensor] = MappingProxyType({})

_TENSOR_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")
_MAX_LAYOUTS = 64
_MAX_HEADER_BYTES = 16 << 10


class InputGroup(NamedTuple):
    """The inputs that calls give in one field of a header.

    Attributes:
        field: The field.
        what: What errors call a tensor in it.
        inputs: The inputs; their arguments follow one another.
        aliases: Names of inputs, by the other names that calls may use for them.
        unused: For each input, whether calls need not give it because no result depends on it; empty: for none.
    """

    field: str
    what: str
    inputs: Sequence[Input]
    aliases: Mapping[str, str] = MappingProxyType({})
    unused: Sequence[bool] = ()


class _Given(NamedTuple):
    """A tensor of a header for one argument.

    Attributes:
        position: Position of the argument.
        input: The input.
        group: The group of the input.
        header: The header of the tensor.
        number: Index of its content; of its offset if it lies in shared memory.
        dtype: Type of its elements in NumPy.
        shape: Its shape.
        size: Size of its elements, bytes.
        is_packed: Whether the content must be unpacked.
        is_plain: Whether the content is the elements as they are.
    """

    position: int
    input: Input
    group: InputGroup
    header: evaluate_pb2.TensorHeader
    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    is_packed: bool
    is_plain: bool

    @property
    def where(self) -> str:
        """Names the tensor in errors."""
        return f"{self.group.what} {self.input.name!r}"

    def read(self, parts: CallParts, memory: CallMemory | None, blobs: BlobReader) -> Any:
        """Returns the tensor as an array, which may share the memory of the call.

        Raises INVALID_TENSOR, BLOB_NOT_FOUND or LIMIT_EXCEEDED.
        """
        if not self.is_plain:
            return self._read_other(parts, memory, blobs)
        start, end = parts.contents[self.number]
        if end - start != self.size:
            raise _size_error(self, end - start)
        # NumPy reads no empty buffer.
        if not self.size:
            return np.empty(self.shape, self.dtype)
        count = self.size // self.dtype.itemsize
        return np.frombuffer(parts.data, self.dtype, count, start).reshape(self.shape)

    def _read_other(self, parts: CallParts, memory: CallMemory | None, blobs: BlobReader) -> Any:
        header, field = self.header, self.group.field
        if header.in_shared_memory:
            if memory is None or parts.shared_memory is None:
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_TENSOR,
                    f"{self.where} lies in shared memory, which this request does not use",
                    node=self.input.name,
                    field=field,
                )
            shared = memory.read(parts.shared_memory.offsets[self.number], self.size, self.where, field)
            return np.frombuffer(shared, self.dtype).reshape(self.shape)
        if header.blob_sha256:
            blob = tensor_pb2.BlobTensor(
                sha256=header.blob_sha256, dtype=header.dtype, shape=tensor_codec.shape_message(self.shape)
            )
            return blobs.array(blob, self.where, field)
        start, end = parts.contents[self.number]
        content = memoryview(parts.data)[start:end]
        try:
            if self.is_packed:
                packed = tensor_pb2.PackedTensor(
                    dtype=header.dtype,
                    shape=tensor_codec.shape_message(self.shape),
                    content_dtype=header.content_dtype,
                    compression=header.compression,
                )
                return tensor_packing.unpack(packed, content=content)
            array = tensor_codec.to_numpy(tensor_pb2.Tensor.FromString(bytes(content)))
            if array.dtype != self.dtype or array.shape != self.shape:
                raise ValueError(f"the content is a tensor of {array.dtype} and shape {list(array.shape)}")
        except ValueError as cause:
            raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{self.where}: {cause}", field=field) from cause
        return array


class CallLayout:
    """Reads the arguments of calls with one header. Thread-safe.

    Args:
        header: The header.
        groups: The inputs, in the order of their arguments.
        max_rank: Highest rank of a tensor.
        max_unpacking: As in `BuiltProgram`.
    """

    def __init__(
        self, header: evaluate_pb2.EvaluateHeader, groups: Sequence[InputGroup], max_rank: int, max_unpacking: int
    ) -> None:
        self.packing = read_packing(header.answer_packing) if header.HasField("answer_packing") else None
        """How the tensors of the answer are packed; None: they are not."""
        self._max_unpacking = max_unpacking
        self._findings: list[Finding] = []
        self._values: list[Any] = []
        self._absent: list[tuple[int, Input, InputGroup]] = []
        self._given: list[_Given] = []
        located, self._contents, self._offsets = _locate(header)
        for group in groups:
            tensors = _by_name(located[group.field], group)
            for order, item in enumerate(group.inputs):
                found = tensors.get(item.name.removesuffix(":0"))
                if found is None:
                    self._absent.append((len(self._values), item, group))
                    is_unused = bool(group.unused) and group.unused[order]
                    self._values.append(_unused_value(item) if item.default is None and is_unused else item.default)
                    continue
                try:
                    dtype, shape, size = check_tensor(found[0], item, max_rank, group.what, group.field)
                    is_packed = bool(found[0].compression or found[0].content_dtype)
                    is_elsewhere = found[0].in_shared_memory or found[0].blob_sha256
                    is_plain = not (is_packed or is_elsewhere or found[0].content_is_tensor)
                    self._given.append(
                        _Given(len(self._values), item, group, *found, dtype, shape, size, is_packed, is_plain)
                    )
                except GradruleError as cause:
                    self._findings += cause.findings
                self._values.append(None)
        self._packed = [item for item in self._given if item.is_packed]
        self.has_blobs = any(item.header.blob_sha256 for item in self._given)
        """Whether elements of a tensor are a blob."""

    def read(
        self, parts: CallParts, memory: CallMemory | None, blobs: BlobReader, state: Mapping[str, tf.Tensor]
    ) -> list[Any]:
        """Returns the value of each argument: an array, which may share the memory of the call, or a kept tensor.

        Raises MALFORMED_REQUEST, LIMIT_EXCEEDED, or one error with the faults of all tensors.

        Args:
            parts: The parts of the call.
            memory: The client's memory that the call uses.
            blobs: Reads values that are blobs.
            state: Values, by name, of inputs that the call does not feed.
        """
        self._check_counts(parts)
        if self._packed:
            self._check_unpacking(parts)
        values, findings = list(self._values), list(self._findings)
        for given in self._given:
            try:
                values[given.position] = given.read(parts, memory, blobs)
            except GradruleError as cause:
                findings += cause.findings
        for position, item, group in self._absent:
            if item.name in state:
                values[position] = state[item.name]
            elif values[position] is None:
                findings.append(_missing(item, group))
        if findings:
            raise GradruleError(findings)
        return values

    def _check_counts(self, parts: CallParts) -> None:
        offsets = 0 if parts.shared_memory is None else len(parts.shared_memory.offsets)
        if len(parts.contents) != self._contents:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"the request has {len(parts.contents)} contents, but its header has {self._contents} tensors that "
                "have one",
                field="contents",
            )
        if offsets != self._offsets and parts.shared_memory is not None:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"the request has {offsets} offsets, but its header has {self._offsets} tensors in shared memory",
                field="shared_memory.offsets",
            )

    def _check_unpacking(self, parts: CallParts) -> None:
        """Raises LIMIT_EXCEEDED if the packed tensors of a call would take too much memory unpacked."""
        after = sum(given.size for given in self._packed)
        before = sum(end - start for start, end in (parts.contents[given.number] for given in self._packed))
        most = FREE_BYTES + self._max_unpacking * before
        if after > most:
            fields = ", ".join(dict.fromkeys(given.group.field for given in self._packed))
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"the packed tensors of {fields} have {before} bytes and would take {after} unpacked; they may take "
                f"{FREE_BYTES >> 20} MiB and {self._max_unpacking} times their size, {most} bytes (--max-unpacking); "
                "send them unpacked, or in several calls",
                field=self._packed[0].group.field,
            )


class FeedPlan:
    """Has the layouts of a program's calls, by their headers. Thread-safe."""

    def __init__(self, built: BuiltProgram) -> None:
        is_jvp = built.kind == evaluate_pb2.DERIVATIVE_JVP
        grad_ys = [stacked_input(item) for item in built.grad_ys] if built.stacked else built.grad_ys
        self._groups = (
            InputGroup("feeds", "feed", built.inputs, built.aliases, built.unused),
            InputGroup("grad_ys", "grad_y", grad_ys),
            InputGroup("tangents" if is_jvp else "vectors", "tangent" if is_jvp else "vector", built.directions),
        )
        self._limits = built.max_rank, built.max_unpacking
        self._stacked = built.stacked
        self._kept_layout = lru_cache(_MAX_LAYOUTS)(self._create_layout)

    def layout(self, header: bytes) -> CallLayout:
        """Returns the layout of calls with a header. Raises MALFORMED_REQUEST, UNKNOWN_FEED or FEED_SHAPE."""
        return (self._kept_layout if len(header) <= _MAX_HEADER_BYTES else self._create_layout)(header)

    def _create_layout(self, header: bytes) -> CallLayout:
        message = evaluate_pb2.EvaluateHeader.FromString(header)
        if self._stacked:
            check_stacks(message.grad_ys)
        return CallLayout(message, self._groups, *self._limits)


class CallArguments(NamedTuple):
    """The arguments of a call, and what the call says about its answer.

    Attributes:
        values: The arguments of the built function: arrays, which may share the memory of the call, or kept tensors.
        packing: How the tensors of the answer are packed; None: they are not.
        answer_area: The part of the client's memory for the answer; None: none.
    """

    values: Sequence[Any]
    packing: tensor_packing.Packing | None = None
    answer_area: AnswerArea | None = None


class ArgumentReader:
    """Reads the arguments of calls.

    `blobs`: holds the values that calls name by their hash. `memories`: shared memory of clients.
    """

    def __init__(self, blobs: BlobReader, memories: AttachedMemories | None = None) -> None:
        self._blobs = blobs
        self._memories = memories or AttachedMemories(None)

    def read(
        self,
        built: BuiltProgram,
        request: link_pb2.RunRequest,
        values: Buffer,
        state: Mapping[str, tf.Tensor] = NO_STATE,
    ) -> CallArguments:
        """Returns the arguments of a call.

        Raises MALFORMED_REQUEST, SHARED_MEMORY_LOST, or one error with the faults of all tensors.

        Args:
            built: The program.
            request: The message of the run.
            values: Bytes of an `EvaluateRequest` with a header.
            state: Values, by name, of inputs that the call does not feed.
        """
        parts = parts_of(values)
        layout = built.feed_plan.layout(parts.header)
        use = parts.shared_memory
        memory = None if use is None else self._memories.open(use)
        blobs = self._blobs.for_folder(request.blob_folder) if layout.has_blobs else self._blobs
        found = layout.read(parts, memory, blobs, state)
        if built.params:
            found += _read_params(built, request.params)
        return CallArguments(found, layout.packing, None if memory is None else memory.answer_area)

    def grad_ys(
        self, built: BuiltProgram, header: evaluate_pb2.EvaluateHeader, parts: CallParts, blob_folder: str
    ) -> dict[int, tf.Tensor]:
        """Returns the upstream gradients of a pull-back by the index of their y.

        Raises INVALID_DERIVATIVE for a name of no y, FEED_SHAPE if stacked ones have different sizes on axis 0.
        """
        ys = {spec.name.removesuffix(":0"): index for index, spec in enumerate(built.specs["ys"])}
        given = [item.name.removesuffix(":0") for item in header.grad_ys]
        for name in given:
            if name not in ys or given.count(name) > 1:
                why = "twice" if name in ys else f"which is none of the ys: {', '.join(ys)}"
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"grad_ys names {name!r} {why}", field="grad_ys"
                )
        inputs = [Input.of(built.specs["ys"][ys[name]]) for name in given]
        if header.stacked_grad_ys:
            inputs = [stacked_input(item) for item in inputs]
            check_stacks(header.grad_ys)
        groups = [InputGroup("grad_ys", "grad_y", inputs)]
        layout = CallLayout(header, groups, built.max_rank, built.max_unpacking)
        arrays = layout.read(parts, None, self._blobs.for_folder(blob_folder), NO_STATE)
        return {
            ys[name]: tf.constant(array, item.dtype) for name, item, array in zip(given, inputs, arrays, strict=True)
        }


def parts_of(values: Buffer) -> CallParts:
    """Returns the parts of a call that the front end sent. Raises MALFORMED_REQUEST."""
    parts = find_parts(values)
    if parts is None:
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call has no header", field="header")
    return parts


def read_packing(message: tensor_pb2.Packing) -> tensor_packing.Packing | None:
    """Returns how the tensors of an answer are packed; None: they are not. Raises MALFORMED_REQUEST."""
    try:
        return tensor_packing.packing_of(message)
    except ValueError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"answer_packing: {cause}", field="answer_packing"
        ) from cause


def stacked_input(item: Input) -> Input:
    """Returns the input for a stack of upstream gradients of a y."""
    return Input(item.name, item.dtype, tf.TensorShape([None]).concatenate(item.shape))


def check_stacks(grad_ys: Iterable[evaluate_pb2.TensorHeader]) -> None:
    """Raises FEED_SHAPE if stacked upstream gradients have different sizes on axis 0."""
    given = [item for item in grad_ys if item.shape]
    if len({item.shape[0] for item in given}) > 1:
        sizes = ", ".join(f"{item.name!r}: {item.shape[0]}" for item in given)
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"stacked grad_ys have one size on axis 0, the number of pull-backs; these have {sizes}",
            field="grad_ys",
        )


def _locate(
    header: evaluate_pb2.EvaluateHeader,
) -> tuple[Mapping[str, Sequence[tuple[evaluate_pb2.TensorHeader, int]]], int, int]:
    """Returns the tensors of each field with their indices, the number of contents and that of offsets."""
    contents = offsets = 0
    located: dict[str, list[tuple[evaluate_pb2.TensorHeader, int]]] = {}
    for field in _TENSOR_FIELDS:
        located[field] = []
        for item in getattr(header, field):
            if item.in_shared_memory:
                located[field].append((item, offsets))
                offsets += 1
            else:
                located[field].append((item, contents))
                contents += not item.blob_sha256
    return located, contents, offsets


def _by_name(
    tensors: Sequence[tuple[evaluate_pb2.TensorHeader, int]], group: InputGroup
) -> Mapping[str, tuple[evaluate_pb2.TensorHeader, int]]:
    """Returns tensors by the names of inputs. Raises UNKNOWN_FEED if one is given twice."""
    found: dict[str, tuple[evaluate_pb2.TensorHeader, int]] = {}
    for tensor in tensors:
        short = tensor[0].name.removesuffix(":0")
        name = group.aliases.get(short, short)
        if name in found:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{group.field} name {name!r} twice, under different names",
                node=name,
                field=group.field,
            )
        found[name] = tensor
    return found


def _missing(item: Input, group: InputGroup) -> Finding:
    message = f"{group.what} {item.name!r} is missing: {item.dtype.name} of shape {item.shape}"
    return Finding(errors_pb2.ERROR_REASON_MISSING_FEED, message, item.name, group.field)


def _size_error(given: _Given, size: int) -> GradruleError:
    what = f"{given.dtype.name} of shape {list(given.shape)}"
    return error(
        errors_pb2.ERROR_REASON_INVALID_TENSOR,
        f"{given.where}: {size} bytes do not fit {what}: {given.size}",
        field=given.group.field,
    )


def _unused_value(item: Input) -> np.ndarray:
    """Returns a value for an input on which no result depends."""
    shape = [size or 0 for size in item.shape] if item.shape.rank else []
    dtype = np.dtype(item.dtype.as_numpy_dtype)
    return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def _read_params(built: BuiltProgram, settings: Iterable[link_pb2.ParamSetting]) -> Iterator[np.ndarray]:
    given: Mapping[tuple[int, str], rule_pb2.ParamValue] = {(item.rule, item.name): item.value for item in settings}
    for param in built.params:
        value = read_param_value(given[param.rule, param.name], param.name, "params")
        yield np.asarray(value, np.float64)
