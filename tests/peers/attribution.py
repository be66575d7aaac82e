"""Reference values of attribution rules on small networks: zennit's and captum's.

The upstream gradient of the outputs is where methods differ. zennit's relevance of the output is the output itself, of
one class: one-hot times output. Gradient-like methods start from one-hot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.peers.cases import DTYPES, Array, Collection
from tests.peers.libraries import captum_attr, captum_rules, torch
from tests.peers.libraries import zennit_canonizers as canonizers
from tests.peers.libraries import zennit_composites as composites
from tests.peers.libraries import zennit_rules as rules
from tests.peers.libraries import zennit_types as types
from tests.peers.networks import NETWORKS, Builder

# Relative to the largest relevance: single relevances are differences of large terms.
_FLOOR = 1.0
_TOLERANCES = {"float32": 1e-3, "float64": 1e-9}
_LINEAR_NETWORKS = ("dense", "convolutional", "residual", "max pooling")
_FOLD = ("fold_batch_norm",)

Override = dict[str, Any]


class MergeBatchNorm(canonizers.SequentialMergeBatchNorm):  # type: ignore[misc]
    """zennit's merges weight, bias, mean and variance and leaves eps: its forward then is off by 1/sqrt(1 + eps)."""

    def register(self, linears: Any, batch_norm: Any) -> None:
        self.eps = batch_norm.eps
        super().register(linears, batch_norm)
        batch_norm.eps = 0.0

    def remove(self) -> None:
        super().remove()
        self.batch_norm.eps = self.eps


@dataclass
class Network:
    """A network of PyTorch, its input and its outputs, in one precision."""

    name: str
    dtype: str
    module: Any
    x: Array
    outputs: Array = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self.outputs = self.module(self.tensor()).numpy()

    def tensor(self) -> Any:
        return torch.tensor(self.x)

    def classes(self) -> Array:
        """One class per sample."""
        return np.arange(len(self.x)) % self.outputs.shape[1]

    def one_hot(self) -> Array:
        return np.eye(self.outputs.shape[1], dtype=self.outputs.dtype)[self.classes()]


def networks(collection: Collection) -> Iterator[Network]:
    """All networks in all their precisions; weights and descriptions go into the collection."""
    for name in NETWORKS:
        builder = Builder(name)
        module = builder.module()
        x = builder.inputs().astype(np.float32)
        collection.networks[name] = builder.description
        for path, value in builder.weights.items():
            collection.arrays[f"{name}/weights/{path}"] = value
        for dtype in DTYPES:
            yield Network(name, dtype, module.to(getattr(torch, dtype)), x.astype(dtype))


def zennit(network: Network, composite: Any, upstream: Array) -> Array:
    """What flows back to the input under a composite."""
    x = network.tensor().requires_grad_()
    with composite.context(network.module) as module:
        (gradient,) = torch.autograd.grad(module(x), x, torch.tensor(upstream))
    return np.asarray(gradient.numpy())


def add_attribution(collection: Collection) -> None:
    """All methods on all networks that they are for."""
    for network in networks(collection):
        # What makes a difference is the rules: the forward is compared on its own.
        collection.add(
            "(forward)", "torch", f"outputs, {network.name} network", network.dtype,
            {"kind": "network", "network": network.name, "forward": True},
            {"x": network.x}, {"y": network.outputs}, floor=_FLOOR, tolerance=_TOLERANCES[network.dtype] / 10,
        )  # fmt: skip
        _add(collection, network, "(true gradient)", "torch", "autograd", network.one_hot(), [], zennit_of(None))
        if network.name != "smooth":
            for method in _activation_methods():
                method.add(collection, network)
        if network.name in _LINEAR_NETWORKS:
            for method in (*_zennit_rules(), *_zennit_presets()):
                method.add(collection, network)
        if network.name == "batch norm":
            _add_batch_norm(collection, network)
        _add_captum(collection, network)


def zennit_of(composite: Any) -> Callable[[Network, Array], Array]:
    """A composite as a function; None: the network's own gradient."""
    return lambda network, upstream: zennit(network, composite or composites.LayerMapComposite([]), upstream)


