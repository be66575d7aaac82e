"""Looks up TensorFlow's op definitions in the generated table `ops.json.gz`, which is read at the first use.

`tools/generate_tables.py` writes the table with these functions, so that a digest computed from TensorFlow can be
compared with the table's.
"""

from __future__ import annotations

import base64
import difflib
import functools
import gzip
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gradrule.v1.graph_pb2 import AttrValue, OpSignature

Row = dict[str, Any]
GradientStatus: TypeAlias = Literal["registered", "none", "absent"]


@dataclass(frozen=True, slots=True)
class ArgDef:
    """Defines an input or an output. Exactly one of `type` (nonzero), `type_attr` and `type_list_attr` is set."""

    name: str
    type: int = 0
    type_attr: str = ""
    number_attr: str = ""
    type_list_attr: str = ""
    is_ref: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AttrDef:
    """Defines an attribute: type as TensorFlow writes it (`type`, `list(int)`, …), default, minimum, allowed values."""

    name: str
    type: str
    default: AttrValue | None = None
    minimum: int | None = None
    allowed: AttrValue | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class OpDef:
    """Defines an op type or a function. `gradient`: `registered`, `none` (not differentiable) or `absent`."""

    name: str
    inputs: tuple[ArgDef, ...]
    outputs: tuple[ArgDef, ...]
    attrs: tuple[AttrDef, ...]
    is_stateful: bool = False
    gradient: GradientStatus = "absent"


def find(op_type: str) -> OpDef | None:
    """Returns the definition of a TensorFlow op type, or None."""
    return _find(op_type)


def names() -> tuple[str, ...]:
    """Returns all op types, sorted."""
    return _names()


def gradients() -> tuple[str, ...]:
    """Returns the op types with a registered gradient function, sorted; these are the names of all OP rules."""
    return _gradients()


def graph_version() -> int:
    """Returns the version of TensorFlow's graph format, which sets the semantics of a graph."""
    version: int = _table()["graph_version"]
    return version


def suggest(op_type: str, more: Iterable[str] = ()) -> str:
    """Returns ` Did you mean 'Sign'?` if an op type, or one of `more`, is similar, else an empty string."""
    known = {*names(), *more}
    close = [name for name in sorted(known) if name.lower() == op_type.lower()]
    close = close or difflib.get_close_matches(op_type, sorted(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def digest() -> str:
    """Returns the SHA-256 (hex) of the table's op definitions, comparable with `digest_of` TensorFlow's."""
    return _digest()


def digest_of(op_defs: Iterable[bytes | OpSignature | OpDef]) -> str:
    """Returns the SHA-256 (hex) of op definitions in any order; bytes are serialized `OpDef` messages."""
    return _digest_of_rows(dict(map(_named_row, op_defs)))


def from_signature(signature: OpSignature) -> OpDef:
    """Returns the definition of a graph's function, so that its calls can be treated as ops."""
    return _from_row(*_named_row(signature))


def row_of(signature: OpSignature) -> Row:
    """Returns the table's row for a definition: JSON of the fields that are set, without descriptions."""
    row: Row = {}
    if signature.input_arg:
        row["in"] = [_arg_row(arg) for arg in signature.input_arg]
    if signature.output_arg:
        row["out"] = [_arg_row(arg) for arg in signature.output_arg]
    if signature.attr:
        row["attr"] = [_attr_row(attr) for attr in signature.attr]
    if signature.is_stateful:
        row["stateful"] = True
    return row


def encode_table(ops: Mapping[str, Row], gradients: Mapping[str, str], tensorflow: str, graph_version: int) -> bytes:
    """Returns the bytes of `ops.json.gz`; equal input gives equal bytes."""
    table = {"tensorflow": tensorflow, "graph_version": graph_version, "gradients": dict(gradients), "ops": dict(ops)}
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def decode_table(data: bytes) -> dict[str, Any]:
    """Decodes what `encode_table` returned."""
    table: dict[str, Any] = json.loads(gzip.decompress(data))
    return table


@functools.cache
def _table() -> dict[str, Any]:
    return decode_table(importlib.resources.files(__package__).joinpath("ops.json.gz").read_bytes())


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(_table()["ops"]))


@functools.cache
def _gradients() -> tuple[str, ...]:
    return tuple(sorted(name for name, kind in _table()["gradients"].items() if kind == "registered"))


@functools.cache
def _digest() -> str:
    return _digest_of_rows(_table()["ops"])


_found: dict[str, OpDef] = {}


def _find(op_type: str) -> OpDef | None:
    # Only known op types are cached: clients choose the names, so unknown ones are unbounded.
    op = _found.get(op_type)
    if op is None:
        table = _table()
        row = table["ops"].get(op_type)
        if row is None:
            return None
        op = _found[op_type] = _from_row(op_type, row, table["gradients"].get(op_type, "absent"))
    return op


def _digest_of_rows(rows: Mapping[str, Row]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _named_row(op_def: bytes | OpSignature | OpDef) -> tuple[str, Row]:
    if isinstance(op_def, OpDef):
        op_def = _to_signature(op_def)
    elif isinstance(op_def, bytes):
        op_def = OpSignature.FromString(op_def)
    return op_def.name, row_of(op_def)


def _arg_row(arg: OpSignature.ArgDef) -> Row:
    row: Row = {"name": arg.name}
    for field in ("type", "type_attr", "number_attr", "type_list_attr", "is_ref"):
        value = getattr(arg, field)
        if value:
            row[field] = value
    return row


def _attr_row(attr: OpSignature.AttrDef) -> Row:
    row: Row = {"name": attr.name, "type": attr.type}
    if attr.HasField("default_value"):
        row["default"] = _packed(attr.default_value)
    if attr.has_minimum:
        row["minimum"] = attr.minimum
    if attr.HasField("allowed_values"):
        row["allowed"] = _packed(attr.allowed_values)
    return row


def _packed(value: AttrValue) -> str:
    return base64.b64encode(value.SerializeToString(deterministic=True)).decode()


def _unpacked(text: str | None) -> AttrValue | None:
    return None if text is None else AttrValue.FromString(base64.b64decode(text))


def _from_row(name: str, row: Row, gradient: GradientStatus = "absent") -> OpDef:
    return OpDef(
        name,
        tuple(ArgDef(**arg) for arg in row.get("in", ())),
        tuple(ArgDef(**arg) for arg in row.get("out", ())),
        tuple(
            AttrDef(
                attr["name"],
                attr["type"],
                _unpacked(attr.get("default")),
                attr.get("minimum"),
                _unpacked(attr.get("allowed")),
            )
            for attr in row.get("attr", ())
        ),
        row.get("stateful", False),
        gradient,
    )


def _to_signature(op: OpDef) -> OpSignature:
    signature = OpSignature(name=op.name, is_stateful=op.is_stateful)
    for args, target in ((op.inputs, signature.input_arg), (op.outputs, signature.output_arg)):
        for arg in args:
            target.add(
                name=arg.name,
                type=arg.type,
                type_attr=arg.type_attr,
                number_attr=arg.number_attr,
                type_list_attr=arg.type_list_attr,
                is_ref=arg.is_ref,
            )
    for attr in op.attrs:
        signature.attr.add(
            name=attr.name,
            type=attr.type,
            default_value=attr.default,
            has_minimum=attr.minimum is not None,
            minimum=attr.minimum or 0,
            allowed_values=attr.allowed,
        )
    return signature
