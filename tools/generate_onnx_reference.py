"""Writes docs/reference/onnx.md from the table of ONNX conversions and the definitions of the installed onnx.

python tools/generate_onnx_reference.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx

from gradrule._models.onnx_files import OLDEST_OPSET
from gradrule._models.onnx_table import all_rows

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/reference/onnx.md"

_HEAD = """\
# ONNX operations

This page is generated from the table of conversions by `make docs`. It tells what `gr.from_onnx` makes of each
operation of opsets {oldest} to {newest}.

- **in the graph**: the op types of the nodes, which overrides name. A name of ONNX's own (`Gemm`, `Gelu`) is a function
  of the graph, whose parts TensorFlow's ops compute; both can be named.
- **gradient**: whether gradients pass.
- **refused**: arguments for which `gr.from_onnx` raises `UnsupportedError`. All operations refuse attributes and inputs
  that their conversion does not read, strings, sequences, optional values, and floating-point numbers of 8 bits and
  less. Integers below 8 bits are only between `QuantizeLinear` and `DequantizeLinear`, or constants of the latter.
"""
_EXPANDED = """
## Operations that ONNX defines by functions

These are replaced by the nodes of their functions, in a scope of their name:

"""
_OTHERS = """
Operations of other domains are refused, except functions of the model, whose nodes replace the calls.
"""


def reference() -> str:
    """Returns the text of docs/reference/onnx.md."""
    rows = all_rows()
    versions: dict[str, list[int]] = {}
    functions: dict[str, bool] = {}
    definitions: Any = onnx.defs.get_all_schemas_with_history()
    for schema in definitions:
        if schema.domain == "":
            versions.setdefault(schema.name, []).append(schema.since_version)
            functions[schema.name] = schema.has_function or schema.has_context_dependent_function
    converted = [
        (f"`{name}`", _opsets(versions[name]), row.nodes, "yes" if row.differentiable else "no", row.refuses)
        for name, row in sorted(rows.items())
        if row.convert is not None
    ]
    refused = [(f"`{name}`", row.refuses) for name, row in sorted(rows.items()) if row.convert is None]
    expanded = [name for name in sorted(versions) if name not in rows and functions[name]]
    parts = [_HEAD.format(oldest=OLDEST_OPSET, newest=onnx.defs.onnx_opset_version())]
    parts.append("\n## Converted operations\n\n")
    parts.append(_table(("operation", "versions", "in the graph", "gradient", "refused"), converted))
    parts.append(_EXPANDED)
    parts += [textwrap.fill(", ".join(f"`{name}`" for name in expanded) + ".", 120), "\n"]
    parts.append("\n## Refused operations\n\n")
    parts.append(_table(("operation", "why, and what would be right"), refused))
    parts.append(_OTHERS)
    return "".join(parts)


def _opsets(versions: Iterable[int]) -> str:
    """Returns the versions that models of a supported opset can have."""
    ordered = sorted(versions)
    oldest = max((version for version in ordered if version <= OLDEST_OPSET), default=0)
    return ", ".join(str(version) for version in ordered if version >= oldest)


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |"]
    lines.append("|" + "---|" * lines[0].count(" | ") + "---|")
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
