"""Rules of gradrule.torch, compared with snntorch, spikingjelly, captum and zennit.

Differences are relative to the largest gradient. The table of docs/guide/frameworks.md has their upper limits.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradrule.torch
from gradrule.torch import override
from tests.bridges import examples, vision_models
from tests.e2e.pages import GUIDE
from tests.peers import elementwise
from tests.peers.attribution import MergeBatchNorm
from tests.peers.libraries import (
    VERSIONS,
    ZennitSum,
    captum_attr,
    captum_rules,
    jelly,
    snn,
    snn_neurons,
    zennit_composites,
    zennit_rules,
    zennit_types,
)

LIMITS = {"float32": 1e-5, "float64": 1e-10}
_EPS = 1e-6
_NOTHING = 1e-12

Overrides = list[tuple[Any, Any]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads make small tensors slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def stated() -> dict[str, dict[str, float]]:
    """Returns the largest differences of the guide's table, by the first column without the version, and by dtype."""
    row = re.compile(r"^\| (\w+) [\d.]+, ([^|]+?) \|.*\| ([\de.-]+) \| ([\de.-]+) \|$", re.MULTILINE)
    page = (GUIDE / "frameworks.md").read_text(encoding="utf-8")
    return {
        f"{library}, {what}": {"float32": float(single), "float64": float(double)}
        for library, what, single, double in row.findall(page)
    }


def check(row: str, dtype: str, found: Any, wanted: Any) -> None:
    """Checks that gradients differ no more than the row of the guide's table says."""
    assert np.isfinite(wanted).all()
    assert np.any(wanted)
    difference = float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
    limit = stated()[row][dtype]
    assert limit <= LIMITS[dtype]
    assert difference <= limit


def test_the_guide_names_the_versions() -> None:
    page = (GUIDE / "frameworks.md").read_text(encoding="utf-8")
    for library in ("snntorch", "spikingjelly", "captum", "zennit"):
        assert f"| {library} {VERSIONS[library]}, " in page


# Surrogates


SURROGATES = [case for case in (*elementwise.of_snntorch(), *elementwise.of_spikingjelly()) if not case.known_fault]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("case", SURROGATES, ids=lambda case: f"{case.what}-{case.params}")
def test_surrogates(case: Any, dtype: str) -> None:
    x, dy = elementwise.grid(dtype, case.kinks)
    wanted = np.asarray(case.gradient(x, dy))
    leaf = torch.tensor(x, requires_grad=True)
    y = gradrule.torch.surrogate(case.rule, **case.params)(leaf)
    (found,) = torch.autograd.grad(y, leaf, torch.tensor(dy))
    compared = np.ones(x.shape, bool) if case.skipped is None else ~case.skipped(x, wanted)
    check(f"{case.peer}, surrogates", dtype, found.numpy()[compared], wanted[compared])
    if isinstance(case.gradient, elementwise.autograd) and case.what != "MultiLevelSpikeCount":
        fired = case.gradient.function(torch.tensor(x))
        # At 0, spikingjelly's neurons fire.
        np.testing.assert_array_equal(y.detach()[x != 0], fired.detach()[x != 0])


DEFAULTS: list[tuple[str, Callable[[], Any], str, dict[str, float]]] = [
    ("snntorch", snn.fast_sigmoid, "fast_sigmoid", {"slope": 25.0}),
    ("snntorch", snn.atan, "atan", {"alpha": 2.0}),
    ("snntorch", snn.sigmoid, "sigmoid_surrogate", {"slope": 25.0}),
    ("snntorch", snn.spike_rate_escape, "spike_rate_escape", {"beta": 1.0, "slope": 25.0}),
    ("snntorch", snn.SFS, "sparse_fast_sigmoid", {"slope": 25.0, "band": 1.0}),
    ("spikingjelly", jelly.Sigmoid, "sigmoid_surrogate", {"slope": 4.0}),
    ("spikingjelly", jelly.ATan, "atan", {"alpha": 2.0}),
    ("spikingjelly", jelly.Erf, "erf", {"alpha": 2.0}),
    ("spikingjelly", jelly.PiecewiseQuadratic, "piecewise_quadratic", {"alpha": 1.0}),
    ("spikingjelly", jelly.S2NN, "s2nn", {"alpha": 4.0, "beta": 1.0}),
    ("spikingjelly", jelly.QPseudoSpike, "q_pseudo_spike", {"q": 2.0}),
]


