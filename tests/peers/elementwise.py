"""Reference values of elementwise rules: surrogates, straight-through estimators, true gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.peers import formulas
from tests.peers.cases import DTYPES, FLOORS, Array, Collection, moments
from tests.peers.libraries import jelly, snn, torch

# Zero of either sign, steps around it, ordinary and large values; all are float32 numbers.
_GRID = np.concatenate(
    [
        [0.0, -0.0, 2.0**-20, -(2.0**-20), 0.125, -0.125],
        np.linspace(-4, 4, 65),
        [-100.0, -30.0, -10.0, -6.5, 6.5, 10.0, 30.0, 100.0],
    ]
)
_STEP = {"kind": "op", "op": "Sign"}

Gradient = Callable[[Array, Array], Array]


def grid(dtype: str, kinks: Sequence[float] = ()) -> tuple[Array, Array]:
    """x, with the kinks and their neighbours on both sides, and a dy of both signs that float32 holds exactly."""
    x = _GRID.astype(dtype)
    edges = np.array([sign * kink for kink in kinks for sign in (1, -1)], dtype)
    infinity = np.array(np.inf, dtype)
    x = np.concatenate([x, edges, np.nextafter(edges, infinity), np.nextafter(edges, -infinity)])
    dy = np.resize(np.array([1.0, -0.75, 2.0, 0.5, -1.5], dtype), x.shape)
    return x, dy


@dataclass(frozen=True)
class autograd:
    """Computes dx of a function of one torch tensor with torch's autograd."""

    function: Callable[[Any], Any]

    def __call__(self, x: Array, dy: Array) -> Array:
        tensor = torch.tensor(x, requires_grad=True)
        output = self.function(tensor)
        (dx,) = torch.autograd.grad(output, tensor, torch.tensor(dy).to(output.dtype))
        return np.asarray(dx.numpy())


@dataclass(frozen=True)
class Elementwise:
    """A rule on an op of one input, and the peer's gradient. params: gradrule's."""

    rule: str
    params: Mapping[str, Any]
    peer: str
    what: str
    gradient: Gradient
    kinks: Sequence[float] = ()
    op: str = "Sign"
    known_fault: str = ""
    skip: str = ""
    skipped: Callable[[Array, Array], Array] | None = None
    dtypes: Sequence[str] = DTYPES
    # Relative to what a difference counts, see cases.FLOORS; more where the reference has zeros without digits.
    floor: float = 0.0