def _add(
    collection: Collection,
    network: Network,
    rule: str,
    peer: str,
    what: str,
    upstream: Array,
    overrides: Sequence[Override],
    compute: Callable[[Network, Array], Array],
    params: Mapping[str, Any] | None = None,
    rewrites: Sequence[str] = (),
    known_fault: str = "",
    times: Array | None = None,
    bias_op: str = "BiasAdd",
    batch_norm: str = "",
) -> None:
    """One case. times: what gradrule's gradient is multiplied with before the comparison."""
    reference = compute(network, upstream)
    if not np.isfinite(reference).all() or not reference.any():
        raise ValueError(f"{peer} {what} on the {network.name} network gives nothing to compare")
    run = {
        "kind": "network",
        "network": network.name,
        "overrides": list(overrides),
        "rewrites": list(rewrites),
        "bias_op": bias_op,
        "batch_norm": batch_norm,
    }
    inputs = {"x": network.x, "dy": upstream} | ({} if times is None else {"times": times})
    collection.add(
        rule, peer, f"{what}, {network.name} network", network.dtype, run, inputs, {"x": reference}, params,
        floor=_FLOOR, tolerance=_TOLERANCES[network.dtype], known_fault=known_fault,
    )  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A composite of zennit and gradrule's overrides for the same."""

    rule: str
    what: str
    composite: Callable[[], Any]
    overrides: Sequence[Override]
    params: Mapping[str, Any] = field(default_factory=dict)
    relevance: bool = True
    rewrites: Sequence[str] = ()
    bias_op: str = "BiasAdd"

    def add(self, collection: Collection, network: Network) -> None:
        upstream = network.one_hot() * (network.outputs if self.relevance else 1)
        _add(
            collection, network, self.rule, "zennit", self.what, upstream, self.overrides,
            zennit_of(self.composite()), self.params, self.rewrites, bias_op=self.bias_op,
        )  # fmt: skip


def linear(rule: str, params: Mapping[str, Any] | None = None, *, biases: bool = True, **selectors: Any) -> Override:
    """The rule on every dense and convolutional layer: with its bias as one pattern, or on layers that have none."""
    where: Override = {"pattern": ["@linear", "BiasAdd"]} if biases else {"op_type": "@linear"}
    return where | {"rule": rule, "params": dict(params or {}), **selectors}


def elsewhere(eps: float = 1e-6) -> list[Override]:
    """zennit's `layer_map_base`: pass on activations and batch norm, norm on sums and averages."""
    norm = {"rule": "lrp_norm", "params": {"eps": eps}, "optional": True}
    keep = {"rule": "lrp_pass", "optional": True}
    return [
        {"op_type": "@activation"} | keep,
        {"op_type": "FusedBatchNormV3"} | keep,
        {"op_type": "AddV2"} | norm,
        {"op_type": "AvgPool"} | norm,
    ]


def _base(stabilizer: float = 1e-6) -> Any:
    return composites.layer_map_base(stabilizer)


def everywhere(rule: Any) -> Callable[[], Any]:
    """zennit: one rule on all linear layers."""
    return lambda: composites.LayerMapComposite([*_base(), (types.Linear, rule)])


def first(rule: Any) -> Callable[[], Any]:
    """zennit: one rule on the first linear layer, epsilon on the others."""
    return lambda: composites.SpecialFirstLayerMapComposite(
        [*_base(), (types.Linear, rules.Epsilon(1e-6))], [(types.Linear, rule)]
    )


def _activation_methods() -> list[Method]:
    """Rules on activations alone, for all networks; they start from one-hot."""
    relu = {"op_type": "Relu", "optional": True}
    methods = []
    for rule, preset, composite, params in (
        ("guided_backprop", "guided_backprop", composites.GuidedBackprop, {}),
        ("deconvnet", "deconvnet", composites.DeconvNet, {}),
        ("relu_beta_smooth", "beta_smooth", composites.BetaSmooth, {"beta": 10.0}),
    ):
        methods += [
            Method(rule, composite.__name__, composite, [relu | {"rule": rule, "params": params}], params, False),
            Method(
                f"preset {preset}", composite.__name__, composite, [{"preset": preset, "params": params}], params, False
            ),
        ]
    return methods


