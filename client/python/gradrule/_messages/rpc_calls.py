"""Describes the calls that both clients send: the request, how to decode the answer, and the uploads it needs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from gradrule._builder import blob_values
from gradrule._builder.graph_sources import GraphLike, graph_bytes, sent_bytes
from gradrule._messages import call_arguments, request_messages
from gradrule._messages.call_arguments import groups_of, with_flat_xs
from gradrule._messages.request_encoding import EncodedForward, EncodedRequest, RequestEncoder
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._results import call_results
from gradrule._results.answers import AnswerReader, labeller
from gradrule.errors import BlobNotFoundError, GradruleWarning, InvalidDerivativeError
from gradrule.v1 import blob_pb2, evaluate_pb2, program_pb2

R = TypeVar("R")
M = TypeVar("M", bound=Message)

_PACKAGE = "gradrule.v1"
EVALUATE = f"/{_PACKAGE}.GradientService/Evaluate"
# Packages whose frames a warning skips.
_OWN_FRAMES = ("gradrule", "asyncio", "threading", "concurrent", "torch", "jax", "pytensor", "scipy")
PAGE_SIZE = 1000
"""Maximum number of rules or programs in one page of a list."""
# A server with little space may evict a blob right after its upload.
_UPLOAD_TRIES = 3


class Call(NamedTuple, Generic[R]):
    """Describes one RPC, or one request of StreamEvaluate.

    Attributes:
        method: Path of the RPC; with `on_stream` the name of the request's field.
        request: The request.
        answer: Reads the answer's bytes.
        decode: Makes the result from what `answer` returns.
        blobs: Blobs that the request names, by SHA-256.
        on_stream: Whether it is a request of StreamEvaluate.
        reader: Reads the answer if it may be in shared memory.
        may_share: Whether its tensors may be in shared memory; packed ones may not.
        may_compile: Whether the server may have to compile a program for it.
    """

    method: str
    request: Message | EncodedRequest | EncodedForward
    answer: Callable[[bytes], Any]
    decode: Callable[[Any], R]
    blobs: Mapping[str, blob_values.Data] = MappingProxyType({})
    on_stream: bool = False
    reader: AnswerReader | None = None
    may_share: bool = True
    may_compile: bool = False


def with_own_arrays(call: Call[R]) -> Call[R]:
    """Returns a call of Evaluate with copies of its arrays, so that the caller may change them before it is sent."""
    assert isinstance(call.request, EncodedRequest)
    return call._replace(request=call.request.with_own_contents())


def unary(method: str, request: Message, response: type[M], decode: Callable[[M], R]) -> Call[R]:
    """Returns the call of `Service/Method`, whose request names no blobs and whose tensors are in the request."""
    return Call(f"/{_PACKAGE}.{method}", request, response.FromString, decode)


def evaluate(
    source: request_messages.Source,
    feeds: call_arguments.Feeds | None,
    params: call_arguments.CallParams | None,
    arguments: call_arguments.ProgramArguments,
    stacked_grad_ys: bool = False,
    transfer: Transfer = PLAIN,
) -> Call[call_results.Result]:
    """Returns the call of Evaluate for a graph."""
    graph = source.graph
    groups = groups_of(arguments.xs, graph)
    blobs: blob_values.Blobs = {}
    spec, grad_ys = source.spec(with_flat_xs(arguments, graph), blobs)
    request = RequestEncoder(graph, source.type_of).encode(
        {"feeds": feeds, "grad_ys": grad_ys}, params, stacked_grad_ys=stacked_grad_ys, packing=transfer.packing
    )
    request.set_spec(spec, blobs)
    aliases = call_arguments.given_aliases(graph, arguments)
    details = call_results.ProgramDetails(aliases)
    reader = AnswerReader(labeller(aliases), keep_bfloat16=transfer.keep_wire_dtype)
    return Call(
        EVALUATE,
        request,
        reader.read,
        lambda answer: with_warnings(call_results.Result(answer, details, groups)),
        request.blobs,
        reader=reader,
        may_share=transfer.packing is None,
        may_compile=True,
    )


def compile_program(
    graph: GraphLike, name: str | None, arguments: call_arguments.ProgramArguments
) -> Call[program_pb2.Program]:
    """Returns the call of CompileProgram."""
    blobs: blob_values.Blobs = {}
    spec, grad_ys = request_messages.program_spec(graph, with_flat_xs(arguments, graph), blobs)
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
        may_compile=True,
    )


def explain(
    graph: GraphLike,
    feeds: call_arguments.Feeds | None,
    params: call_arguments.CallParams | None,
    arguments: call_arguments.ProgramArguments,
) -> Call[call_results.Explanation]:
    """Returns the call of CompileProgram that only checks. Feeds, params and arrays are checked here and not sent."""
    blobs: blob_values.Blobs = {}
    spec, grad_ys = request_messages.program_spec(graph, with_flat_xs(arguments, graph), blobs)
    encoder = RequestEncoder(graph, request_messages.types_of_graph(graph))
    request = encoder.encode({"feeds": feeds, "grad_ys": grad_ys}, params)
    request_messages.check_call(spec, evaluate_pb2.EvaluateHeader.FromString(request.header), graph)
    aliases = call_arguments.given_aliases(graph, arguments)
    sent = sent_bytes(graph)
    return Call(
        f"/{_PACKAGE}.ProgramService/CompileProgram",
        program_pb2.CompileProgramRequest(spec=spec, validate_only=True),
        program_pb2.CompileProgramResponse.FromString,
        lambda response: with_warnings(call_results.explanation(response, aliases, sent)),
        blobs,
        may_compile=True,
    )


class _Noted(Protocol):
    """Types what has notes of the server."""

    @property
    def notes(self) -> Iterable[str]: ...


N = TypeVar("N", bound=_Noted)


def with_warnings(answer: N) -> N:
    """Returns an answer; warns of the notes in it, at the line that made the call."""
    warn_of(answer.notes)
    return answer


def warn_of(notes: Iterable[str]) -> None:
    """Warns of notes at the line outside of gradrule that made the call."""
    for note in notes:
        warnings.warn(note, GradruleWarning, stacklevel=_frames_of_gradrule())


def _frames_of_gradrule() -> int:
    """Returns the number of calls between `warn_of` and the code that uses gradrule."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_FRAMES:
        frame, count = frame.f_back, count + 1
    return count


