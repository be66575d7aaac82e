"""Parses the values, rules, overrides and presets on a command line.

Each public function is an argparse type: it raises `ArgumentTypeError`, a usage error, for text that cannot be parsed.
"""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import numpy as np

from gradrule._builder.overrides import Override, Preset, Region
from gradrule._builder.rules import EXPRESSION, Rule, named_or_rule
from gradrule.common import tensor_codec
from gradrule.common.dtypes import NUMBERS
from gradrule.errors import GradruleError

STDIN = "-"
_TENSOR = "tensor:"
_VARIABLE = re.compile(r"(x|y|dy|default)\d*")
PRESET = "preset:"
_NPY, _NPZ = b"\x93NUMPY", b"PK"
_NUMBER = re.compile(r"-?\d+")
_PARAM = re.compile(r"[A-Za-z_]\w*")
_OPENING, _CLOSING = "([{", ")]}"
CONDITIONS = (
    "op", "node", "nodes", "regex", "scope", "pattern", "layer", "region", "near_xs", "near_ys", "position", "dtype",
    "rank", "depends_on", "attr", "order",
)  # fmt: skip
"""Kinds of conditions: the words before the colon."""


def feed(text: str) -> dict[str, Any]:
    """Parses `x=FILE.npy`, `x=FILE.npz`, `x=FILE.npz:KEY`, `x=[1, 2.5]`, or `FILE.npz` for all its arrays.

    `x=-` and `-` read the same from standard input: NumPy's formats or JSON.
    """
    name, equals, value = text.partition("=")
    if text == STDIN:
        given = _stdin_value("feeds")
        if not isinstance(given, dict):
            raise ArgumentTypeError('--feed - takes a .npz file or a JSON object such as {"x": [1, 2]}; write x=-')
        return given
    if not equals:
        if text.endswith(".npz"):
            return _load_npz(Path(text))
        raise ArgumentTypeError(f"expected NAME=VALUE or a file FILE.npz, got {text!r}")
    return {_name(name, text): read_value(value, name)}


def variable(text: str) -> dict[str, Any]:
    """Parses `x=VALUE` for a variable of the rule language: x, y, dy or default, with or without digits."""
    name = text.partition("=")[0]
    if not _VARIABLE.fullmatch(name):
        raise ArgumentTypeError(f"{name!r} is no variable; expected x, x1, y, dy, default, … before the = in {text!r}")
    return feed(text)


def grad_y(text: str) -> tuple[str, Any]:
    """Parses `y=FILE.npy`, `y=[1, 2.5]`, or `y=tensor:NAME` for a tensor of the graph."""
    name, value = assignment(text, "Y=VALUE")
    if value.startswith(_TENSOR):
        return name, value.removeprefix(_TENSOR)
    return name, read_value(value, name)


def parse_rule(text: str) -> str | Rule:
    """Parses a rule's name, or a formula; one that could be a name, such as `dy`, is written `expr:FORMULA`.

    `-` reads the formula from standard input.
    """
    if text == STDIN:
        return Rule(read_stdin_text("the formula"))
    return Rule(text.removeprefix(EXPRESSION)) if text.startswith(EXPRESSION) else named_or_rule(text)


def call_param(text: str) -> tuple[str, str, Any]:
    """Parses `LABEL.PARAM=NUMBER` into label, param and value. The label may contain dots."""
    key, value = assignment(text, "LABEL.PARAM=VALUE")
    label, dot, param = key.rpartition(".")
    if not (dot and label and param):
        raise ArgumentTypeError(
            f"expected LABEL.PARAM=VALUE, got {text!r}; the label is the override's op type or glob"
        )
    return label, param, literal(value, text)


def call_params(text: str) -> tuple[str, str, list[Any]]:
    """Parses `LABEL.PARAM=[VALUE,…]` into label, param and values."""
    label, param, values = call_param(text)
    if not isinstance(values, list) or not values:
        raise ArgumentTypeError(f"expected LABEL.PARAM=[VALUE,…] with several values, got {text!r}")
    return label, param, values


def rule_param(text: str) -> tuple[str, Any]:
    """Parses the declaration of a param: `a=1` with a default, `a` without a default."""
    if "=" not in text:
        return text, None
    name, value = assignment(text, "NAME=VALUE")
    return name, literal(value, text)


def sample_param(text: str) -> tuple[str, Any]:
    """Parses `a=1`, the value of a param of the sampled rule."""
    name, value = assignment(text, "NAME=VALUE")
    return name, literal(value, text)