@pytest.mark.parametrize(("library", "peer", "rule", "params"), DEFAULTS, ids=lambda value: str(value)[:20])
def test_defaults_are_the_params_in_the_guide(library: str, peer: Any, rule: str, params: dict[str, float]) -> None:
    x = torch.linspace(-3, 3, 101, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(peer()(x).sum(), x)
    (found,) = torch.autograd.grad(gradrule.torch.surrogate(rule, **params)(x).sum(), x)
    finite = wanted.isfinite()
    check(f"{library}, surrogates", "float64", found[finite].numpy(), wanted[finite].numpy())
    text = f"{rule}({', '.join(f'{name}={value:g}' for name, value in params.items())})"
    assert text in (GUIDE / "frameworks.md").read_text(encoding="utf-8")


class Spiking(nn.Module):  # type: ignore[misc]
    """A network of leaky integrate-and-fire neurons of snntorch that sees an image ten times."""

    def __init__(self, spike: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.output = nn.Linear(64, 64), nn.Linear(64, 10)
        self.neurons = nn.ModuleList(snn_neurons.Leaky(beta=0.9, spike_grad=spike) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the number of spikes of each class."""
        first, second = (neuron.init_leaky() for neuron in self.neurons)
        spikes, current = [], self.hidden(images)
        for _ in range(10):
            fired, first = self.neurons[0](current, first)
            fired, second = self.neurons[1](self.output(fired), second)
            spikes.append(fired)
        return torch.stack(spikes).sum(0)


def trained(spike: Any) -> tuple[list[torch.Tensor], float]:
    """Trains a spiking network on digits; returns the gradients of the first step, and the accuracy on other digits."""
    network, digits, first = Spiking(spike), examples.DIGITS, list[torch.Tensor]()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    for batch in examples.BATCHES:
        x, labels = torch.tensor(digits.train_x[batch]), torch.tensor(digits.train_labels[batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), labels.long()).backward()
        first = first or [parameter.grad.clone() for parameter in network.parameters()]
        optimizer.step()
    with torch.no_grad():
        found = network(torch.tensor(digits.test_x)).argmax(1).numpy()
    return first, float(np.mean(found == digits.test_labels))


def test_a_spiking_network_trains_as_with_snntorchs_surrogate() -> None:
    """The gradients are equal; later, rounding errors move single spikes."""
    ours, accuracy = trained(gradrule.torch.surrogate("fast_sigmoid", slope=25.0))
    theirs, wanted = trained(snn.fast_sigmoid(25.0))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert wanted >= examples.WANTED_ACCURACY
    assert accuracy >= wanted - 0.03


LEFT_OUT = {
    "SSO": "random: `make test-peers` compares moments",
    "StochasticSpikeOperator": "random: `make test-peers` compares moments",
    "PoissonPass": "random, and no rule has its gradient",
    "LSO": "raises TypeError in snntorch 1.0.0; its gradient is that of LeakySpikeOperator",
    "Triangular": "no triangle in snntorch 1.0.0: it is the threshold without bound",
    "CustomSurrogate": "takes the user's function",
    "FakeNumericalGradient": "no rule has its gradient",
    "SurrogateFunctionBase": "base class",
    "SparseFastSigmoid": "compared by its other name, SFS",
}


def test_all_surrogates_with_a_rule_are_compared() -> None:
    compared = {case.what.split(",")[0].split(".")[0].replace("_", "").lower() for case in SURROGATES}
    for module, base in ((snn, torch.autograd.Function), (jelly, nn.Module)):
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__:
                assert (name.lower() in compared) != (name in LEFT_OUT), name


# Attributions


def linear(convolution: Any, dense: Any = None) -> Overrides:
    """Returns overrides for convolutions and dense layers."""
    return [(nn.Conv2d, convolution), (nn.Linear, dense or convolution)]


def elsewhere(eps: float = _EPS, *, passes: bool = True) -> Overrides:
    """Returns the overrides of zennit's `layer_map_base`: for activations, batch norms, sums and average pools."""
    norms: Overrides = [(kind, ("lrp_norm", {"eps": eps})) for kind in (nn.AvgPool2d, nn.AdaptiveAvgPool2d, ZennitSum)]
    return [*([(nn.ReLU, "lrp_pass"), (nn.BatchNorm2d, "lrp_pass")] if passes else []), *norms]


def everywhere(hook: Any) -> Callable[[], Any]:
    """Returns zennit's composite of one rule on all convolutions and dense layers."""
    base = zennit_composites.layer_map_base(_EPS)
    return lambda: zennit_composites.LayerMapComposite([*base, (zennit_types.Linear, hook)])


def params(rule: str, **values: float) -> tuple[str, dict[str, float]]:
    return rule, {"eps": _EPS, **values}


_ZPLUS, _EPSILON, _FLAT = params("lrp_zplus"), params("lrp_epsilon"), params("lrp_flat")
_ALPHA_BETA, _GAMMA = params("lrp_alpha_beta", alpha=2.0, beta=1.0), params("lrp_gamma", gamma=0.25)
_BOX = params("lrp_zbox", low=-4.0, high=4.0)

RULES: list[tuple[Any, Any]] = [
    (_EPSILON, zennit_rules.Epsilon(_EPS)),
    (params("lrp_epsilon", eps=0.25), zennit_rules.Epsilon(0.25)),
    (_ZPLUS, zennit_rules.ZPlus(_EPS)),
    (_ALPHA_BETA, zennit_rules.AlphaBeta(2.0, 1.0)),
    (_GAMMA, zennit_rules.Gamma(0.25)),
    (params("lrp_wsquare"), zennit_rules.WSquare(_EPS)),
    (_FLAT, zennit_rules.Flat(_EPS)),
]
COMPOSITES: dict[str, Overrides] = {
    "EpsilonPlus": [*linear(_ZPLUS, _EPSILON), *elsewhere()],
    "EpsilonPlusFlat": [("0", _FLAT), *linear(_ZPLUS, _EPSILON), *elsewhere()],
    "EpsilonAlpha2Beta1": [*linear(_ALPHA_BETA, _EPSILON), *elsewhere()],
    "EpsilonAlpha2Beta1Flat": [("0", _FLAT), *linear(_ALPHA_BETA, _EPSILON), *elsewhere()],
    "EpsilonGammaBox": [("0", _BOX), *linear(_GAMMA, _EPSILON), *elsewhere()],
    "ExcitationBackprop": [*linear(_ZPLUS), *elsewhere(passes=False)],
}
ACTIVATIONS: dict[str, Any] = {
    "GuidedBackprop": "guided_relu",
    "DeconvNet": "deconvnet",
    "BetaSmooth": ("relu_beta_smooth", {"beta": 10.0}),
}


class Network:
    """A model, two images, and the class of each, in one precision."""

    def __init__(self, name: str, dtype: str, *, fused: bool = False) -> None:
        self.dtype = dtype
        self.model = vision_models.build(name, getattr(torch, dtype), fused=fused)
        self.x = vision_models.images(getattr(torch, dtype))
        self.classes = torch.tensor([0, 1])
        outputs = self.model(self.x).detach()
        self.one_hot = torch.eye(outputs.shape[1], dtype=outputs.dtype)[self.classes]
        self.relevance = self.one_hot * outputs

    def gradient(self, overrides: Overrides, upstream: torch.Tensor) -> Any:
        """Returns what gradrule's overrides give; those for layers that the model lacks are left out."""
        layers = list(self.model.modules())
        present = [
            pair for pair in overrides if isinstance(pair[0], str) or any(isinstance(one, pair[0]) for one in layers)
        ]
        x = self.x.clone().requires_grad_()
        with override(self.model, present):
            return torch.autograd.grad(self.model(x), x, upstream)[0].numpy()

    def by_zennit(self, composite: Any, upstream: torch.Tensor) -> Any:
        x = self.x.clone().requires_grad_()
        with composite.context(self.model) as model:
            return torch.autograd.grad(model(x), x, upstream)[0].numpy()

    def by_captum(self, method: Any) -> Any:
        return method(self.model).attribute(self.x.clone().requires_grad_(), target=self.classes).detach().numpy()


@pytest.fixture(params=[(name, dtype) for name in vision_models.MODELS for dtype in LIMITS], ids="-".join)
def network(request: pytest.FixtureRequest) -> Network:
    return Network(*request.param)


@pytest.mark.parametrize(("rule", "hook"), RULES, ids=lambda value: str(value) if isinstance(value, tuple) else "")
def test_rules_of_zennit(network: Network, rule: Any, hook: Any) -> None:
    found = network.gradient([*linear(rule), *elsewhere()], network.relevance)
    wanted = network.by_zennit(everywhere(hook)(), network.relevance)
    check("zennit, LRP rules", network.dtype, found, wanted)


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_of_zennit(network: Network, name: str) -> None:
    bounds: Sequence[float] = (-4.0, 4.0) if name == "EpsilonGammaBox" else ()
    wanted = network.by_zennit(getattr(zennit_composites, name)(*bounds), network.relevance)
    check("zennit, composites for LRP", network.dtype, network.gradient(COMPOSITES[name], network.relevance), wanted)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rules_of_activations_of_zennit(network: Network, name: str) -> None:
    wanted = network.by_zennit(getattr(zennit_composites, name)(), network.one_hot)
    found = network.gradient([(nn.ReLU, ACTIVATIONS[name])], network.one_hot)
    check("zennit, `GuidedBackprop`, `DeconvNet`, `BetaSmooth`", network.dtype, found, wanted)


@pytest.mark.parametrize("name", vision_models.MODELS)
def test_merged_batch_norms_of_zennit(name: str) -> None:
    """In float64 only: weights merged in another order differ by rounding, which small sums amplify."""
    unmerged = Network(name, "float64")
    composite = zennit_composites.EpsilonPlus(canonizers=[MergeBatchNorm()])
    wanted = unmerged.by_zennit(composite, unmerged.relevance)
    found = Network(name, "float64", fused=True).gradient(COMPOSITES["EpsilonPlus"], unmerged.relevance)
    check("zennit, composites for LRP", "float64", found, wanted)


@pytest.mark.filterwarnings("ignore:Setting backward hooks:UserWarning")
@pytest.mark.parametrize(
    ("rule", "method"), [("guided_relu", captum_attr.GuidedBackprop), ("deconvnet", captum_attr.Deconvolution)]
)
def test_rules_of_activations_of_captum(network: Network, rule: str, method: Any) -> None:
    found = network.gradient([(nn.ReLU, rule)], network.one_hot)
    check("captum, `GuidedBackprop`, `Deconvolution`", network.dtype, found, network.by_captum(method))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", vision_models.MODELS)
def test_epsilon_rule_of_captum(name: str, dtype: str) -> None:
    """captum takes a batch norm for a linear layer, so they are merged first; and a max pool for one with a norm."""
    network = Network(name, dtype, fused=True)
    for layer in network.model.modules():
        if not list(layer.children()) and not isinstance(layer, nn.ReLU):
            is_linear = isinstance(layer, nn.Conv2d | nn.Linear)
            layer.rule = captum_rules.EpsilonRule(_EPS if is_linear else _NOTHING)
    others = (nn.MaxPool2d, nn.Flatten, vision_models.Same)
    norms: Overrides = [(kind, ("lrp_norm", {"eps": _NOTHING})) for kind in others]
    found = network.gradient([*linear(_EPSILON), *elsewhere(_NOTHING), *norms], network.relevance)
    check("captum, `LRP` with `EpsilonRule`", dtype, found, network.by_captum(captum_attr.LRP))
