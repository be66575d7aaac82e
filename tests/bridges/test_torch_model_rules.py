"""Tests overrides on graphs of PyTorch modules against zennit, captum and hooks on the same modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradrule as gr
from tests.bridges import torch_networks, vision_models
from tests.peers.attribution import MergeBatchNorm
from tests.peers.libraries import captum_attr, zennit_composites, zennit_rules, zennit_types

_EPS = 1e-6
LIMITS = {"float32": 1e-5, "float64": 1e-10}


def _gamma() -> Any:
    base = zennit_composites.layer_map_base(_EPS)
    return zennit_composites.LayerMapComposite([*base, (zennit_types.Linear, zennit_rules.Gamma(0.25))])


COMPOSITES: dict[str, tuple[Any, Any]] = {
    "EpsilonPlus": (zennit_composites.EpsilonPlus, [gr.Preset("epsilon_plus")]),
    "EpsilonAlpha2Beta1": (zennit_composites.EpsilonAlpha2Beta1, [gr.Preset("epsilon_alpha2_beta1")]),
    "Gamma": (
        _gamma,
        [gr.Override("lrp_gamma", layer="@linear", params={"gamma": 0.25, "eps": _EPS}), gr.Preset("epsilon_plus")],
    ),
    "ExcitationBackprop": (zennit_composites.ExcitationBackprop, [gr.Preset("excitation_backprop")]),
    "GuidedBackprop": (zennit_composites.GuidedBackprop, {"Relu": "guided_relu"}),
}


def _explained(client: Any, module: nn.Module, images: torch.Tensor, overrides: Any, **options: Any) -> Any:
    """Returns the gradient of the input for the outputs of two classes as upstream gradient, and that gradient."""
    outputs = module(images).detach()
    upstream = torch.eye(outputs.shape[1], dtype=outputs.dtype)[torch.tensor([0, 1])] * outputs
    result = client.evaluate(
        gr.from_torch(module, images),
        {"input": images.numpy()},
        ys=["output"],
        xs=["input"],
        grad_ys=[upstream.numpy()],
        overrides=overrides,
        **options,
    )
    return result.gradients["input"], upstream


def _check(found: Any, wanted: torch.Tensor, limit: float) -> None:
    largest = wanted.abs().max().item()
    assert largest > 0
    assert np.abs(found - wanted.numpy()).max() <= limit * largest


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("network", vision_models.MODELS)
def test_presets_equal_zennit(client: Any, network: str, name: str, dtype: str) -> None:
    module = vision_models.build(network, getattr(torch, dtype))
    images = vision_models.images(getattr(torch, dtype))
    composite, overrides = COMPOSITES[name]
    found, upstream = _explained(client, module, images, overrides)
    leaf = images.clone().requires_grad_()
    with composite().context(module) as changed:
        (wanted,) = torch.autograd.grad(changed(leaf), leaf, upstream)
    _check(found, wanted, LIMITS[dtype])
