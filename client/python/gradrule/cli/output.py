"""Prints the results and the failures of commands: tables, JSON, and one message on stderr with an exit code."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradrule._progress import can_show
from gradrule._results.call_results import Resolution, Sparse
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.errors import GradruleError, UnknownRuleError

if TYPE_CHECKING:
    from rich.table import Table

FAILED = 1
USAGE = 2
INTERRUPTED = 130
_PIPE_WIDTH = 200
_SHOWN_VALUES = 24
_PICTURES = (".png", ".svg", ".pdf")
RESOLUTION_COLUMNS = ("node", "op type", "rule", "label", "status")
ARRAY_COLUMNS = ("name", "type", "shape", "norm", "values")


class CommandError(Exception):
    """Ends a command. The message gives the cause and the remedy; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def missing_extra(what: str, extra: str) -> CommandError:
    """Returns the error for a missing optional dependency; `what` describes it."""
    return CommandError(f"{what}; install it with: pip install 'gradrule[{extra}]'")


def report(command: str, message: str) -> None:
    """Writes the message to stderr."""
    print(f"{command}: {message}", file=sys.stderr)


def describe(failure: GradruleError) -> str:
    """Formats an error: reason, message, all findings with their fields, and the time of a retry."""
    lines = [str(failure)]
    fields = [f"{detail.field}" for detail in failure.details if detail.field]
    if fields:
        lines.append(f"  at: {', '.join(dict.fromkeys(fields))}")
    if isinstance(failure, UnknownRuleError) and any(field.endswith(".rule") for field in fields):
        lines.append("  to use a formula instead of a rule's name, write expr:FORMULA")
    if failure.retry_delay is not None:
        lines.append(f"  retry after {failure.retry_delay:g} s")
    return "\n".join(lines)


def picture(text: str) -> Path:
    """Returns the path of a picture file; serves as an argparse type."""
    path = Path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"a picture's name ends with {', '.join(_PICTURES)}, got {text!r}")
    return path


def shows_progress() -> bool:
    """Returns whether a command shows bars: standard error is a terminal, and rich is installed."""
    return can_show() and importlib.util.find_spec("rich") is not None


class Screen(Protocol):
    """Types the output of commands: rich's `Console` or `PlainScreen`."""

    @property
    def is_terminal(self) -> bool: ...

    @property
    def width(self) -> int: ...

    def print(self, *objects: Any) -> None:
        """Prints a line."""


class PlainScreen:
    """Prints plain text if rich is not installed: no frames, colours or animations."""

    is_terminal = False
    width = _PIPE_WIDTH

    def print(self, *objects: Any) -> None:
        """Prints a line."""
        print(*objects)


def console() -> Screen:
    """Returns the screen for standard output, with rich's markup disabled for names and messages."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return PlainScreen()
    screen = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not screen.is_terminal:
        screen.width = _PIPE_WIDTH
    return screen


def table(
    screen: Screen, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, one_line: bool = False
) -> None:
    """Prints a table; prints nothing without rows. `one_line`: cut long cells on a terminal, one line for each row."""
    cells = [list(row) for row in rows]
    if cells:
        is_plain, is_cut = isinstance(screen, PlainScreen), one_line and screen.is_terminal
        drawn = plain_table(title, columns, cells) if is_plain else drawn_table(title, columns, cells, is_cut=is_cut)
        screen.print(drawn)


def counted(count: int, what: str) -> str:
    """Returns `1 rule`, `2 rules`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def drawn_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, is_cut: bool = False) -> Table:
    """Returns a rich table. `is_cut`: each row takes one line; long cells are cut."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE_HEAD if any(columns) else box.SIMPLE
    drawn = Table(title=title or None, title_justify="left", box=style, show_header=any(columns), pad_edge=False)
    for number, column in enumerate(columns):
        # The first column has the names, by which the other commands find the rows.
        least = 24 if is_cut and number == 0 else None
        drawn.add_column(printable(column), overflow="ellipsis" if is_cut else "fold", no_wrap=is_cut, min_width=least)
    for row in rows:
        cells = (printable(cell) for cell in row)
        drawn.add_row(*(Text(" ".join(cell.split()) if is_cut else cell) for cell in cells))
    return drawn


def plain_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a plain-text table: title, header, a line, and columns two spaces apart."""
    split = [[printable(cell).splitlines() or [""] for cell in row] for row in rows]
    lines = [list(line) for row in split for line in itertools.zip_longest(*row, fillvalue="")]
    if any(columns):
        header = [printable(column) for column in columns]
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        lines = [header, ["-" * width for width in widths], *lines]
    else:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*([title] if title else []), *body, ""])


