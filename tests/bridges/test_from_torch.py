"""Tests graphs of PyTorch modules against PyTorch: results, gradients, names, overrides and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradrule as gr
from tests.bridges import torch_networks, transformer_models


def check_against_torch(
    client: Any, module: nn.Module, inputs: tuple[torch.Tensor, ...], *, tolerance: float, examples: Any = None
) -> gr.Graph:
    """Compares the outputs, and the gradients of inputs and parameters for random upstream gradients, with PyTorch's.

    tolerance: Largest difference, relative to the largest value of each tensor.
    examples: Arguments of `from_torch` after the module; default: `inputs`.
    """
    graph = gr.from_torch(module, *(inputs if examples is None else examples))
    leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    expected = module(*leaves)
    by_name = _named(expected)
    names = list(graph.inputs)
    generator = torch.Generator().manual_seed(1)
    upstream = {name: torch.randn(y.shape, generator=generator, dtype=y.dtype) for name, y in by_name.items()}
    differentiable = [name for name, leaf in zip(names, leaves, strict=True) if leaf.requires_grad]
    gradients = torch.autograd.grad(
        list(by_name.values()),
        [*(leaf for leaf in leaves if leaf.requires_grad), *parameters.values()],
        list(upstream.values()),
        allow_unused=True,
    )
    wanted = {
        name: gradient
        for name, gradient in zip([*differentiable, *parameters], gradients, strict=True)
        if gradient is not None
    }
    result = client.evaluate(
        graph,
        feeds={name: value.numpy() for name, value in zip(names, inputs, strict=True)},
        fetches=list(by_name),
        ys=list(by_name),
        xs=list(wanted),
        grad_ys={name: value.numpy() for name, value in upstream.items()},
        dense_gradients=True,
    )
    for name, y in by_name.items():
        check_close(result.outputs[name], y, tolerance, name)
    # The gradient of a key's bias is 0 but for rounding: its scale is that of the others.
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        check_close(result.gradients[name], gradient, tolerance, f"gradient of {name}", floor)
    return graph


def _named(result: Any) -> Mapping[str, torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return {"output": result}
    items = result.items() if isinstance(result, Mapping) else ((f"output_{i}", y) for i, y in enumerate(result))
    return {name: y for name, y in items if isinstance(y, torch.Tensor)}


def check_close(actual: Any, expected: torch.Tensor, tolerance: float, what: str, floor: float = 0.0) -> None:
    """Compares two arrays, relative to the largest value of the expected one, or to `floor` if that is larger."""
    wanted = expected.detach().numpy()
    assert actual.shape == wanted.shape, what
    assert actual.dtype == wanted.dtype, what
    scale = max(np.abs(wanted).max(), floor)
    assert np.abs(actual - wanted).max() <= tolerance * scale, what


@pytest.mark.parametrize("name", torch_networks.NETWORKS)
def test_network_equals_torch(client: Any, name: str) -> None:
    module, images = torch_networks.build(name, torch.float32)
    # The example has another batch size than the call: the batch is dynamic.
    check_against_torch(client, module, (images,), tolerance=1e-5, examples=(images[:1],))


@pytest.mark.parametrize("name", sorted(set(torch_networks.NETWORKS) - {"Volumes"}))
def test_network_equals_torch_in_float64(client: Any, name: str) -> None:
    module, images = torch_networks.build(name, torch.float64)
    # PyTorch's gradient of hardsigmoid multiplies by 1/6 in float32.
    check_against_torch(client, module, (images,), tolerance=1e-7 if name == "MobileNetV3" else 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", transformer_models.MODELS)
def test_transformer_equals_torch(client: Any, name: str, dtype: torch.dtype) -> None:
    module, inputs = transformer_models.build(name, dtype)
    # T5 computes variances in float32, whatever its type.
    exact = 1e-6 if name == "T5 encoder" else 1e-10
    check_against_torch(client, module, inputs, tolerance=1e-5 if dtype == torch.float32 else exact)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_network_equals_torch(client: Any, kind: Any) -> None:
    torch.manual_seed(0)

    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = kind(4, 6, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.rnn(x)[0])
            return y

    check_against_torch(client, Network().eval(), (torch.randn(3, 5, 4),), tolerance=1e-5)
