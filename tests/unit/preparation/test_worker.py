"""Tests tasks of a compile worker and its questions to the front end."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, override_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, error, reason_name
from gradrule_server.link.framing import Buffer, Frame, FrameSocket, Kind
from gradrule_server.link.messages import CallShape, fault_message, read_call_shape, shape_message
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.preparation.prepare import prepare
from gradrule_server.preparation.references import FrontEndBlobs, FrontEndRuleLookup
from gradrule_server.preparation.worker import PreparationService
from tests.service import raw
from tests.stores import no_blobs

_LENGTH = struct.Struct("<Q")
_HASH = "ab" * 32


class Files:
    """Files of blobs and of kept values, by name. `read_names`: the blobs that were read."""

    def __init__(self, found: dict[str, bytes] | None = None) -> None:
        self._found = {} if found is None else found
        self.read_names: list[str] = []

    def read(self, name: str) -> bytes:
        self.read_names.append(name)
        return self._found[name]

    def map_kept(self, name: str) -> memoryview:
        return memoryview(self._found[name])


class Frames(FrameSocket):
    """Answers each question immediately; `asked` holds all questions."""

    def __init__(self, answer: Callable[[link_pb2.Question], link_pb2.Answer]) -> None:
        self.answer = answer
        self.service: PreparationService
        self.asked: list[link_pb2.Question] = []

    def send(self, kind: Kind, request_id: int, payload: Buffer | Sequence[Buffer]) -> None:
        assert kind is Kind.QUESTION
        assert isinstance(payload, bytes)
        question = link_pb2.Question.FromString(payload)
        self.asked.append(question)
        self.service.deliver_answer(Frame(Kind.ANSWER, request_id, self.answer(question).SerializeToString()))


def answer(question: link_pb2.Question) -> link_pb2.Answer:
    """Answers as a front end with one rule and no blobs."""
    match question.WhichOneof("question"):
        case "rules":
            found = [
                rule_pb2.Rule(
                    name="Mine",
                    kind=rule_pb2.RULE_KIND_USER,
                    definition=rule_pb2.RuleDefinition(expression="2 * dy"),
                    aliases=[name],
                )
                for name in question.rules.names
                if name == "Mine"
            ]
            return link_pb2.Answer(rules=found)
        case "unknown_rule":
            cause = error(errors_pb2.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {question.unknown_rule!r}. Mean it")
            return link_pb2.Answer(fault=fault_message(cause))
        case "blob_sizes":
            return link_pb2.Answer(sizes=[-1] * len(question.blob_sizes.names))
        case kind:
            raise AssertionError(kind)


def worked(request: link_pb2.PrepareRequest) -> tuple[bytes, Frames]:
    request.limits.update(Limits().to_values())
    frames = Frames(answer)
    frames.service = PreparationService(frames, lambda folder: Files())
    return frames.service.prepare(Frame(Kind.PREPARE, 7, request.SerializeToString())), frames


def spec(rule: str) -> program_pb2.ProgramSpec:
    found = program_pb2.ProgramSpec(fetches=["y"])
    found.graph.inline_graph.CopyFrom(raw.sign_graph())
    found.vjp.ys.append("y")
    found.vjp.xs.append("x")
    found.overrides.append(override_pb2.GradientOverride(selector=override_pb2.Selector(op_type="Sign"), rule=rule))
    return found


def prepared(found: program_pb2.ProgramSpec) -> tuple[link_pb2.PreparedProgram, link_pb2.CompileRequest, Frames]:
    answer, frames = worked(
        link_pb2.PrepareRequest(program=link_pb2.ProgramTask(spec=found.SerializeToString(), namespace="n"))
    )
    start = _LENGTH.size + _LENGTH.unpack_from(answer)[0]
    message = link_pb2.PreparedProgram.FromString(answer[_LENGTH.size : start])
    return message, link_pb2.CompileRequest.FromString(answer[start:]), frames


def test_limits_and_call_shapes_survive_a_round_trip() -> None:
    limits = Limits(trusted=True, rank=3, selections=5)
    sent = link_pb2.PrepareRequest(limits=limits.to_values()).SerializeToString()
    assert Limits.from_values(link_pb2.PrepareRequest.FromString(sent).limits) == limits
    assert {field.name for field in dataclasses.fields(CallShape)} == set(link_pb2.CallShape.DESCRIPTOR.fields_by_name)
    call = CallShape(frozenset({"a"}), frozenset({"b"}), 2, frozenset({"c"}), frozenset({"d"}), True, True, True)
    assert read_call_shape(shape_message(call)) == call


def test_a_rule_is_requested_once_and_listed_with_the_program() -> None:
    message, request, frames = prepared(spec("Mine"))
    assert [list(question.rules.names) for question in frames.asked] == [["Mine"]]
    assert list(message.rule_names) == ["Mine"]
    assert request.rules[0].definition.expression == "2 * dy"
    assert request.key == message.key
    assert b"Sign" in request.graph


def test_the_front_end_explains_an_unknown_rule() -> None:
    with pytest.raises(GradruleError) as caught:
        prepared(spec("Yours"))
    assert reason_name(caught.value.reason) == "UNKNOWN_RULE"
    assert caught.value.message == "there is no rule 'Yours'. Mean it"


def test_only_the_first_of_many_unknown_rules_are_explained() -> None:
    asked: list[link_pb2.Question] = []

    def ask(question: link_pb2.Question) -> link_pb2.Answer:
        asked.append(question)
        return answer(question)

    rules = FrontEndRuleLookup(ask)
    rules.fetch(f"R{index}" for index in range(1200))
    for index in range(1200):
        with pytest.raises(GradruleError, match="there is no rule"):
            rules.resolve(f"R{index}")
    assert [question.WhichOneof("question") for question in asked] == ["rules"] * 3 + ["unknown_rule"] * 20


def test_a_missing_graph_blob_is_refused() -> None:
    found = program_pb2.ProgramSpec(fetches=["y"])
    found.graph.blob_sha256 = _HASH
    with pytest.raises(GradruleError) as caught:
        prepared(found)
    assert reason_name(caught.value.reason) == "BLOB_NOT_FOUND"
    assert [resource.name for resource in caught.value.resources] == [_HASH]


def test_a_blob_is_read_once_the_front_end_has_checked_it() -> None:
    events: list[str] = []

    def ask(question: link_pb2.Question) -> link_pb2.Answer:
        events.append(f"checked {question.blob}")
        return link_pb2.Answer()

    class Recording(Files):
        def read(self, name: str) -> bytes:
            events.append(f"read {name}")
            return b"bytes"

    assert FrontEndBlobs(ask, Recording()).read(_HASH) == b"bytes"
    assert events == [f"checked {_HASH}", f"read {_HASH}"]


def test_invalid_spec_bytes_are_refused() -> None:
    with pytest.raises(GradruleError) as caught:
        worked(link_pb2.PrepareRequest(program=link_pb2.ProgramTask(spec=b"\xff")))
    assert reason_name(caught.value.reason) == "MALFORMED_REQUEST"
    assert "gradrule.v1.ProgramSpec" in caught.value.message


def test_a_rule_without_its_definition_is_requested_again() -> None:
    asked: list[list[str]] = []

    def ask(question: link_pb2.Question) -> link_pb2.Answer:
        names = list(question.rules.names)
        asked.append(names)
        # One definition fits.
        return link_pb2.Answer(
            rules=[
                rule_pb2.Rule(
                    name=name,
                    kind=rule_pb2.RULE_KIND_USER,
                    definition=rule_pb2.RuleDefinition(expression=f"{number} * dy") if name == names[0] else None,
                    aliases=[name],
                )
                for number, name in enumerate(names)
            ]
        )

    rules = FrontEndRuleLookup(ask)
    rules.fetch(["A", "B", "C"])
    assert asked == [["A", "B", "C"], ["B", "C"], ["C"]]
    assert [rules.resolve(name).name for name in "ABC"] == ["A", "B", "C"]
    assert len(asked) == 3


def test_names_beyond_the_limit_are_refused_without_a_suggestion() -> None:
    asked: list[link_pb2.Question] = []

    def ask(question: link_pb2.Question) -> link_pb2.Answer:
        asked.append(question)
        return answer(question)

    rules = FrontEndRuleLookup(ask)
    rules.fetch(f"R{index}" for index in range(20_000))
    with pytest.raises(GradruleError) as caught:
        rules.resolve("Mine")
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"
    assert "20000 rules" in caught.value.message
    assert "unknown_rule" not in {question.WhichOneof("question") for question in asked}


def test_too_long_names_are_not_requested() -> None:
    rules = FrontEndRuleLookup(lambda question: pytest.fail("it asked"))
    with pytest.raises(GradruleError) as caught:
        rules.resolve("x" * 10_000)
    assert reason_name(caught.value.reason) == "UNKNOWN_RULE"


def test_sizes_of_many_blobs_are_requested_in_batches() -> None:
    asked: list[int] = []

    def ask(question: link_pb2.Question) -> link_pb2.Answer:
        asked.append(len(question.blob_sizes.names))
        return link_pb2.Answer(sizes=[7] * asked[-1])

    names = [f"{number:064x}" for number in range(1200)]
    blobs = FrontEndBlobs(ask, Files())
    assert blobs.missing(names) == []
    assert blobs.size(names[-1]) == 7
    assert asked == [500, 500, 200]


class KeepingFrontEnd:
    """Answers as a front end that keeps files of values. `files`: blobs and kept files, by name."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.names: dict[str, str] = {}
        """Names of complete files, by content."""
        self._incoming = link_pb2.Content()
        self._data = b""
        self.sent = 0
        """Bytes of values that workers have sent."""

    def answer(self, question: link_pb2.Question) -> link_pb2.Answer:
        match question.WhichOneof("question"):
            case "content":
                self._incoming, self._data = question.content, b""
                return link_pb2.Answer(file=self.names.get(question.content.name))
            case "part":
                self._data += question.part
                self.sent += len(question.part)
                assert len(self._data) <= self._incoming.size
                if len(self._data) < self._incoming.size:
                    return link_pb2.Answer()
                file = self.names[self._incoming.name] = f".kept-{len(self.files)}"
                self.files[file] = self._data
                return link_pb2.Answer(file=file)
            case "blob_sizes":
                return link_pb2.Answer(sizes=[len(self.files.get(name, b"")) for name in question.blob_sizes.names])
            case "blob":
                return link_pb2.Answer()
            case _:
                return answer(question)

    def forget(self) -> None:
        """Removes all kept files."""
        for file in self.names.values():
            del self.files[file]
        self.names.clear()


