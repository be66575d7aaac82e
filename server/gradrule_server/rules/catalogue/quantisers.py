"""Lists rules for whole quantisers: for regions, and for ops whose bounds are inputs with gradients."""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_SEED = Param("seed", None, "another one for every call gives other noise", "integer")
_TAU = Param("tau", 1.0, "temperature", "> 0")


def _softmax_slope(logits: str) -> str:
    """Returns the expression for the gradient of softmax(logits / tau)."""
    p = f"softmax(({logits}) / tau)"
    return f"{p} * (dy - sum(dy * {p}, axis=-1)) / tau"


def _fake_quant() -> str:
    """Returns TensorFlow's gradient: 0 is a level of the moved bounds, which get the gradient outside of them."""
    lowest, highest = "narrow_range", "(2 ** num_bits - 1)"
    step = f"((x2 - x1) / ({highest} - {lowest}))"
    # TensorFlow rounds half up here; `round` rounds half to even.
    zero = f"clip(floor({lowest} - x1 / {step} + 0.5), {lowest}, {highest})"
    low, high = f"({lowest} - {zero}) * {step}", f"({highest} - {zero}) * {step}"
    return (
        f"(where(x1 == 0 and x2 == 0 or {low} <= x0 <= {high}, dy, 0), "
        f"sum_to(where(x0 < {low}, dy, 0), x1), sum_to(where(x0 > {high}, dy, 0), x2))"
    )


RULES = (
    BuiltinRule(
        "dorefa_weight",
        "div_no_nan(dy * (1 - square(tanh(x))), max(abs(tanh(x))))",
        "Of a region from weights x to 2 quantize(tanh(x) / (2 max abs(tanh(x))) + 1/2) - 1: the quantizer passes dy, "
        "the maximum counts as a constant. Zero where all x are 0.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160, section 2.3 (tensorpack differentiates the maximum too)",
    ),
    BuiltinRule(
        "dorefa_gradient",
        "2 * max(abs(dy), axis='sample') * (round((2 ** bits - 1) * clip("
        "div_no_nan(dy, 2 * max(abs(dy), axis='sample')) + 0.5 + (uniform(dy, seed) - 0.5) / (2 ** bits - 1), 0, 1)"
        ") / (2 ** bits - 1) - 0.5)",
        "Quantises the gradient of each sample to 2^bits levels between its largest magnitude and minus that, with "
        "noise of half a level. A sample of zeros stays zeros.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160, section 2.5",
        params=(Param("bits", 6.0, "width of a quantised gradient", ">= 1, <= 16, integer"), _SEED),
        op_types=("Identity",),
    ),
    BuiltinRule(
        "pact",
        "(sum_to(where(x0 <= x1, dy, 0), x0), sum_to(where(x0 >= x1, dy, 0), x1))",
        "Of Minimum(x, a) with a learned clipping level a: dx where x <= a, and a gets the sum of dy where x >= a. "
        "At x = a both get it.",
        "Choi et al. 2018 (PACT), arXiv:1805.06085",
        op_types=("Minimum",),
        true_gradient=True,
    ),
    BuiltinRule(
        "lsq",
        "(where(qn < x0 / x1 < qp, dy, 0), sum_to(dy * where(x0 / x1 <= qn, qn, where(x0 / x1 >= qp, qp, round(x0 / "
        "x1) - x0 / x1)), x1) / sqrt(size(x0) * qp))",
        "Of a region from x and a learned step s > 0, which broadcasts to x, to s round(clip(x / s, qn, qp)). The "
        "edges are outside: dx is 0 there, and s gets qn or qp.",
        "Esser et al. 2020 (LSQ), arXiv:1902.08153, sections 2.1 and 2.2; N of its gradient scale counts the elements "
        "of x",
        params=(
            Param("qn", None, "lowest level, the paper's -Q_N", "<= 0"),
            Param("qp", None, "highest level, the paper's Q_P", "> 0"),
        ),
    ),
    BuiltinRule(
        "fake_quant",
        _fake_quant(),
        "TensorFlow's own gradient, written out: dx where x is within the nudged bounds, edges included; min and max "
        "get the sum of dy below and above them. Where min and max are 0, dx is dy.",
        "TensorFlow, FakeQuantWithMinMaxVars; Jacob et al. 2018, arXiv:1712.05877",
        params=(
            Param("num_bits", 8.0, "as the op's attribute", ">= 2, <= 16, integer"),
            Param("narrow_range", 0.0, "as the op's attribute: 1 leaves out the lowest level", ">= 0, <= 1, integer"),
        ),
        op_types=("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"),
    ),
    BuiltinRule(
        "argmax_softmax",
        _softmax_slope("x"),
        "Of a region from logits x to the one-hot vector of their largest: the gradient of softmax(x / tau) along the "
        "last axis.",
        "straight-through softmax; Jang, Gu, Poole 2017, arXiv:1611.01144, section 2.2",
        params=(_TAU,),
    ),
    BuiltinRule(
        "gumbel_softmax",
        _softmax_slope("x - log(-log(maximum(uniform(x, seed), 1e-7)))"),
        "The same with Gumbel noise in the logits, drawn by the rule from its seed (uniform numbers are kept at 1e-7 "
        "or above): a forward with noise of its own is another sample.",
        "Jang, Gu, Poole 2017 (Straight-Through Gumbel-Softmax), arXiv:1611.01144, section 2.2",
        params=(_TAU, _SEED),
    ),
)
