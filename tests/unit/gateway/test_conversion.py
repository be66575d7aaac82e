"""JSON ⇄ messages: protobuf's own library is the reference for its mapping; the compact form is read back."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2
from gradrule_gateway import conversion, decoding, encoding, json_text, tensors
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES
from tests.samples import size
from tests.unit.client.plain_requests import translated
from tests.unit.gateway.messages import message_types, messages

TYPES = message_types()
quick = settings(max_examples=size(4, 20), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def decoded(kind: Any, value: Any) -> Any:
    message = GetMessageClass(kind)()
    for tensor in decoding.decode(message, value):
        tensors.set_dtype(tensor.tensor, None, tensor.path)
    return message


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@quick
@given(data=st.data())
def test_protobufs_mapping_is_read_and_written_as_protobuf_does(kind: Any, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    answer = json_text.dump(encoding.encode(message, "proto"))
    assert json_format.Parse(answer, GetMessageClass(kind)()) == message
    text = json_format.MessageToJson(message, preserving_proto_field_name=data.draw(st.booleans()))
    assert decoded(kind, json_text.parse(text.encode())) == json_format.Parse(text, GetMessageClass(kind)())


# Of NamedTensor, Gradient and JacobianBlock only lists have a compact form.
COMPACT = [kind for kind in TYPES if kind.name not in ("NamedTensor", "Gradient", "JacobianBlock")]


@pytest.mark.parametrize("kind", COMPACT, ids=lambda kind: kind.name)
@quick
@given(data=st.data())
def test_the_compact_forms_are_read_back(kind: Any, data: st.DataObject) -> None:
    message = data.draw(messages(kind, with_tensors=True))
    forms: tuple[encoding.Format, ...] = ("compact", "base64")
    for form in forms:
        text = json_text.dump(encoding.encode(message, form))
        assert decoded(kind, json.loads(text)) == message


@cache
def objects(kind: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for JSON objects, with names of the message's fields and others."""
    names = [field.json_name for field in kind.fields] + ["values", "base64", "dtype", "shape", "dense"]
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    return st.dictionaries(
        st.sampled_from(names),
        st.recursive(
            leaves,
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(names) | st.text(), inner),
            max_leaves=8,
        ),
    )


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@quick
@given(data=st.data())
def test_any_json_is_a_message_or_a_problem(kind: Any, data: st.DataObject) -> None:
    value = data.draw(objects(kind))
    try:
        decoded(kind, value)
    except Problem as problem:
        assert problem.status == 400
        json_text.dump(problem.body())


EVALUATE = next(route for route in ROUTES if route.rpc == "GradientService/Evaluate")
LISTED = {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "2"}]}, "floatVal": [1, 2]}
BODY = {
    "program": "programs/p",
    "feeds": {
        "x": {"dtype": "float32", "values": [[1, 2]]},
        "s": {"dtype": "string", "values": ["a", "b"]},
        "n": {"dtype": "int4", "values": [1, -2]},
        "empty": {"dtype": "float32", "shape": [0, 3], "values": []},
        "listed": {"inlineTensor": LISTED},
    },
    "gradYs": {"y": {"dtype": "float64", "values": [[1, 2]]}},
    "stackedGradYs": True,
    "params": {"b": {"values": {"q": 1, "p": 2}}, "a": {"values": {"r": 3}}},
    "runTimeout": "30s",
}


def test_a_call_of_a_compiled_program_is_sent_as_header_and_contents() -> None:
    message = conversion.decode_body(EVALUATE, json.dumps(BODY).encode()).message
    message.run_timeout.FromSeconds(30)
    sent = evaluate_pb2.EvaluateRequest.FromString(conversion.encode_request(message))
    assert sent.header
    found = translated(sent)
    assert found == message
    again = conversion.encode_request(conversion.decode_body(EVALUATE, json.dumps(BODY).encode()).message)
    assert evaluate_pb2.EvaluateRequest.FromString(again).header == sent.header


@pytest.mark.parametrize(
    "body",
    [
        {"spec": {"fetches": ["x"]}, "feeds": BODY["feeds"]},
        {"program": "programs/p", "feeds": {"x": {"blob": {"sha256": "0"}}}},
        {"program": "programs/p", "feeds": {"x": {"inlineTensor": {"packed": {"dtype": "DT_FLOAT"}}}}},
        {"program": "programs/p", "sharedMemory": {}},
        {"header": "", "contents": ["AA=="]},
    ],
    ids=["inline", "blob", "packed", "shared", "own"],
)
def test_other_calls_are_sent_as_they_are(body: dict[str, Any]) -> None:
    message = conversion.decode_body(EVALUATE, json.dumps(body).encode()).message
    assert conversion.encode_request(message) == message.SerializeToString()