class KeepingWorker:
    """A compile worker of a front end that keeps values."""

    def __init__(self, front_end: KeepingFrontEnd) -> None:
        self.files = Files(front_end.files)
        self.frames = Frames(front_end.answer)
        self.frames.service = PreparationService(self.frames, lambda folder: self.files)

    def prepare(self, spec: program_pb2.ProgramSpec) -> tuple[link_pb2.PreparedProgram, bytes]:
        """Returns the answer and the bytes of the `CompileRequest`."""
        task = link_pb2.ProgramTask(spec=spec.SerializeToString(), namespace="n")
        request = link_pb2.PrepareRequest(program=task, limits=Limits().to_values())
        data = self.frames.service.prepare(Frame(Kind.PREPARE, 7, request.SerializeToString()))
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        return link_pb2.PreparedProgram.FromString(data[_LENGTH.size : end]), data[end:]


_WEIGHTS = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)


def _network(scale: float = 1.0) -> bytes:
    """Returns the graph y = relu(x @ w) * large, with two large constants."""
    graph = gr.Graph()
    product = graph.op("MatMul", graph.placeholder("x", "float32", [None, 300]), graph.constant(scale * _WEIGHTS))
    graph.op("Mul", graph.op("Relu", product, name="r"), graph.constant(scale * _WEIGHTS[0]), name="y")
    # The second one has 1200 bytes.
    return graph.to_bytes()