def read_value(text: str, name: str) -> Any:
    """Reads an array from a `.npy` or `.npz` file, or parses JSON: numbers, strings, booleans, nested lists.

    `-` reads the same from standard input.
    """
    if text == STDIN:
        given = _stdin_value(name)
        if not isinstance(given, dict):
            return given
        return _choose(given, name, "standard input")
    path, key = _file(text)
    if path is None:
        return literal(text, f"{name}={text}")
    if path.suffix == ".npy":
        array = _open(path, repr(str(path)))
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(f"{path} is no .npy file of one array")
        return array
    arrays = _load_npz(path)
    if not key and len(arrays) == 1:
        return next(iter(arrays.values()))
    return _choose(arrays, key or name, str(path))


def _choose(arrays: dict[str, Any], name: str, source: str) -> Any:
    if name not in arrays:
        raise ArgumentTypeError(f"{source} has no array {name!r}; it has {', '.join(map(repr, arrays)) or 'none'}")
    return arrays[name]


def read_stdin(what: str) -> bytes:
    """Reads standard input, which only one argument can have. `what`: names that argument."""
    data = sys.stdin.buffer.read()
    if not data:
        raise ArgumentTypeError(f"standard input has no bytes for {what}; - can be given only once")
    return data


def read_stdin_text(what: str) -> str:
    """Reads text from standard input, without white space at its ends."""
    try:
        return read_stdin(what).decode().strip()
    except UnicodeDecodeError:
        raise ArgumentTypeError(f"standard input is no text for {what}") from None


def _stdin_value(what: str) -> Any:
    data = read_stdin(what)
    if data.startswith((_NPY, _NPZ)):
        return _open(io.BytesIO(data), "standard input")
    try:
        return json.loads(data)
    except ValueError:
        raise ArgumentTypeError(f"standard input has neither a .npy or .npz file nor JSON for {what}") from None