def printable(text: str) -> str:
    """Returns the text without control characters; names and messages may come from untrusted users."""
    return "".join(character for character in text if character.isprintable() or character == "\n")


def print_styled(screen: Screen, parts: Iterable[tuple[str, str]]) -> None:
    """Prints a line of text pieces, each with a rich style, which plain text ignores."""
    if isinstance(screen, PlainScreen):
        screen.print("".join(text for text, _ in parts))
        return
    from rich.text import Text

    screen.print(Text.assemble(*parts))


def print_json(value: object) -> None:
    """Prints one line of strict JSON."""
    print(json.dumps(value, allow_nan=False, ensure_ascii=False))


def resolution_rows(overrides: Iterable[Resolution]) -> list[list[str]]:
    """Returns rows of `RESOLUTION_COLUMNS`."""
    return [
        [item.qualified_name, item.op_type, item.rule, item.label, item.status.replace("_", " ")] for item in overrides
    ]


def array_row(name: str, value: tensor_codec.Array | Sparse | None, kind: str = "dense") -> list[str]:
    """Returns a row of `ARRAY_COLUMNS`; for a missing gradient, `kind` is the reason."""
    if value is None:
        return [name, "", "", "", kind.replace("_", " ")]
    if isinstance(value, Sparse):
        shape = shape_text(tuple(int(size) for size in value.dense_shape))
        shown = f"slices {_values(value.indices)} of\n{_values(value.values)}"
        return [name, f"{dtype_text(value.values)}, sparse", shape, norm_text(value.to_dense()), shown]
    return [name, dtype_text(value), shape_text(value.shape), norm_text(value), _values(value)]


def dtype_text(array: tensor_codec.Array) -> str:
    """Returns the dtype's name; `string` for arrays of objects."""
    return dtype_name(tensor_codec.number_of_array(array))


def shape_text(shape: Sequence[int | None] | None) -> str:
    """Returns a shape such as `[?, 3]`; `unknown` for an unknown rank."""
    if shape is None:
        return "unknown"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def norm_text(array: tensor_codec.Array) -> str:
    """Returns the L2 norm of floating-point or complex numbers; empty for other types and empty arrays."""
    if not array.size or array.dtype.kind in "OSUbiu" or "int" in array.dtype.name:
        return ""
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return f"{np.linalg.norm(wide.ravel()):.6g}"


def _values(array: tensor_codec.Array) -> str:
    wide = array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array
    return np.array2string(wide, threshold=_SHOWN_VALUES, edgeitems=3, precision=6, max_line_width=100)


def array_json(value: tensor_codec.Array | Sparse | None, kind: str = "dense") -> dict[str, object]:
    """Returns kind, dtype, shape and values (nested lists, see `plain`); only `kind` without a value."""
    if value is None:
        return {"kind": kind}
    if isinstance(value, Sparse):
        return {
            "kind": "sparse",
            "dtype": dtype_text(value.values),
            "shape": [int(size) for size in value.dense_shape],
            "indices": value.indices.tolist(),
            "values": plain(value.values.tolist()),
        }
    return {"kind": "dense", "dtype": dtype_text(value), "shape": list(value.shape), "values": plain(value.tolist())}


def plain(value: Any) -> Any:
    """Converts a value to types of strict JSON.

    Infinities and NaN become strings as in protobuf's JSON, complex numbers become pairs, and bytes become text or, if
    they are not UTF-8, base64.
    """
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value)