def _of_network(front_end: KeepingFrontEnd, rule: str = "") -> program_pb2.ProgramSpec:
    data = _network()
    name = hashlib.sha256(data).hexdigest()
    front_end.files[name] = data
    found = program_pb2.ProgramSpec(fetches=["y"], graph={"blob_sha256": name})
    found.vjp.ys.append("y")
    found.vjp.xs.append("x")
    if rule:
        override = found.overrides.add(definition=rule_pb2.RuleDefinition(expression=rule))
        override.selector.op_type = "Relu"
    return found


def test_the_second_map_of_a_network_copies_none_of_its_constants() -> None:
    front_end = KeepingFrontEnd()
    worker = KeepingWorker(front_end)
    for number in range(5):
        prepared_program, request = worker.prepare(_of_network(front_end, f"{number} * dy"))
        # A map of a program without values.
        assert len(request) < 4000
        assert prepared_program.graph_digest == hashlib.sha256(_network()).hexdigest()
        [constant] = link_pb2.CompileRequest.FromString(request).variables
        assert constant.kept.sha256 == hashlib.sha256(_WEIGHTS.tobytes()).hexdigest()
        start = constant.kept.offset
        assert front_end.files[constant.kept.file][start : start + _WEIGHTS.nbytes] == _WEIGHTS.tobytes()
    assert front_end.sent == _WEIGHTS.nbytes
    # The graph is neither read nor parsed again.
    assert len(worker.files.read_names) == 1


