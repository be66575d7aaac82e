"""The reviewed list of ops: `ops.tsv`, one row per op type that TensorFlow registers, each allowed or denied, and why.

Closed by default: an op without a row, or whose definition is another than the one that was reviewed, is denied.
`tools/generate_op_policy.py` adds such rows as denied, for people to review.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradrule import _opdefs
from gradrule._opdefs import OpDef

FILE = "ops.tsv"
NOT_REVIEWED = "not reviewed"

_ALLOWED, _DENIED = "allowed", "denied"
_DIGEST_LENGTH = 16
_HEADER = "# op\tdecision\tcategory\tdigest of its definition\treason\n"


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the review says of an op. `category`: one of `categories`; `digest`: of the definition that was reviewed."""

    op: str
    allowed: bool
    category: str
    digest: str
    reason: str


def rulings() -> Mapping[str, Ruling]:
    """All rows by op type, in the order of their names."""
    return _rulings()


def ruling_of(op: OpDef) -> Ruling:
    """The row of an op; one that denies it where there is none, or where the op is defined otherwise by now."""
    found = _checked.get(op.name)
    if found is None:
        found = judged(op.name, digest_of(op))
        # Only ops that TensorFlow has come here, so this cannot grow without end.
        _checked[op.name] = found
    return found


def judged(name: str, digest: str) -> Ruling:
    """The row of an op of this name whose definition has this digest."""
    row = _rulings().get(name)
    if row is not None and row.digest == digest:
        return row
    why = "has not been reviewed" if row is None else "is defined otherwise than when it was reviewed"
    return Ruling(name, False, NOT_REVIEWED, digest, why)


def digest_of(op: OpDef | bytes) -> str:
    """Tells definitions of an op apart: inputs, outputs, attributes, statefulness; not what is written for people."""
    return _opdefs.digest_of([op])[:_DIGEST_LENGTH]


def read_rows(text: str) -> dict[str, Ruling]:
    """Rows from the file's text."""
    rows: dict[str, Ruling] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            op, decision, category, digest, reason = line.split("\t")
            if decision not in (_ALLOWED, _DENIED) or op in rows:
                raise ValueError(f"{FILE}: the row of {op} stands there twice, or is neither allowed nor denied")
            rows[op] = Ruling(op, decision == _ALLOWED, category, digest, reason)
    return rows


def write_rows(rows: Iterable[Ruling]) -> str:
    """The file's text, sorted."""
    lines = [
        f"{row.op}\t{_ALLOWED if row.allowed else _DENIED}\t{row.category}\t{row.digest}\t{row.reason}\n"
        for row in sorted(rows, key=lambda row: row.op)
    ]
    return _HEADER + "".join(lines)


_checked: dict[str, Ruling] = {}


@functools.cache
def _rulings() -> Mapping[str, Ruling]:
    return read_rows(importlib.resources.files(__package__).joinpath(FILE).read_text("utf-8"))
