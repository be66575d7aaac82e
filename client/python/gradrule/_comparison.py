"""What a comparison of override maps gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gradrule._differences import FiniteDifferences
from gradrule._results import Resolution
from gradrule._tensors import Array

DEFAULT = "default"
FINITE_DIFFERENCES = "finite_differences"


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The upstream gradient of one tensor under one label.

    norm: None where there is no gradient. difference: from the reference, relative to its norm (infinite where that is
    zero); None for the reference itself. from_finite_differences: the same from these, for xs alone.
    """

    tensor: str
    op_type: str
    is_x: bool
    label: str
    norm: float | None
    difference: float | None
    from_finite_differences: float | None


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a label's gradients first differ from the reference's, from the ys to the xs.

    tensor: whose upstream gradient differs. rules: those of the nodes that take it.
    """

    tensor: str
    op_type: str
    difference: float
    rules: tuple[Resolution, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A graph under several override maps.

    labels: in order, `default` first where the graph has a gradient of its own, `finite_differences` last. reference:
    what differences are from: `default`, else the first label; None where there is none. gradients: by label and x, in
    float64. rows: the tensors on the path from ys to xs, then the xs, for each label. partings: by label, None where it
    never parts from the reference. overrides: which node got which rule, by label. notes: what was left out, and why.
    """

    labels: tuple[str, ...]
    reference: str | None
    gradients: Mapping[str, Mapping[str, Array | None]]
    rows: tuple[ComparedRow, ...]
    partings: Mapping[str, Parting | None]
    overrides: Mapping[str, list[Resolution]]
    finite_differences: FiniteDifferences | None
    notes: tuple[str, ...]

    def table(self) -> list[dict[str, object]]:
        """The rows as dicts, as data frames and CSV writers take them."""
        return [asdict(row) for row in self.rows]

    def norms(self, label: str) -> dict[str, float | None]:
        """Norms by tensor for one label, from the ys to the xs."""
        return {row.tensor: row.norm for row in self.rows if row.label == label}
