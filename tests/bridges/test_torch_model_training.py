"""Tests that sessions train graphs of PyTorch modules as PyTorch does, spiking networks included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradrule as gr
from tests.peers.libraries import snn, snn_neurons


class Classifier(nn.Module):  # type: ignore[misc]
    """A convolutional network whose result is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2))
        self.frozen, self.head = nn.Linear(64, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.head(functional.gelu(self.frozen(self.features(images).flatten(1))))
        return functional.cross_entropy(logits, classes)


def test_adam_equals_torch(client: Any) -> None:
    torch.manual_seed(0)
    module = Classifier()
    images, classes = torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))
    graph = gr.from_torch(module, images, classes)
    with client.session(graph) as session:
        for _ in range(50):
            feeds = {"images": images.numpy(), "classes": classes.numpy()}
            loss = session.step(feeds, "output", gr.optimizers.Adam(0.01, epsilon=1e-8)).loss
        trained = session.read()
    optimizer = torch.optim.Adam([value for value in module.parameters() if value.requires_grad], 0.01)
    for _ in range(50):
        optimizer.zero_grad()
        wanted = module(images, classes)
        wanted.backward()
        optimizer.step()
    assert loss == pytest.approx(wanted.item(), rel=1e-3)
    state = module.state_dict()
    assert set(trained) == set(state)
    for name, value in state.items():
        np.testing.assert_allclose(trained[name], value.numpy(), atol=1e-4 * max(1, value.abs().max().item()))
    # The names are those of the module, which takes the values back.
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in trained.items()})


def test_spiking_network_equals_snntorch(client: Any) -> None:
    torch.manual_seed(0)
    slope = 25.0

    class Spiking(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.neuron = nn.Linear(4, 6), snn_neurons.Leaky(beta=0.9, spike_grad=snn.fast_sigmoid(slope))
            self.readout = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            membrane, total = torch.zeros(x.shape[1], 6), torch.zeros(x.shape[1], 2)
            for step in range(x.shape[0]):
                spikes, membrane = self.neuron(self.dense(x[step]), membrane)
                total = total + self.readout(spikes)
            return total

    module, x = Spiking(), 2 * torch.randn(5, 3, 4)
    with pytest.warns(gr.errors.GradruleWarning, match="FastSigmoid"):
        graph = gr.from_torch(module, x, dynamic_shapes={"x": {1: torch.export.Dim.AUTO}})
    rule = gr.Override("fast_sigmoid", op_type="Heaviside", scope="neuron", params={"slope": slope})
    result = client.evaluate(
        graph, {"x": x.numpy()}, ["output"], ys=["output"], xs=["x", "dense.weight"], overrides=[rule]
    )
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    wanted = torch.autograd.grad(y.sum(), [leaf, module.dense.weight])
    np.testing.assert_allclose(result.outputs["output"], y.detach().numpy(), atol=1e-5)
    for found, gradient in zip(result.gradients.values(), wanted, strict=True):
        np.testing.assert_allclose(found, gradient.numpy(), atol=1e-5 * gradient.abs().max().item())
