"""The protos as an interface: everything is documented, reachable from Python, and served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import gradrule as gr
from gradrule.v1 import admin_pb2, blob_pb2, errors_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2
from tests.service import blocking

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos" / "gradrule" / "v1").glob("*.proto"))

# A declaration that needs a comment; options, reserved numbers and closing braces do not.
DECLARATION = re.compile(
    r"^\s*(?:(?:message|enum|service|oneof|rpc)\s+(?P<block>\w+)"
    r"|(?:repeated\s+|optional\s+)?(?:map<[^>]+>|[\w.]+)\s+(?P<field>\w+)\s*=\s*\d+"
    r"|(?P<value>[A-Z][A-Z0-9_]*)\s*=\s*\d+)"
)
WITHOUT_COMMENT = re.compile(r"^\s*(?:syntax|package|import|option|reserved)\b")


def declarations(text: str) -> list[tuple[str, bool]]:
    """Returns declarations and whether a comment stands directly above each."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = None if WITHOUT_COMMENT.match(line) else DECLARATION.match(line)
        if match is not None:
            name = match["block"] or match["field"] or match["value"]
            found.append((name, number > 0 and lines[number - 1].strip().startswith("//")))
    return found


@pytest.mark.parametrize("path", PROTOS, ids=[path.name for path in PROTOS])
def test_everything_has_a_comment(path: Path) -> None:
    found = declarations(path.read_text())
    assert [name for name, commented in found if not commented] == []


def declared_in(file: Any) -> set[str]:
    """Returns the names of all messages, fields, oneofs, enums, values, services and RPCs of a descriptor."""
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    names = {service.name for service in proto.service}
    names |= {method.name for service in proto.service for method in service.method}
    enums = list(proto.enum_type)

    def visit(message: descriptor_pb2.DescriptorProto) -> None:
        if message.options.map_entry:
            return
        names.add(message.name)
        names.update(field.name for field in message.field)
        names.update(oneof.name for oneof in message.oneof_decl if not oneof.name.startswith("_"))
        enums.extend(message.enum_type)
        for nested in message.nested_type:
            visit(nested)

    for message in proto.message_type:
        visit(message)
    for enum in enums:
        names.add(enum.name)
        names.update(value.name for value in enum.value)
    return names


@pytest.mark.parametrize("path", PROTOS, ids=[path.name for path in PROTOS])
def test_comment_check_finds_every_declaration(path: Path) -> None:
    file = descriptor_pool.Default().FindFileByName(f"gradrule/v1/{path.name}")
    assert declared_in(file) == {name for name, _ in declarations(path.read_text())}


def test_every_reason_documents_its_status_code() -> None:
    from gradrule_server.front.calls import status_code

    text = (ROOT / "protos" / "gradrule" / "v1" / "errors.proto").read_text()
    comments = re.findall(r"((?:^ *//.*\n)+)^ *(ERROR_REASON_\w+) = (\d+);", text, re.MULTILINE)
    assert len(comments) == len(errors_pb2.ErrorReason.values())
    for comment, name, number in comments:
        if int(number):
            (code,) = re.findall(r"\[([A-Z_]+)\]", comment)
            assert status_code(errors_pb2.ErrorReason.Value(name)).name == code, name


def test_every_reason_has_an_exception() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()[1:]}
    classes = {
        cls.REASON: cls
        for cls in vars(gr.errors).values()
        if isinstance(cls, type) and issubclass(cls, gr.errors.GradruleError) and cls is not gr.errors.GradruleError
    }
    assert set(classes) == reasons
    assert all(cls.__doc__ for cls in classes.values())


SERVICES: list[ServiceDescriptor] = [
    file.DESCRIPTOR.services_by_name[name]
    for file in (rule_pb2, program_pb2, evaluate_pb2, blob_pb2, session_pb2, admin_pb2)
    for name in file.DESCRIPTOR.services_by_name
]

PYTHON = {
    "RuleService.CreateRule": "create_rule",
    "RuleService.GetRule": "get_rule",
    "RuleService.ListRules": "list_rules",
    "RuleService.DeleteRule": "delete_rule",
    "RuleService.SampleRule": "sample_rule",
    "RuleService.ListPresets": "list_presets",
    "ProgramService.CompileProgram": "compile",
    "ProgramService.GetProgram": "program",
    "ProgramService.ListPrograms": "list_programs",
    "ProgramService.DeleteProgram": "delete_program",
    "GradientService.Evaluate": "evaluate",
    # Calls with large tensors use it by themselves.
    "GradientService.ShareMemory": "evaluate",
    "BlobService.FindMissingBlobs": "find_missing_blobs",
    "BlobService.UploadBlob": "upload",
    "SessionService.RunSession": "session",
    "AdminService.GetServerStatus": "server_status",
}

OF_PROGRAMS = {"GradientService.StreamEvaluate": "forward"}
"""Those that the methods of programs are for."""