def of_snntorch() -> list[Elementwise]:
    """Returns the cases of snntorch's surrogates."""
    cases = []
    for slope in (25.0, 1.0, 100.0):
        cases.append(
            Elementwise("fast_sigmoid", {"slope": slope}, "snntorch", "fast_sigmoid", autograd(snn.fast_sigmoid(slope)))
        )
    cases += [
        Elementwise("atan", {"alpha": alpha}, "snntorch", "atan", autograd(snn.atan(alpha))) for alpha in (2.0, 0.5)
    ]
    for slope in (25.0, 4.0):
        cases.append(
            Elementwise(
                "sigmoid_surrogate",
                {"slope": slope},
                "snntorch",
                "sigmoid",
                autograd(snn.sigmoid(slope)),
                skip="x where snntorch gives NaN",
                skipped=lambda x, reference: np.isnan(reference),
            )
        )
    cases.append(
        Elementwise(
            "sigmoid_surrogate",
            {"slope": 25.0},
            "snntorch",
            "sigmoid, all x",
            autograd(snn.sigmoid(25.0)),
            known_fault="k·exp(-kx)/(exp(-kx)+1)² is inf/inf = NaN where exp overflows, below x = -3.55 in float32 "
            "(-28.4 in float64); the limit is 0",
        )
    )
    cases += [
        Elementwise(
            "spike_rate_escape",
            {"beta": beta, "slope": slope},
            "snntorch",
            "spike_rate_escape",
            autograd(snn.spike_rate_escape(beta, slope)),
            kinks=(1.0,),
        )
        for beta, slope in ((1.0, 25.0), (2.0, 1.0))
    ]
    cases.append(Elementwise("heaviside_gradient", {}, "snntorch", "heaviside", autograd(snn.heaviside())))
    cases.append(
        Elementwise("ste", {}, "snntorch", "straight_through_estimator", autograd(snn.straight_through_estimator()))
    )
    # LeakySpikeOperator computes in float32, and gives one gradient for two inputs, which autograd refuses: its
    # backward is called by hand.
    for slope in (0.125, 0.5):

        def leaky(x: Array, dy: Array, slope: float = slope) -> Array:
            context = SimpleNamespace(saved_tensors=((torch.tensor(x) > 0).to(torch.tensor(x).dtype),), slope=slope)
            return np.asarray(snn.LeakySpikeOperator.backward(context, torch.tensor(dy)).numpy())

        cases.append(
            Elementwise(
                "leaky_spike_operator",
                {"slope": slope},
                "snntorch",
                "LeakySpikeOperator.backward, called by hand",
                leaky,
            )
        )

    def lso(x: Array, dy: Array) -> Array:
        torch.manual_seed(0)
        return autograd(snn.LSO(0.1))(x, dy)

    def triangular(x: Array, dy: Array) -> Array:
        return autograd(snn.triangular(1))(x, dy)

    cases += [
        Elementwise(
            "leaky_spike_operator",
            {"slope": 0.1},
            "snntorch",
            "LSO()",
            _or_refusal(lso),
            known_fault="LSO(slope) applies StochasticSpikeOperator without its variance: autograd raises TypeError; "
            "LeakySpikeOperator itself returns one gradient for two inputs",
            dtypes=("float32",),
        ),
        Elementwise(
            "triangle",
            {"gamma": 1.0},
            "snntorch",
            "triangular",
            triangular,
            known_fault="+threshold below 0 and -threshold from 0 on, without bound in x: no triangle",
        ),
    ]
    for slope, band in ((25.0, 1.0), (2.0, 0.5)):
        cases.append(
            Elementwise(
                "sparse_fast_sigmoid",
                {"slope": slope, "band": band, "mode": 0},
                "snntorch",
                "SFS",
                autograd(snn.SFS(slope, band)),
                kinks=(band,),
            )
        )
    return cases


def _or_refusal(gradient: Gradient) -> Gradient:
    """NaN where the library raises: a fault that shows in the comparison."""

    def refused(x: Array, dy: Array) -> Array:
        try:
            return gradient(x, dy)
        except (RuntimeError, TypeError):
            return np.full_like(x, np.nan)

    return refused


