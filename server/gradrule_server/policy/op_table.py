"""Reads the reviews of ops: `ops.tsv` has a row for each op type of TensorFlow, which allows or denies it.

An op without a row is denied, and so is an op whose definition has changed since its review.
`tools/generate_op_policy.py` adds rows for new ops as denied; people then review them.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradrule.common import op_definitions
from gradrule.common.op_definitions import OpDef

FILE = "ops.tsv"
NOT_REVIEWED = "not reviewed"

_ALLOWED, _DENIED = "allowed", "denied"
_DIGEST_LENGTH = 16
_HEADER = "# op\tdecision\tcategory\tdigest of its definition\treason\n"


_FEED = "feed its output instead"
_REMOVE = "remove it from the graph"

REMEDIES: Mapping[str, str] = {
    "TPU": "trace the model for a CPU or a GPU",
    "across runs": _FEED,
    "code": "write it in TensorFlow's ops, or feed its result",
    "codec": "decode the data at the client, and feed the result",
    "compiler": "write it in TensorFlow's ops; the compiler needs no ops of its own in the graph",
    "control": "build the graph with control flow of version 2",
    "dataset": _FEED,
    "debug": _REMOVE,
    "distributed": "trace the model for one device",
    "file read": "read the file at the client, and feed its content",
    "file write": _REMOVE,
    "internal": "send the graph as it was before TensorFlow optimised it",
    "memory": "use Fill, and ConcatV2 to join tensors",
    "network": _FEED,
    "no kernel": "use another op",
    "process": _REMOVE,
    "queue": _FEED,
    "resource": _FEED,
    "table": _FEED,
    "tensor array": "use TensorArrayV3, or tensor lists",
    "test": _REMOVE,
    "training": "ask for gradients, and train with those",
    "variable": "ask for gradients, and let a session apply them",
    NOT_REVIEWED: "use an op that has been reviewed",
}
"""What a caller can do instead of using a denied op, by category of the op."""


@dataclass(frozen=True, slots=True)
class OpReview:
    """The review of an op: a row of the table.

    Attributes:
        op: The op type.
        allowed: Whether the op may run.
        category: The category of the op; a key of `REMEDIES` if the op is denied.
        digest: The digest of the definition that was reviewed.
        reason: Why the op is allowed or denied.
    """

    op: str
    allowed: bool
    category: str
    digest: str
    reason: str


def op_reviews() -> Mapping[str, OpReview]:
    """Returns all reviews by op type, sorted."""
    return _read_table()


def find_review(op: OpDef) -> OpReview:
    """Returns the review of an op; a denial if the op was not reviewed, or has changed since its review."""
    found = _found.get(op.name)
    if found is None:
        found = review_with_digest(op.name, definition_digest(op))
        # The cache cannot grow without limit, because all of these ops are registered in TensorFlow.
        _found[op.name] = found
    return found


def review_with_digest(name: str, digest: str) -> OpReview:
    """Returns the review of an op whose definition has this digest; a denial if there is none."""
    row = _read_table().get(name)
    if row is not None and row.digest == digest:
        return row
    why = "has not been reviewed" if row is None else "is defined otherwise than when it was reviewed"
    return OpReview(name, False, NOT_REVIEWED, digest, why)


def definition_digest(op: OpDef | bytes) -> str:
    """Returns a digest of an op's inputs, outputs, attributes and statefulness; descriptions do not count."""
    return op_definitions.digest_of([op])[:_DIGEST_LENGTH]


def read_rows(text: str) -> dict[str, OpReview]:
    """Parses the text of the file. Raises `ValueError` for an invalid row or two rows of one op."""
    rows: dict[str, OpReview] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            op, decision, category, digest, reason = line.split("\t")
            if decision not in (_ALLOWED, _DENIED) or op in rows:
                raise ValueError(f"{FILE}: {op} has two rows, or is neither allowed nor denied")
            rows[op] = OpReview(op, decision == _ALLOWED, category, digest, reason)
    return rows


def write_rows(rows: Iterable[OpReview]) -> str:
    """Returns the text of the file, sorted by op type."""
    lines = [
        f"{row.op}\t{_ALLOWED if row.allowed else _DENIED}\t{row.category}\t{row.digest}\t{row.reason}\n"
        for row in sorted(rows, key=lambda row: row.op)
    ]
    return _HEADER + "".join(lines)


_found: dict[str, OpReview] = {}


@functools.cache
def _read_table() -> Mapping[str, OpReview]:
    return read_rows(importlib.resources.files(__package__).joinpath(FILE).read_text("utf-8"))
