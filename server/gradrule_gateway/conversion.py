"""Converts whole bodies: JSON text to the bytes of a request, and the bytes of a response to JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from gradrule.common import wire_format
from gradrule.v1 import admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_gateway import decoding, encoding, json_text, tensors
from gradrule_gateway.decoding import OpenTensor
from gradrule_gateway.encoding import Format
from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.routes import PACKAGE, Route

_MODULES = (admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2)

_INTEGERS = (Dt.DT_INT64, Dt.DT_UINT64)

# The tensors of a program that the values of an EvaluateRequest's field are for.
_TENSORS_OF_FIELD = {"feeds": "inputs", "grad_ys": "ys", "tangents": "xs", "vectors": "xs"}

_HEADER = evaluate_pb2.EvaluateRequest.HEADER_FIELD_NUMBER
_CONTENTS = evaluate_pb2.EvaluateRequest.CONTENTS_FIELD_NUMBER

Types = Mapping[str, Mapping[str, int]]
"""Element types of a program's tensors, by name, for each of `inputs`, `ys` and `xs`."""


Places = list[tuple[str, int, str]]
"""Tensors of a request: field, index in it, and path."""


@dataclass(slots=True)
class DecodedRequest:
    """A request message, and the places of its tensors whose element types the program tells."""

    message: Any
    open: Places = field(default_factory=list)

    def close(self, types: Types) -> None:
        """Sets the types of the open tensors. Raises `Problem`."""
        for field_name, index, path in self.open:
            named = getattr(self.message, field_name)[index]
            number = types.get(_TENSORS_OF_FIELD[field_name], {}).get(named.name.removesuffix(":0"))
            tensors.set_dtype(named.value.inline_tensor, number, path)
        self.open = []


def encode_request(message: Any) -> bytes:
    """Returns the bytes of a request; those of a call of a compiled program are a header and contents.

    Equal calls have equal headers, by which the server finds what it knows about them.
    """
    if not isinstance(message, evaluate_pb2.EvaluateRequest) or not _fits_header(message):
        found: bytes = message.SerializeToString()
        return found
    others = {field.name: value for field, value in message.ListFields() if field.name not in _TENSORS_OF_FIELD}
    header = evaluate_pb2.EvaluateHeader(**others)
    contents: list[bytes] = []
    for name in _TENSORS_OF_FIELD:
        for item in getattr(message, name):
            tensor = item.value.inline_tensor
            sizes = [dim.size for dim in tensor.tensor_shape.dim]
            content = tensor.tensor_content
            # Strings, and numbers that the body lists in protobuf's form.
            is_listed = not content or tensor.tensor_shape.unknown_rank
            getattr(header, name).add(name=item.name, dtype=tensor.dtype, shape=sizes, content_is_tensor=is_listed)
            content = tensor.SerializeToString() if is_listed else content
            contents += (wire_format.prefix(_CONTENTS, len(content)), content)
    data = header.SerializeToString(deterministic=True)
    return b"".join((wire_format.prefix(_HEADER, len(data)), data, *contents))


def _fits_header(call: evaluate_pb2.EvaluateRequest) -> bool:
    """Returns whether a call names a compiled program and holds its tensors, unpacked."""
    tensors = [item.value for name in _TENSORS_OF_FIELD for item in getattr(call, name)]
    is_inline = all(each.HasField("inline_tensor") and not each.inline_tensor.HasField("packed") for each in tensors)
    return bool(call.program) and is_inline and not (call.header or call.contents or call.HasField("shared_memory"))


@cache
def method_of(route: Route) -> MethodDescriptor:
    """Returns the descriptor of a route's RPC."""
    service, _, method = route.rpc.partition("/")
    descriptor = descriptor_pool.Default().FindServiceByName(f"{PACKAGE}.{service}")
    found: MethodDescriptor = descriptor.methods_by_name[method]
    return found


def new_request(route: Route) -> Any:
    """Returns an empty request of a route's RPC."""
    return GetMessageClass(method_of(route).input_type)()


def decode_body(route: Route, body: bytes) -> DecodedRequest:
    """Returns the request in a body. Raises `Problem`."""
    value = json_text.parse(body)
    if not isinstance(value, dict):
        raise malformed("the body is not a JSON object")
    message = new_request(route)
    found = decoding.decode(message, value)
    is_call = isinstance(message, evaluate_pb2.EvaluateRequest)
    is_sample = isinstance(message, rule_pb2.SampleRuleRequest)
    # By identity: messages with equal contents are different tensors.
    waiting: dict[int, OpenTensor] = {}
    for tensor in found:
        if is_call and tensor.field in _TENSORS_OF_FIELD:
            waiting[id(tensor.tensor)] = tensor
        else:
            # Rules compute with floats, and many languages write 1.0 as 1.
            is_float = is_sample and tensor.field == "values" and tensor.tensor.dtype in _INTEGERS
            tensors.set_dtype(tensor.tensor, Dt.DT_FLOAT if is_float else None, tensor.path)
    places = [
        (field_name, index, waiting[id(named.value.inline_tensor)].path)
        for field_name in dict.fromkeys(tensor.field for tensor in waiting.values())
        for index, named in enumerate(getattr(message, field_name))
        if id(named.value.inline_tensor) in waiting
    ]
    return DecodedRequest(message, places)


def decode_to_bytes(route: Route, body: bytes) -> tuple[bytes, Places]:
    """Returns what `decode_body` returns in a form that processes can exchange. Raises `Problem`."""
    decoded = decode_body(route, body)
    return decoded.message.SerializeToString(), decoded.open


def decoded_from_bytes(route: Route, message: bytes, places: Places) -> DecodedRequest:
    """Returns the request that `decode_to_bytes` made bytes of."""
    request = new_request(route)
    request.ParseFromString(message)
    return DecodedRequest(request, places)


def close_bytes(route: Route, message: bytes, places: Places, types: Types) -> bytes:
    """Returns a request with the types of its open tensors set. Raises `Problem`."""
    decoded = decoded_from_bytes(route, message, places)
    decoded.close(types)
    found: bytes = decoded.message.SerializeToString()
    return found


def decode_parameters(route: Route, path: Mapping[str, str], query: Iterable[tuple[str, str]]) -> Message:
    """Returns the request of a route without a body. Raises `Problem`."""
    message: Message = new_request(route)
    given = [(name, route.prefix + text) for name, text in path.items()]
    decoding.decode_fields(message, [*given, *query])
    return message


def encode_answer(route: Route, answer: bytes, form: Format) -> bytes:
    """Returns a response as JSON text. Raises `Problem`."""
    try:
        message = GetMessageClass(method_of(route).output_type).FromString(answer)
    except DecodeError as cause:
        raise Problem("INTERNAL", f"the server's answer cannot be read: {cause}") from None
    return json_text.dump(encoding.encode(message, form))


def program_types(program: program_pb2.Program) -> dict[str, dict[str, int]]:
    """Returns the element types of a program's tensors, under all names that calls may use."""
    types = {
        kind: {spec.name.removesuffix(":0"): spec.dtype for spec in getattr(program, kind)}
        for kind in ("inputs", "ys", "xs")
    }
    for alias, name in program.aliases.items():
        for found in types.values():
            if name.removesuffix(":0") in found:
                found.setdefault(alias, found[name.removesuffix(":0")])
    return types