def of_spikingjelly() -> list[Elementwise]:
    """Returns the cases of spikingjelly's surrogates."""

    def case(rule: str, params: Mapping[str, Any], kind: str, *arguments: Any, **options: Any) -> Elementwise:
        return Elementwise(rule, params, "spikingjelly", kind, autograd(getattr(jelly, kind)(*arguments)), **options)

    cases = []
    for alpha in (2.0, 0.5):
        cases += [
            case("superspike_unit", {"alpha": alpha}, "SuperSpike", alpha),
            case("soft_sign", {"alpha": alpha}, "SoftSign", alpha),
            case("atan", {"alpha": alpha}, "ATan", alpha),
            case("sigmoid_surrogate", {"slope": 2 * alpha}, "Sigmoid", 2 * alpha),
            case("erf", {"alpha": alpha}, "Erf", alpha),
            case("piecewise_quadratic", {"alpha": alpha}, "PiecewiseQuadratic", alpha, kinks=(1 / alpha,)),
            case("piecewise_exp", {"alpha": alpha}, "PiecewiseExp", alpha),
            case("boxcar", {"alpha": alpha}, "Rect", alpha, kinks=(0.5 / alpha,)),
            case("nonzero_sign_log_abs", {"alpha": alpha}, "NonzeroSignLogAbs", alpha),
            case("s2nn", {"alpha": 2 * alpha, "beta": alpha}, "S2NN", 2 * alpha, alpha),
            case("log_tailed_relu", {"alpha": alpha / 4}, "LogTailedReLU", alpha / 4, kinks=(1.0,), op="Relu"),
        ]
    cases += [
        case("piecewise_leaky_relu", {"w": 1.0, "c": 0.01}, "PiecewiseLeakyReLU", 1.0, 0.01, kinks=(1.0,)),
        case("piecewise_leaky_relu", {"w": 0.25, "c": 0.5}, "PiecewiseLeakyReLU", 0.25, 0.5, kinks=(0.25,)),
        case("leaky_k_relu", {"leak": 0.0, "k": 1.0}, "LeakyKReLU", 0.0, 1.0),
        case("leaky_k_relu", {"leak": 0.25, "k": 2.0}, "LeakyKReLU", 0.25, 2.0),
        case("q_pseudo_spike", {"q": 2.0}, "QPseudoSpike", 2.0),
        case("q_pseudo_spike", {"q": 3.5}, "QPseudoSpike", 3.5),
        case("squarewave_fourier", {"n": 2, "period": 8.0}, "SquarewaveFourierSeries", 2, 8.0, floor=1e-3),
        case("squarewave_fourier", {"n": 5, "period": 4.0}, "SquarewaveFourierSeries", 5, 4.0, floor=1e-3),
        case("multi_level", {"levels": 1.0}, "MultiLevelSpikeCount", 1, kinks=(1.0,)),
        case("multi_level", {"levels": 4.0}, "MultiLevelSpikeCount", 4, kinks=(4.0,)),
        case("ste", {}, "DeterministicPass"),
    ]
    return cases


def _written_out() -> list[Elementwise]:
    """norse's, the papers' and larq's."""
    cases = [
        Elementwise(
            "fast_sigmoid",
            {"slope": 100.0},
            "norse",
            "superspike, alpha=100",
            formulas.norse_superspike,
            known_fault="norse 1.1.0 takes alpha and does not use it: dy/(abs(x)+1)² whatever alpha is; the "
            "paper that it cites has 1/(beta·abs(x)+1)², and calls beta what norse calls alpha",
        ),
        Elementwise("superspike_unit", {"alpha": 1.0}, "norse", "superspike", formulas.norse_superspike),
    ]
    for k in (1.0, 0.5, 3.0):
        cases += [
            Elementwise("tanh_surrogate", {"alpha": k}, "norse", "tanh", _with(formulas.norse_tanh, k=k)),
            Elementwise("heavi_erfc", {"k": k}, "norse", "heavi_erfc", _with(formulas.norse_heavi_erfc, k=k)),
            # For x = ±100 norse's own difference of two terms has lost its digits, in float64 too.
            Elementwise(
                "circ",
                {"alpha": k},
                "norse",
                "circ",
                _with(formulas.norse_circ, alpha=k),
                skip="abs(x) > 10, where norse's difference of two equal terms has no digits left",
                skipped=lambda x, reference: np.abs(x) > 10,
            ),
            Elementwise(
                "triangle", {"gamma": k}, "norse", "triangle", _with(formulas.norse_triangle, alpha=k), kinks=(1.0,)
            ),
        ]
    for lens, gamma in ((0.5, 0.5), (1.0, 2.0)):
        normal = {"lens": lens, "gamma": gamma}
        several = normal | {"h": 0.15, "s": 6.0}
        cases += [
            Elementwise("gaussian", normal, "paper", "Yin 2021, G", _with(formulas.yin_gaussian, **normal)),
            Elementwise(
                "multi_gaussian", several, "paper", "Yin 2021, MG", _with(formulas.yin_multi_gaussian, **several)
            ),
            Elementwise(
                "slayer",
                {"alpha": 10 * lens, "gamma": gamma},
                "paper",
                "SLAYER",
                _with(formulas.slayer, alpha=10 * lens, gamma=gamma),
            ),
        ]
    for clip in (1.0, 2.5):
        cases += [
            Elementwise(
                rule, {"clip": clip}, "larq", name, _with(formulas.larq_clipped, clip=clip), kinks=(clip,), op=op
            )
            for rule, name, op in (
                ("ste_sign", "SteSign", "Sign"),
                ("ste_tern", "SteTern", "Sign"),
                ("ste_heaviside", "SteHeaviside", "Sign"),
                ("ste_sign", "SteSign", "Round"),
            )
        ]
    cases += [
        Elementwise("approx_sign", {}, "larq", "ApproxSign", formulas.larq_approx_sign, kinks=(1.0,)),
        Elementwise(
            "dorefa_activation", {}, "larq", "DoReFa, activations", formulas.larq_dorefa_activation, (1.0,), "Round"
        ),
    ]
    cases += [
        Elementwise("swish_sign", {"beta": beta}, "larq", "SwishSign", _with(formulas.larq_swish_sign, beta=beta))
        for beta in (5.0, 1.0)
    ]
    return cases


