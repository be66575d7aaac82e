"""Updates the table of reviewed ops for the installed TensorFlow, and writes the page that documents it.

python tools/generate_op_policy.py            # writes server/gradrule_server/policy/ops.tsv and docs/reference/ops.md
python tools/generate_op_policy.py --check    # exit code 1 if a committed file differs

Reviewed rows stay unchanged. An op that is new, or whose definition has changed, gets a row that denies it as "not
reviewed"; rows of ops that no longer exist are removed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

# Set before the import of TensorFlow, which reads it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from gradrule_server.policy.op_tables import NOT_REVIEWED, REMEDIES, OpReview, definition_digest, read_rows, write_rows

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "server/gradrule_server/policy/ops.tsv"
PAGE = ROOT / "docs/reference/ops.md"

_INTRODUCTION = """# Allowed ops

A graph is a program of its sender. A server therefore runs only ops that were reviewed and allowed: {allowed} of
TensorFlow's {total} ops. It refuses all others with `OP_NOT_ALLOWED`. The error lists all refused ops of the graph
with node, category and an alternative. Nodes that no result needs are ignored, for example the savers and summaries of
exported graphs. An op that a TensorFlow release adds or changes is denied until it is reviewed.

The same table applies to ops at the top level, in functions, loops and branches, in gradients that are part of a graph,
and in rules that are graphs. The engine also checks the final graph, with its gradients, before it runs.

`gradrule serve --trust full` allows all ops. The operator then trusts every caller: a caller can read and write files
and use the network as far as the engine can. Ops that gradrule does not support (datasets, queues, Python
functions) are still refused, with `UNSUPPORTED_OP`. The Python client replaces lookup tables by constants.

In every mode, devices in a graph are ignored, and names of containers, shared names and attributes that begin with `_`
are removed, except those that gradrule reads itself.

This page is generated from `server/gradrule_server/policy/ops.tsv` by `make op-policy`.
"""


def definitions() -> dict[str, str]:
    """Returns the digest of each op that TensorFlow registers, by op type."""
    ops = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return {op.name: definition_digest(op.SerializeToString()) for op in ops.op}


def current(kept: Mapping[str, OpReview], digests: Mapping[str, str]) -> list[OpReview]:
    """Returns one row for each op: the reviewed row, unless the definition has changed."""
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
    """Returns the text of docs/reference/ops.md."""
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
    parser = argparse.ArgumentParser(description="Updates the table of reviewed ops for the installed TensorFlow.")
    parser.add_argument("--check", action="store_true", help="only compare with the committed files")
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
