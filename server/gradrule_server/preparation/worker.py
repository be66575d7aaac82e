"""Runs the tasks of a compile worker: all processing of callers' graphs."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradrule.common.structural import without_values
from gradrule.v1 import errors_pb2, program_pb2, rule_pb2
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Frame, FrameSocket, Kind
from gradrule_server.link.messages import read_call_shape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, check_parsed_size
from gradrule_server.preparation.prepare import override_values, prepare
from gradrule_server.preparation.references import (
    AskFrontEnd,
    BlobFiles,
    FrontEndBlobs,
    FrontEndRuleLookup,
    GraphReader,
    SnapshotRuleLookup,
)
from gradrule_server.preparation.sampling import sample_call
from gradrule_server.rules import RuleContent

# Length prefix: bytes of the PreparedProgram; the CompileRequest follows it.
_LENGTH = struct.Struct("<Q")

MessageT = TypeVar("MessageT", bound=Message)

OpenFolder = Callable[[str], BlobFiles]
"""Opens a folder of blobs, given its name relative to the blob folder of the process."""


class PreparationService:
    """Handles PREPARE frames; thread-safe. Tasks send QUESTION frames and wait for ANSWER frames."""

    def __init__(self, frames: FrameSocket, open_folder: OpenFolder) -> None:
        self._frames = frames
        self._open_folder = open_folder
        self._reader = GraphReader()
        self._answers: dict[int, queue.SimpleQueue[bytes]] = {}

    def prepare(self, frame: Frame) -> bytes:
        """Runs a task and returns the payload of the PREPARED frame. Raises `GradruleError` with all findings."""
        answers = self._answers[frame.request_id] = queue.SimpleQueue()

        def ask(question: link_pb2.Question) -> link_pb2.Answer:
            self._frames.send(Kind.QUESTION, frame.request_id, question.SerializeToString())
            return link_pb2.Answer.FromString(answers.get())

        try:
            return self._run_task(link_pb2.PrepareRequest.FromString(bytes(frame.payload)), ask)
        finally:
            del self._answers[frame.request_id]

    def deliver_answer(self, frame: Frame) -> None:
        """Passes an answer of the front end to the task that requested it."""
        answers = self._answers.get(frame.request_id)
        if answers is not None:
            answers.put(bytes(frame.payload))

    def _run_task(self, request: link_pb2.PrepareRequest, ask: AskFrontEnd) -> bytes:
        limits = Limits.from_values(request.limits)
        blobs = FrontEndBlobs(ask, self._open_folder(request.blob_folder))
        reply: Message
        match request.WhichOneof("task"):
            case "program":
                reply, compiling = _prepare_program(request.program, limits, ask, blobs, self._reader)
                compiling.blob_folder = request.blob_folder
                prepared, large = reply.SerializeToString(), compiling.SerializeToString()
                return b"".join([_LENGTH.pack(len(prepared)), prepared, large])
            case "variables":
                reply = _list_variables(request.variables.spec, limits, blobs, self._reader)
            case "describe":
                spec = _parse(request.describe, program_pb2.ProgramSpec, limits)
                read = self._reader.load(spec, limits, blobs).graph
                reply = program_pb2.DescribeGraphResponse(
                    structure=without_values(read.graph).SerializeToString(), tensors=read.tensors
                )
            case "rule":
                reply = link_pb2.CheckedRule(definition=_check_rule(request.rule, limits))
            case "sample":
                sample = _parse(request.sample, rule_pb2.SampleRuleRequest, limits)
                reply = sample_call(sample, FrontEndRuleLookup(ask), limits)
            case None:
                raise DecodeError("a PREPARE without a task")
        return reply.SerializeToString()


def _prepare_program(
    task: link_pb2.ProgramTask, limits: Limits, ask: AskFrontEnd, blobs: FrontEndBlobs, reader: GraphReader
) -> tuple[link_pb2.PreparedProgram, link_pb2.CompileRequest]:
    spec = _parse(task.spec, program_pb2.ProgramSpec, limits)
    call = read_call_shape(task.call)
    rules = SnapshotRuleLookup(task.snapshot) if task.HasField("snapshot") else FrontEndRuleLookup(ask)
    prepared = prepare(spec, call, rules, limits, blobs, task.namespace, reader, blobs.keep)
    reply = prepared.reply
    reply.rule_names.extend(rules.used)
    if task.is_kept:
        reply.override_values = override_values(prepared.table)
        if spec.graph.HasField("inline_graph"):
            spec.graph.serialized = spec.graph.inline_graph.SerializeToString(deterministic=True)
        reply.kept_spec = spec.SerializeToString()
    return reply, prepared.request


def _list_variables(spec: bytes, limits: Limits, blobs: FrontEndBlobs, reader: GraphReader) -> link_pb2.GraphVariables:
    graph = reader.load(_parse(spec, program_pb2.ProgramSpec, limits), limits, blobs).graph
    return link_pb2.GraphVariables(variables=graphs.variables(graph, limits))


def _check_rule(definition: rule_pb2.RuleDefinition, limits: Limits) -> rule_pb2.RuleDefinition:
    content = RuleContent.from_definition(definition, limits)
    refused = content.check_nodes(limits)
    if refused:
        raise GradruleError(refused)
    return content.to_definition()


def _parse(data: bytes, message: type[MessageT], limits: Limits) -> MessageT:
    check_parsed_size(data, message, limits)
    try:
        return message.FromString(data)
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are no {message.DESCRIPTOR.full_name}"
        ) from cause
