"""Makes the payloads of frames that hold a call from requests in the plain form."""

from __future__ import annotations

from google.protobuf.message import Message

from gradrule.v1 import evaluate_pb2
from gradrule_server.link.call_parts import find_parts
from gradrule_server.link.framing import Buffer
from gradrule_server.link.messages import split_values, with_values
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.call_requests import translate


def call_values(request: evaluate_pb2.EvaluateRequest) -> bytes:
    """Returns the bytes of a request with a header that equals a request in the plain form."""
    return b"".join(translate(link_pb2.RawEvaluateRequest.FromString(request.SerializeToString())).values)


def call_payload(message: Message, request: evaluate_pb2.EvaluateRequest, received_ns: int = 0) -> bytes:
    """Returns the payload of a frame with a message and a call, which is given in the plain form."""
    return b"".join(with_values(message.SerializeToString(), received_ns, [call_values(request)]))


def contents_of(payload: Buffer) -> list[bytes]:
    """Returns the contents of the call in the payload of a frame."""
    parts = find_parts(split_values(payload).values)
    assert parts is not None
    return [bytes(parts.data[start:end]) for start, end in parts.contents]