def _zennit_rules() -> list[Method]:
    methods = []
    for rule, params, hook in (
        ("lrp_epsilon", {"eps": 1e-6}, rules.Epsilon(1e-6)),
        ("lrp_epsilon", {"eps": 0.25}, rules.Epsilon(0.25)),
        ("lrp_0", {}, rules.Epsilon(0.0)),
        ("lrp_zplus", {"eps": 1e-6}, rules.ZPlus(1e-6)),
        ("lrp_zplus", {"eps": 0.1}, rules.ZPlus(0.1)),
        ("lrp_alpha_beta", {"alpha": 2.0, "beta": 1.0, "eps": 1e-6}, rules.AlphaBeta(2.0, 1.0)),
        ("lrp_alpha_beta", {"alpha": 1.5, "beta": 0.5, "eps": 1e-3}, rules.AlphaBeta(1.5, 0.5, 1e-3)),
        ("lrp_alpha_beta", {"alpha": 1.0, "beta": 0.0, "eps": 1e-6}, rules.AlphaBeta(1.0, 0.0)),
        ("lrp_gamma", {"gamma": 0.25, "eps": 1e-6}, rules.Gamma(0.25)),
        ("lrp_gamma", {"gamma": 2.0, "eps": 1e-3}, rules.Gamma(2.0, 1e-3)),
        ("lrp_wsquare", {"eps": 1e-6}, rules.WSquare(1e-6)),
        ("lrp_flat", {"eps": 1e-6}, rules.Flat(1e-6)),
    ):
        overrides = [linear(rule, params), *elsewhere()]
        methods.append(Method(rule, f"{type(hook).__name__} everywhere", everywhere(hook), overrides, params))
    for rule, params, hook in (
        ("lrp_zbox", {"low": -4.0, "high": 4.0, "eps": 1e-6}, rules.ZBox(-4.0, 4.0)),
        ("lrp_wsquare", {"eps": 1e-6}, rules.WSquare(1e-6)),
        ("lrp_flat", {"eps": 1e-6}, rules.Flat(1e-6)),
    ):
        others = linear("lrp_epsilon", {"eps": 1e-6})
        overrides = [linear(rule, params, position="nearest_xs"), others, *elsewhere()]
        methods.append(Method(rule, f"{type(hook).__name__} first", first(hook), overrides, params))
    return methods


def _zennit_presets() -> list[Method]:
    box = {"low": -4.0, "high": 4.0}
    presets: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        ("epsilon_plus", composites.EpsilonPlus, {}),
        ("epsilon_plus_flat", composites.EpsilonPlusFlat, {}),
        ("epsilon_alpha2_beta1", composites.EpsilonAlpha2Beta1, {}),
        ("epsilon_alpha2_beta1_flat", composites.EpsilonAlpha2Beta1Flat, {}),
        ("epsilon_gamma_box", lambda: composites.EpsilonGammaBox(**box), box),
        ("excitation_backprop", composites.ExcitationBackprop, {}),
    ]
    methods = []
    for name, composite, params in presets:
        what = "".join(word.capitalize() for word in name.split("_"))
        overrides = [{"preset": name, "params": params}]
        methods.append(Method(f"preset {name}", what, composite, overrides, params))
        # Keras adds a dense layer's bias with Add, others with AddV2.
        methods.append(
            Method(f"preset {name}", f"{what}, biases by AddV2", composite, overrides, params, bias_op="AddV2")
        )
    return methods


def _add_batch_norm(collection: Collection, network: Network) -> None:
    """Batch norm folded into the convolution before it, as zennit's canonizer does, and passed over."""
    relevance = network.one_hot() * network.outputs
    # FusedBatchNormV3 has no float64.
    forms = ("FusedBatchNormV3", "MulAdd") if network.dtype == "float32" else ("MulAdd",)
    for form in forms:

        def add(
            rule: str, what: str, composite: Any, override: Override, *more: Override, form: str = form, **options: Any
        ) -> None:
            _add(
                collection, network, rule, "zennit", f"{what} ({form})", relevance, [override, *more],
                zennit_of(composite), override["params"], batch_norm=form, **options,
            )  # fmt: skip

        for name, composite in (
            ("epsilon_plus", composites.EpsilonPlus),
            ("epsilon_alpha2_beta1", composites.EpsilonAlpha2Beta1),
            ("epsilon_plus_flat", composites.EpsilonPlusFlat),
            ("excitation_backprop", composites.ExcitationBackprop),
        ):
            preset: Override = {"preset": name, "params": {}}
            merged = composite(canonizers=[MergeBatchNorm()])
            add(f"preset {name}", f"{composite.__name__}, folded", merged, preset, rewrites=_FOLD)
            if form == "FusedBatchNormV3" and name != "excitation_backprop":
                add(f"preset {name}", f"{composite.__name__}, batch norm passed over", composite(), preset)
        for rule, params, hook in (
            ("lrp_epsilon", {"eps": 1e-6}, rules.Epsilon(1e-6)),
            ("lrp_gamma", {"gamma": 0.25, "eps": 1e-6}, rules.Gamma(0.25)),
        ):
            merged = composites.LayerMapComposite([*_base(), (types.Linear, hook)], canonizers=[MergeBatchNorm()])
            what = f"{type(hook).__name__} everywhere, folded"
            add(rule, what, merged, linear(rule, params), *elsewhere(), rewrites=_FOLD)
        if network.dtype == "float32":
            continue
        add(
            "preset epsilon_plus",
            "EpsilonPlus, SequentialMergeBatchNorm as it is",
            composites.EpsilonPlus(canonizers=[canonizers.SequentialMergeBatchNorm()]),
            {"preset": "epsilon_plus", "params": {}},
            rewrites=_FOLD,
            known_fault="zennit 0.5.1 merges a batch norm and leaves its eps: what stays divides by sqrt(1 + eps)",
        )


