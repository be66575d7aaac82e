"""Prints the results of commands: tables and JSON."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradrule._progress import can_show
from gradrule._results.call_results import Resolution, Result, Sparse
from gradrule.cli.failures import CommandError, missing_extra
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_PIPE_WIDTH = 200
_GAP = 2
_LEAST_CUT = 24
"""Characters between two columns, and the least width of a column whose cells are cut."""
_SHOWN_VALUES = 24
_PICTURES = (".png", ".svg", ".pdf")
RESOLUTION_COLUMNS = ("node", "op type", "rule", "label", "status")
ARRAY_COLUMNS = ("name", "type", "shape", "norm", "values")


def picture(text: str) -> Path:
    """Returns the path of a picture file; serves as an argparse type."""
    path = Path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"a picture's name ends with {', '.join(_PICTURES)}, got {text!r}")
    return path


def npz(text: str) -> Path:
    """Returns the path of a .npz file; serves as an argparse type."""
    path = Path(text)
    if path.suffix != ".npz":
        raise argparse.ArgumentTypeError(f"a name that ends with .npz is expected, got {text!r}")
    return path


def require_matplotlib() -> None:
    """Raises `CommandError` if Matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_extra("pictures need Matplotlib, which is not installed", "plot")


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
        is_cut = one_line and screen.is_terminal
        if isinstance(screen, PlainScreen):
            screen.print(plain_table(title, columns, cells))
        else:
            screen.print(drawn_table(title, columns, cells, width=screen.width, is_cut=is_cut))


def drawn_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, is_cut: bool = False
) -> RenderableType:
    """Returns a table for rich that fits into `width` characters and keeps words whole.

    A table that is too wide for its longest words is turned: each of its columns becomes a line. `is_cut`: each row
    takes one line; the first column is whole, the others are cut, and those that do not fit are left out.
    """
    from rich.console import Group
    from rich.text import Text

    header, cells = [printable(column) for column in columns], [[printable(cell) for cell in row] for row in rows]
    if is_cut:
        cells = [[" ".join(cell.split()) for cell in row] for row in cells]
        tables = [_rich_table(header, cells, _cut_widths(header, cells, width), is_cut=True)]
    elif (widths := _widths([header, *cells], width)) is not None:
        tables = [_rich_table(header, cells, widths)]
    elif any(header):
        tables = list(_turned_tables(header, cells, width))
    else:
        tables = [_rich_table(header, cells, _folded_widths(cells, width))]
    heading = [Text(printable(title), style="table.title")] if title else []
    return Group(*heading, *(part for one in tables for part in (one, Text(""))))


def _turned_tables(header: list[str], cells: list[list[str]], width: int) -> Iterator[Table]:
    """Yields tables with a line for each column, and as many rows side by side as fit."""

    def turned(count: int) -> list[list[str]]:
        return [list(line) for line in zip(header, *cells[:count], strict=True)]

    while cells:
        count = 1
        while count < len(cells) and _widths(turned(count + 1), width, is_folded=False) is not None:
            count += 1
        lines = turned(count)
        widths = _widths(lines, width) or _folded_widths(lines, width)
        yield _rich_table([""] * len(widths), lines, widths)
        cells = cells[count:]


def _rich_table(header: list[str], cells: list[list[str]], widths: list[int], *, is_cut: bool = False) -> Table:
    """Returns a rich table of columns with these widths; columns without a width are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style, gap = box.SIMPLE_HEAD if any(header) else box.SIMPLE, (0, _GAP - 1, 0, 0)
    drawn = Table(box=style, show_header=any(header), show_edge=False, pad_edge=False, padding=gap)
    for number, (column, width) in enumerate(zip(header, widths, strict=False)):
        is_whole = number == 0 or not is_cut
        drawn.add_column(column, width=width, overflow="fold" if is_whole else "ellipsis", no_wrap=not is_whole)
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row[: len(widths)]))
    return drawn


def _widths(lines: list[list[str]], width: int, *, is_folded: bool = True) -> list[int] | None:
    """Returns widths of columns that fit and keep words whole; None if there are none.

    `is_folded`: cells may be folded between words.
    """
    wanted = _longest(lines, str.splitlines)
    least = _longest(lines, str.split) if is_folded else wanted
    room = width - _GAP * (len(wanted) - 1)
    return None if sum(least) > room else _shrunk(wanted, least, room)


def _cut_widths(header: list[str], cells: list[list[str]], width: int) -> list[int]:
    """Returns widths of the first columns, as many as fit with `_LEAST_CUT` characters each."""
    wanted = _longest([header, *cells], str.splitlines)
    least = [min(wanted[0], width), *(min(one, _LEAST_CUT) for one in wanted[1:])]
    count = next(n for n in range(len(least), 0, -1) if n == 1 or sum(least[:n]) + _GAP * (n - 1) <= width)
    return _shrunk(wanted[:count], least[:count], width - _GAP * (count - 1))


def _folded_widths(lines: list[list[str]], width: int) -> list[int]:
    """Returns widths for a table whose last column gets the remaining room, even if its words are longer."""
    *wanted, _ = _longest(lines, str.splitlines)
    return [*wanted, max(width - sum(wanted) - _GAP * len(wanted), 1)]


def _shrunk(wanted: list[int], least: list[int], room: int) -> list[int]:
    """Returns widths whose sum is at most `room`: the widest columns are made narrower, but not below `least`."""
    widths = [max(min(one, room), low) for one, low in zip(wanted, least, strict=True)]
    while sum(widths) > room:
        widest = max((n for n in range(len(widths)) if widths[n] > least[n]), key=lambda n: widths[n])
        widths[widest] -= 1
    return widths


def _longest(lines: list[list[str]], split: Callable[[str], list[str]]) -> list[int]:
    """Returns the width of the longest part of each column."""
    from rich.cells import cell_len

    return [
        max((cell_len(part) for cell in column for part in split(cell)), default=0)
        for column in zip(*lines, strict=True)
    ]


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


def percent_text(value: float | None) -> str:
    """Returns a relative difference as text, such as `12.5%` or `× 20`; empty for None."""
    if value is None:
        return ""
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.1%}" if value < 10 else f"× {value:.3g}"


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


def result_arrays(result: Result) -> dict[str, tensor_codec.Array]:
    """Returns the arrays of a result for a .npz file: `outputs/NAME`, and `gradients/NAME` of dense gradients."""
    found = {f"outputs/{name}": _npz_array(name, value) for name, value in result.outputs.items()}
    for name, gradient in result.gradients.items():
        if gradient is not None:
            dense = gradient.to_dense() if isinstance(gradient, Sparse) else gradient
            found[f"gradients/{name}"] = _npz_array(name, dense)
    return found


def write_npz(path: Path, arrays: Mapping[str, tensor_codec.Array]) -> None:
    """Writes arrays into a .npz file."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _npz_array(name: str, array: tensor_codec.Array) -> tensor_codec.Array:
    """Converts an array to a dtype that NumPy's file formats support."""
    if array.dtype.kind == "O":
        raise CommandError(f"{name!r} holds strings, which a .npz file cannot hold safely; use --json")
    return array.astype(np.float32) if dtype_text(array) == "bfloat16" else array
