"""Reads the two tables of op types: reviews, which allow or deny ops (`ops.tsv`), and traits (`op_traits.tsv`).

An op without a review is denied, and so is an op whose definition has changed since its review.
`tools/generate_op_policy.py` adds rows for new ops as denied; people then review them.

Graphs and engines use traits. A trait is a word, or a word with a value (`view=0`). To add a trait to an op type,
change only its row.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from gradrule.common import op_definitions
from gradrule.common.op_definitions import OpDef

REVIEWS_FILE = "ops.tsv"
NOT_REVIEWED = "not reviewed"

_ALLOWED, _DENIED = "allowed", "denied"
_DIGEST_LENGTH = 16
_REVIEWS_HEADER = "# op\tdecision\tcategory\tdigest of its definition\treason\n"

TRAITS_FILE = "op_traits.tsv"

_TRAITS_HEADER = "# op\ttraits (`op_tables.py` explains them)\n"


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
    "table": "load the model with gr.load or gr.trace of the Python client, which replace tables by constants",
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
    return _read_reviews()


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
    row = _read_reviews().get(name)
    if row is not None and row.digest == digest:
        return row
    why = "has not been reviewed" if row is None else "has changed since its review"
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
                raise ValueError(f"{REVIEWS_FILE}: {op} has two rows, or is neither allowed nor denied")
            rows[op] = OpReview(op, decision == _ALLOWED, category, digest, reason)
    return rows


def write_rows(rows: Iterable[OpReview]) -> str:
    """Returns the text of the file, sorted by op type."""
    lines = [
        f"{row.op}\t{_ALLOWED if row.allowed else _DENIED}\t{row.category}\t{row.digest}\t{row.reason}\n"
        for row in sorted(rows, key=lambda row: row.op)
    ]
    return _REVIEWS_HEADER + "".join(lines)


_found: dict[str, OpReview] = {}


@functools.cache
def _read_reviews() -> Mapping[str, OpReview]:
    return read_rows(importlib.resources.files(__package__).joinpath(REVIEWS_FILE).read_text("utf-8"))


TRAITS: Mapping[str, str] = MappingProxyType(
    {
        # Groups that overrides can select.
        "@activation": "an activation function",
        "@convolution": "a convolution",
        "@dense": "a product of matrices",
        "@linear": "@convolution or @dense",
        "@pool": "a pooling",
        "@sum": "may add values that all depend on the xs",
        "@bias": "may add a bias: one input does not depend on the xs",
        "@step": "a comparison that may be a step function: a Cast of its result follows",
        # Structure of graphs.
        "batch_norm": "a batch normalisation that a rewrite may fold into the linear op before it",
        "batch_norm_param": "may compute parameters of such a normalisation",
        "bodies": "runs functions as control flow. Value: its attributes that name them",
        "branch": "runs one of its functions",
        "call": "calls one function",
        "loop": "runs its functions again and again",
        "loop_v1": "part of a loop of control flow version 1; types cannot be inferred around its cycle",
        "linear_operands": "linear in each of two inputs. Value: the numbers of the data and of the weights",
        "matrix_product": "multiplies and sums along axes",
        "moves_elements": "outputs the elements of one input, reordered or padded with zeros. Value: its number",
        "permutes": "has a gradient, and may output the elements of an input in another order and the same shape. "
        "Value: its number",
        "parameterised": "applies parameters to data, not element by element, and is no linear op of two operands",
        "placeholder": "its value is fed by each call",
        "plain_add": "adds two inputs with broadcasting",
        "python_function": "calls a Python function",
        # Gradients.
        "zero_gradient": "registered as not differentiable on purpose: it cuts the path, or its output is a constant",
        "keeps_shape": "one input and one output of the same shape",
        # Randomness.
        "draws_random": "draws random numbers from a state that is not one of its inputs",
        # Memory and sizes.
        "view": "outputs share the memory of an input, or a part of it. Value: the input's number; each: output n of n",
        "reads_shape": "reads nothing of its inputs but their shapes",
        "tells_shape": "its output is a size, known where the shape of the input is known",
        # How outputs depend on elements of the inputs.
        "elementwise": "computes element by element",
        "reduction": "reduces along the axes that the second input names",
        # These ops do not have the trait `xla`:
        # - ops that fail for some values (Assert, CheckNumerics, GatherV2, InvertPermutation, integer division): with
        #   XLA they do not fail;
        # - random ops: XLA draws other numbers;
        # - sorting and ArgMax: the results differ where values are equal;
        # - convolutions and pooling: they were slower with XLA;
        # - loops and branches: XLA compiles them for fixed sizes only;
        # - ops on strings or resources, and ops whose output size depends on values;
        # - SqrtGrad, RsqrtGrad and ReciprocalGrad: their kernels give 0 for an upstream gradient of 0, for any operand;
        # - ClipByValue: the result differs if the lower bound exceeds the upper bound, or if a bound is NaN.
        # DivNoNan and Pow have it for floats only: with integers they differ or fail for some values.
        "xla": "XLA computes it as TensorFlow's kernels do, up to rounding. Value: floats, if for floats only",
    }
)
"""Every trait, with its meaning."""


def ops_with(trait: str, value: str | None = None) -> frozenset[str]:
    """Returns the op types with a trait, and with this value of it if given. Raises `KeyError` for an unknown trait."""
    return frozenset(op for op, found in trait_values(trait).items() if value is None or found == value)


def trait_values(trait: str) -> Mapping[str, str]:
    """Returns the values of a trait by op type; empty strings for a trait without values. Raises `KeyError`."""
    if trait not in TRAITS:
        raise KeyError(f"there is no op trait {trait!r}")
    return _read_traits().get(trait, {})


def input_numbers(trait: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the values of a trait whose values are indices of inputs, by op type."""
    return {op: tuple(map(int, value.split(","))) for op, value in trait_values(trait).items()}


@functools.cache
def _read_traits() -> Mapping[str, Mapping[str, str]]:
    """Returns the values by op type, by trait."""
    content = resources.files(__package__).joinpath(TRAITS_FILE).read_text("utf-8")
    if not content.startswith(_TRAITS_HEADER):
        raise ValueError(f"{TRAITS_FILE} starts with another line than {_TRAITS_HEADER!r}")
    table: dict[str, dict[str, str]] = {}
    for line in content.removeprefix(_TRAITS_HEADER).splitlines():
        op, traits = line.split("\t")
        for item in traits.split():
            trait, _, value = item.partition("=")
            table.setdefault(trait, {})[op] = value
    return table
