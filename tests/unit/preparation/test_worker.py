"""Tests tasks of a compile worker and its questions to the front end."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence

import pytest

from gradrule.v1 import errors_pb2, override_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, error, reason_name
from gradrule_server.link.framing import Buffer, Frame, FrameSocket, Kind
from gradrule_server.link.messages import CallShape, fault_message, read_call_shape, shape_message
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.preparation.references import FrontEndBlobs, FrontEndRuleLookup
from gradrule_server.preparation.worker import PreparationService
from tests.service import raw

_LENGTH = struct.Struct("<Q")
_HASH = "ab" * 32


class Files:
    """Files of blobs, by name."""

    def __init__(self, found: dict[str, bytes] | None = None) -> None:
        self._found = found or {}

    def read(self, name: str) -> bytes:
        return self._found[name]

    def map_kept(self, name: str) -> memoryview:
        return memoryview(self._found[name])


class Frames(FrameSocket):
    """Answers each question immediately; `asked` holds all questions."""

    def __init__(self, answer: Callable[[link_pb2.Question], link_pb2.Answer]) -> None:
        self._answer = answer
        self.service: PreparationService
        self.asked: list[link_pb2.Question] = []

    def send(self, kind: Kind, request_id: int, payload: Buffer | Sequence[Buffer]) -> None:
        assert kind is Kind.QUESTION
        assert isinstance(payload, bytes)
        question = link_pb2.Question.FromString(payload)
        self.asked.append(question)
        self.service.deliver_answer(Frame(Kind.ANSWER, request_id, self._answer(question).SerializeToString()))


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


def test_a_program_that_is_known_is_not_prepared() -> None:
    task = link_pb2.ProgramTask(spec=spec("Mine").SerializeToString(), may_be_known=True)
    frames = Frames(lambda question: link_pb2.Answer(is_known=True))
    frames.service = PreparationService(frames, lambda folder: Files())
    request = link_pb2.PrepareRequest(program=task, limits=Limits().to_values())
    answer = frames.service.prepare(Frame(Kind.PREPARE, 7, request.SerializeToString()))
    assert link_pb2.PreparedProgram.FromString(answer[_LENGTH.size :]).is_known
    assert len(frames.asked) == 1


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
