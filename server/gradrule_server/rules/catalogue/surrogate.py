"""Lists surrogate gradients of spiking networks: the forward op is a step at 0; x is potential minus threshold.

Each dx is dy times a factor. The forward op, not the rule, determines the value of the step at 0.
"""

from __future__ import annotations

from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule
from gradrule_server.rules.params import Param

_STEPS = ("@step", "Sign", "Ceil", "Floor")


def _factor(
    name: str, factor: str, description: str, reference: str, *params: Param, aliases: tuple[str, ...] = ()
) -> BuiltinRule:
    return BuiltinRule(
        name, f"dy * ({factor})", description, reference, aliases=aliases, params=params, op_types=_STEPS
    )


def _cosines() -> str:
    """Returns (4/T)·sum of cos((2i−1)·πu) for i = 1 … m, with u = 2x/T, m = n−1: sin(2mπu) / (2 sin(πu)).

    With u = k + f, k an integer and abs(f) <= 1/2, this is (−1)^k·sin(2mπf) / (2 sin(πf)), which is precise far from 0
    and equals m·(−1)^k where f is 0. The inner `where` keeps the second derivative finite there.
    """
    # mod is exact, so that u neither overflows nor loses its fraction where x is large.
    u = "(2 * (mod(x, period) / period))"
    f = f"({u} - round{u})"
    ratio = f"where({f} == 0, n - 1, sin(2 * (n - 1) * pi * {f}) / (2 * where({f} == 0, 1, sin(pi * {f}))))"
    return f"4 / period * (1 - 2 * mod(round{u}, 2)) * {ratio}"


