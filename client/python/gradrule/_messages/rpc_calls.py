"""Describes calls, which both clients send: the request, and how to decode the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import Message

from gradrule._builder import blob_values
from gradrule._builder.graph_sources import GraphLike, graph_bytes, sent_bytes
from gradrule._messages import request_messages
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._messages.x_groups import flat_words, groups_of
from gradrule._results import call_results, explanations
from gradrule._results.answers import AnswerReader, labeller
from gradrule.common import wire_format
from gradrule.errors import InvalidDerivativeError
from gradrule.v1 import evaluate_pb2, program_pb2

R = TypeVar("R")
M = TypeVar("M", bound=Message)

UnconnectedGradients: TypeAlias = Literal["none", "zero"]
NoGradient: TypeAlias = Literal["error", "default", "pass", "zero"]
Jit: TypeAlias = Literal["off", "auto"]
RuleKind: TypeAlias = Literal["user", "builtin", "op"]

_PACKAGE = "gradrule.v1"
EVALUATE = f"/{_PACKAGE}.GradientService/Evaluate"
PAGE_SIZE = 1000
"""Most rules or programs in one page of a list."""


class Call(NamedTuple, Generic[R]):
    """One RPC, or one request of StreamEvaluate.

    Attributes:
        method: Path of the RPC; with `on_stream` the name of the request's field.
        request: The request, without the tensors in `large`.
        answer: Reads the answer's bytes.
        decode: Makes the result from what `answer` returns.
        blobs: Bytes that the request names by their SHA-256.
        on_stream: Whether it is a request of StreamEvaluate.
        large: Bytes of the request that follow those of `request`.
        reader: Reads the answer if it may be in shared memory.
        may_share: Whether its tensors may be in shared memory; packed ones may not.
    """

    method: str
    request: Message
    answer: Callable[[bytes], Any]
    decode: Callable[[Any], R]
    blobs: Mapping[str, blob_values.Data] = MappingProxyType({})
    on_stream: bool = False
    large: Sequence[wire_format.Parts] = ()
    reader: AnswerReader | None = None
    may_share: bool = True


def with_own_arrays(call: Call[R]) -> Call[R]:
    """Returns the call with copies of its arrays, so that the caller may change them before it is sent."""
    return call._replace(large=[(b"".join(parts),) for parts in call.large])


def unary(method: str, request: Message, response: type[M], decode: Callable[[M], R]) -> Call[R]:
    """Returns the call of `Service/Method`, whose request names no blobs and whose tensors are in the request."""
    return Call(f"/{_PACKAGE}.{method}", request, response.FromString, decode)


def evaluate(
    graph: GraphLike,
    feeds: request_messages.Feeds | None,
    params: request_messages.CallParams | None,
    words: request_messages.Words,
    stacked_grad_ys: bool = False,
    transfer: Transfer = PLAIN,
) -> Call[call_results.Result]:
    """Returns the call of Evaluate for a graph."""
    groups = groups_of(words.xs, graph)
    blobs = blob_values.fed(feeds, words.grad_ys)
    spec, grad_ys = request_messages.program_spec(graph, flat_words(words, graph), blobs)
    type_of = request_messages.types_of_graph(graph)
    large: list[wire_format.Parts] = []
    request = request_messages.evaluate_request(
        feeds,
        type_of,
        grad_ys=grad_ys,
        params=params,
        graph=graph,
        stacked_grad_ys=stacked_grad_ys,
        # Tensors to be packed must be in the request.
        large=large if transfer.packing is None else None,
    )
    transfer.prepare(request)
    request.spec.CopyFrom(spec)
    aliases = request_messages.given_aliases(graph, words)
    details = call_results.ProgramDetails(aliases)
    reader = AnswerReader(labeller(aliases), keep_bfloat16=transfer.keep_wire_dtype)
    return Call(
        EVALUATE,
        request,
        reader.read,
        lambda answer: call_results.Result(answer, details, groups),
        blobs,
        large=large,
        reader=reader,
        may_share=transfer.packing is None,
    )


def compile_program(graph: GraphLike, name: str | None, words: request_messages.Words) -> Call[program_pb2.Program]:
    """Returns the call of CompileProgram."""
    blobs: blob_values.Blobs = {}
    spec, grad_ys = request_messages.program_spec(graph, flat_words(words, graph), blobs)
    if grad_ys:
        raise InvalidDerivativeError(
            f"grad_ys of {next(iter(grad_ys))!r} is a value; compile takes names of tensors, calls give values"
        )
    return Call(
        f"/{_PACKAGE}.ProgramService/CompileProgram",
        program_pb2.CompileProgramRequest(spec=spec, program_id=(name or "").removeprefix("programs/")),
        program_pb2.CompileProgramResponse.FromString,
        lambda response: response.program,
        blobs,
    )


def explain(
    graph: GraphLike,
    feeds: request_messages.Feeds | None,
    params: request_messages.CallParams | None,
    words: request_messages.Words,
) -> Call[explanations.Explanation]:
    """Returns the call of CompileProgram that only checks. Feeds, params and arrays are checked here and not sent."""
    blobs: blob_values.Blobs = {}
    spec, grad_ys = request_messages.program_spec(graph, flat_words(words, graph), blobs)
    type_of = request_messages.types_of_graph(graph)
    call = request_messages.evaluate_request(feeds, type_of, grad_ys=grad_ys, params=params, graph=graph)
    request_messages.check_call(spec, call, graph)
    aliases = request_messages.given_aliases(graph, words)
    sent = sent_bytes(graph)
    return Call(
        f"/{_PACKAGE}.ProgramService/CompileProgram",
        program_pb2.CompileProgramRequest(spec=spec, validate_only=True),
        program_pb2.CompileProgramResponse.FromString,
        lambda response: explanations.explanation(response, aliases, sent),
        blobs,
    )


def upload(value: Any) -> blob_values.Upload:
    """Returns the upload of a graph, bytes, an array or a `gr.Blob`."""
    if isinstance(value, blob_values.Blob):
        return blob_values.Upload(value.sha256, value.data)
    is_graph = isinstance(value, bytes | bytearray | memoryview) or not (
        hasattr(value, "dtype") or hasattr(value, "__array__") or isinstance(value, list | tuple)
    )
    if is_graph:
        data = graph_bytes(value)
        return blob_values.Upload(blob_values.digest(data), data)
    return upload(blob_values.Blob(value))


def evaluate_call(
    request: evaluate_pb2.EvaluateRequest,
    decode: Callable[[Any], R],
    blobs: Mapping[str, blob_values.Data],
    large: Sequence[wire_format.Parts] = (),
    answer: Callable[[bytes], Any] = evaluate_pb2.EvaluateResponse.FromString,
) -> Call[R]:
    """Returns a call of Evaluate for a request."""
    return Call(EVALUATE, request, answer, decode, blobs, large=large)


def full_name(collection: str, name: str) -> str:
    """Returns `collection/name` for a name with or without its collection."""
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"
