"""Holds the results of comparing a graph under several override maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gradrule._builder.notebook_text import html_table, names_text, short_repr
from gradrule._comparison.numeric_gradients import FiniteDifferences
from gradrule._results.call_results import Resolution
from gradrule.common.tensor_codec import Array

DEFAULT = "default"
FINITE_DIFFERENCES = "finite_differences"


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRow:
    """Describes the upstream gradient of one tensor under one label.

    Attributes:
        tensor: name of the tensor.
        op_type: op type of the node that computes it.
        is_x: whether the tensor is one of the xs.
        label: label of the override map, `default` or `finite_differences`.
        norm: Euclidean norm of the gradient; None without a gradient.
        difference: norm of the difference from the reference, relative to the reference's norm; infinite if that norm
            is zero; None for the reference itself.
        from_finite_differences: the same, relative to the finite differences; only for xs.
    """

    tensor: str
    op_type: str
    is_x: bool
    label: str
    norm: float | None
    difference: float | None
    from_finite_differences: float | None

    def __repr__(self) -> str:
        return short_repr(f"<ComparedRow {self.label} {self.tensor!r}: norm {self.norm}, difference {self.difference}>")


@dataclass(frozen=True, slots=True, repr=False)
class FirstDifference:
    """Names the first tensor, from the ys to the xs, whose gradient differs from the reference's.

    Attributes:
        tensor: the tensor whose upstream gradient differs.
        op_type: op type of the node that computes it.
        difference: relative to the norm of the reference's gradient.
        rules: the active overrides of the nodes that consume the tensor; they cause the difference.
    """

    tensor: str
    op_type: str
    difference: float
    rules: tuple[Resolution, ...]

    def __repr__(self) -> str:
        return short_repr(f"<FirstDifference {self.tensor!r} ({self.op_type}): {self.difference:.6g}>")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """Holds the gradients of one graph under several override maps.

    Attributes:
        labels: in order; `default` first if the graph has a gradient without overrides, `finite_differences` last.
        reference: the label that differences refer to: `default`, else the first label; None without labels.
        gradients: float64 arrays of the shape of x, by label, then by x; None if y does not depend on x.
        rows: for each label, the tensors on the path from the ys to the xs, then the xs.
        first_differences: by label; None if no gradient differs from the reference's.
        overrides: the rule of each overridden node, by label.
        finite_differences: None if they were not asked for or could not be computed.
        notes: what was left out, and why.
    """

    labels: tuple[str, ...]
    reference: str | None
    gradients: Mapping[str, Mapping[str, Array | None]]
    rows: tuple[ComparedRow, ...]
    first_differences: Mapping[str, FirstDifference | None]
    overrides: Mapping[str, list[Resolution]]
    finite_differences: FiniteDifferences | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return short_repr(f"<Comparison of {names_text(self.labels)}: {len(self.rows)} rows>")

    def _repr_html_(self) -> str:
        rows = [(row.label, row.tensor, row.op_type, row.norm, row.difference) for row in self.rows]
        return html_table("Comparison", ("label", "tensor", "op type", "norm", "relative difference"), rows)

    def table(self) -> list[dict[str, object]]:
        """Returns the rows as dicts, for data frames and CSV writers."""
        return [asdict(row) for row in self.rows]

    def norms(self, label: str) -> dict[str, float | None]:
        """Returns the Euclidean norm of each tensor's gradient, from the ys to the xs.

        Args:
            label: One of `labels`.
        """
        return {row.tensor: row.norm for row in self.rows if row.label == label}