OF_OTHERS = {"ProgramService.DescribeGraph"}
"""Those for clients that read no graphs; the Python client reads them itself."""


def test_every_rpc_has_a_method_in_both_clients(client: Any, aio_client: blocking.BlockingClient) -> None:
    assert {*PYTHON, *OF_PROGRAMS, *OF_OTHERS} == {
        f"{service.name}.{method.name}" for service in SERVICES for method in service.methods
    }
    for method in [*PYTHON.values(), "explain", "close"]:
        assert callable(getattr(client, method)), method
        assert callable(getattr(aio_client, method)), method
    for method in OF_PROGRAMS.values():
        assert callable(getattr(gr.Program, method)), method
        assert callable(getattr(gr.aio.AsyncProgram, method)), method


def test_clients_take_the_same_arguments(client: Any, aio_client: blocking.BlockingClient) -> None:
    import inspect

    for method in PYTHON.values():
        sync = inspect.signature(getattr(type(client), method)).parameters
        asynchronous = inspect.signature(getattr(type(aio_client.target), method)).parameters
        assert [(p.name, p.kind, p.default) for p in sync.values()] == [
            (p.name, p.kind, p.default) for p in asynchronous.values()
        ]


@pytest.mark.parametrize("service", SERVICES, ids=[service.name for service in SERVICES])
def test_every_rpc_has_messages_of_its_own(service: ServiceDescriptor) -> None:
    for method in service.methods:
        assert (method.input_type.name, method.output_type.name) == (f"{method.name}Request", f"{method.name}Response")


class Reflection:
    """Discovers services and descriptors from the address alone."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        self.pool = descriptor_pool.DescriptorPool()

    def ask(self, **request: Any) -> reflection_pb2.ServerReflectionResponse:
        (answer,) = self._stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
        return answer

    def services(self) -> set[str]:
        return {service.name for service in self.ask(list_services="").list_services_response.service}

    def load(self, symbol: str) -> None:
        """Adds the file that defines the symbol, and all its imports."""
        for data in self.ask(file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto:
            self._add(descriptor_pb2.FileDescriptorProto.FromString(data))

    def _add(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        for dependency in file.dependency:
            try:
                self.pool.FindFileByName(dependency)
            except KeyError:
                answer = self.ask(file_by_filename=dependency).file_descriptor_response
                for data in answer.file_descriptor_proto:
                    self._add(descriptor_pb2.FileDescriptorProto.FromString(data))
        try:
            self.pool.FindFileByName(file.name)
        except KeyError:
            self.pool.Add(file)

    def call(self, channel: grpc.Channel, service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """Sends JSON and returns JSON, like grpcurl."""
        descriptor = self.pool.FindServiceByName(service).methods_by_name[method]
        message = message_factory.GetMessageClass(descriptor.input_type)()
        json_format.ParseDict(request, message, descriptor_pool=self.pool)
        answer = message_factory.GetMessageClass(descriptor.output_type)()
        answer.ParseFromString(channel.unary_unary(f"/{service}/{method}")(message.SerializeToString(), timeout=30))
        return json_format.MessageToDict(answer, descriptor_pool=self.pool)


def test_reflection_serves_all_services(channel: grpc.Channel) -> None:
    assert Reflection(channel).services() == {
        "gradrule.v1.RuleService",
        "gradrule.v1.ProgramService",
        "gradrule.v1.GradientService",
        "gradrule.v1.BlobService",
        "gradrule.v1.SessionService",
        "gradrule.v1.AdminService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


SIGN = {
    "graph": {
        "inlineGraph": {
            "node": [
                {"name": "x", "op": "Placeholder", "attr": {"dtype": {"type": "DT_FLOAT"}}},
                {"name": "y", "op": "Sign", "input": ["x"]},
            ]
        }
    },
    "overrides": [{"selector": {"opType": "Sign"}, "definition": {"expression": "where(abs(x) <= 1, dy, 0)"}}],
    "fetches": ["y"],
    "vjp": {"ys": ["y"], "xs": ["x"]},
}


def test_json_through_reflection_alone(channel: grpc.Channel) -> None:
    """Works like grpcurl: descriptors from the server, a request in JSON, an answer in JSON."""
    reflection = Reflection(channel)
    reflection.load("gradrule.v1.GradientService")
    value = {"dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "3"}]}, "floatVal": [-2, 0.5, 3]}
    answer = reflection.call(
        channel,
        "gradrule.v1.GradientService",
        "Evaluate",
        {"spec": SIGN, "feeds": [{"name": "x", "value": {"inlineTensor": value}}]},
    )
    import base64
    import struct

    (gradient,) = answer["gradients"]
    content = base64.b64decode(gradient["dense"]["tensorContent"])
    assert gradient["x"] == "x"
    assert struct.unpack("<3f", content) == (0, 1, 0)
    assert answer["overrides"] == [
        {"node": "y", "opType": "Sign", "rule": "inline", "label": "Sign", "status": "RESOLUTION_STATUS_ACTIVE"}
    ]
