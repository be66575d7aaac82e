"""Reads the properties of op types that graphs and engines use: `op_traits.tsv` lists the traits of each op type.

A trait is a word, or a word with a value (`view=0`). To add a trait to an op type, change only its row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

FILE = "op_traits.tsv"

_HEADER = "# op\ttraits (`op_traits.py` explains them)\n"

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
        "placeholder": "its value is fed by each call",
        "plain_add": "adds two inputs with broadcasting",
        "python_function": "calls a Python function",
        # Gradients.
        "zero_gradient": "registered as not differentiable on purpose: it cuts the path, or its output is a constant",
        "keeps_shape": "one input and one output of the same shape",
        # Memory and sizes.
        "view": "outputs share the memory of an input, or a part of it. Value: the input's number; each: output n of n",
        "reads_shape": "reads nothing of its inputs but their shapes",
        "tells_shape": "its output is a size, known where the shape of the input is known",
        "size_inputs": "values of inputs decide how large the output is. Value: the numbers of those inputs",
        # How outputs depend on examples (`engine/batching`).
        "elementwise": "computes element by element. Value: one_input, broadcasts, or one_shape (of all inputs)",
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
    return _table().get(trait, {})


def input_numbers(trait: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the values of a trait whose values are indices of inputs, by op type."""
    return {op: tuple(map(int, value.split(","))) for op, value in trait_values(trait).items()}


@functools.cache
def _table() -> Mapping[str, Mapping[str, str]]:
    """Returns the values by op type, by trait."""
    content = resources.files(__package__).joinpath(FILE).read_text("utf-8")
    if not content.startswith(_HEADER):
        raise ValueError(f"{FILE} starts with another line than {_HEADER!r}")
    table: dict[str, dict[str, str]] = {}
    for line in content.removeprefix(_HEADER).splitlines():
        op, traits = line.split("\t")
        for item in traits.split():
            trait, _, value = item.partition("=")
            table.setdefault(trait, {})[op] = value
    return table
