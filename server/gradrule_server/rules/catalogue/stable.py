"""Lists rules that compute the gradient of an op and stay finite where the usual formula does not."""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

RULES = (
    BuiltinRule(
        "log1pexp",
        "dy * sigmoid(x)",
        "The gradient of log(1 + exp(x)) without overflow: 1 at x = 100, where the plain graph gives NaN.",
        "TensorFlow's documentation of tf.custom_gradient",
        op_types=("Softplus",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_sqrt",
        "where(y > 0, dy * (0.5 / y), 0)",
        "The gradient of sqrt, zero at 0 where it is infinite.",
        "common practice",
        op_types=("Sqrt",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_norm",
        "dy * div_no_nan(x, y)",
        "Of a region from x to its Euclidean norm over everything, or along axes that stay with size 1: x over its "
        "norm, and 0 where that is 0.",
        "common practice",
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_log",
        "dy / maximum(x, eps)",
        "The gradient of log with x kept at eps or above.",
        "common practice",
        params=(Param("eps", 1e-7, "smallest divisor; in float16 not below 6e-8", "> 0"),),
        op_types=("Log",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_div",
        "(sum_to(div_no_nan(dy, x1), x0), sum_to(-div_no_nan(dy * y, x1), x1))",
        "The gradients of x0 / x1, zero where x1 is 0; inputs that were broadcast get the sum.",
        "tf.math.divide_no_nan's gradient",
        op_types=("RealDiv", "DivNoNan"),
        true_gradient=True,
    ),
    BuiltinRule(
        "eigh_lorentzian",
        None,
        "The gradient of eigenvalues e and eigenvectors v with 1/d, which is infinite for equal eigenvalues, replaced "
        "by d / (d² + eps): equal ones share nothing.",
        "Liao et al. 2019, arXiv:1903.09650 (Lorentzian broadening)",
        params=(Param("eps", 1e-12, "width of the broadening, in squared units of the eigenvalues", "> 0"),),
        op_types=("SelfAdjointEigV2",),
        formula="v (diag(de) + F * (vᵀ dv)) vᵀ, F[i, j] = d / (square(d) + eps), d = e[j] - e[i]",
    ),
)
