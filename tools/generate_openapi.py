"""Writes the OpenAPI document of the HTTP API from the protos, with their comments; with --check, only compares it.

`make proto` and `make lint` run it in the tools' environment, as they do for the stubs. The paths come from the
gateway's table of routes, the schemas from the messages; the compact forms of tensors are described here.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "server"))

from gradrule_gateway.routes import PACKAGE, ROUTES, Route  # noqa: E402  # found by the line above

PROTOS = ROOT / "protos"
DOCUMENT = ROOT / "server" / "gradrule_gateway" / "openapi.json"

Field = descriptor_pb2.FieldDescriptorProto
Schema = dict[str, Any]

# Numbers of fields in descriptor.proto, which the paths of comments consist of.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _VALUES, _METHODS = 2, 3, 2, 2

_DTYPE_NAMES = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16"}
_NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_UNSIGNED = "^[0-9]{1,20}$"
_SIGNED = "^-?[0-9]{1,19}$"
_SCALARS: dict[int, Schema] = {
    Field.TYPE_DOUBLE: _NUMBER,
    Field.TYPE_FLOAT: _NUMBER,
    Field.TYPE_BOOL: {"type": "boolean"},
    Field.TYPE_STRING: {"type": "string"},
    Field.TYPE_BYTES: {"type": "string", "contentEncoding": "base64", "pattern": "^(?:[A-Za-z0-9+/]{4})*$"},
    Field.TYPE_INT32: {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    Field.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    Field.TYPE_INT64: {"type": "string", "pattern": _SIGNED},
    Field.TYPE_UINT64: {"type": "string", "pattern": _UNSIGNED},
    Field.TYPE_FIXED64: {"type": "string", "pattern": _UNSIGNED},
}
_WELL_KNOWN: dict[str, Schema] = {
    "google.protobuf.Duration": {"type": "string", "pattern": r"^-?[0-9]{1,11}(\.[0-9]{1,9})?s$", "examples": ["1.5s"]},
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
}
_BY_NAME = {"NamedTensor": "by name", "Gradient": "by the name of x"}

FORMAT: Schema = {
    "name": "format",
    "in": "query",
    "description": "Form of the answer: tensors as nested lists or in base64, or protobuf's own JSON mapping.",
    "schema": {"enum": ["compact", "base64", "proto"], "default": "compact"},
}
TIMEOUT: Schema = {
    "name": "Grpc-Timeout",
    "in": "header",
    "description": "Deadline, in gRPC's notation: at most 8 digits and H, M, S, m (ms), u (µs) or n (ns).",
    "schema": {"type": "string", "pattern": "^0{0,7}[1-9][0-9]{0,7}[HMSmun]$", "maxLength": 9, "examples": ["5S"]},
}


def ref(name: str) -> Schema:
    """A reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