def assignment(text: str, expected: str) -> tuple[str, str]:
    """Splits `NAME=VALUE` into two parts that are not empty; an error shows `expected` as the valid form."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ArgumentTypeError(f"expected {expected}, got {text!r}")
    return _name(name, text), value


def _name(name: str, text: str) -> str:
    if not name:
        raise ArgumentTypeError(f"there is no name before the = in {text!r}")
    return name


def _file(text: str) -> tuple[Path | None, str]:
    if text.endswith((".npy", ".npz")):
        return Path(text), ""
    before, colon, key = text.rpartition(":")
    return (Path(before), key) if colon and before.endswith(".npz") else (None, "")


def _load_npz(path: Path) -> dict[str, tensor_codec.Array]:
    opened = _open(path, repr(str(path)))
    if isinstance(opened, np.ndarray):
        raise ArgumentTypeError(f"{path} is no .npz file; name it .npy if it holds one array")
    return opened


def _open(file: Path | io.BytesIO, source: str) -> tensor_codec.Array | dict[str, tensor_codec.Array]:
    """Opens a NumPy file. Refuses pickled objects: loading them would run their code."""
    try:
        opened = np.load(file, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            return opened
        with opened:
            return {name: opened[name] for name in opened.files}
    except FileNotFoundError:
        raise ArgumentTypeError(f"there is no file {source}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as cause:
        raise ArgumentTypeError(f"cannot read {source}: {cause}") from None


def literal(text: str, whole: str) -> Any:
    """Parses a JSON value. `whole`: the complete argument, for the error message."""
    try:
        return json.loads(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} in {whole!r} is neither a .npy or .npz file nor a JSON value such as 2.5, [1, 2] or '\"text\"'"
        ) from None


def override(text: str) -> Override:
    """Parses `SELECTOR=RULE[:param=value,…]`; a formula as RULE is a rule for this call only.

    A selector is one condition, or several conditions joined by `&`, which must all hold; see `CONDITIONS`.
    """
    selector, right = assignment(text, "OP_TYPE=RULE, node:GLOB=RULE, pattern:MatMul+BiasAdd=RULE, …")
    conditions: dict[str, Any] = {}
    for condition in selector.split("&"):
        for field, value in _condition(condition.strip(), text).items():
            if field in conditions and field != "attrs":
                raise ArgumentTypeError(f"{field} is given twice in {text!r}")
            conditions[field] = {**conditions.get(field, {}), **value} if field == "attrs" else value
    rule, params = _with_params(right)
    try:
        return Override(parse_rule(rule), params=params or None, **conditions)
    except GradruleError as refusal:
        raise ArgumentTypeError(f"{refusal.message} in {text!r}") from None


def preset(text: str) -> Preset:
    """Parses a preset: `NAME` or `NAME:param=value,…`."""
    name, params = _with_params(text)
    if not _PARAM.fullmatch(name):
        raise ArgumentTypeError(f"{name!r} is no preset's name; expected NAME or NAME:param=value,… in {text!r}")
    return Preset(name, **params)


def override_map(text: str) -> tuple[str, list[Override | Preset]]:
    """Parses `LABEL=OVERRIDE,OVERRIDE,…`; `preset:NAME` is a preset, and `LABEL=` is a map without overrides."""
    label, equals, rest = text.partition("=")
    if not equals or not label:
        raise ArgumentTypeError(f"expected NAME=OVERRIDE,OVERRIDE,… got {text!r}")
    return label, [
        preset(part.removeprefix(PRESET)) if part.startswith(PRESET) else override(part) for part in _parts(rest)
    ]


def preset_map(text: str) -> tuple[str, list[Override | Preset]]:
    """Parses `LABEL=PRESET` or `LABEL=PRESET:param=value,…`."""
    label, chosen = assignment(text, "NAME=PRESET")
    return label, [preset(chosen)]


def _condition(text: str, whole: str) -> dict[str, Any]:
    kind, colon, rest = text.partition(":")
    if not colon and kind in ("near_xs", "near_ys"):
        return {"position": kind.replace("near_", "nearest_")}
    if not colon:
        kind, rest = "op", text
    if not rest:
        raise ArgumentTypeError(f"nothing is selected in {whole!r}")
    match kind:
        case "op":
            return {"op_type": rest}
        case "node" | "scope" | "layer":
            return {kind: rest}
        case "nodes":
            return {"node": _words(rest, "+", whole)}
        case "regex":
            return {"node_regex": rest}
        case "pattern":
            return {"pattern": _words(rest, "+", whole)}
        case "region":
            return {"region": _region(rest, whole)}
        case "near_xs" | "near_ys":
            return {"op_type": rest, "position": kind.replace("near_", "nearest_")}
        case "position" | "rank":
            if not _NUMBER.fullmatch(rest):
                raise ArgumentTypeError(f"{kind} is a number, not {rest!r}, in {whole!r}")
            return {kind: int(rest)}
        case "dtype":
            if rest not in NUMBERS:
                raise ArgumentTypeError(f"{rest!r} is no element type such as float32, in {whole!r}")
            return {"dtype": rest}
        case "order":
            return {"order": rest}
        case "depends_on":
            return {"depends_on": _words(rest, ",", whole)}
        case "attr":
            name, _, value = rest.partition(":")
            return {"attrs": {name: _attr(value)}}
        case _:
            raise ArgumentTypeError(f"{kind!r} is no selector; expected one of {', '.join(CONDITIONS)} in {whole!r}")


def _region(text: str, whole: str) -> Region | str:
    """Parses a region: `NAME`, or `INPUT,…>OUTPUT,…`."""
    inputs, arrow, outputs = text.partition(">")
    if not arrow and "," not in text:
        return text
    if not arrow or ">" in outputs:
        raise ArgumentTypeError(f"a region is written region:INPUT,…>OUTPUT,…=RULE, or region:NAME=RULE, not {whole!r}")
    return Region(_words(inputs, ",", whole), _words(outputs, ",", whole))


def _words(text: str, separator: str, whole: str) -> list[str]:
    words = [word.strip() for word in text.split(separator)]
    if not all(words):
        raise ArgumentTypeError(f"there is an empty name in {whole!r}")
    return words


def _attr(text: str) -> Any:
    """Parses an attribute; a value that is not JSON is a string: `attr:padding:SAME`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_params(text: str) -> tuple[str, dict[str, Any]]:
    """Splits `NAME:param=value,…`; does not split formulas, because they may contain colons and commas."""
    if text.startswith(EXPRESSION):
        return text, {}
    name, colon, rest = text.partition(":")
    params: dict[str, Any] = {}
    for part in _split(rest) if colon else ():
        param, value = assignment(part, "param=value")
        if not _PARAM.fullmatch(param):
            raise ArgumentTypeError(f"{param!r} is no param's name in {text!r}")
        params[param] = literal(value, text)
    return name, params


def _parts(text: str) -> list[str]:
    """Splits a map into its overrides, but not at commas inside a region or between params."""
    parts: list[str] = []
    unfinished = ""
    for piece in _split(text):
        piece = f"{unfinished},{piece}" if unfinished else piece
        unfinished = ""
        if "=" not in piece and not piece.startswith(PRESET):
            unfinished = piece
        elif parts and _is_param(piece):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return [*parts, unfinished] if unfinished else parts


def _is_param(piece: str) -> bool:
    """Returns whether text is a param: the value after `=` is JSON, but a rule's name is not."""
    name, _, value = piece.partition("=")
    if not _PARAM.fullmatch(name):
        return False
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _split(text: str) -> list[str]:
    """Splits text at the commas outside all brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
