"""Parses values on a command line: feeds, rules, params.

Each function is an argparse type: it raises `ArgumentTypeError` for text that it cannot parse, a usage error.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import numpy as np

from gradrule._builder.rules import Rule
from gradrule.common import tensor_codec

EXPRESSION = "expr:"
_TENSOR = "tensor:"
_VARIABLE = re.compile(r"(x|y|dy|default)\d*")
# Names that a registry accepts for rules; this includes op types.
_RULE_NAME = re.compile(r"((rules|builtin)/)?[A-Za-z_][A-Za-z0-9_.>-]*")


def feed(text: str) -> dict[str, Any]:
    """Parses `x=FILE.npy`, `x=FILE.npz`, `x=FILE.npz:KEY`, `x=[1, 2.5]`, or `FILE.npz` for all its arrays."""
    name, equals, value = text.partition("=")
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
    """Parses a rule's name, or `expr:FORMULA` for a rule that is not registered."""
    if text.startswith(EXPRESSION):
        return Rule(text.removeprefix(EXPRESSION))
    if not _RULE_NAME.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is no rule's name; write a formula as {EXPRESSION + text!r}")
    return text


def call_param(text: str) -> tuple[str, str, Any]:
    """Parses `LABEL.PARAM=NUMBER` into label, param and value. The label may contain dots."""
    key, value = assignment(text, "LABEL.PARAM=VALUE")
    label, dot, param = key.rpartition(".")
    if not (dot and label and param):
        raise ArgumentTypeError(
            f"expected LABEL.PARAM=VALUE, got {text!r}; the label is the override's op type or glob"
        )
    return label, param, literal(value, text)


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
    """Reads an array from a `.npy` or `.npz` file, or parses JSON: numbers, strings, booleans, nested lists."""
    path, key = _file(text)
    if path is None:
        return literal(text, f"{name}={text}")
    if path.suffix == ".npy":
        array = _open(path)
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(f"{path} is no .npy file of one array")
        return array
    arrays = _load_npz(path)
    if not key and len(arrays) == 1:
        return next(iter(arrays.values()))
    if (key or name) not in arrays:
        raise ArgumentTypeError(f"{path} has no array {key or name!r}; it has {', '.join(map(repr, arrays)) or 'none'}")
    return arrays[key or name]


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
    opened = _open(path)
    if isinstance(opened, np.ndarray):
        raise ArgumentTypeError(f"{path} is no .npz file; name it .npy if it holds one array")
    return opened


def _open(path: Path) -> tensor_codec.Array | dict[str, tensor_codec.Array]:
    """Opens a NumPy file. Refuses pickled objects: loading them would run their code."""
    try:
        opened = np.load(path, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            return opened
        with opened:
            return {name: opened[name] for name in opened.files}
    except FileNotFoundError:
        raise ArgumentTypeError(f"there is no file {str(path)!r}") from None
    except (OSError, ValueError, EOFError) as cause:
        raise ArgumentTypeError(f"cannot read {str(path)!r}: {cause}") from None


def literal(text: str, whole: str) -> Any:
    """Parses a JSON value. `whole`: the complete argument, for the error message."""
    try:
        return json.loads(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} in {whole!r} is neither a .npy or .npz file nor a JSON value such as 2.5, [1, 2] or '\"text\"'"
        ) from None
