"""Writes the page with the results of the models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tests.models.comparing import TOLERANCE, Row
from tests.models.substitution import OWN_RULE

_PAGE = """# Whole models, compared with local TensorFlow

`make test-models` writes this page. It runs each model with random weights and two small examples, on a server and with
local TensorFlow, and compares the output and the gradients:

- The gradients are those of a random linear combination of the outputs. They are taken with respect to the input
  (except for the model of words, whose input is integers), and to the first, a middle and the last weight.
- Each model runs without overrides (plain), and with three overrides of the op type in the table: `guided_relu`, `ste`
  and a user's rule, `{own}`. Local TensorFlow does the same with `tf.custom_gradient` around the Keras function that
  makes the op. A test checks that this gradient is used as often as the override is active.
- All values are float32. The table shows the largest difference, relative to the largest element of its tensor. At most
  {tolerance:.0e} passes.

Times are seconds on {cores} cores with TensorFlow {version}, client and server on one machine: tracing the model in the
client; compiling the plain program, with sending the weights; its first run, in which TensorFlow optimises the graph;
and one more run. Runs compute outputs and gradients.

{table}
"""


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Returns the lines of the table in Markdown."""
    variants = list(rows[0].differences)
    yield f"| model | nodes | weights | op type | trace s | compile s | first run s | run s | {' | '.join(variants)} |"
    yield "|---|---:|---:|---|---:|---:|---:|---:|" + "---:|" * len(variants)
    for row in rows:
        seconds = " | ".join(f"{value:.2f}" for value in (row.trace_s, row.compile_s, row.first_s, row.run_s))
        differences = " | ".join(f"{row.differences[variant]:.0e}" for variant in variants)
        yield f"| {row.name} | {row.nodes:,} | {row.weights:,} | {row.op_type} | {seconds} | {differences} |"


def page(rows: Sequence[Row]) -> str:
    """Returns the text of docs/reference/model-comparison.md."""
    return _PAGE.format(
        own=OWN_RULE,
        tolerance=TOLERANCE,
        cores=os.cpu_count(),
        version=tf.__version__,
        table="\n".join(table(rows)),
    )
