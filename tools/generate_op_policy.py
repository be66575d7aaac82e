"""Brings the list of reviewed ops up to the installed TensorFlow, and writes the page that tells people what it says.

python tools/generate_op_policy.py            # writes server/gradrule_server/policy/ops.tsv and docs/ops.md
python tools/generate_op_policy.py --check    # exit code 1 where a committed file differs

Rows that were reviewed stay as they are. An op that is new, or that is defined otherwise by now, gets a row that
denies it as "not reviewed"; rows of ops that are gone go.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

# Before TensorFlow's import, which reads it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from gradrule_server.policy.op_table import NOT_REVIEWED, REMEDIES, OpReview, definition_digest, read_rows, write_rows

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "server/gradrule_server/policy/ops.tsv"
PAGE = ROOT / "docs/ops.md"

_INTRODUCTION = """# Which ops run

A graph is a program of its sender's. A server runs those of TensorFlow's {total} ops that were reviewed and allowed:
{allowed} of them. The others are refused with `OP_NOT_ALLOWED`, all of a graph at once, each with its node, its
category and what to do instead; what no result needs is not looked at, so that savers and summaries of exported graphs
do no harm. The list is closed: an op that a new release of TensorFlow brings, or defines otherwise, is denied until it
was reviewed. The rule holds wherever an op stands: at the top level, in functions, loops and branches, in gradients
that a graph brings along, and in rules that are graphs. The engine holds what it is about to run, gradients included,
against the same list once more.

`gradrule serve --trust full` takes the list away: whoever runs the server vouches for every caller, who can then read
and write files as the engine can, and reach the network where it can. What gradrule cannot follow (datasets, tables,
queues, Python functions) is refused all the same, with `UNSUPPORTED_OP`.

Whatever is trusted: devices in a graph are ignored, names of containers and shared names are dropped, and so are
attributes that begin with `_`, save those that gradrule reads itself.

This page is made from `server/gradrule_server/policy/ops.tsv` by `make op-policy`.
"""


def definitions() -> dict[str, str]:
    """Digest by op type, for all ops that TensorFlow registers."""
    ops = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return {op.name: definition_digest(op.SerializeToString()) for op in ops.op}


def current(kept: Mapping[str, OpReview], digests: Mapping[str, str]) -> list[OpReview]:
    """One row per op: the reviewed one where the definition is the one that was reviewed."""
    rows = []
    for name, digest in digests.items():
        row = kept.get(name)
        if row is None:
            row = OpReview(name, False, NOT_REVIEWED, digest, "is new")
        elif row.digest != digest:
            row = OpReview(name, False, NOT_REVIEWED, digest, f"is defined otherwise than when it was {row.category!r}")
        rows.append(row)
    return rows


def page(rows: Iterable[OpReview]) -> str:
    """docs/ops.md."""
    rows = sorted(rows, key=lambda row: row.op)
    groups: dict[tuple[bool, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.allowed, row.category][row.reason].append(row.op)
    allowed = sum(row.allowed for row in rows)
    parts = [_INTRODUCTION.format(total=len(rows), allowed=allowed)]
    for verdict, title in ((False, "Denied"), (True, "Allowed")):
        parts.append(f"## {title}\n")
        for (is_allowed, category), reasons in sorted(groups.items()):
            if is_allowed is verdict:
                count = sum(map(len, reasons.values()))
                parts.append(f"### {category} ({count})\n")
                if not verdict:
                    parts.append(f"Instead: {REMEDIES[category]}.\n")
                for reason, names in sorted(reasons.items()):
                    parts.append(f"- {reason}: {', '.join(f'`{name}`' for name in names)}")
                parts[-1] += "\n"
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Brings the list of reviewed ops up to the installed TensorFlow.")
    parser.add_argument("--check", action="store_true", help="only compare with the files that are there")
    options = parser.parse_args()
    rows = current(read_rows(LIST.read_text("utf-8")), definitions())
    wanted = {LIST: write_rows(rows), PAGE: page(rows)}
    if options.check:
        return int(any(not path.exists() or path.read_text("utf-8") != text for path, text in wanted.items()))
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
