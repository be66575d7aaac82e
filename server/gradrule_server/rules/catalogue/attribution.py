"""Lists rules that explain models: they propagate a relevance or saliency instead of a gradient."""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_RELUS = ("Relu", "Relu6", "LeakyRelu", "Elu", "Selu")
_WARMUP = (
    Param("step", None, "number of the optimisation step, from 0 on", ">= 0"),
    Param("warmup", 16.0, "last step on which the gradient may be redirected", ">= 0"),
)


def _redirected(passed: str, against: str) -> str:
    """Returns the expression for the op's own gradient, replaced during the warm-up in samples where it is all zero."""
    own = f"where({passed}, dy, 0)"
    return f"where(step > warmup or any({own} != 0, axis='sample'), {own}, where({against}, 0, dy))"


RULES = (
    BuiltinRule(
        "guided_relu",
        "where(dy > 0, default, 0)",
        "The op's own gradient where the upstream gradient is positive, zero elsewhere.",
        "Springenberg et al. 2014, arXiv:1412.6806",
        aliases=("guided_backprop",),
        op_types=_RELUS,
    ),
    BuiltinRule(
        "deconvnet",
        "maximum(dy, 0)",
        "Passes the positive part of the upstream gradient, whatever the forward did.",
        "Zeiler, Fergus 2013, arXiv:1311.2901",
        op_types=("Relu",),
    ),
    BuiltinRule(
        "relu_beta_smooth",
        "dy * sigmoid(beta * x)",
        "The slope of a softplus of steepness beta in place of the step: dy/2 at 0.",
        "Dombrowski et al. 2019, arXiv:1906.07983",
        params=(Param("beta", 10.0, "steepness", "> 0"),),
        op_types=("Relu",),
    ),
    BuiltinRule(
        "linearize",
        "dy",
        "Passes the upstream gradient unchanged.",
        "Lucid, linear activations",
        op_types=("Relu",),
    ),
    BuiltinRule(
        "elrp_activation",
        "dy * y / (x + where(x >= 0, eps, -eps))",
        "The op's output over its input, kept off 0 by eps with the sign of x (+ at 0).",
        "Ancona et al. 2018 (DeepExplain), arXiv:1711.06104",
        params=(Param("eps", 1e-4, "keeps the divisor off 0", "> 0"),),
        op_types=("Relu", "Elu", "Sigmoid", "Tanh", "Softplus"),
    ),
    BuiltinRule(
        "redirected_relu",
        _redirected("x >= 0", "x < 0 and dy > 0"),
        "The gradient of relu (dy at 0), but during the warm-up a sample of which nothing would pass gets dy, except "
        "where a step against it would lower an x that is below 0 already.",
        "Lucid, redirected_relu_grad (it takes the step from the graph's global step)",
        params=_WARMUP,
        op_types=("Relu",),
    ),
    BuiltinRule(
        "redirected_relu6",
        _redirected("0 <= x <= 6", "x < 0 and dy > 0 or x > 6 and dy < 0"),
        "The same for relu6, whose edges 0 and 6 pass dy; an x above 6 is not raised either.",
        "Lucid, redirected_relu6_grad",
        params=_WARMUP,
        op_types=("Relu6",),
    ),
    BuiltinRule(
        "maxpool_as_avgpool",
        None,
        "The gradient of an average pool of the same windows.",
        "Lucid, avg pool gradient for max pools",
        op_types=("MaxPool", "MaxPool3D"),
        formula="vjp of avg_pool(x) at dy",
        per_sample=True,
    ),
    BuiltinRule(
        "maxpool_smooth",
        None,
        "The gradient of a smooth mean in which large magnitudes weigh more; at x = 0 abs has slope 0.",
        "Lucid, smoothed max pool gradient",
        params=(Param("eps", 0.01, "keeps the divisor off 0", "> 0"),),
        op_types=("MaxPool", "MaxPool3D"),
        formula="vjp of avg_pool(square(x)) / (eps + avg_pool(abs(x))) at dy",
        per_sample=True,
    ),
    BuiltinRule(
        "rectgrad",
        None,
        "Passes dy where the product of output and dy is above the percentile q of its sample; equal to it passes "
        "nothing.",
        "Kim et al. 2019 (Rectified Gradient), arXiv:1902.04893",
        params=(Param("q", 98.0, "percentile", ">= 0, <= 100"),),
        op_types=("@activation",),
        formula="where(y * dy > percentile(y * dy, q, axis='sample'), dy, 0)",
        per_sample=True,
    ),
    BuiltinRule(
        "deeplift_rescale",
        None,
        "Multipliers of DeepLIFT's Rescale rule: the change of the output over that of the input, against a second "
        "forward in which the xs are the baseline. The op's own gradient where the input changes by no more than eps.",
        "Shrikumar, Greenside, Kundaje 2017, arXiv:1704.02685, the Rescale rule; DeepExplain",
        params=(
            Param("baseline", 0.0, "value of the xs to compare with; broadcasts to them"),
            Param("eps", 1e-5, "largest change of the input that counts as none", "> 0"),
        ),
        op_types=("@activation",),
        formula="where(abs(x - reference(x)) > eps, dy * (y - reference(y)) / (x - reference(x)), default), "
        "reference(v) is v where the xs are baseline",
        per_sample=True,
    ),
)
