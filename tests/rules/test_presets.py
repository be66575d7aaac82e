"""Presets: their entries, params and names."""

from __future__ import annotations

import pytest

from gradrule.common import op_definitions
from gradrule.v1 import override_pb2, rule_pb2
from gradrule_server.graphs.selectors import GROUPS, LAYER_KINDS
from gradrule_server.registry.rule_entries import preset_message
from gradrule_server.rules import write_param_value
from gradrule_server.rules.catalogue import BUILTINS, Catalogue
from gradrule_server.rules.catalogue.presets import PRESETS, Preset

BASE = [
    "@normalization → default",
    "@batch_norm → lrp_pass",
    "@activation → lrp_pass",
    "@sum → lrp_norm(eps=1e-06)",
    "@pool → lrp_norm(eps=1e-06)",
]
EPSILON = ["@dense → lrp_epsilon(eps=1e-06)"]
PLUS = ["@convolution → lrp_zplus(eps=1e-06)"]
ALPHA_BETA = ["@convolution → lrp_alpha_beta(alpha=2, beta=1, eps=1e-06)"]
FLAT = ["@linear nearest the xs → lrp_flat(eps=1e-06)"]

# The entries of zennit's composites, a first layer before the others.
LINES = {
    "beta_smooth": ["Relu → relu_beta_smooth(beta=10)"],
    "deconvnet": ["Relu → deconvnet"],
    "epsilon_alpha2_beta1": [*ALPHA_BETA, *EPSILON, *BASE],
    "epsilon_alpha2_beta1_flat": [*FLAT, *ALPHA_BETA, *EPSILON, *BASE],
    "epsilon_gamma_box": [
        "@convolution nearest the xs → lrp_zbox(eps=1e-06)",
        "@convolution → lrp_gamma(eps=1e-06, gamma=0.25)",
        *EPSILON,
        *BASE,
    ],
    "epsilon_plus": [*PLUS, *EPSILON, *BASE],
    "epsilon_plus_flat": [*FLAT, *PLUS, *EPSILON, *BASE],
    "excitation_backprop": [
        "@linear → lrp_zplus(eps=1e-06)",
        "@normalization → default",
        "@activation → default",
        "@sum → lrp_norm(eps=1e-06)",
        "@pool → lrp_norm(eps=1e-06)",
    ],
    "guided_backprop": ["Relu → guided_relu"],
}


def test_presets_equal_zennits_composites() -> None:
    assert {preset.name: list(preset_message(preset).overrides) for preset in PRESETS} == LINES
    assert [preset.name for preset in PRESETS] == sorted(LINES)
    assert len(PRESETS) == len(LINES)


@pytest.mark.parametrize("preset", list(PRESETS), ids=lambda preset: preset.name)
def test_every_entry_is_valid(preset: Preset) -> None:
    assert preset.description.endswith(".")
    assert preset.reference
    for override in preset.overrides:
        assert override.optional
        if override.selector.layer:
            assert override.selector.layer in LAYER_KINDS
        for word in override.selector.pattern or filter(None, [override.selector.op_type]):
            assert word in GROUPS or op_definitions.find(word) is not None, word
        if override.rule != "default":
            assert override.rule.startswith("builtin/")
            rule = BUILTINS[override.rule.removeprefix("builtin/")]
            declared = {param.name: param for param in rule.params}
            for name, value in override.params.items():
                declared[name].check(value, "params")


def test_params_have_the_values_of_the_preset() -> None:
    box = {param.name: param for param in preset_message(PRESETS["epsilon_gamma_box"]).params}
    assert list(box) == ["low", "high", "eps", "gamma"]
    assert not box["low"].HasField("default_value")
    assert not box["high"].HasField("default_value")
    assert box["gamma"].default_value.number == 0.25
    assert (box["eps"].range, box["eps"].default_value.number) == ("> 0", 1e-6)
    assert [(param.name, param.default) for param in PRESETS["beta_smooth"].params] == [("beta", 10.0)]
    assert preset_message(PRESETS["deconvnet"]).params == []


def entry(rule: str, **params: float) -> override_pb2.GradientOverride:
    values: dict[str, rule_pb2.ParamValue] = {name: write_param_value(value) for name, value in params.items()}
    selector = override_pb2.Selector(op_type="Relu")
    return override_pb2.GradientOverride(selector=selector, rule=rule, params=values, optional=True)


def test_preset_with_two_values_of_a_param_is_refused() -> None:
    overrides = (entry("builtin/lrp_norm", eps=1e-6), entry("builtin/lrp_zplus", eps=1e-3))
    with pytest.raises(ValueError, match="'mixed' has two values of the param 'eps'"):
        Preset("mixed", ".", ".", overrides)


def test_names_and_aliases_find_their_preset() -> None:
    presets = Catalogue([("lrp", [Preset("one", ".", ".", (entry("default"),), aliases=("uno",))])], kind="preset")
    assert presets["uno"] is presets["one"]
    assert "uno" in presets
    assert len(presets) == len(list(presets)) == 1
    with pytest.raises(KeyError, match=r"there is no preset 'onee'\. Did you mean 'one'"):
        presets["onee"]
    with pytest.raises(ValueError, match=r"the name 'uno' of the preset 'two' \(lrp\) is taken by the preset 'one'"):
        Catalogue([("lrp", [*presets, Preset("two", ".", ".", (), aliases=("uno",))])], kind="preset")
