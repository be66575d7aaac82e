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


@pytest.mark.parametrize("name", vision_models.MODELS)
def test_folded_batch_norms_equal_zennit(client: Any, name: str) -> None:
    """Compares float32 with zennit in float64, whose merged weights would differ by rounding in float32."""
    module, images = vision_models.build(name, torch.float32), vision_models.images(torch.float32)
    found, upstream = _explained(client, module, images, [gr.Preset("epsilon_plus")], rewrites=["fold_batch_norm"])
    leaf = images.double().requires_grad_()
    exact = vision_models.build(name, torch.float64)
    with zennit_composites.EpsilonPlus(canonizers=[MergeBatchNorm()]).context(exact) as changed:
        (wanted,) = torch.autograd.grad(changed(leaf), leaf, upstream.double())
    _check(found, wanted, LIMITS["float32"])


def test_guided_relu_equals_hooks(client: Any) -> None:
    module, images = torch_networks.build("VGG", torch.float32)
    images = images[:2]
    found, upstream = _explained(client, module, images, {"Relu": "guided_relu"})
    hooks = [
        layer.register_full_backward_hook(lambda _, down, __: (down[0].clamp(min=0),))
        for layer in module.modules()
        if isinstance(layer, nn.ReLU)
    ]
    leaf = images.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(leaf), leaf, upstream)
    for hook in hooks:
        hook.remove()
    _check(found, wanted, LIMITS["float32"])


@pytest.mark.filterwarnings("ignore:Setting backward hooks")
def test_guided_backprop_and_grad_cam_equal_captum(client: Any) -> None:
    module = vision_models.build("VGG", torch.float32)
    images = vision_models.images(torch.float32)
    graph = gr.from_torch(module, images)
    one_hot = np.eye(5, dtype=np.float32)[[0, 1]]
    call = {"graph": graph, "feeds": {"input": images.numpy()}, "ys": ["output"], "grad_ys": [one_hot]}
    guided = client.evaluate(**call, xs=["input"], overrides=[gr.Preset("guided_backprop")]).gradients["input"]
    classes = torch.tensor([0, 1])
    wanted = captum_attr.GuidedBackprop(module).attribute(images.clone().requires_grad_(), target=classes)
    _check(guided, wanted.detach(), LIMITS["float32"])
    # The name of a module is that of its output, whose channels are its last axis.
    result = client.evaluate(**call, xs=["9"], fetches=["9"])
    weights = result.gradients["9"].mean((1, 2), keepdims=True)
    found = (weights * result.outputs["9"]).sum(-1)[:, None]
    wanted = captum_attr.LayerGradCam(module, module[9]).attribute(images, target=classes)
    _check(found, wanted.detach(), LIMITS["float32"])


class Mixed(nn.Module):  # type: ignore[misc]
    """Layers that are one node each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.SiLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(self.head(self.encoder(x)))
        return y


@pytest.mark.parametrize(
    ("overrides", "identities"),
    [
        ({"Gelu": gr.Rule("dy")}, ["encoder.2"]),
        ({"LayerNorm": gr.Rule("first(dy)"), "Silu": gr.Rule("dy")}, ["encoder.1", "encoder.4"]),
        ([gr.Override(gr.Rule("dy"), node="encoder/4/*")], ["encoder.4"]),
        ([gr.Override(gr.Rule("dy"), op_type="Gelu", scope="encoder/2")], ["encoder.2"]),
    ],
    ids=str,
)
def test_overrides_name_composite_ops(client: Any, overrides: Any, identities: list[str]) -> None:
    torch.manual_seed(0)
    module, x = Mixed().double(), torch.randn(4, 6, dtype=torch.float64)
    graph = gr.from_torch(module, x)
    result = client.evaluate(
        graph, {"x": x.numpy()}, ys=["output"], xs=["x"], fetches=["encoder.3"], overrides=overrides
    )
    hooks = [
        layer.register_full_backward_hook(lambda _, __, up: (up[0],))
        for path, layer in module.named_modules()
        if path in identities
    ]
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(torch.ones_like(y))
    for hook in hooks:
        hook.remove()
    _check(result.gradients["x"], leaf.grad, 1e-9)
    _check(result.outputs["encoder.3"], module.encoder[:4](x).detach(), 1e-10)


def test_parts_of_composite_ops_are_found_by_path(client: Any) -> None:
    module, x = Mixed().double(), torch.randn(4, 6, dtype=torch.float64)
    graph = gr.from_torch(module, x)
    call = {"graph": graph, "feeds": {"x": x.numpy()}, "ys": ["encoder.2"], "xs": ["encoder.1"]}
    result = client.evaluate(**call, overrides=[gr.Override(gr.Rule("0 * dy"), node="encoder/2/Gelu/Erf")])
    # Without the derivative of Erf, that of x * Phi(x) is Phi(x).
    h = module.encoder[:2](x)
    _check(result.gradients["encoder.1"], torch.special.ndtr(h).detach(), 1e-10)
