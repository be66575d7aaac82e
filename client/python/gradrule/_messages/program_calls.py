"""Describes compiled programs and writes the requests that run them, for both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradrule._builder import blob_values
from gradrule._builder.notebook_text import html_block, html_line, short_digest, short_repr
from gradrule._builder.specs import TensorSpec
from gradrule._messages import call_arguments, request_messages, rpc_calls
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs, Name
from gradrule._messages.feed_values import array_of
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._results import call_results, tables
from gradrule._results.answers import Answer, AnswerReader, labeller
from gradrule.common import fast_paths, large_tensors, tensor_codec, wire_format
from gradrule.common.tensor_packing import Packing, pack
from gradrule.errors import UnknownFeedError
from gradrule.v1 import evaluate_pb2, program_pb2

_FEEDS = evaluate_pb2.EvaluateRequest.FEEDS_FIELD_NUMBER
_GRAD_YS = evaluate_pb2.EvaluateRequest.GRAD_YS_FIELD_NUMBER
_STACKED = evaluate_pb2.EvaluateRequest(stacked_grad_ys=True).SerializeToString()
_FIELD_NAMES = {_FEEDS: "feeds", _GRAD_YS: "grad_ys"}
# Limits the memory for programs whose feeds have many different shapes.
_MAX_HEADS = 1024


class ProgramEncoder:
    """Writes the calls of a program as bytes. Safe to share between threads.

    The bytes before a tensor's content (name, type, shape, lengths) are the same in every call with a tensor of this
    type and shape, so they are made once.
    """

    def __init__(self, program: program_pb2.Program) -> None:
        self._program = program
        self._type_of = request_messages.types_of_specs([*program.inputs, *program.ys])
        self._heads: dict[Any, bytes] = {}
        self._keeps_heads = fast_paths.is_enabled("request-heads")

    def encode(
        self,
        feeds: call_arguments.Feeds | None,
        params: call_arguments.CallParams | None = None,
        grad_ys: call_arguments.GradYs | None = None,
        stacked_grad_ys: bool = False,
        packing: Packing | None = None,
    ) -> tuple[list[wire_format.Part], blob_values.Blobs]:
        """Returns the bytes of an `EvaluateRequest` without its target, and the blobs that it names.

        packing: packing of the feeds and of the answer. Raises what `request_messages.evaluate_request` raises.
        """
        parts: list[wire_format.Part] = []
        blobs: blob_values.Blobs = {}
        if feeds is not None:
            for key, value in request_messages.pairs(feeds, "feeds"):
                self._add(parts, blobs, _FEEDS, key, value, packing)
        if grad_ys is not None:
            for y, value in request_messages.program_grad_ys(grad_ys, self._program).items():
                self._add(parts, blobs, _GRAD_YS, y, value, packing)
        if params is not None:
            parts.append(request_messages.evaluate_request(None, self._type_of, params=params).SerializeToString())
        if stacked_grad_ys:
            parts.append(_STACKED)
        if packing is not None:
            parts.append(evaluate_pb2.EvaluateRequest(answer_packing=packing.message()).SerializeToString())
        return parts, blobs

    def _add(
        self,
        parts: list[wire_format.Part],
        blobs: blob_values.Blobs,
        field: int,
        key: Any,
        value: Any,
        packing: Packing | None,
    ) -> None:
        if packing is None and type(value) is np.ndarray:
            # The type and shape of the array were checked when the head was made.
            head = self._heads.get((field, key, value.dtype, value.shape))
            if head is not None:
                parts += (head, _content(value))
                return
        name = call_arguments.name_of_tensor(key, self._program)
        if isinstance(value, blob_values.Blob):
            parts.append(self._message(field, name, value))
            blobs[value.sha256] = value.data
            return
        where = f"{_FIELD_NAMES[field]}[{name!r}]"
        array = array_of(value, self._type_of(name, True), where)
        if not (array.nbytes and tensor_codec.has_plain_bytes(array)):
            parts.append(self._message(field, name, array))
            return
        packed = None if packing is None else pack(tensor_codec.number_of_array(array), array, packing)
        if packed is not None:
            parts += (large_tensors.named(field, name, packed.head, len(packed.content)), packed.content)
            return
        head = self._heads.get((field, key, array.dtype, array.shape))
        if head is None:
            head = large_tensors.head(field, name, array)
            if self._keeps_heads and tensor_codec.is_little_endian(array):
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()
                self._heads[field, key, array.dtype, array.shape] = head
        parts += (head, _content(array))

    def _message(self, field: int, name: str, value: Any) -> bytes:
        """Returns the field for a value whose bytes a message does not hold: strings, blobs, empty arrays."""
        request = evaluate_pb2.EvaluateRequest()
        request_messages.add_named_tensor(request, _FIELD_NAMES[field], name, value, self._type_of)
        return request.SerializeToString()


def _content(array: tensor_codec.Array) -> wire_format.Part:
    """Returns an array's bytes: a copy for small arrays, which is faster than a view, and a view for large ones."""
    if array.nbytes < large_tensors.MIN_LARGE_BYTES and tensor_codec.is_little_endian(array):
        return array.tobytes()
    return tensor_codec.content_of(array)


