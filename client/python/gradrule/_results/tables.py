"""Describes programs in notebooks: tables of tensors and of the rules that nodes got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gradrule._builder.notebook_text import html_line, html_table, names_text
from gradrule._builder.specs import TensorSpec

if TYPE_CHECKING:
    from gradrule._results.call_results import Resolution


def resolutions_table(found: Iterable[Resolution]) -> str:
    """Returns an HTML table of the rules that nodes got."""
    rows = [(item.qualified_name, item.op_type, item.rule, item.label, item.status) for item in found]
    return html_table("Overrides", ("node", "op type", "rule", "label", "status"), rows)


def default_nodes_line(nodes: Sequence[str]) -> str:
    """Returns a line of HTML that counts the nodes that keep TensorFlow's gradient; empty without such nodes."""
    count = f"{len(nodes)} nodes keep" if len(nodes) != 1 else "1 node keeps"
    return html_line(f"{count} TensorFlow's gradient: {names_text(nodes)}" if nodes else "")


def specs_table(caption: str, specs_by_kind: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    """Returns an HTML table of the dtypes and shapes of tensors, by kind and name."""
    rows = [
        (kind, name, spec.dtype, "unknown" if spec.shape is None else _shape_text(spec.shape))
        for kind, by_name in specs_by_kind.items()
        for name, spec in by_name.items()
    ]
    return html_table(caption, ("", "tensor", "dtype", "shape"), rows)


def _shape_text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