def _with(function: Callable[..., Array], **params: float) -> Gradient:
    def gradient(x: Array, dy: Array) -> Array:
        return function(x, dy, **params)

    return gradient


def _true_gradients() -> list[Elementwise]:
    def smooth(x: Any) -> Any:
        return torch.logaddexp(x, torch.zeros_like(x))

    def off_zero(rule: str, params: Mapping[str, Any], op: str, function: Callable[[Any], Any]) -> Elementwise:
        return Elementwise(
            rule,
            params,
            "torch",
            op.lower(),
            autograd(function),
            op=op,
            skip="x below 0.01, where the plain gradient is large, infinite or NaN",
            skipped=lambda x, reference: x < 0.01,
        )

    cases = [
        Elementwise("log1pexp", {}, "torch", "logaddexp(x, 0)", autograd(smooth), op="Softplus"),
        off_zero("safe_sqrt", {}, "Sqrt", torch.sqrt),
        off_zero("safe_log", {"eps": 1e-3}, "Log", torch.log),
    ]
    for op, function in (
        ("Softplus", smooth),
        ("Sigmoid", torch.sigmoid),
        ("Tanh", torch.tanh),
        ("Relu", torch.relu),
        ("Elu", torch.nn.functional.elu),
        ("Erf", torch.erf),
        ("Atan", torch.atan),
    ):
        cases.append(Elementwise(op, {}, "torch", f"{op.lower()}, true gradient", autograd(function), op=op))
    return cases


def add_elementwise(collection: Collection) -> None:
    """Rules on an op of one input."""
    rows = [*of_snntorch(), *of_spikingjelly(), *_written_out(), *_true_gradients()]
    for row in rows:
        for dtype in row.dtypes:
            x, dy = grid(dtype, row.kinks)
            reference = np.asarray(row.gradient(x, dy))
            collection.add(
                row.rule,
                row.peer,
                row.what,
                dtype,
                {"kind": "op", "op": row.op},
                {"x": x, "dy": dy},
                {"x": reference},
                row.params,
                floor=max(row.floor, FLOORS[dtype]),
                known_fault=row.known_fault,
                skip=row.skip,
                skipped=None if row.skipped is None else row.skipped(x, reference),
            )


def add_others(collection: Collection) -> None:
    """Rules on ops of several inputs, on tensors of several axes, and random ones."""
    random = np.random.default_rng(7)
    for dtype in DTYPES:
        _add_magnitude_aware(collection, dtype, random)
        _add_bounds(collection, dtype)
        _add_division(collection, dtype, random)
        _add_fake_quant(collection, dtype)
    _add_stochastic(collection, random)


def _add_magnitude_aware(collection: Collection, dtype: str, random: np.random.Generator) -> None:
    for shape in ((6, 5), (3, 3, 2, 4)):
        x, dy = (random.normal(size=shape).astype(dtype) for _ in range(2))
        for clip in (1.0, 0.5):
            collection.add(
                "magnitude_aware_sign",
                "larq",
                f"MagnitudeAwareSign, rank {len(shape)}",
                dtype,
                _STEP,
                {"x": x, "dy": dy},
                {"x": formulas.larq_magnitude_aware_sign(x, dy, clip)},
                {"clip": clip},
            )
        collection.add(
            "dorefa_weight",
            "larq",
            f"DoReFa, weights, rank {len(shape)}",
            dtype,
            {"kind": "graph", "graph": "dorefa_weight"},
            {"x": x, "dy": dy},
            {"x": formulas.larq_dorefa_weight(x, dy)},
        )