RULES = (
    _factor(
        "fast_sigmoid",
        "1 / square(1 + slope * abs(x))",
        "Uses the slope of the fast sigmoid x / (1 + slope abs(x)): 1 at 0.",
        "Zenke, Ganguli 2018 (SuperSpike), arXiv:1705.11146; snntorch 1.0.0 surrogate.py:142, slope 146",
        Param("slope", 25.0, "steepness", "> 0"),
        aliases=("superspike",),
    ),
    _factor(
        "superspike_unit",
        "alpha / square(1 + abs(x))",
        "alpha at 0, decreasing with 1/x².",
        "spikingjelly 2.0.0 activation_based/surrogate.py:1001, alpha 1048",
        Param("alpha", 1.0, "height"),
    ),
    _factor(
        "soft_sign",
        "1 / (2 * alpha * square(1 / alpha + abs(x)))",
        "Uses the slope of (softsign(alpha x) + 1) / 2: alpha/2 at 0.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:836, alpha 883",
        Param("alpha", 2.0, "steepness", "> 0"),
    ),
    _factor(
        "atan",
        "alpha / 2 / (1 + square(pi * alpha * x / 2))",
        "Uses the slope of atan(pi alpha x / 2) / pi + 1/2: alpha/2 at 0.",
        "Fang et al. 2021, arXiv:2007.05785; spikingjelly 2.0.0 activation_based/surrogate.py:1146, alpha "
        "1193; snntorch 1.0.0 surrogate.py:197",
        Param("alpha", 2.0, "steepness", "> 0"),
    ),
    _factor(
        "sigmoid_surrogate",
        "slope * sigmoid(slope * x) * (1 - sigmoid(slope * x))",
        "Uses the slope of sigmoid(slope x): slope/4 at 0. Computed as s (1 - s), because snntorch's form overflows.",
        "snntorch 1.0.0 surrogate.py:304, slope 313; spikingjelly 2.0.0 activation_based/surrogate.py:673 (alpha 4)",
        Param("slope", 25.0, "steepness", "> 0"),
    ),
    _factor(
        "tanh_surrogate",
        "1 - square(tanh(alpha * x))",
        "Uses the slope of tanh(alpha x) without its factor alpha: 1 at 0.",
        "norse 1.1.0 torch/functional/threshold.py:54; alpha 1 is gradrule's own choice",
        Param("alpha", 1.0, "steepness", "> 0"),
    ),
    _factor(
        "erf",
        "alpha / sqrt(pi) * exp(-square(alpha * x))",
        "Uses the slope of erfc(-alpha x) / 2: alpha/sqrt(pi) at 0.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:1504, alpha 1553",
        Param("alpha", 2.0, "steepness", "> 0"),
    ),
    _factor(
        "heavi_erfc",
        "2 / sqrt(pi) * exp(-square(k * x))",
        "A Gaussian function of x: 2/sqrt(pi) at 0.",
        "norse 1.1.0 torch/functional/threshold.py:29; k 0.5 is gradrule's own choice",
        Param("k", 0.5, "steepness", "> 0"),
    ),
    _factor(
        "circ",
        "alpha ** 3 / (square(x) + alpha ** 2) ** 1.5",
        "Uses the slope of a circular distance: 1 at 0.",
        "norse 1.1.0 torch/functional/threshold.py:106; alpha 0.5 is gradrule's own choice",
        Param("alpha", 0.5, "width", "> 0"),
    ),
    _factor(
        "triangle",
        "gamma * maximum(0, 1 - abs(x))",
        "gamma at 0, decreasing linearly to 0 at abs(x) = 1.",
        "Bellec et al. 2018 (LSNN), arXiv:1803.09574; norse 1.1.0 torch/functional/threshold.py:186, alpha "
        "191 (snntorch's triangular is ±threshold, no triangle)",
        Param("gamma", 0.3, "height"),
    ),
    _factor(
        "piecewise_quadratic",
        "where(abs(x) <= 1 / alpha, alpha - square(alpha) * abs(x), 0)",
        "alpha at 0, decreasing linearly to 0 at abs(x) = 1/alpha.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:307, alpha 358",
        Param("alpha", 1.0, "steepness", "> 0"),
    ),
    _factor(
        "piecewise_exp",
        "alpha / 2 * exp(-alpha * abs(x))",
        "alpha/2 at 0, decreasing exponentially.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:498, alpha 545",
        Param("alpha", 1.0, "steepness", "> 0"),
    ),
    _factor(
        "boxcar",
        "where(abs(x) < 0.5 / alpha, alpha, 0)",
        "alpha where abs(x) < 1/(2 alpha) (edges excluded); zero elsewhere.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:3123, alpha 3178",
        Param("alpha", 1.0, "height, and 1/width", "> 0"),
        aliases=("rect",),
    ),
    _factor(
        "gaussian",
        "gamma * exp(-square(x / lens) / 2) / (lens * sqrt(2 * pi))",
        "gamma times the normal density with standard deviation lens.",
        "Yin, Corradi, Bohté 2021, arXiv:2103.12593; its code, byin-cwi/Efficient-spiking-networks@bfd47cf "
        "ECG/adapt_srnn_0.844_gpu-v1.py:62, gamma 34, lens 35",
        Param("lens", 0.5, "standard deviation", "> 0"),
        Param("gamma", 0.5, "height"),
    ),
    _factor(
        "multi_gaussian",
        "gamma * ((1 + h) * exp(-square(x / lens) / 2) / (lens * sqrt(2 * pi))"
        " - h * (exp(-square((x - lens) / (s * lens)) / 2) + exp(-square((x + lens) / (s * lens)) / 2))"
        " / (s * lens * sqrt(2 * pi)))",
        "A normal density with standard deviation lens, minus two wider ones (s lens) centred at ±lens; times gamma.",
        "Yin, Corradi, Bohté 2021, arXiv:2103.12593; its code, byin-cwi/Efficient-spiking-networks@bfd47cf "
        "ECG/adapt_srnn_0.844_gpu-v1.py:64, gamma 34, lens 35, s 59, h 60",
        Param("lens", 0.5, "standard deviation", "> 0"),
        Param("h", 0.15, "weight of the wider densities"),
        Param("s", 6.0, "factor by which they are wider", "> 0"),
        Param("gamma", 0.5, "height"),
    ),
    _factor(
        "slayer",
        "gamma * exp(-alpha * abs(x))",
        "gamma at 0, decreasing exponentially.",
        "Shrestha, Orchard 2018 (SLAYER), arXiv:1810.08646; bamsumit/slayerPytorch@01beeeb src/slayer.py:862 "
        "(alpha is 1/tauRho, gamma scaleRho/tauRho); alpha 5 as byin-cwi/Efficient-spiking-networks@bfd47cf "
        "ECG/adapt_srnn_0.844_gpu-v1.py:70; gamma 1 is gradrule's own choice",
        Param("alpha", 5.0, "steepness", "> 0"),
        Param("gamma", 1.0, "height"),
    ),
    _factor(
        "piecewise_leaky_relu",
        "where(abs(x) < w, 1 / (2 * w), c)",
        "1/(2w) where abs(x) < w (edges excluded); c elsewhere.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:1689, w and c 1742",
        Param("w", 1.0, "half the width", "> 0"),
        Param("c", 0.01, "slope where abs(x) >= w"),
    ),
    _factor(
        "leaky_k_relu",
        "where(x >= 0, k, leak)",
        "k where x >= 0, leak where x < 0.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:2316, leak and k 2377",
        Param("leak", 0.0, "slope where x < 0"),
        Param("k", 1.0, "slope where x >= 0"),
    ),
    _factor(
        "leaky_spike_operator",
        "where(x > 0, 1, slope)",
        "1 where x > 0, slope where x <= 0.",
        "snntorch 1.0.0 surrogate.py:505, slope 510 (its own LSO() calls SSO by mistake)",
        Param("slope", 0.1, "slope where x <= 0"),
    ),
    _factor(
        "stochastic_spike_operator",
        "where(x > 0, 1, (uniform(x, seed) - 0.5 + mean) * var)",
        "1 where x > 0; elsewhere a random slope, uniform in [mean - 1/2, mean + 1/2), multiplied by var.",
        "snntorch 1.0.0 surrogate.py:443, mean and var 449 (its var is named a variance, and is a factor)",
        Param("mean", 0.0, "mean of the noise before it is multiplied"),
        Param("var", 0.2, "factor of the noise"),
        Param("seed", None, "seed of the noise; use a new value in each call", "integer"),
    ),
    _factor(
        "spike_rate_escape",
        "slope * exp(-beta * abs(x - 1))",
        "An escape rate: slope at x = 1, decreasing exponentially from there.",
        "snntorch 1.0.0 surrogate.py:364, beta and slope 372",
        Param("beta", 1.0, "steepness", "> 0"),
        Param("slope", 25.0, "height"),
    ),
    _factor(
        "sparse_fast_sigmoid",
        "where(where(mode == 0, x > band, abs(x) < band), 1 / square(1 + slope * abs(x)), 0)",
        "Uses the slope of a fast sigmoid where x > band (mode 0, snntorch's code) or where abs(x) < band (mode 1, the "
        "paper); zero elsewhere.",
        "Perez-Nieves, Goodman 2021, arXiv:2105.08810; snntorch 1.0.0 surrogate.py:564, slope and band 572",
        Param("slope", 25.0, "steepness", "> 0"),
        Param("band", 1.0, "edge of the band", "> 0"),
        Param("mode", 0.0, "0: x > band, 1: abs(x) < band", ">= 0, <= 1, integer"),
    ),
    _factor("heaviside_gradient", "x > 0", "1 where x > 0; zero elsewhere.", "snntorch 1.0.0 surrogate.py:250"),
    _factor(
        "s2nn",
        "where(x < 0, alpha * sigmoid(alpha * x) * (1 - sigmoid(alpha * x)), beta / (x + 1))",
        "Uses the slope of a sigmoid where x < 0, and beta/(x + 1) where x >= 0.",
        "Suetake et al. 2022 (S²NN), arXiv:2201.10879; spikingjelly 2.0.0 "
        "activation_based/surrogate.py:2028, alpha and beta 2035",
        Param("alpha", 4.0, "steepness where x < 0", "> 0"),
        Param("beta", 1.0, "height where x >= 0"),
    ),
    _factor(
        "q_pseudo_spike",
        "(1 + 2 * abs(x) / (q - 1)) ** -q",
        "1 at 0; q determines how fast the tails decrease.",
        "Herranz-Celotti, Rouat 2022, arXiv:2202.00282; spikingjelly 2.0.0 "
        "activation_based/surrogate.py:2179, alpha 2185",
        Param("q", 2.0, "tail exponent", "> 1"),
    ),
    _factor(
        "nonzero_sign_log_abs",
        "1 / (1 / alpha + abs(x))",
        "alpha at 0, decreasing with 1/abs(x).",
        "spikingjelly 2.0.0 activation_based/surrogate.py:1311, alpha 1360",
        Param("alpha", 1.0, "height", "> 0"),
    ),
    _factor(
        "squarewave_fourier",
        _cosines(),
        "Uses the slope of the Fourier series of a square wave: 4/period times the sum of cos((2i - 1) 2pi x/period) "
        "for i from 1 to n - 1, computed in closed form. It is periodic, so it does not decrease far from 0.",
        "spikingjelly 2.0.0 activation_based/surrogate.py:1900, n and T_period 1909",
        Param("n", 2.0, "number of terms plus 1", ">= 2, integer"),
        Param("period", 8.0, "period of the wave", "> 0"),
    ),
    _factor(
        "multi_level",
        "0 <= x <= levels",
        "1 where 0 <= x <= levels (edges included); zero elsewhere.",
        "spikingjelly 2.0.0 activation_based/quantize.py:496 (MultiLevelSpikeCount)",
        Param("levels", None, "number of levels", "> 0"),
    ),
)
