"""Lists straight-through estimators, and rules for whole quantisers.

The own gradient of ops such as Round is zero almost everywhere. Rules for quantisers are for regions, and for ops whose
bounds are inputs with gradients.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_QUANTISERS = ("Sign", "Round", "Rint", "Floor", "Ceil", "ClipByValue", "Minimum", "Maximum")

_SEED = Param("seed", None, "seed of the noise; use a new value in each call", "integer")
_TAU = Param("tau", 1.0, "temperature", "> 0")


def _softmax_slope(logits: str) -> str:
    """Returns the expression for the gradient of softmax(logits / tau)."""
    p = f"softmax(({logits}) / tau)"
    return f"{p} * (dy - sum(dy * {p}, axis=-1)) / tau"


def _swish_sign() -> str:
    """Returns dy * beta * (2 - z tanh(z/2)) / (1 + cosh(z)) for z = beta x, without overflow.

    The formula is even in z, and 1 / (1 + cosh(z)) is 2e / (1 + e)² with e = exp(-z). From z = 1000 on it is 0.
    """
    z = "minimum(abs(beta * x), 1000)"
    return f"dy * beta * (2 - {z} * tanh({z} / 2)) * 2 * exp(-{z}) / square(1 + exp(-{z}))"


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
        "ste",
        "first(dy)",
        "Passes the gradient to the first input as if the op were the identity.",
        "Bengio, Léonard, Courville 2013, arXiv:1308.3432",
        aliases=("straight_through",),
        op_types=_QUANTISERS,
    ),
    BuiltinRule(
        "ste_sign",
        "where(abs(x) <= clip, dy, 0)",
        "Passes the gradient where abs(x) <= clip (edges included); zero elsewhere.",
        "Courbariaux et al. 2016 (BinaryNet), arXiv:1602.02830, eq. 4; larq 0.14.0 quantizers.py:79, clip_value 83",
        aliases=("ste_tern", "ste_heaviside"),
        params=(Param("clip", 1.0, "half the width of the window", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "approx_sign",
        "where(abs(x) <= 1, dy * (2 - 2 * abs(x)), 0)",
        "Uses the slope of a piecewise quadratic sign: 2 at 0, decreasing to 0 at abs(x) = 1.",
        "Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278; larq 0.14.0 quantizers.py:104",
        op_types=("Sign",),
    ),
    BuiltinRule(
        "swish_sign",
        _swish_sign(),
        "Uses the slope of SignSwish: beta at 0, negative where abs(beta x) > 2.4, vanishing far from 0.",
        "Darabi et al. 2018 (BNN+), arXiv:1812.11800; larq 0.14.0 quantizers.py:114, beta 109",
        params=(Param("beta", 5.0, "steepness", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "magnitude_aware_sign",
        "where(abs(x) <= clip, dy, 0) * mean(abs(x), axis='channel')",
        "ste_sign times the mean magnitude of each channel (last axis), which is treated as a constant. The edges are "
        "included.",
        "Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278, section 3.3; larq 0.14.0 quantizers.py:458, clip_value 452",
        params=(Param("clip", 1.0, "half the width of the window", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "dorefa_activation",
        "where(0 <= x <= 1, dy, 0)",
        "Passes the gradient where 0 <= x <= 1 (edges included); zero elsewhere.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160",
        op_types=("Round",),
    ),
    BuiltinRule(
        "sign_clip_gradient",
        "clip(dy, -c, c)",
        "Clips the gradient to [-c, c].",
        "tensorlayer 2.2.5 activation.py:258",
        params=(Param("c", 1.0, "largest absolute gradient", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "ede",
        "dy * k * t * (1 - square(tanh(t * x)))",
        "Uses the slope of k tanh(t x). During training, raise t and set k = max(1/t, 1), with values in each call.",
        "Qin et al. 2020 (IR-Net, error decay estimator), arXiv:1909.10788, eq. 9; htqin/IR-Net@f63a590 "
        "CIFAR-10/ResNet20/1w1a/modules/binaryfunction.py:15; k 1 and t 1 are gradrule's own choice",
        params=(Param("k", 1.0, "height of the tanh"), Param("t", 1.0, "steepness", "> 0")),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "reste",
        "dy * where(abs(x) <= m, m ** (1 / o) / m, where(abs(x) <= t, abs(x) ** ((1 - o) / o) / o, 0))",
        "Uses the slope of sign(x) abs(x)^(1/o): constant m^(1/o)/m where abs(x) <= m, zero where abs(x) > t.",
        "Wu et al. 2023 (ReSTE), arXiv:2308.06689; DravenALG/ReSTE@0d3c36a "
        "model/binary_module/binarized_modules.py:84, t 17, m 80, utils/arguments.py:148 (o)",
        params=(
            Param("o", 3.0, "order of the root", ">= 1"),
            Param("t", 1.5, "half the width of the window", "> 0"),
            Param("m", 0.1, "half the width of the range with a constant slope", "> 0"),
        ),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "ewgs",
        "dy * (1 + delta * sign(dy) * (x - y))",
        "Scales the gradient of each element according to the difference between x and its rounded value.",
        "Lee, Kim, Ham 2021 (element-wise gradient scaling), arXiv:2104.00903, eq. 4; "
        "cvlab-yonsei/EWGS@56c654c CIFAR10/custom_modules.py:29; delta 0.001 is gradrule's own choice",
        params=(Param("delta", 1e-3, "strength; 0 is the same as ste", ">= 0"),),
        op_types=("Round",),
    ),
    BuiltinRule(
        "soft_round",
        "dy * alpha * (1 - square(tanh(alpha * (x - floor(x) - 0.5)))) / (2 * tanh(alpha / 2))",
        "Uses the slope of a soft rounding function: largest halfway between integers; nearly 1 for a small alpha.",
        "Agustsson, Theis 2020, arXiv:2006.09952, section 4.1; the slope of tensorflow-compression 2.14.1 "
        "python/ops/round_ops.py:72; alpha 5 is gradrule's own choice",
        params=(Param("alpha", 5.0, "steepness", "> 0"),),
        op_types=("Round",),
    ),
    BuiltinRule(
        "clamp_window",
        "first(where(lo <= x <= hi, dy, 0))",
        "Passes the gradient to the first input where lo <= x <= hi (edges included); zero elsewhere.",
        "spikingjelly 0.0.0.0.14 activation_based/quantize.py:71 (2.0.0 has PyTorch's own gradient there)",
        params=(Param("lo", None, "lower edge"), Param("hi", None, "upper edge")),
        op_types=("ClipByValue",),
    ),
    BuiltinRule(
        "abs_binary_sign",
        "where(x >= 0, dy, -dy)",
        "The gradient of abs, but with slope +1 at 0. TensorFlow's slope at 0 is 0.",
        "brevitas 0.13.4 ops/autograd_ste_ops.py:379",
        op_types=("Abs",),
        true_gradient=True,
    ),
    BuiltinRule(
        "log_tailed_relu",
        "dy * where(x <= 0, alpha, where(x <= 1, 1, 1 / x))",
        "Uses the slope alpha where x <= 0, 1 where 0 < x <= 1, and 1/x where x > 1.",
        "Cai et al. 2017 (HWGQ), arXiv:1702.00953, eq. 11; spikingjelly 2.0.0 "
        "activation_based/surrogate.py:2678, alpha 2735",
        params=(Param("alpha", 0.0, "slope for x <= 0"),),
        op_types=("Relu",),
    ),
    BuiltinRule(
        "lower_bound",
        "(where(x >= x1 or dy < 0, dy, 0), None)",
        "For Maximum(x, b): passes the gradient to x where x >= b, or where gradient descent would increase x. "
        "b gets no gradient; it must broadcast to the shape of x.",
        "tensorflow-compression 2.14.1 python/ops/math_ops.py:134 (identity_if_towards)",
        op_types=("Maximum",),
    ),
    BuiltinRule(
        "upper_bound",
        "(where(x <= x1 or dy > 0, dy, 0), None)",
        "For Minimum(x, b): passes the gradient to x where x <= b, or where gradient descent would decrease x. "
        "b gets no gradient; it must broadcast to the shape of x.",
        "tensorflow-compression 2.14.1 python/ops/math_ops.py:69 (identity_if_towards)",
        op_types=("Minimum",),
    ),
    BuiltinRule(
        "passthrough_sigmoid",
        "dy",
        "Passes the gradient unchanged, without multiplying it by the slope of the sigmoid.",
        "gradrule's own choice, for hard gates with a sigmoid forward",
        op_types=("Sigmoid",),
    ),
    BuiltinRule(
        "dorefa_weight",
        "div_no_nan(dy * (1 - square(tanh(x))), max(abs(tanh(x))))",
        "For a region that computes 2 quantize(tanh(x) / (2 max abs(tanh(x))) + 1/2) - 1 from weights x. The quantiser "
        "passes dy; the maximum is treated as a constant. Zero if all x are 0.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160, section 2.3 (tensorpack differentiates the maximum too)",
    ),
    BuiltinRule(
        "dorefa_gradient",
        "2 * max(abs(dy), axis='sample') * (round((2 ** bits - 1) * clip("
        "div_no_nan(dy, 2 * max(abs(dy), axis='sample')) + 0.5 + (uniform(dy, seed) - 0.5) / (2 ** bits - 1), 0, 1)"
        ") / (2 ** bits - 1) - 0.5)",
        "Quantises the gradient of each sample to 2^bits levels between -m and m, where m is its largest magnitude, "
        "after adding noise of up to half a level. A gradient of zeros stays zero.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160, section 2.5; bits 6 is gradrule's own choice",
        params=(Param("bits", 6.0, "number of bits of a quantised gradient", ">= 1, <= 16, integer"), _SEED),
        op_types=("Identity",),
    ),
    BuiltinRule(
        "pact",
        "(sum_to(where(x0 <= x1, dy, 0), x0), sum_to(where(x0 >= x1, dy, 0), x1))",
        "For Minimum(x, a) with a learned clipping level a: x gets dy where x <= a, and a gets the sum of dy where "
        "x >= a. At x = a, both get dy.",
        "Choi et al. 2018 (PACT), arXiv:1805.06085",
        op_types=("Minimum",),
        true_gradient=True,
    ),
    BuiltinRule(
        "lsq",
        "(where(qn < x0 / x1 < qp, dy, 0), sum_to(dy * where(x0 / x1 <= qn, qn, where(x0 / x1 >= qp, qp, round(x0 / "
        "x1) - x0 / x1)), x1) / sqrt(maximum(size(x0), 1) * qp))",
        "For a region that computes s round(clip(x / s, qn, qp)) from x and a learned step size s > 0, which "
        "broadcasts to x. Edges count as clipped: the gradient of x is 0 there, and s gets qn or qp times dy.",
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
        "TensorFlow's own gradient as a formula: x gets dy where it is within the adjusted bounds (edges included); "
        "min and max get the sum of dy below and above the bounds. If min and max are 0, x gets dy.",
        "tensorflow 2.21.0 include/tensorflow/core/kernels/fake_quant_ops_functor.h:41; Jacob et al. 2018, "
        "arXiv:1712.05877; narrow_range and num_bits as the op's attributes",
        params=(
            Param("num_bits", 8.0, "as the op's attribute", ">= 2, <= 16, integer"),
            Param("narrow_range", 0.0, "as the op's attribute; 1 omits the lowest level", ">= 0, <= 1, integer"),
        ),
        op_types=("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"),
    ),
    BuiltinRule(
        "argmax_softmax",
        _softmax_slope("x"),
        "For a region that computes the one-hot vector of the largest logit x: the gradient of softmax(x / tau) along "
        "the last axis.",
        "Jang, Gu, Poole 2017, arXiv:1611.01144, section 2.2, without noise; tau 1 is gradrule's own choice",
        params=(_TAU,),
    ),
    BuiltinRule(
        "gumbel_softmax",
        _softmax_slope("x - log(-log(maximum(uniform(x, seed), 1e-7)))"),
        "As argmax_softmax, with Gumbel noise added to the logits. The rule draws the noise from its seed (uniform "
        "numbers are at least 1e-7), so it differs from noise that the forward pass draws.",
        "Jang, Gu, Poole 2017 (Straight-Through Gumbel-Softmax), arXiv:1611.01144, section 2.2; tau 1 and "
        "the bound 1e-7 are gradrule's own choice",
        params=(_TAU, _SEED),
    ),
)
