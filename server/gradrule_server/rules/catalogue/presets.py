"""Lists presets: named lists of overrides that apply a method to a whole model (zennit's composites).

Presets and rules have separate names: `guided_backprop` is a rule and a preset. Each override is optional, because no
model has all kinds of layers. Overrides name their rules `builtin/NAME`, so that a USER rule cannot replace them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradrule.v1 import override_pb2
from gradrule_server.rules.catalogue import BUILTINS, Catalogue
from gradrule_server.rules.params import Param, read_param_value, write_param_value

BUILTIN_PREFIX = "builtin/"
OWN_GRADIENT = "default"

_EPS = 1e-6
_CITED = "zennit, Anders et al. 2021, arXiv:2106.13200"
_EPS_NOTE = "`eps` is both zennit's epsilon and its stabilizer. Fold batch norms into the layers before them."


@dataclass(frozen=True, eq=False)
class Preset:
    """A named list of overrides.

    Attributes:
        is_for_all_layers: Whether it must have a rule for every op with parameters on the path; UNMATCHED_OVERRIDE
            otherwise.

    Raises:
        ValueError: Two of its rules have a param of one name with different values.
    """

    name: str
    description: str
    reference: str
    overrides: tuple[override_pb2.GradientOverride, ...]
    aliases: tuple[str, ...] = ()
    is_for_all_layers: bool = False

    def __post_init__(self) -> None:
        # Compute the params here, so that an invalid preset stops the start of the server, not its first use.
        _ = self.params

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The params of its rules, each name once, with the preset's values as defaults."""
        found: dict[str, Param] = {}
        for override in self.overrides:
            if override.rule == OWN_GRADIENT:
                continue
            for declared in BUILTINS[override.rule.removeprefix(BUILTIN_PREFIX)].params:
                value = declared.default
                if declared.name in override.params:
                    value = read_param_value(override.params[declared.name], declared.name, "params")
                param = Param(declared.name, value, declared.description, declared.range)
                if found.setdefault(declared.name, param).default != value:
                    raise ValueError(f"the preset {self.name!r} has two values of the param {declared.name!r}")
        return tuple(found.values())


def _entry(selector: override_pb2.Selector, rule: str, **params: float) -> override_pb2.GradientOverride:
    values = {name: write_param_value(value) for name, value in params.items()}
    return override_pb2.GradientOverride(selector=selector, rule=BUILTIN_PREFIX + rule, params=values, optional=True)


def _ops(op_type: str, rule: str, **params: float) -> override_pb2.GradientOverride:
    return _entry(override_pb2.Selector(op_type=op_type), rule, **params)


def _layer(kind: str, rule: str, **params: float) -> override_pb2.GradientOverride:
    return _entry(override_pb2.Selector(layer=kind), rule, **params)


def _first(kind: str, rule: str, **params: float) -> override_pb2.GradientOverride:
    """Returns an override for the first layers."""
    position = override_pb2.Position(nearest=override_pb2.POSITION_NEAREST_XS)
    return _entry(override_pb2.Selector(layer=kind, position=position), rule, **params)


def _keep_gradient(kind: str) -> override_pb2.GradientOverride:
    """Returns an override for layers that keep their gradients: means in them are no pooling, additions no sums."""
    return override_pb2.GradientOverride(selector=override_pb2.Selector(layer=kind), rule=OWN_GRADIENT, optional=True)


_NORMALIZATION = _keep_gradient("@normalization")
_SUMS = (_ops("@sum", "lrp_norm", eps=_EPS), _ops("@pool", "lrp_norm", eps=_EPS))

# Must follow the overrides for layers, because the addition of a bias may be an op of @sum.
_BASE = (
    _NORMALIZATION,
    _layer("@batch_norm", "lrp_pass"),
    _layer("@activation", "lrp_pass"),
    *_SUMS,
)
_EPSILON = (_layer("@dense", "lrp_epsilon", eps=_EPS),)
_PLUS = (_layer("@convolution", "lrp_zplus", eps=_EPS),)
_ALPHA_BETA = (_layer("@convolution", "lrp_alpha_beta", alpha=2.0, beta=1.0, eps=_EPS),)
_FLAT = _first("@linear", "lrp_flat", eps=_EPS)
_BOX = _first("@convolution", "lrp_zbox", eps=_EPS)

_PRESETS = [
    Preset(
        "epsilon_plus",
        f"LRP: zplus on convolutions, epsilon on dense layers. {_EPS_NOTE}",
        f"{_CITED}, EpsilonPlus",
        (*_PLUS, *_EPSILON, *_BASE),
        is_for_all_layers=True,
    ),
    Preset(
        "epsilon_plus_flat",
        f"LRP: flat on the first layer, zplus on other convolutions, epsilon on other dense layers. {_EPS_NOTE}",
        f"{_CITED}, EpsilonPlusFlat",
        (_FLAT, *_PLUS, *_EPSILON, *_BASE),
        is_for_all_layers=True,
    ),
    Preset(
        "epsilon_alpha2_beta1",
        f"LRP: alpha 2, beta 1 on convolutions, epsilon on dense layers. {_EPS_NOTE}",
        f"{_CITED}, EpsilonAlpha2Beta1",
        (*_ALPHA_BETA, *_EPSILON, *_BASE),
        is_for_all_layers=True,
    ),
    Preset(
        "epsilon_alpha2_beta1_flat",
        "LRP: flat on the first layer, alpha 2, beta 1 on other convolutions, epsilon on other dense layers. "
        f"{_EPS_NOTE}",
        f"{_CITED}, EpsilonAlpha2Beta1Flat",
        (_FLAT, *_ALPHA_BETA, *_EPSILON, *_BASE),
        is_for_all_layers=True,
    ),
    Preset(
        "epsilon_gamma_box",
        "LRP: zbox on the first convolution, whose inputs lie within low and high, gamma on the others, epsilon on "
        f"dense layers. {_EPS_NOTE}",
        f"{_CITED}, EpsilonGammaBox",
        (_BOX, _layer("@convolution", "lrp_gamma", gamma=0.25, eps=_EPS), *_EPSILON, *_BASE),
        is_for_all_layers=True,
    ),
    Preset(
        "excitation_backprop",
        "zplus on convolutions and dense layers, norm on sums and average pools, own gradients elsewhere.",
        f"Zhang et al. 2016, arXiv:1608.00507; {_CITED}, ExcitationBackprop",
        (_layer("@linear", "lrp_zplus", eps=_EPS), _NORMALIZATION, _keep_gradient("@activation"), *_SUMS),
        is_for_all_layers=True,
    ),
    Preset(
        "deconvnet",
        "Passes the positive part of the upstream gradient at every relu.",
        f"Zeiler, Fergus 2013, arXiv:1311.2901; {_CITED}, DeconvNet",
        (_ops("Relu", "deconvnet"),),
    ),
    Preset(
        "guided_backprop",
        "Passes the gradient of each relu only where the upstream gradient is positive.",
        f"Springenberg et al. 2014, arXiv:1412.6806; {_CITED}, GuidedBackprop",
        (_ops("Relu", "guided_relu"),),
    ),
    Preset(
        "beta_smooth",
        "Uses the slope of a softplus instead of the slope of each relu.",
        f"Dombrowski et al. 2019, arXiv:1906.07983; {_CITED}, BetaSmooth",
        (_ops("Relu", "relu_beta_smooth", beta=10.0),),
    ),
]

PRESETS = Catalogue([("presets", sorted(_PRESETS, key=lambda preset: preset.name))], kind="preset")
"""All presets, ordered by name."""