def _add_bounds(collection: Collection, dtype: str) -> None:
    for low, high in ((-1.0, 1.0), (0.25, 6.0)):
        x, dy = grid(dtype, (abs(low), high))
        params = {"lo": low, "hi": high}

        def clamp(x: Any, low: float = low, high: float = high) -> Any:
            return torch.clamp(x, low, high)

        constants = {"x1": np.array(low, dtype), "x2": np.array(high, dtype)}
        collection.add(
            "clamp_window",
            "torch",
            "clamp",
            dtype,
            {"kind": "op", "op": "ClipByValue", "constants": ["x1", "x2"]},
            {"x": x, "dy": dy, **constants},
            {"x": autograd(clamp)(x, dy)},
            params,
        )


def _add_division(collection: Collection, dtype: str, random: np.random.Generator) -> None:
    numerator, denominator = random.normal(size=(4, 3)).astype(dtype), (random.uniform(0.5, 2, size=3)).astype(dtype)
    dy = random.normal(size=(4, 3)).astype(dtype)
    tensors = [torch.tensor(value, requires_grad=True) for value in (numerator, denominator)]
    gradients = torch.autograd.grad(tensors[0] / tensors[1], tensors, torch.tensor(dy))
    collection.add(
        "safe_div",
        "torch",
        "division, the denominator broadcast",
        dtype,
        {"kind": "op", "op": "RealDiv"},
        {"x": numerator, "x1": denominator, "dy": dy},
        {name: gradient.numpy() for name, gradient in zip(("x", "x1"), gradients, strict=True)},
    )


def _add_fake_quant(collection: Collection, dtype: str) -> None:
    # TensorFlow's op is float32 only. Here its nudged range equals [low, high]: scale 1/16, zero point 128.
    if dtype != "float32":
        return
    low, high, scale, zero = -8.0, 127 / 16, 1 / 16, 128
    x, dy = grid(dtype, (8.0, high))

    def quantize(x: Any) -> Any:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)

    reference = autograd(quantize)(x, dy)
    # torch asks whether the rounded value is in the range: it passes the gradient half a step further.
    border = (x < low) & (x >= low - scale / 2) | (x > high) & (x <= high + scale / 2)
    constants = {"x1": np.array(low, dtype), "x2": np.array(high, dtype)}
    for rule in ("fake_quant", "FakeQuantWithMinMaxVars"):
        collection.add(
            rule,
            "torch",
            "fake_quantize_per_tensor_affine, dx",
            dtype,
            {"kind": "op", "op": "FakeQuantWithMinMaxVars", "constants": ["x1", "x2"]},
            {"x": x, "dy": dy, **constants},
            {"x": reference},
            skip="half a step outside [min, max], where torch passes the gradient and TensorFlow does not",
            skipped=border,
        )


def _add_stochastic(collection: Collection, random: np.random.Generator) -> None:
    """Mean, deviation and range of the noise below 0; above 0 the gradient is dy."""
    x = random.normal(size=200_000).astype("float32")
    for mean, variance in ((0.0, 0.2), (0.5, 1.0)):
        torch.manual_seed(3)
        gradient = autograd(snn.SSO(mean, variance))(x, np.ones_like(x))
        collection.add(
            "stochastic_spike_operator",
            "snntorch",
            "SSO, moments of 100,000 samples",
            "float32",
            {"kind": "op", "op": "Sign", "post": "moments"},
            {"x": x, "dy": np.ones_like(x)},
            {"x": moments(x, gradient)},
            {"mean": mean, "var": variance, "seed": 1},
            tolerance=0.01,
            floor=1.0,
        )