def _add_captum(collection: Collection, network: Network) -> None:
    classes = torch.tensor(network.classes())
    one_hot = network.one_hot()
    relu = {"op_type": "Relu", "optional": True}

    def attribute(kind: Any, **options: Any) -> Callable[[Network, Array], Array]:
        def compute(network: Network, upstream: Array) -> Array:
            del upstream
            attributions = kind(network.module).attribute(network.tensor(), target=classes, **options)
            return np.asarray(attributions.detach().numpy())

        return compute

    if network.name not in ("smooth",):
        for rule, kind in (("guided_backprop", captum_attr.GuidedBackprop), ("deconvnet", captum_attr.Deconvolution)):
            compute = attribute(kind)
            _add(collection, network, rule, "captum", kind.__name__, one_hot, [relu | {"rule": rule}], compute)
    if network.name in ("dense", "convolutional", "smooth", "residual"):
        _add_deeplift(collection, network, attribute)
    _add_captum_lrp(collection, network, attribute(captum_attr.LRP))


def _add_deeplift(
    collection: Collection, network: Network, attribute: Callable[..., Callable[[Network, Array], Array]]
) -> None:
    shape = network.x.shape
    other = np.random.default_rng(5).normal(size=shape).astype(network.dtype)
    for what, baseline, given in (
        ("baseline 0", np.zeros(shape, network.dtype), 0.0),
        ("baseline 0.5", np.full(shape, 0.5, network.dtype), 0.5),
        ("a baseline of its own per sample", other, None),
    ):
        params: dict[str, Any] = {"baseline": "@baseline" if given is None else given, "eps": 1e-10}
        overrides = [{"rule": "deeplift_rescale", "op_type": "@activation", "params": params}]
        compute = attribute(captum_attr.DeepLift, baselines=torch.tensor(baseline))
        _add(
            collection, network, "deeplift_rescale", "captum", f"DeepLift, {what}", network.one_hot(), overrides,
            compute, params, times=network.x - baseline,
        )  # fmt: skip
        if given is None:
            collection.arrays[f"{collection.cases[-1].id}/in/@baseline"] = baseline


def _add_captum_lrp(collection: Collection, network: Network, compute: Callable[[Network, Array], Array]) -> None:
    """captum's gamma and alpha1-beta0 rules are zennit's where there are no biases and x >= 0."""
    relevance = network.one_hot() * network.outputs
    epsilon = ("EpsilonRule", lambda: captum_rules.EpsilonRule(1e-3), "lrp_epsilon", {"eps": 1e-3})
    gamma = ("GammaRule", lambda: captum_rules.GammaRule(0.25), "lrp_gamma", {"gamma": 0.25, "eps": 1e-9})
    plus = ("Alpha1_Beta0_Rule", captum_rules.Alpha1_Beta0_Rule, "lrp_zplus", {"eps": 1e-9})
    if network.name in ("dense", "convolutional"):
        methods = [epsilon]
    elif network.name.endswith("without biases, x >= 0"):
        methods = [epsilon, gamma, plus]
    else:
        return
    for what, make, rule, params in methods:
        hidden = [
            module for module in network.module.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
        ]

        def ruled(network: Network, upstream: Array, make: Any = make, hidden: Any = tuple(hidden)) -> Array:
            # captum forgets a module's rule after each call.
            for module in hidden[:-1]:
                module.rule = make()
            hidden[-1].rule = captum_rules.EpsilonRule(1e-3)
            return compute(network, upstream)

        biases = hidden[0].bias is not None
        last = linear("lrp_epsilon", {"eps": 1e-3}, biases=biases, position="nearest_ys")
        overrides = [last, linear(rule, params, biases=biases), *elsewhere(1e-9)]
        _add(collection, network, rule, "captum", f"LRP, {what}", relevance, overrides, ruled, params)
