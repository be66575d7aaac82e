"""Reads the arguments of a built function from calls. What the header of a call decides is decided once per header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec, tensor_packing
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine.client_memory import AnswerArea, AttachedMemories, CallMemory
from gradrule_server.engine.program import BuiltProgram, Input, as_array, as_tensor
from gradrule_server.engine.tensor_sources import BlobReader, check_tensor
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.call_parts import CallParts, find_parts
from gradrule_server.link.framing import Buffer
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import FREE_BYTES
from gradrule_server.rules import read_param_value

NO_STATE: Mapping[str, tf.Tensor] = MappingProxyType({})

_TENSOR_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")
_MAX_LAYOUTS = 256
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
    """

    position: int
    input: Input
    group: InputGroup
    header: evaluate_pb2.TensorHeader
    number: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int

    @property
    def is_packed(self) -> bool:
        """Whether the content must be unpacked."""
        return bool(self.header.compression or self.header.content_dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the content is the elements as they are."""
        header = self.header
        is_elsewhere = header.in_shared_memory or header.blob_sha256
        return not (is_elsewhere or self.is_packed or header.content_is_tensor) and self.size > 0

    @property
    def where(self) -> str:
        """Names the tensor in errors."""
        return f"{self.group.what} {self.input.name!r}"


class CallLayout:
    """Reads the arguments of calls with one header. Thread-safe.

    Args:
        header: The header.
        groups: The inputs, in the order of their arguments.
        template: For each argument, the array of calls that do not give it; None: calls must give it.
        max_rank: Highest rank of a tensor.
        max_unpacking: As in `BuiltProgram`.
    """

    def __init__(
        self,
        header: evaluate_pb2.EvaluateHeader,
        groups: Sequence[InputGroup],
        template: Sequence[Any],
        max_rank: int,
        max_unpacking: int = 0,
    ) -> None:
        self.packing = read_packing(header.answer_packing) if header.HasField("answer_packing") else None
        """How the tensors of the answer are packed; None: they are not."""
        self._template = list(template)
        self._max_unpacking = max_unpacking
        self._findings: list[Finding] = []
        self._absent: list[tuple[int, Input, InputGroup]] = []
        given: list[_Given] = []
        located, self._contents, self._offsets = _locate(header)
        position = 0
        for group in groups:
            tensors = _by_name(located[group.field], group)
            for order, item in enumerate(group.inputs):
                found = tensors.get(item.name.removesuffix(":0"))
                if found is not None:
                    try:
                        dtype, shape, size = check_tensor(found[0], item, max_rank, group.what, group.field)
                        given.append(_Given(position, item, group, *found, dtype, shape, size))
                    except GradruleError as cause:
                        self._findings += cause.findings
                else:
                    self._absent.append((position, item, group))
                    if self._template[position] is None and group.unused and group.unused[order]:
                        self._template[position] = _unused_value(item)
                position += 1
        self._plain = [item for item in given if item.is_plain]
        self._others = [item for item in given if not item.is_plain]
        self.has_blobs = any(item.header.blob_sha256 for item in given)
        """Whether elements of a tensor are a blob."""

    def read(
        self, parts: CallParts, memory: CallMemory | None, blobs: BlobReader, state: Mapping[str, tf.Tensor] = NO_STATE
    ) -> list[Any]:
        """Returns the arguments as arrays, which may share the memory of the call; those of params are None.

        Raises MALFORMED_REQUEST, or one error with the faults of all tensors.

        Args:
            parts: The parts of the call.
            memory: The client's memory that the call uses.
            blobs: Reads values that are blobs.
            state: Values, by name, of inputs that the call does not feed.
        """
        self._check_counts(parts)
        values, findings = list(self._template), list(self._findings)
        for given in self._plain:
            start, end = parts.contents[given.number]
            if end - start == given.size:
                count = given.size // given.dtype.itemsize
                values[given.position] = np.frombuffer(parts.data, given.dtype, count, start).reshape(given.shape)
            else:
                findings += _size_error(given, end - start).findings
        for field in {given.group.field for given in self._others if given.is_packed}:
            self._check_unpacking(field, parts)
        for given in self._others:
            try:
                values[given.position] = _read_other(given, parts, memory, blobs)
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

    def _check_unpacking(self, field: str, parts: CallParts) -> None:
        """Raises LIMIT_EXCEEDED if the packed tensors of a field would take too much memory unpacked."""
        packed = [given for given in self._others if given.is_packed and given.group.field == field]
        after = sum(given.size for given in packed)
        before = sum(end - start for start, end in (parts.contents[given.number] for given in packed))
        most = FREE_BYTES + self._max_unpacking * before
        if after > most:
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"the packed tensors of {field} have {before} bytes and would take {after} unpacked; they may take "
                f"{FREE_BYTES >> 20} MiB and {self._max_unpacking} times their size, {most} bytes (--max-unpacking); "
                "send them unpacked, or in several calls",
                field=field,
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
        inputs = [item for group in self._groups for item in group.inputs]
        self.dtypes = [item.dtype for item in inputs] + [tf.float64] * len(built.params)
        """The type of each argument."""
        self.defaults = [item.default for item in inputs] + [None] * len(built.params)
        """For each argument, its value in calls that do not give it; None: calls must give it."""
        self._template = [None if default is None else as_array(default) for default in self.defaults]
        self._first_param = len(inputs)
        self._limits = built.max_rank, built.max_unpacking
        self._stacked = built.stacked
        self._layouts: dict[bytes, CallLayout] = {}

    def is_default(self, position: int, array: Any) -> bool:
        """Returns whether an argument is the default of its input."""
        return self._template[position] is not None and array is self._template[position]

    def layout(self, header: bytes) -> CallLayout:
        """Returns the layout of calls with a header. Raises MALFORMED_REQUEST, UNKNOWN_FEED or FEED_SHAPE."""
        found = self._layouts.get(header)
        if found is None:
            message = evaluate_pb2.EvaluateHeader.FromString(header)
            if self._stacked:
                check_stacks(message.grad_ys)
            found = CallLayout(message, self._groups, self._template, *self._limits)
            if len(header) <= _MAX_HEADER_BYTES:
                if len(self._layouts) >= _MAX_LAYOUTS:
                    self._layouts.clear()
                self._layouts[header] = found
        return found


class OpenedCall(NamedTuple):
    """A call whose arguments can be read.

    Attributes:
        layout: Its layout.
        parts: Its parts.
        memory: The client's memory that it uses; None: none.
    """

    layout: CallLayout
    parts: CallParts
    memory: CallMemory | None

    @property
    def answer_area(self) -> AnswerArea | None:
        """The part of the client's memory for the answer; None: none."""
        return None if self.memory is None else self.memory.answer_area


class ArgumentReader:
    """Reads the arguments of calls.

    `blobs`: holds the values that calls name by their hash. `memories`: shared memory of clients.
    """

    def __init__(self, blobs: BlobReader, memories: AttachedMemories | None = None) -> None:
        self._blobs = blobs
        self._memories = memories or AttachedMemories(None)

    def open(self, built: BuiltProgram, values: Buffer) -> OpenedCall:
        """Returns a call of a program. `values`: bytes of an `EvaluateRequest` with a header.

        Raises MALFORMED_REQUEST, INVALID_TENSOR or SHARED_MEMORY_LOST.
        """
        parts = parts_of(values)
        layout = built.feed_plan.layout(parts.header)
        use = parts.shared_memory
        return OpenedCall(layout, parts, None if use is None else self._memories.open(use))

    def arrays(self, built: BuiltProgram, request: link_pb2.RunRequest, call: OpenedCall) -> list[Any]:
        """Returns the arguments of the built function as NumPy arrays, which may share the memory of the call."""
        return self._read(built, request, call, NO_STATE)

    def arguments(
        self,
        built: BuiltProgram,
        request: link_pb2.RunRequest,
        values: Buffer,
        state: Mapping[str, tf.Tensor] = NO_STATE,
    ) -> list[tf.Tensor]:
        """Returns the arguments of the built function as tensors; raises what `open` and `arrays` raise.

        Args:
            built: The program.
            request: The message of the run.
            values: Bytes of an `EvaluateRequest` with a header. Its tensors must not lie in shared memory.
            state: Values, by name, of inputs that the call does not feed.
        """
        parts, plan = parts_of(values), built.feed_plan
        read = self._read(built, request, OpenedCall(plan.layout(parts.header), parts, None), state)
        # Values of variables may be large: they stay on the device.
        return [
            default if plan.is_default(position, value) else as_tensor(value, dtype)
            for position, (value, dtype, default) in enumerate(zip(read, plan.dtypes, plan.defaults, strict=True))
        ]

    def grad_ys(
        self, values: Buffer, inputs: Sequence[Input], built: BuiltProgram, blob_folder: str
    ) -> list[tf.Tensor]:
        """Returns the upstream gradients of a pull-back; stacked ones have the same size on axis 0.

        Args:
            values: Bytes of an `EvaluateRequest` with a header.
            inputs: The ys that it names.
            built: Gives the limits.
            blob_folder: As in `PullBackRequest`.
        """
        parts = parts_of(values)
        header = evaluate_pb2.EvaluateHeader.FromString(parts.header)
        if header.stacked_grad_ys:
            inputs = [stacked_input(item) for item in inputs]
            check_stacks(header.grad_ys)
        groups = [InputGroup("grad_ys", "grad_y", inputs)]
        layout = CallLayout(header, groups, [None] * len(inputs), built.max_rank, built.max_unpacking)
        read = layout.read(parts, None, self._blobs.for_folder(blob_folder))
        return [as_tensor(value, item.dtype) for value, item in zip(read, inputs, strict=True)]

    def _read(
        self, built: BuiltProgram, request: link_pb2.RunRequest, call: OpenedCall, state: Mapping[str, tf.Tensor]
    ) -> list[Any]:
        blobs = self._blobs.for_folder(request.blob_folder) if call.layout.has_blobs else self._blobs
        values = call.layout.read(call.parts, call.memory, blobs, state)
        if built.params:
            values[len(values) - len(built.params) :] = _read_params(built, request.params)
        return values


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


def _read_other(given: _Given, parts: CallParts, memory: CallMemory | None, blobs: BlobReader) -> Any:
    """Returns a tensor that is no plain content. Raises INVALID_TENSOR, BLOB_NOT_FOUND or LIMIT_EXCEEDED."""
    header, field = given.header, given.group.field
    if header.in_shared_memory:
        if memory is None or parts.shared_memory is None:
            raise _invalid(given, "lies in shared memory, which this request does not use")
        content: Buffer = memory.read(parts.shared_memory.offsets[given.number], given.size, given.where, field)
        return np.frombuffer(content, given.dtype).reshape(given.shape)
    if header.blob_sha256:
        blob = tensor_pb2.BlobTensor(
            sha256=header.blob_sha256, dtype=header.dtype, shape=tensor_codec.shape_message(given.shape)
        )
        return blobs.array(blob, given.where, field)
    start, end = parts.contents[given.number]
    content = memoryview(parts.data)[start:end]
    try:
        if header.content_is_tensor:
            array = tensor_codec.to_numpy(tensor_pb2.Tensor.FromString(bytes(content)))
            if array.dtype != given.dtype or array.shape != given.shape:
                raise ValueError(f"the content is a tensor of {array.dtype} and shape {list(array.shape)}")
            return array
        if given.is_packed:
            packed = tensor_pb2.PackedTensor(
                dtype=header.dtype,
                shape=tensor_codec.shape_message(given.shape),
                content_dtype=header.content_dtype,
                compression=header.compression,
            )
            return tensor_packing.unpack(packed, content=content)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{given.where}: {cause}", field=field) from cause
    if len(content) != given.size:
        raise _size_error(given, len(content))
    return np.empty(given.shape, given.dtype)


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


def _invalid(given: _Given, fault: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_INVALID_TENSOR,
        f"{given.where} {fault}",
        node=given.input.name,
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
