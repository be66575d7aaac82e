"""Lists rules that explain models: they propagate a relevance or saliency instead of a gradient.

In layer-wise relevance propagation, dy is the relevance of an op's outputs and dx that of its data input. In the
formulas of these rules, `vjp(v)` is Wᵀv, the linear op's own gradient of x; `vjp(v; weights)` is the same with other
weights, and `op(v; weights)` is the op applied to v. `st(z)` keeps z away from 0: z + eps where z >= 0, else z - eps.
`pos` and `neg` are the parts above and below 0. A layer is a linear op without a bias (b = 0), or a linear op and the
addition of its bias b.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_RELUS = ("Relu", "Relu6", "LeakyRelu", "Elu", "Selu")
_WARMUP = (
    Param("step", None, "number of the optimisation step, starting at 0", ">= 0"),
    Param("warmup", 16.0, "last step in which the gradient may be redirected", ">= 0"),
)


def _redirected(passed: str, against: str) -> str:
    """Returns the expression for the op's own gradient, replaced during the warm-up in samples where it is all zero."""
    own = f"where({passed}, dy, 0)"
    return f"where(step > warmup or any({own} != 0, axis='sample'), {own}, where({against}, 0, dy))"


_EPS = Param("eps", 1e-6, "added to divisors, with their sign (+ at 0), to avoid a division by 0", "> 0")
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
    BuiltinRule(
        "guided_relu",
        "where(dy > 0, default, 0)",
        "The op's own gradient where the upstream gradient is positive, zero elsewhere.",
        "Springenberg et al. 2014, arXiv:1412.6806; zennit 0.5.1 rules.py:407",
        aliases=("guided_backprop",),
        op_types=_RELUS,
    ),
    BuiltinRule(
        "deconvnet",
        "maximum(dy, 0)",
        "Passes the positive part of the upstream gradient, independent of the input.",
        "Zeiler, Fergus 2013, arXiv:1311.2901; zennit 0.5.1 rules.py:400",
        op_types=("Relu",),
    ),
    BuiltinRule(
        "relu_beta_smooth",
        "dy * sigmoid(beta * x)",
        "Uses the slope of a softplus with steepness beta: dy/2 at x = 0.",
        "Dombrowski et al. 2019, arXiv:1906.07983; zennit 0.5.1 rules.py:438, beta_smooth 424",
        params=(Param("beta", 10.0, "steepness", "> 0"),),
        op_types=("Relu",),
    ),
    BuiltinRule(
        "linearize",
        "dy",
        "Passes the upstream gradient unchanged.",
        "lucid 0.3.10 optvis/overrides/identity_grad.py:4",
        op_types=("Relu",),
    ),
    BuiltinRule(
        "elrp_activation",
        "dy * y / (x + where(x >= 0, eps, -eps))",
        "Multiplies dy by output / (input ± eps); eps has the sign of x (+ at 0) and avoids a division by 0.",
        "Ancona et al. 2018, arXiv:1711.06104; marcoancona/DeepExplain@87fb43a "
        "deepexplain/tensorflow/methods.py:335, epsilon 320",
        params=(Param("eps", 1e-4, "added to the divisor to avoid a division by 0", "> 0"),),
        op_types=("Relu", "Elu", "Sigmoid", "Tanh", "Softplus"),
    ),
    BuiltinRule(
        "redirected_relu",
        _redirected("x >= 0", "x < 0 and dy > 0"),
        "The gradient of relu (dy at x = 0). During the warm-up, a sample whose gradient would be zero everywhere gets "
        "dy instead, except where gradient descent would further decrease a negative x.",
        "lucid 0.3.10 misc/redirected_relu_grad.py:90, warm-up 112 (it takes the step from the graph's global step)",
        params=_WARMUP,
        op_types=("Relu",),
    ),
    BuiltinRule(
        "redirected_relu6",
        _redirected("0 <= x <= 6", "x < 0 and dy > 0 or x > 6 and dy < 0"),
        "As redirected_relu, for relu6: dy passes at the edges 0 and 6, and an x above 6 is not further increased.",
        "lucid 0.3.10 misc/redirected_relu_grad.py:117, warm-up 143",
        params=_WARMUP,
        op_types=("Relu6",),
    ),
    BuiltinRule(
        "maxpool_as_avgpool",
        None,
        "The gradient of average pooling with the same windows.",
        "lucid 0.3.10 optvis/overrides/smoothed_maxpool_grad.py:18",
        op_types=("MaxPool", "MaxPool3D"),
        formula="vjp of avg_pool(x) at dy",
        per_sample=True,
    ),
    BuiltinRule(
        "maxpool_smooth",
        None,
        "The gradient of a smooth mean that gives large magnitudes more weight. The slope of abs at 0 is 0.",
        "lucid 0.3.10 optvis/overrides/smoothed_maxpool_grad.py:15, epsilon 6",
        params=(Param("eps", 0.01, "added to the divisor to avoid a division by 0", "> 0"),),
        op_types=("MaxPool", "MaxPool3D"),
        formula="vjp of avg_pool(square(x)) / (eps + avg_pool(abs(x))) at dy",
        per_sample=True,
    ),
    BuiltinRule(
        "rectgrad",
        None,
        "Passes dy where the product of output and dy is greater than the percentile q of its sample; zero elsewhere, "
        "also where they are equal.",
        "Kim et al. 2019 (Rectified Gradient), arXiv:1902.04893; 1202kbs/Rectified-Gradient@5e1839b "
        "deepexplain/tensorflow/methods.py:215, percentile 191",
        params=(Param("q", 98.0, "percentile", ">= 0, <= 100"),),
        op_types=("@activation",),
        formula="where(y * dy > percentile(y * dy, q, axis='sample'), dy, 0)",
        per_sample=True,
    ),
    BuiltinRule(
        "deeplift_rescale",
        None,
        "Multiplies dy by DeepLIFT's multiplier: the change of the output divided by the change of the input, compared "
        "with a second forward pass in which the xs are the baseline. Where the input changes by at most eps, uses the "
        "op's own gradient.",
        "Shrikumar, Greenside, Kundaje 2017, arXiv:1704.02685, the Rescale rule; "
        "marcoancona/DeepExplain@87fb43a deepexplain/tensorflow/methods.py:368, eps too; baseline 0 is "
        "gradrule's own choice",
        params=(
            Param("baseline", 0.0, "values of the xs in the second forward pass; broadcasts to their shape"),
            Param("eps", 1e-5, "largest change of the input that is treated as no change", "> 0"),
        ),
        op_types=("@activation",),
        formula="where(abs(x - reference(x)) > eps, dy * (y - reference(y)) / (x - reference(x)), default), "
        "reference(v) is v where the xs are baseline",
        per_sample=True,
    ),
    _layer_rule(
        "lrp_epsilon",
        "x * vjp(dy / st(op(x; W) + b))",
        "Distributes relevance in proportion to the contribution of each input to the output; eps absorbs some.",
        "Bach et al. 2015, doi:10.1371/journal.pone.0130140, eq. 58; zennit 0.5.1 rules.py:120, epsilon 114",
        _EPS,
    ),
    _layer_rule(
        "lrp_0",
        "x * vjp(div_no_nan(dy, op(x; W) + b))",
        "lrp_epsilon without eps; an output of exactly 0 passes no relevance.",
        "Bach et al. 2015, doi:10.1371/journal.pone.0130140, eq. 56; zennit 0.5.1 rules.py:120 with epsilon "
        "0, which gives NaN at an output of 0",
    ),
    _layer_rule(
        "lrp_zplus",
        "pos(x) * vjp(u; pos(W)) + neg(x) * vjp(u; neg(W)), u = dy / st(op(pos(x); pos(W)) + op(neg(x); neg(W)) + "
        "pos(b))",
        "Distributes relevance among the positive contributions only.",
        "Montavon et al. 2017, arXiv:1512.02479; zennit 0.5.1 rules.py:209, stabilizer 197; it takes "
        "negative inputs too",
        _EPS,
    ),
    _layer_rule(
        "lrp_alpha_beta",
        "alpha * (pos(x) * vjp(u; pos(W)) + neg(x) * vjp(u; neg(W))) - beta * (pos(x) * vjp(v; neg(W)) + neg(x) * "
        "vjp(v; pos(W))), u = dy / st(op(pos(x); pos(W)) + op(neg(x); neg(W)) + pos(b)), v = dy / st(op(pos(x); "
        "neg(W)) + op(neg(x); pos(W)) + neg(b))",
        "alpha times the share of the positive contributions minus beta times the share of the negative contributions. "
        "The sum of relevance is preserved if alpha - beta is 1.",
        "Bach et al. 2015, doi:10.1371/journal.pone.0130140, eq. 60; zennit 0.5.1 rules.py:257, alpha, beta "
        "and stabilizer 234",
        Param("alpha", 2.0, "weight of the positive contributions, 1 + beta", ">= 0"),
        Param("beta", 1.0, "weight of the negative contributions", ">= 0"),
        _EPS,
    ),
    _layer_rule(
        "lrp_gamma",
        "where z = op(x; W) + b is > 0: pos(x) * vjp(u; P) + neg(x) * vjp(u; N), u = dy / st(op(pos(x); P) + "
        "op(neg(x); N) + b + gamma * pos(b)), P = W + gamma * pos(W), N = W + gamma * neg(W); where z < 0: P and N "
        "change places, and b + gamma * neg(b)",
        "Gives contributions with the sign of the output more weight (gamma). An output of 0 passes no relevance.",
        "Montavon et al. 2019, doi:10.1007/978-3-030-28954-6_10; zennit 0.5.1 rules.py:163, gamma and "
        "stabilizer 143, the generalised form",
        Param("gamma", 0.25, "additional weight of contributions with the sign of the output", ">= 0"),
        _EPS,
    ),
    _layer_rule(
        "lrp_zbox",
        "x * vjp(u) - low * vjp(u; pos(W)) - high * vjp(u; neg(W)), u = dy / st(op(x; W) - op(low; pos(W)) - op(high; "
        "neg(W)))",
        "For a first layer whose inputs lie within [low, high]. The bias cancels out.",
        "Montavon et al. 2017 (z^B rule), arXiv:1512.02479; zennit 0.5.1 rules.py:315, stabilizer 296",
        Param("low", None, "lowest value of the inputs; broadcasts to x"),
        Param("high", None, "highest value of the inputs; broadcasts to x"),
        _EPS,
    ),
    _layer_rule(
        "lrp_wsquare",
        "vjp(dy / st(op(ones_like(x); square(W)) + square(b)); square(W))",
        "For a first layer whose inputs have no bounds: distributes relevance in proportion to squared weights, "
        "independent of the inputs.",
        "Montavon et al. 2017 (w² rule), arXiv:1512.02479; zennit 0.5.1 rules.py:368, stabilizer 360",
        _EPS,
    ),
    _layer_rule(
        "lrp_flat",
        "vjp(dy / st(op(ones_like(x); ones_like(W))); ones_like(W))",
        "For a first layer: distributes relevance equally among the inputs of each output.",
        "Lapuschkin et al. 2019, arXiv:1902.10178; zennit 0.5.1 rules.py:395, stabilizer 386",
        _EPS,
    ),
    BuiltinRule(
        "lrp_norm",
        None,
        "Distributes relevance in proportion to the contribution of each input to a sum or mean.",
        "zennit 0.5.1 rules.py:342, stabilizer 336",
        params=(_EPS,),
        op_types=("@sum", "@pool"),
        formula="each(x * vjp(dy / st(y)))",
        per_sample=True,
    ),
    BuiltinRule(
        "lrp_pass",
        "first(dy)",
        "Passes relevance to the first input unchanged.",
        "zennit 0.5.1 rules.py:320",
        op_types=("@activation", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    ),
)
