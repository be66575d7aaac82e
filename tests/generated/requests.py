"""What a generated case asks of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradrule as gr
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt
from tests.generated.rules import Rule

_DTYPE_NAMES: Mapping[int, str] = {
    Dt.DT_FLOAT: "float32",
    Dt.DT_DOUBLE: "float64",
    Dt.DT_INT32: "int32",
    Dt.DT_BOOL: "bool",
}


@dataclass(frozen=True)
class Override:
    """One entry of the list; conditions that are None are not given. region: inputs and outputs."""

    rule: Rule
    op_type: str | None = None
    node: str | None = None
    node_regex: str | None = None
    scope: str | None = None
    position: int | str | None = None
    pattern: tuple[str, ...] = ()
    dtype: int | None = None
    depends_on: tuple[str, ...] = ()
    region: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    label: str | None = None
    optional: bool = False
    every_order: bool = False
    params: Mapping[str, float] = field(default_factory=dict)

    @property
    def shown_label(self) -> str:
        """The label, or its default as override.proto says."""
        region = self.region[1][0] if self.region else None
        chain = "+".join(self.pattern)
        return self.label or self.op_type or self.node or self.scope or self.node_regex or chain or region or ""

    @property
    def is_only_op_type(self) -> bool:
        return self.op_type is not None and not any(
            (self.node, self.node_regex, self.scope, self.position is not None, self.dtype, self.depends_on)
        )

    def served(self) -> gr.Override:
        given: dict[str, Any] = {
            "op_type": self.op_type,
            "node": self.node,
            "node_regex": self.node_regex,
            "scope": self.scope,
            "position": self.position,
            "pattern": self.pattern or None,
            "dtype": None if self.dtype is None else _DTYPE_NAMES[self.dtype],
            "region": None if self.region is None else gr.Region(*map(list, self.region)),
        }
        return gr.Override(
            self.rule.served(),
            depends_on=list(self.depends_on),
            params=dict(self.params) or None,
            label=self.label,
            optional=self.optional,
            order="all" if self.every_order else "first",
            **given,
        )


@dataclass(frozen=True)
class Request:
    """A graph and one derivative of it.

    kind: vjp, stacked (many upstream gradients at once), jacobian, batched (Jacobian by example), hvp. upstream: by y,
    for stacked with one more axis in front. vectors: by x, for hvp. params: of the call, by label and name.
    """

    graph: graph_pb2.Graph
    feeds: Mapping[str, Any]
    ys: Sequence[str]
    xs: Sequence[str]
    kind: str
    overrides: Sequence[Override]
    upstream: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Any] = field(default_factory=dict)
    stopped: Sequence[str] = ()
    params: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def name_matches(override: Override, name: str) -> bool:
    """`?` and `*` do not match `/`, `**` does; a regular expression matches the whole name."""
    if override.scope is not None and not name.startswith(f"{override.scope}/"):
        return False
    if override.node_regex is not None and re.fullmatch(override.node_regex, name) is None:
        return False
    if override.node is None:
        return True
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*|\*|\?)", override.node)
    return re.fullmatch("".join(words.get(part, re.escape(part)) for part in parts), name) is not None