class Document:
    """Collects the schemas of messages and enums, with the comments of the protos."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        self.comments: dict[str, str] = {}
        self.messages: dict[str, descriptor_pb2.DescriptorProto] = {}
        self.enums: dict[str, descriptor_pb2.EnumDescriptorProto] = {}
        self.methods: dict[str, descriptor_pb2.MethodDescriptorProto] = {}
        self.schemas: dict[str, Schema] = {}
        for file in files.file:
            if file.package == PACKAGE:
                self._read(file)

    def _read(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        texts = {
            tuple(place.path): " ".join(place.leading_comments.split())
            for place in file.source_code_info.location
            if place.leading_comments
        }
        for index, service in enumerate(file.service):
            self.comments[service.name] = texts.get((_SERVICES, index), "")
            for number, method in enumerate(service.method):
                rpc = f"{service.name}/{method.name}"
                self.methods[rpc] = method
                self.comments[rpc] = texts.get((_SERVICES, index, _METHODS, number), "")
        for index, message in enumerate(file.message_type):
            self._read_message(f".{PACKAGE}.{message.name}", message, (_MESSAGES, index), texts)
        for index, kind in enumerate(file.enum_type):
            self._read_enum(f".{PACKAGE}.{kind.name}", kind, (_ENUMS, index), texts)

    def _read_message(self, name: str, message: Any, path: tuple[int, ...], texts: dict[tuple[int, ...], str]) -> None:
        self.messages[name] = message
        self.comments[name] = texts.get(path, "")
        for index, field in enumerate(message.field):
            self.comments[f"{name}.{field.name}"] = texts.get((*path, _FIELDS, index), "")
        for index, inner in enumerate(message.nested_type):
            self._read_message(f"{name}.{inner.name}", inner, (*path, _NESTED, index), texts)
        for index, kind in enumerate(message.enum_type):
            self._read_enum(f"{name}.{kind.name}", kind, (*path, 4, index), texts)

    def _read_enum(self, name: str, kind: Any, path: tuple[int, ...], texts: dict[tuple[int, ...], str]) -> None:
        self.enums[name] = kind
        values = [f"{value.name}: {texts.get((*path, _VALUES, index), '')}" for index, value in enumerate(kind.value)]
        # A reference type has no meaning in a request.
        self.comments[name] = "\n".join([texts.get(path, ""), *(text for text in values if "_REF:" not in text)])

    def of_type(self, name: str) -> Schema:
        """The schema of a message or an enum, as a reference; adds it to the document."""
        if name.removeprefix(".") in _WELL_KNOWN:
            return dict(_WELL_KNOWN[name.removeprefix(".")])
        short = name.removeprefix(f".{PACKAGE}.")
        if short not in self.schemas:
            self.schemas[short] = {}
            self.schemas[short] = self._enum(name) if name in self.enums else self._message(name, short)
        return ref(short)

    def _enum(self, name: str) -> Schema:
        values = [value.name for value in self.enums[name].value]
        if name.endswith(".Dt"):
            values = [value for value in values if not value.endswith("_REF")]
            names = [_DTYPE_NAMES.get(value, value.removeprefix("DT_").lower()) for value in values[1:]]
            values = names + values
        return {"type": "string", "description": self.comments[name], "enum": values}

    def _message(self, name: str, short: str) -> Schema:
        message = self.messages[name]
        schema: Schema = {
            "type": "object",
            "description": self.comments[name],
            "properties": {field.json_name: self._field(name, message, field) for field in message.field},
            "additionalProperties": False,
        }
        alone = [oneof.name for oneof in message.oneof_decl if not oneof.name.startswith("_")]
        for index, oneof in enumerate(alone):
            of_oneof = [field for field in message.field if field.HasField("oneof_index")]
            names = [field.json_name for field in of_oneof if field.oneof_index == index]
            pairs = [[one, other] for place, one in enumerate(names) for other in names[place + 1 :]]
            schema.setdefault("allOf", []).extend({"not": {"required": pair}} for pair in pairs)
            schema["description"] += f" At most one of {', '.join(names)} ({oneof})."
        compact = self._compact(short)
        return schema if compact is None else {"anyOf": [*compact, schema], "description": self.comments[name]}

    def _compact(self, short: str) -> list[Schema] | None:
        """The schemas of a message's compact forms."""
        if short in ("Tensor", "TensorSource"):
            self.of_type(f".{PACKAGE}.Dt")
            return [ref("TensorInJson")]
        if short == "Gradient":
            self.of_type(f".{PACKAGE}.Dt")
            return [ref("TensorInJson")]
        if short == "JacobianBlock":
            return [ref("TensorInJson")]
        if short == "TensorShape":
            size = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, {"type": "null"}]}
            return [
                {"type": "array", "items": size, "description": "Sizes; null is an unknown size."},
                {"type": "null", "description": "The rank is unknown."},
            ]
        if short == "ParamValue":
            return [_NUMBER, ref("TensorInJson")]
        return None

    def _field(self, name: str, message: descriptor_pb2.DescriptorProto, field: Any) -> Schema:
        description = self.comments[f"{name}.{field.name}"]
        inner = self.messages.get(field.type_name)
        if inner is not None and inner.options.map_entry:
            value = next(entry for entry in inner.field if entry.name == "value")
            keys = next(entry for entry in inner.field if entry.name == "key")
            schema: Schema = {"type": "object", "additionalProperties": self._single(value)}
            if keys.type != Field.TYPE_STRING:
                schema["propertyNames"] = {"pattern": "^-?[0-9]{1,9}$"}
        elif field.label == Field.LABEL_REPEATED:
            schema = self._repeated(field)
        else:
            schema = self._single(field)
        if "$ref" in schema:
            return {"allOf": [schema], "description": description} if description else schema
        return {**schema, "description": description} if description else schema

    def _single(self, field: Any) -> Schema:
        return self.of_type(field.type_name) if field.type_name else dict(_SCALARS[field.type])

    def _repeated(self, field: Any) -> Schema:
        items = self._single(field)
        listed: Schema = {"type": "array", "items": items}
        short = field.type_name.removeprefix(f".{PACKAGE}.")
        if short == "NamedTensor":
            self.of_type(f".{PACKAGE}.TensorSource")
            by_name: Schema = {"anyOf": [ref("TensorSource"), {"type": "null"}]}
            return {"anyOf": [{"type": "object", "additionalProperties": by_name}, listed]}
        if short == "Gradient":
            return {"anyOf": [{"type": "object", "additionalProperties": items}, listed]}
        if short == "JacobianBlock":
            rows = {"type": "object", "additionalProperties": items}
            return {"anyOf": [{"type": "object", "additionalProperties": rows}, listed]}
        return listed


