"""What was found of the models, for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tests.models.comparing import TOLERANCE, Row
from tests.models.substitution import OWN_RULE

_PAGE = """# Whole models, compared with local TensorFlow

`make test-models` writes this page. Each model has random weights and takes two small examples. Its output, and the
gradients of a random combination of its outputs by the input (a model of words has none) and by the first, a middle and
the last of its weights, are those of local TensorFlow: plain, and with `guided_relu`, `ste` and a user's rule
(`{own}`) in place of the gradient of the op type that stands in
the table. Locally the same is done with `tf.custom_gradient` around the function by which Keras makes the op, and it is
asked for as often as the override is active. All is float32; a difference is a part of the largest element of its
tensor, and at most {tolerance:.0e} passes.

Seconds on {cores} cores, TensorFlow {version}, client and server on one machine: tracing the model in the client,
compiling the plain program (the weights are sent then), its first run, in which TensorFlow optimises the graph, and one
more run; forward and gradients.

{table}
"""


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as Markdown."""
    variants = list(rows[0].differences)
    yield f"| model | nodes | weights | op type | trace s | compile s | first run s | run s | {' | '.join(variants)} |"
    yield "|---|---:|---:|---|---:|---:|---:|---:|" + "---:|" * len(variants)
    for row in rows:
        seconds = " | ".join(f"{value:.2f}" for value in (row.trace_s, row.compile_s, row.first_s, row.run_s))
        differences = " | ".join(f"{row.differences[variant]:.0e}" for variant in variants)
        yield f"| {row.name} | {row.nodes:,} | {row.weights:,} | {row.op_type} | {seconds} | {differences} |"


def page(rows: Sequence[Row]) -> str:
    """The page in `docs`."""
    return _PAGE.format(
        own=OWN_RULE,
        tolerance=TOLERANCE,
        cores=os.cpu_count(),
        version=tf.__version__,
        table="\n".join(table(rows)),
    )
