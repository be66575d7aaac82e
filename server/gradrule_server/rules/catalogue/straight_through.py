"""Lists straight-through estimators, for ops such as Round whose own gradient is zero almost everywhere.

Rules for whole quantisers are in `quantisers`.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_QUANTISERS = ("Sign", "Round", "Rint", "Floor", "Ceil", "ClipByValue", "Minimum", "Maximum")

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
        "Passes the gradient where abs(x) <= clip, the edge included; zero outside.",
        "Courbariaux et al. 2016 (BinaryNet), arXiv:1602.02830, eq. 4; larq ste_sign",
        aliases=("ste_tern", "ste_heaviside"),
        params=(Param("clip", 1.0, "half the width of the window", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "approx_sign",
        "where(abs(x) <= 1, dy * (2 - 2 * abs(x)), 0)",
        "The slope of a piecewise quadratic sign: 2 at 0, falling to 0 at abs(x) = 1.",
        "Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278; larq approx_sign",
        op_types=("Sign",),
    ),
    BuiltinRule(
        "swish_sign",
        "dy * beta * (2 - beta * x * tanh(beta * x / 2)) / (1 + cosh(beta * x))",
        "The slope of SignSwish: beta at 0, negative where abs(beta x) > 2.4, zero where cosh overflows.",
        "Darabi et al. 2018 (BNN+), arXiv:1812.11800; larq swish_sign",
        params=(Param("beta", 5.0, "steepness", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "magnitude_aware_sign",
        "where(abs(x) <= clip, dy, 0) * mean(abs(x), axis='channel')",
        "ste_sign times the mean magnitude of each channel (the last axis), which counts as a constant; the edge is "
        "inside.",
        "Liu et al. 2018 (Bi-Real Net), arXiv:1808.00278, section 3.3; larq MagnitudeAwareSign",
        params=(Param("clip", 1.0, "half the width of the window", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "dorefa_activation",
        "where(0 <= x <= 1, dy, 0)",
        "Passes the gradient where 0 <= x <= 1, both edges included.",
        "Zhou et al. 2016 (DoReFa-Net), arXiv:1606.06160",
        op_types=("Round",),
    ),
    BuiltinRule(
        "sign_clip_gradient",
        "clip(dy, -c, c)",
        "Passes the gradient, cut to [-c, c].",
        "TensorLayer, sign()",
        params=(Param("c", 1.0, "largest absolute gradient", "> 0"),),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "ede",
        "dy * k * t * (1 - square(tanh(t * x)))",
        "The slope of k tanh(t x). Training raises t and sets k = max(1/t, 1); both are given per call.",
        "Qin et al. 2020 (IR-Net, error decay estimator), arXiv:1909.10788, eq. 9",
        params=(Param("k", 1.0, "height of the tanh"), Param("t", 1.0, "steepness", "> 0")),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "reste",
        "dy * where(abs(x) <= m, m ** (1 / o) / m, where(abs(x) <= t, abs(x) ** ((1 - o) / o) / o, 0))",
        "The slope of sign(x) abs(x)^(1/o): held constant at m^(1/o)/m within abs(x) <= m, zero beyond t.",
        "Wu et al. 2023 (ReSTE), arXiv:2308.06689",
        params=(
            Param("o", 3.0, "order of the root", ">= 1"),
            Param("t", 1.5, "half the width of the window", "> 0"),
            Param("m", 0.1, "within abs(x) <= m the slope stays finite", "> 0"),
        ),
        op_types=("Sign",),
    ),
    BuiltinRule(
        "ewgs",
        "dy * (1 + delta * sign(dy) * (x - y))",
        "Scales the gradient by how far rounding moved the element.",
        "Lee, Kim, Ham 2021 (element-wise gradient scaling), arXiv:2104.00903, eq. 4",
        params=(Param("delta", 1e-3, "strength; 0 is ste", ">= 0"),),
        op_types=("Round",),
    ),
    BuiltinRule(
        "soft_round",
        "dy * alpha * (1 - square(tanh(alpha * (x - floor(x) - 0.5)))) / (2 * tanh(alpha / 2))",
        "The slope of a soft rounding: largest halfway between whole numbers; nearly dy for small alpha.",
        "Agustsson, Theis 2020, arXiv:2006.09952; tensorflow-compression soft_round",
        params=(Param("alpha", 5.0, "steepness", "> 0"),),
        op_types=("Round",),
    ),
    BuiltinRule(
        "clamp_window",
        "first(where(lo <= x <= hi, dy, 0))",
        "Passes the gradient of the first input where lo <= x <= hi, both edges included.",
        "spikingjelly",
        params=(Param("lo", None, "lower edge"), Param("hi", None, "upper edge")),
        op_types=("ClipByValue",),
    ),
    BuiltinRule(
        "abs_binary_sign",
        "where(x >= 0, dy, -dy)",
        "The gradient of abs with slope +1 at 0, where TensorFlow's is 0.",
        "brevitas, abs_binary_sign_grad",
        op_types=("Abs",),
        true_gradient=True,
    ),
    BuiltinRule(
        "log_tailed_relu",
        "dy * where(x <= 0, alpha, where(x <= 1, 1, 1 / x))",
        "Slope alpha for x <= 0, 1 up to 1, then 1/x.",
        "Cai et al. 2017 (HWGQ), arXiv:1702.00953, eq. 11",
        params=(Param("alpha", 0.0, "slope for x <= 0"),),
        op_types=("Relu",),
    ),
    BuiltinRule(
        "lower_bound",
        "(where(x >= x1 or dy < 0, dy, 0), None)",
        "Of Maximum(x, b): passes the gradient where x >= b, and where descent would raise x. "
        "Nothing for b, which broadcasts to x.",
        "tensorflow-compression, lower_bound (identity_if_towards)",
        op_types=("Maximum",),
    ),
    BuiltinRule(
        "upper_bound",
        "(where(x <= x1 or dy > 0, dy, 0), None)",
        "Of Minimum(x, b): passes the gradient where x <= b, and where descent would lower x. "
        "Nothing for b, which broadcasts to x.",
        "tensorflow-compression, upper_bound (identity_if_towards)",
        op_types=("Minimum",),
    ),
    BuiltinRule(
        "passthrough_sigmoid",
        "dy",
        "Passes the gradient unchanged, without the sigmoid's slope.",
        "public code (hard gates with a sigmoid forward)",
        op_types=("Sigmoid",),
    ),
)