TENSOR: Schema = {
    "description": "A tensor: a number, a bool, a string or a nested list; or an object with element type, shape, and "
    "the elements as nested lists or in base64 (row-major, little-endian). NaN, infinities and integers beyond 2^53 "
    "are strings. Complex numbers are pairs [re, im]. Without dtype, the tensor that a value is for decides.",
    "anyOf": [
        ref("Elements"),
        {
            "type": "object",
            "properties": {"dtype": ref("Dt"), "shape": ref("KnownShape"), "values": ref("Elements")},
            "required": ["values"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "dtype": ref("Dt"),
                "shape": ref("KnownShape"),
                "base64": {"type": "string", "contentEncoding": "base64"},
            },
            "required": ["dtype", "base64"],
            "additionalProperties": False,
        },
    ],
}
ELEMENTS: Schema = {
    "description": "One element, or a list of lists of elements with equal lengths.",
    "anyOf": [
        {"type": "number"},
        {"type": "boolean"},
        {"type": "string"},
        # Not a reference to this schema: generators of clients drop operations with recursive lists.
        {"type": "array", "items": {"description": "An element, or a list."}},
        {
            "type": "object",
            "description": "A string that is not UTF-8.",
            "properties": {"base64": {"type": "string", "contentEncoding": "base64"}},
            "required": ["base64"],
            "additionalProperties": False,
        },
    ],
}
PROBLEM: Schema = {
    "type": "object",
    "description": "Why a request failed (RFC 9457).",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string", "description": "Phrase of the HTTP status."},
        "status": {"type": "integer", "description": "HTTP status."},
        "detail": {"type": "string", "description": "What is wrong, where, and what would be right."},
        "reason": {"type": "string", "description": "Name of an ErrorReason, for example UNKNOWN_RULE."},
        "code": {"type": "string", "description": "Name of the gRPC status code, for example NOT_FOUND."},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "violations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in ("field", "description", "reason", "node")},
                "required": ["field", "description"],
            },
        },
        "retryAfterSeconds": {"type": "number", "description": "When another try may succeed."},
    },
    "required": ["type", "title", "status", "detail", "reason", "code", "metadata", "violations"],
}
HEALTH: Schema = {
    "type": "object",
    "properties": {"status": {"enum": ["SERVING", "NOT_SERVING"]}},
    "required": ["status"],
}