def make_upload(value: Any) -> blob_values.Upload:
    """Returns the upload of a graph, bytes, an array or a `gr.Blob`."""
    if isinstance(value, blob_values.Blob):
        return blob_values.Upload(value.sha256, value.data)
    is_graph = isinstance(value, bytes | bytearray | memoryview) or not (
        hasattr(value, "dtype") or hasattr(value, "__array__") or isinstance(value, list | tuple)
    )
    if is_graph:
        data = graph_bytes(value)
        return blob_values.Upload(blob_values.digest(data), data)
    return make_upload(blob_values.Blob(value))


def evaluate_call(
    request: EncodedRequest,
    decode: Callable[[Any], R],
    transfer: Transfer = PLAIN,
) -> Call[R]:
    """Returns a call of Evaluate whose answer is parsed."""
    return Call(
        EVALUATE,
        request,
        transfer.reader_of(evaluate_pb2.EvaluateResponse),
        decode,
        request.blobs,
        may_share=transfer.packing is None,
        may_compile=True,
    )


def full_name(collection: str, name: str) -> str:
    """Returns `collection/name` for a name with or without its collection."""
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"


def find_missing(names: Iterable[str]) -> Call[list[str]]:
    """Returns the call of FindMissingBlobs."""
    return Call(
        f"/{_PACKAGE}.BlobService/FindMissingBlobs",
        blob_pb2.FindMissingBlobsRequest(sha256=names),
        blob_pb2.FindMissingBlobsResponse.FromString,
        lambda response: list(response.missing),
    )


def call_steps(call: Call[R]) -> Generator[Call[Any] | blob_values.Upload, Any, R]:
    """Yields the steps that run a call: the call, and uploads of blobs that the server lacks; returns the answer.

    The caller sends each step's outcome to the generator, or throws its error.
    """
    bare = call._replace(blobs={})
    for _ in range(_UPLOAD_TRIES):
        try:
            answer: R = yield bare
        except BlobNotFoundError:
            if not call.blobs:
                raise
        else:
            return answer
        yield from upload_steps(call.blobs)
    try:
        last: R = yield bare
    except BlobNotFoundError as refusal:
        advice = BlobNotFoundError(
            f"{refusal.message}. The client has uploaded it {_UPLOAD_TRIES} times: if several servers have this "
            "address, start all of them with one --blobs"
        )
        advice.request_id = refusal.request_id
        raise advice from refusal
    return last


def upload_steps(blobs: Mapping[str, blob_values.Data]) -> Generator[Call[Any] | blob_values.Upload, Any, float]:
    """Yields the steps that upload those blobs that the server lacks; returns the sum of their `additional_s`."""
    missing = yield find_missing(blobs)
    added_s = 0.0
    for name in missing:
        upload = blob_values.Upload(name, blobs[name])
        added_s += upload.additional_s
        yield upload
    return added_s
