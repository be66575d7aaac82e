"""Lists rules of layer-wise relevance propagation: dy is the relevance of an op's outputs, dx that of its data input.

In the formulas, `vjp(v)` is Wᵀv, the linear op's own gradient of x; `vjp(v; weights)` is the same with other weights,
and `op(v; weights)` is the op applied to v. `st(z)` keeps z away from 0: z + eps where z >= 0, else z - eps. `pos` and
`neg` are the parts above and below 0. A layer is a linear op without a bias (b = 0), or a linear op and the addition of
its bias b.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_EPS = Param("eps", 1e-6, "keeps divisors off 0, with their sign (+ at 0)", "> 0")
_BACH = "Bach et al. 2015, doi:10.1371/journal.pone.0130140"
_NOTHING = "Weights and bias get no gradient."


def _layer_rule(
    name: str, formula: str, description: str, reference: str, *params: Param, op_types: tuple[str, ...] = ("@linear",)
) -> BuiltinRule:
    """Returns a rule for a linear op, alone or with its bias."""
    return BuiltinRule(
        name,
        None,
        f"{description} {_NOTHING}",
        reference,
        params=params,
        op_types=op_types,
        formula=formula,
        per_sample=True,
    )


RULES = (
    _layer_rule(
        "lrp_epsilon",
        "x * vjp(dy / st(op(x; W) + b))",
        "Shares relevance out in proportion to what each input contributes to the output; eps takes a part of it.",
        f"{_BACH}, eq. 58; zennit Epsilon",
        _EPS,
    ),
    _layer_rule(
        "lrp_0",
        "x * vjp(div_no_nan(dy, op(x; W) + b))",
        "lrp_epsilon without eps: an output that is exactly 0 passes nothing on.",
        f"{_BACH}, eq. 56; zennit Epsilon(0), which gives NaN at an output of 0",
    ),
    _layer_rule(
        "lrp_zplus",
        "pos(x) * vjp(u; pos(W)) + neg(x) * vjp(u; neg(W)), u = dy / st(op(pos(x); pos(W)) + op(neg(x); neg(W)) + "
        "pos(b))",
        "Shares relevance out among the positive contributions alone.",
        "Montavon et al. 2017, arXiv:1512.02479; zennit ZPlus, which takes negative inputs too",
        _EPS,
    ),
    _layer_rule(
        "lrp_alpha_beta",
        "alpha * (pos(x) * vjp(u; pos(W)) + neg(x) * vjp(u; neg(W))) - beta * (pos(x) * vjp(v; neg(W)) + neg(x) * "
        "vjp(v; pos(W))), u = dy / st(op(pos(x); pos(W)) + op(neg(x); neg(W)) + pos(b)), v = dy / st(op(pos(x); "
        "neg(W)) + op(neg(x); pos(W)) + neg(b))",
        "alpha times the share of the positive contributions less beta times that of the negative ones; relevance is "
        "kept where alpha - beta is 1.",
        f"{_BACH}, eq. 60; zennit AlphaBeta",
        Param("alpha", 2.0, "weight of the positive contributions, 1 + beta", ">= 0"),
        Param("beta", 1.0, "weight of the negative contributions", ">= 0"),
        _EPS,
    ),
    _layer_rule(
        "lrp_gamma",
        "where z = op(x; W) + b is > 0: pos(x) * vjp(u; P) + neg(x) * vjp(u; N), u = dy / st(op(pos(x); P) + "
        "op(neg(x); N) + b + gamma * pos(b)), P = W + gamma * pos(W), N = W + gamma * neg(W); where z < 0: P and N "
        "change places, and b + gamma * neg(b)",
        "Favours contributions of the output's sign by gamma; an output of 0 passes nothing on.",
        "Montavon et al. 2019, doi:10.1007/978-3-030-28954-6_10; zennit Gamma, the generalised form",
        Param("gamma", 0.25, "how much more they count", ">= 0"),
        _EPS,
    ),
    _layer_rule(
        "lrp_zbox",
        "x * vjp(u) - low * vjp(u; pos(W)) - high * vjp(u; neg(W)), u = dy / st(op(x; W) - op(low; pos(W)) - op(high; "
        "neg(W)))",
        "For a first layer whose inputs lie within [low, high]. The bias cancels out.",
        "Montavon et al. 2017 (z^B rule), arXiv:1512.02479; zennit ZBox",
        Param("low", None, "lowest value of the inputs; broadcasts to x"),
        Param("high", None, "highest value of the inputs; broadcasts to x"),
        _EPS,
    ),
    _layer_rule(
        "lrp_wsquare",
        "vjp(dy / st(op(ones_like(x); square(W)) + square(b)); square(W))",
        "For a first layer whose inputs have no bounds: shares relevance out by squared weights, whatever the inputs "
        "are.",
        "Montavon et al. 2017 (w² rule), arXiv:1512.02479; zennit WSquare",
        _EPS,
    ),
    _layer_rule(
        "lrp_flat",
        "vjp(dy / st(op(ones_like(x); ones_like(W))); ones_like(W))",
        "For a first layer: shares relevance out evenly among the inputs of an output.",
        "Lapuschkin et al. 2019, arXiv:1902.10178; zennit Flat",
        _EPS,
    ),
    BuiltinRule(
        "lrp_norm",
        None,
        "Shares relevance out in proportion to what each input contributes to a sum or a mean.",
        "zennit, Norm",
        params=(_EPS,),
        op_types=("@sum", "@pool"),
        formula="each(x * vjp(dy / st(y)))",
        per_sample=True,
    ),
    BuiltinRule(
        "lrp_pass",
        "first(dy)",
        "Passes relevance to the first input unchanged.",
        "zennit, Pass",
        op_types=("@activation", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    ),
)
