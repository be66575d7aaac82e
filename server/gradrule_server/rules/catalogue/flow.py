"""Lists rules that change the upstream gradient, usually for Identity ops, and rules that keep an op's gradient finite.

The first reverse, scale, clip or zero the gradient. The others (`STABLE_RULES`) compute the gradient of an op where the
usual formula gives infinity or NaN.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_IDENTITY = ("Identity",)


RULES = (
    BuiltinRule(
        "gradient_reversal",
        "-scale * dy",
        "Multiplies the gradient by -scale.",
        "Ganin, Lempitsky 2015, arXiv:1409.7495 (scale is the paper's lambda, a keyword of the language); "
        "scale 1 is gradrule's own choice",
        params=(Param("scale", 1.0, "the paper's lambda", ">= 0"),),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_scale",
        "factor * dy",
        "Multiplies the gradient by a factor.",
        "gradrule's own choice",
        params=(Param("factor", None, "any number"),),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_clip",
        "clip(dy, low, high)",
        "Clips each element of the gradient to [low, high].",
        "gradrule's own choice",
        params=(Param("low", -1.0, "lower bound"), Param("high", 1.0, "upper bound; used if low is greater than high")),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_clip_norm",
        'cast(cast(dy, "float64") * (norm / maximum(norm(cast(dy, "float64")), norm)), dy)',
        "Scales the gradient of the whole tensor to the given norm, if its norm is larger. Zero stays zero.",
        "the gradient clipped as by tf.clip_by_norm, tensorflow 2.21.0 python/ops/clip_ops.py:154; norm 1 is "
        "gradrule's own choice",
        params=(Param("norm", 1.0, "largest Euclidean norm", "> 0"),),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_zero",
        "each(zeros_like(x))",
        "Returns zeros for every input. Zeros are not the same as no gradient (None).",
        "gradrule's own choice",
    ),
    BuiltinRule(
        "gradient_mask",
        "dy * mask",
        "Multiplies the gradient by a mask that broadcasts to it.",
        "gradrule's own choice",
        params=(Param("mask", None, "a number or a tensor, usually of 0 and 1"),),
    ),
    BuiltinRule(
        "gradient_sign",
        "sign(dy)",
        "Returns the sign of the gradient; 0 where it is 0.",
        "signSGD, Bernstein et al. 2018, arXiv:1802.04434",
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_normalize",
        'cast(cast(dy, "float64") / (norm(cast(dy, "float64")) + eps), dy)',
        "Scales the gradient of the whole tensor to norm 1.",
        "lucid 0.3.10 optvis/transform.py:110, there per sample; eps is gradrule's own choice",
        params=(Param("eps", 1e-6, "added to the norm, so that a gradient of zeros stays zero", "> 0"),),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "gradient_noise",
        "dy + normal(dy, seed) * sqrt(eta) / (1 + step) ** 0.275",
        "Adds normally distributed noise with variance eta / (1 + step)^0.55, which decreases during training.",
        "Neelakantan et al. 2015, arXiv:1511.06807; eta 0.3 is one of the paper's three values",
        params=(
            Param("eta", 0.3, "variance at step 0; the paper tries 0.01, 0.3 and 1", ">= 0"),
            Param("step", None, "number of the training step, starting at 0", ">= 0"),
            Param("seed", None, "seed of the noise; use a new value in each call", "integer"),
        ),
        op_types=_IDENTITY,
    ),
    BuiltinRule(
        "nan_to_zero",
        "where(is_finite(dy), dy, 0)",
        "Replaces NaN and infinities by zero.",
        "gradrule's own choice",
    ),
    BuiltinRule(
        "tanh_agree",
        "dy * abs(sign(y) + sign(dy)) / 2",
        "Passes dy where it has the same sign as the output, and half of it where the output is 0; zero elsewhere.",
        "gradrule's own choice",
        op_types=("Tanh",),
    ),
    BuiltinRule(
        "feedback_alignment",
        None,
        "Computes the gradient of x with fixed random weights B instead of the op's weights. B depends on the seed and "
        "the op's name. Weights and bias get their own gradients.",
        "Lillicrap et al. 2014, arXiv:1411.0247; the distribution of B and seed 0 are gradrule's own choice",
        params=(Param("seed", 0.0, "seed of B; use one value for the whole training", "integer"),),
        op_types=("@linear",),
        formula="vjp(dy; B) for x, B drawn from seed; default for weights and bias",
        per_sample=False,
    ),
)


STABLE_RULES = (
    BuiltinRule(
        "log1pexp",
        "dy * sigmoid(x)",
        "The gradient of log(1 + exp(x)) without overflow: 1 at x = 100, where the gradients of its ops give NaN.",
        "tensorflow 2.21.0 python/ops/custom_gradient.py:79",
        op_types=("Softplus",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_sqrt",
        "where(y > 0, dy * (0.5 / y), 0)",
        "The gradient of sqrt, but zero at x = 0, where the gradient is infinite.",
        "gradrule's own choice",
        op_types=("Sqrt",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_norm",
        "dy * div_no_nan(x, y)",
        "For a region that computes the Euclidean norm of x over all axes, or over axes that remain with size 1: x "
        "divided by its norm; 0 where the norm is 0.",
        "gradrule's own choice",
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_log",
        "dy / maximum(x, eps)",
        "The gradient of log, with maximum(x, eps) as the divisor.",
        "gradrule's own choice",
        params=(Param("eps", 1e-7, "smallest divisor; at least 6e-8 for float16", "> 0"),),
        op_types=("Log",),
        true_gradient=True,
    ),
    BuiltinRule(
        "safe_div",
        "(sum_to(div_no_nan(dy, x1), x0), sum_to(-div_no_nan(dy * y, x1), x1))",
        "The gradients of x0 / x1; zero where x1 is 0. Gradients of broadcast inputs are summed.",
        "tensorflow 2.21.0 python/ops/math_grad.py:1501 (DivNoNan)",
        op_types=("RealDiv", "DivNoNan"),
        true_gradient=True,
    ),
    BuiltinRule(
        "eigh_lorentzian",
        None,
        "The gradient of eigenvalues e and eigenvectors v, with d / (d² + eps) instead of 1/d, which is infinite for "
        "equal eigenvalues (d is the difference of two eigenvalues).",
        "Liao et al. 2019, arXiv:1903.09650 (Lorentzian broadening); eps 1e-12 is gradrule's own choice",
        params=(Param("eps", 1e-12, "width of the broadening, in squared units of the eigenvalues", "> 0"),),
        op_types=("SelfAdjointEigV2",),
        formula="v (diag(de) + F * (vᵀ dv)) vᵀ, F[i, j] = d / (square(d) + eps), d = e[j] - e[i]",
    ),
)
