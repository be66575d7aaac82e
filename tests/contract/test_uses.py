"""One request and answer for each use case, future ones included: all need only added fields, RPCs and values.

Each file of `uses` lists what does not exist yet under `adds` (`Message.field`, `Enum.VALUE`, `Service.Rpc`); `embeds`
names existing messages inside new ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gradrule.v1 import admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2

FILES = sorted((Path(__file__).parent / "uses").glob("*.json"))
PACKAGE = evaluate_pb2.DESCRIPTOR.package
SERVICES = {
    f"{service.name}.{method.name}": method
    for file in (
        rule_pb2.DESCRIPTOR,
        program_pb2.DESCRIPTOR,
        evaluate_pb2.DESCRIPTOR,
        blob_pb2.DESCRIPTOR,
        session_pb2.DESCRIPTOR,
        admin_pb2.DESCRIPTOR,
    )
    for service in file.services_by_name.values()
    for method in service.methods
}

Json = Any


class Reading:
    """Parses JSON with today's messages and collects what they lack."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()

    def message(self, value: Json, descriptor: Descriptor) -> Json:
        """Returns `value` without what the message lacks."""
        if descriptor.full_name.startswith("google.protobuf."):
            return value
        known = {}
        for key, item in value.items():
            field = descriptor.fields_by_camelcase_name.get(key)
            if field is None:
                self.unknown.add(f"{descriptor.name}.{key}")
                continue
            kept = self._field(item, field)
            if kept is not None:
                known[key] = kept
        return known

    def _field(self, value: Json, field: FieldDescriptor) -> Json:
        if field.enum_type is not None:
            if value not in field.enum_type.values_by_name:
                self.unknown.add(f"{field.enum_type.name}.{value}")
                return None
            return value
        message = field.message_type
        if message is None:
            return value
        if message.GetOptions().map_entry:
            inner = message.fields_by_name["value"]
            return {key: self._field(item, inner) for key, item in value.items()}
        if field.is_repeated:
            return [self.message(item, message) for item in value]
        return self.message(value, message)


def parse(value: Json, descriptor: Descriptor) -> set[str]:
    """Parses the JSON and returns what the message lacks; the rest must round-trip unchanged."""
    reading = Reading()
    known = reading.message(value, descriptor)
    parsed = json_format.ParseDict(value, message_factory.GetMessageClass(descriptor)(), ignore_unknown_fields=True)
    back = json_format.MessageToDict(type(parsed).FromString(parsed.SerializeToString()))
    assert normalized(back) == normalized(known)
    return reading.unknown


def normalized(value: Json) -> Json:
    """Removes irrelevant differences from JSON: empty parts, and the ways to write a duration."""
    if isinstance(value, dict):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list):
        return [normalized(item) for item in value]
    if isinstance(value, str) and value.endswith("s") and value[:-1].replace(".", "").isdigit():
        return float(value[:-1])
    return value


def descriptor_of(name: str) -> Descriptor:
    descriptor: Descriptor = descriptor_pool.Default().FindMessageTypeByName(f"{PACKAGE}.{name}")
    return descriptor


def at(value: Json, path: str) -> Json:
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def messages(use: Json) -> Iterator[tuple[Json, Descriptor]]:
    """Returns the parts of a use that are messages of today."""
    method = SERVICES.get(use["rpc"])
    if method is not None:
        yield use["request"], method.input_type
        yield use["response"], method.output_type
    for path, name in use.get("embeds", {}).items():
        yield at(use, path), descriptor_of(name)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_use_needs_only_additions(path: Path) -> None:
    use = json.loads(path.read_text())
    assert set(use) <= {"use", "rpc", "request", "response", "adds", "embeds"}
    met = set() if use["rpc"] in SERVICES else {use["rpc"]}
    for value, descriptor in messages(use):
        met |= parse(value, descriptor)
    assert sorted(met) == use["adds"]


def test_every_rpc_of_today_has_a_use() -> None:
    uses = [json.loads(path.read_text()) for path in FILES]
    assert set(SERVICES) <= {use["rpc"] for use in uses if not use["adds"]}


@pytest.mark.parametrize(
    "name", ["EvaluateRequest", "EvaluateResponse", "ProgramSpec", "GradientOverride", "RuleDefinition"]
)
def test_every_field_of_today_has_a_use(name: str) -> None:
    wanted = {field.camelcase_name for field in descriptor_of(name).fields}
    seen: set[str] = set()

    def visit(value: Json, descriptor: Descriptor) -> None:
        for key, item in value.items():
            field = descriptor.fields_by_camelcase_name.get(key)
            if field is None:
                continue
            if descriptor.name == name:
                seen.add(key)
            if field.message_type is None or field.message_type.full_name.startswith("google."):
                continue
            if field.message_type.GetOptions().map_entry:
                inner = field.message_type.fields_by_name["value"].message_type
                for entry in item.values() if inner is not None else ():
                    visit(entry, inner)
            else:
                for entry in item if field.is_repeated else [item]:
                    visit(entry, field.message_type)

    for path in FILES:
        for value, descriptor in messages(json.loads(path.read_text())):
            visit(value, descriptor)
    assert seen == wanted


def test_incompatible_use_is_found() -> None:
    """Tests the test: a field of another kind is no addition."""
    use = json.loads((Path(__file__).parent / "uses" / "evaluate_override.json").read_text())
    use["request"]["feeds"] = {"x": 1}
    with pytest.raises((json_format.ParseError, AttributeError, TypeError)):
        parse(use["request"], evaluate_pb2.EvaluateRequest.DESCRIPTOR)
