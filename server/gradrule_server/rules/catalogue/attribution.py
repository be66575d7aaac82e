"""Rules that explain models: what flows back is a relevance or a saliency, not a gradient."""

from __future__ import annotations

from gradrule_server.rules.catalogue.table import BuiltinRule
from gradrule_server.rules.params import Param

_RELUS = ("Relu", "Relu6", "LeakyRelu", "Elu", "Selu")
_ACTIVATIONS = (*_RELUS, "Sigmoid", "Tanh", "Softplus")

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
        params=(Param("beta", 10.0, "steepness, > 0"),),
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
        params=(Param("eps", 1e-4, "> 0"),),
        op_types=_ACTIVATIONS,
    ),
    BuiltinRule(
        "lrp_pass",
        "first(dy)",
        "Passes relevance to the first input unchanged.",
        "zennit, Pass",
        op_types=_ACTIVATIONS,
    ),
)