def test_values_that_the_front_end_has_removed_are_sent_again() -> None:
    front_end = KeepingFrontEnd()
    worker = KeepingWorker(front_end)
    _, first = worker.prepare(_of_network(front_end, "dy"))
    front_end.forget()
    _, second = worker.prepare(_of_network(front_end, "dy"))
    assert front_end.sent == 2 * _WEIGHTS.nbytes
    places = [link_pb2.CompileRequest.FromString(data).variables[0].kept for data in (first, second)]
    assert front_end.files[places[1].file] == _WEIGHTS.tobytes()
    assert len(worker.files.read_names) == 1


def test_a_worker_that_reads_the_graph_anew_sends_no_values_that_are_kept() -> None:
    front_end = KeepingFrontEnd()
    answers = [KeepingWorker(front_end).prepare(_of_network(front_end, "dy")) for _ in range(2)]
    assert answers[0] == answers[1]
    assert front_end.sent == _WEIGHTS.nbytes


def test_maps_in_any_order_give_what_fresh_workers_give() -> None:
    front_end = KeepingFrontEnd()
    worker = KeepingWorker(front_end)
    for number in np.random.default_rng(1).permutation(10):
        spec = _of_network(front_end, f"{number % 7} * dy")
        if number % 3 == 0:
            spec.fetches.append("r")
        assert worker.prepare(spec) == KeepingWorker(front_end).prepare(spec)


def test_a_removed_graph_is_missing_although_a_worker_knows_it() -> None:
    front_end = KeepingFrontEnd()
    sizes = front_end.answer

    def gone(question: link_pb2.Question) -> link_pb2.Answer:
        return link_pb2.Answer(sizes=[-1]) if question.HasField("blob_sizes") else sizes(question)

    worker = KeepingWorker(front_end)
    spec = _of_network(front_end)
    worker.prepare(spec)
    worker.frames.answer = gone
    with pytest.raises(GradruleError) as caught:
        worker.prepare(spec)
    assert reason_name(caught.value.reason) == "BLOB_NOT_FOUND"


def test_digests_are_those_of_programs_that_hold_their_constants() -> None:
    """Stored programs keep their digests."""
    front_end = KeepingFrontEnd()
    spec = _of_network(front_end)
    moved, _ = KeepingWorker(front_end).prepare(spec)
    spec.graph.serialized = _network()
    whole = prepare(spec, CallShape(), FrontEndRuleLookup(answer), Limits(), no_blobs())
    reply = whole.reply
    assert (moved.key, moved.graph_digest, moved.likeness) == (reply.key, reply.graph_digest, reply.likeness)
    assert not whole.request.variables


def test_values_of_variables_in_a_request_are_kept() -> None:
    graph = gr.Graph()
    graph.op("MatMul", graph.placeholder("x", "float32", [None, 300]), graph.variable("w", _WEIGHTS), name="y")
    spec = program_pb2.ProgramSpec(fetches=["y"], graph={"serialized": graph.to_bytes()})
    spec.variables.add(name="w").value.inline_tensor.CopyFrom(tensor_codec.to_message(_WEIGHTS))
    front_end = KeepingFrontEnd()
    worker = KeepingWorker(front_end)
    moved, request = worker.prepare(spec)
    [variable] = link_pb2.CompileRequest.FromString(request).variables
    assert front_end.files[variable.kept.file] == _WEIGHTS.tobytes()
    assert not variable.HasField("value")
    spec.fetches.append("x")
    worker.prepare(spec)
    assert front_end.sent == _WEIGHTS.nbytes
    del spec.fetches[1]
    whole = prepare(spec, CallShape(), FrontEndRuleLookup(answer), Limits(), no_blobs())
    assert moved.key == whole.reply.key


def test_few_graphs_are_kept() -> None:
    front_end = KeepingFrontEnd()
    worker = KeepingWorker(front_end)
    specs = []
    for number in range(6):
        data = _network(number + 2.0)
        name = hashlib.sha256(data).hexdigest()
        front_end.files[name] = data
        specs.append(program_pb2.ProgramSpec(fetches=["y"], graph={"blob_sha256": name}))
        worker.prepare(specs[-1])
    read = len(worker.files.read_names)
    worker.prepare(specs[-1])
    assert len(worker.files.read_names) == read == 6
    worker.prepare(specs[0])
    assert len(worker.files.read_names) == 7