class ProgramBase:
    """Describes a compiled program and builds the requests of its calls; base class of `Program` and `AsyncProgram`."""

    def __init__(self, message: program_pb2.Program, groups: call_results.Groups = None) -> None:
        self._message = message
        self._groups = groups
        self._overrides = call_results.resolutions(message.overrides)
        # Answers of a compiled program omit the facts that the program's message contains.
        self._details = call_results.ProgramDetails(
            dict(message.aliases),
            self._overrides,
            self.default_gradient_nodes,
            self.rewritten,
            message.draws_random,
        )
        self._encoder = ProgramEncoder(message)
        # Whether the user must still be warned of the notes.
        self._must_warn = bool(message.notes)
        self._reader = AnswerReader(labeller(message.aliases))
        self._bfloat16_reader = AnswerReader(labeller(message.aliases), keep_bfloat16=True)

    @property
    def message(self) -> program_pb2.Program:
        """The server's description of the program."""
        return self._message

    @property
    def groups(self) -> call_results.Groups:
        """Groups of the xs; None if the xs were given as a list."""
        return self._groups

    @property
    def name(self) -> str:
        """`programs/{id}`."""
        return self._message.name

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the placeholders that a call feeds, by alias or name."""
        return call_results.specs(self._message.inputs, self._message.aliases)

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the fetches, by the names in the request."""
        return call_results.specs(self._message.outputs, self._message.aliases)

    @property
    def ys(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the ys, by the names in the request."""
        return call_results.specs(self._message.ys, self._message.aliases)

    @property
    def xs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the xs, by the names in the request."""
        return call_results.specs(self._message.xs, self._message.aliases)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tensors by alias; an alias is valid wherever a name is."""
        return dict(self._message.aliases)

    @property
    def overrides(self) -> list[call_results.Resolution]:
        """The rule that each node got."""
        return list(self._overrides)

    @property
    def default_gradient_nodes(self) -> list[str]:
        """Names of the nodes on the path without an override; they keep TensorFlow's gradient."""
        return list(self._message.default_gradient_nodes)

    @property
    def sparse_gradients(self) -> list[str]:
        """Names of the xs whose gradients are `gr.Sparse` in results of calls; with a stack of grad_ys, none is."""
        return list(self._message.sparse_gradients)

    @property
    def rewritten(self) -> list[str]:
        """Nodes that rewrites replaced."""
        return list(self._message.rewritten)

    @property
    def notes(self) -> list[str]:
        """Hints that the program may not compute what is wanted, such as gradients of a sum that is constant."""
        return list(self._message.notes)

    @property
    def repeatable(self) -> bool:
        """Whether calls with equal feeds give equal outputs. False if the program draws random numbers."""
        return not self._message.draws_random

    @property
    def digests(self) -> call_results.Digests:
        """SHA-256 of the graph's bytes and of the program."""
        return call_results.Digests(self._message.digests.graph, self._message.digests.program)

    @property
    def device(self) -> str:
        """Device that runs the program, for example `CPU:0`."""
        return self._message.device

    @property
    def create_time(self) -> float:
        """Time of the first compilation, in seconds since 1970."""
        return self._message.create_time.ToNanoseconds() / 1e9

    def __repr__(self) -> str:
        return short_repr(f"<{type(self).__name__} {self.name!r}>")

    def _repr_html_(self) -> str:
        kinds = {"input": self.inputs, "output": self.outputs, "y": self.ys, "x": self.xs}
        digests = self.digests
        return html_block(
            tables.specs_table(f"Program {self.name.removeprefix('programs/')}", kinds),
            html_line(
                self.device,
                digests.program and f"program {short_digest(digests.program)}",
                digests.graph and f"graph {short_digest(digests.graph)}",
                "" if self.repeatable else "draws random numbers",
            ),
            *(html_line(f"Note: {note}", kind="bad") for note in self.notes),
            tables.resolutions_table(self.overrides),
            tables.default_nodes_line(self.default_gradient_nodes),
        )

    def _call(
        self,
        feeds: Feeds | None,
        params: CallParams | None,
        grad_ys: GradYs | None,
        stacked_grad_ys: bool = False,
        transfer: Transfer = PLAIN,
    ) -> rpc_calls.Call[call_results.Result]:
        if self._must_warn and grad_ys is None:
            # The notes concern calls without grad_ys only.
            self._must_warn = False
            rpc_calls.warn_of(self._message.notes)
        reader = self._answer_reader(transfer)
        parts, blobs = self._encoder.encode(feeds, params, grad_ys, stacked_grad_ys, transfer.packing)
        return rpc_calls.Call(
            rpc_calls.EVALUATE,
            # One for each call, because its time limit is added to it.
            evaluate_pb2.EvaluateRequest(program=self._message.name),
            reader.read,
            self._decode,
            blobs,
            large=(parts,),
            reader=reader,
            may_share=transfer.packing is None,
            # The server compiles a program again after it removed it from memory, and for calls with upstream
            # gradients or values of variables.
            may_compile=True,
        )

    def _answer_reader(self, transfer: Transfer) -> AnswerReader:
        return self._bfloat16_reader if transfer.keep_wire_dtype else self._reader

    def _decode(self, answer: Answer) -> call_results.Result:
        return call_results.Result(answer, self._details, self._groups)


def merged(feeds: Feeds | None, named: Mapping[str, Any]) -> Feeds:
    """Returns the feeds of a call, which may be a dict, keywords or both.

    Raises:
        InvalidTensorError: `feeds` is not a dict.
        UnknownFeedError: A tensor is fed twice.
    """
    together: dict[Name, Any] = dict(request_messages.pairs(feeds or {}, "feeds"))
    for name, value in named.items():
        if name in together:
            raise UnknownFeedError(f"{name!r} is fed twice, in the dict and by keyword")
        together[name] = value
    return together