def answer(description: str, schema: Schema, kind: str = "application/json") -> Schema:
    """The description of an answer."""
    return {"description": description, "content": {kind: {"schema": schema}}}


def operation(document: Document, route: Route) -> Schema:
    """The description of a route."""
    method = document.methods[route.rpc]
    request = document.messages[method.input_type]
    comment = document.comments[route.rpc]
    parameters: list[Schema] = []
    for field in request.field if route.body != "json" else ():
        is_path = field.name == route.path_field
        if route.body == "none" or is_path:
            schema = document._field(method.input_type, request, field)
            description = schema.pop("description", "")
            if is_path:
                schema = {"type": "string", "minLength": 1}
            parameters.append(
                {
                    "name": field.name if is_path else field.json_name,
                    "in": "path" if is_path else "query",
                    "description": description,
                    "schema": schema,
                    **({"required": True} if is_path else {}),
                }
            )
    found: Schema = {
        "operationId": route.rpc.partition("/")[2],
        "tags": [route.rpc.partition("/")[0]],
        "summary": comment.partition(". ")[0].rstrip(".") + ".",
        "description": comment,
        "parameters": [*parameters, FORMAT, TIMEOUT],
    }
    if route.body == "json":
        body = {"application/json": {"schema": document.of_type(method.input_type)}}
        found["requestBody"] = {"required": True, "content": body}
    elif route.body == "bytes":
        body = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        found["requestBody"] = {"required": True, "content": body}
    found["responses"] = {
        "200": answer("Success.", document.of_type(method.output_type)),
        "default": answer("Failure.", ref("Problem"), "application/problem+json"),
    }
    return found


def health(summary: str, *, may_fail: bool) -> Schema:
    """The description of a health check."""
    responses = {"200": answer("Ready.", HEALTH)}
    if may_fail:
        responses["503"] = {
            "description": "Not ready, or not reachable.",
            "content": {
                "application/json": {"schema": HEALTH},
                "application/problem+json": {"schema": ref("Problem")},
            },
        }
        responses["default"] = answer("Failure.", ref("Problem"), "application/problem+json")
    return {"tags": ["Health"], "summary": summary, "responses": responses}


def read_protos() -> descriptor_pb2.FileDescriptorSet:
    """The descriptors of the API's protos, with comments."""
    wellknown = Path(protoc.__file__).parent / "_proto"
    files = [str(path) for path in sorted((PROTOS / "gradrule" / "v1").glob("*.proto"))]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "protos"
        flags = ["--include_imports", "--include_source_info", f"--descriptor_set_out={output}"]
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{wellknown}", *flags, *files]) != 0:
            sys.exit("protoc failed")
        return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())


def generate() -> str:
    """The text of the document."""
    document = Document(read_protos())
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(document, route)
    paths["/v1/health"] = {"get": health("Returns whether an engine of the server is ready.", may_fail=True)}
    paths["/healthz"] = {"get": health("Returns whether the gateway runs.", may_fail=False)}
    size = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    document.schemas |= {
        "TensorInJson": TENSOR,
        "Elements": ELEMENTS,
        "KnownShape": {"type": "array", "items": size, "maxItems": 32},
        "Problem": PROBLEM,
    }
    services = sorted({route.rpc.partition("/")[0] for route in ROUTES})
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "gradrule",
            "version": "v1",
            "description": "Computes gradients with your own rules. Messages of the gRPC API in protobuf's JSON "
            "mapping, tensors also as nested lists.",
        },
        "tags": [{"name": name, "description": document.comments[name]} for name in services],
        "paths": paths,
        "components": {
            "schemas": {name: document.schemas[name] for name in sorted(document.schemas)},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        # A server without credentials needs no token.
        "security": [{}, {"bearer": []}],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Generate, or check with --check."""
    text = generate()
    if sys.argv[1:] == ["--check"]:
        if not DOCUMENT.exists() or DOCUMENT.read_text() != text:
            sys.exit(f"{DOCUMENT.relative_to(ROOT)} is out of date (run `make proto`)")
    else:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
