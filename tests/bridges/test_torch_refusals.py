"""Tests that modules which cannot be converted, or would give other numbers, are refused, and edge cases are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradrule as gr
from tests.bridges.test_from_torch import check_against_torch


class Call(nn.Module):  # type: ignore[misc]
    """Calls a function."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.layers)


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_all_unsupported_operations_are_listed() -> None:
    class Inner(nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x).real + torch.rand_like(x)

    module = nn.Sequential(nn.Linear(3, 3), Inner(), nn.Dropout(0.5))
    with pytest.raises(gr.errors.UnsupportedError) as refusal:
        gr.from_torch(module, torch.randn(2, 3))
    messages = [detail.message for detail in refusal.value.details]
    assert any(message.startswith("_fft_r2c") and "'1'" in message for message in messages)
    assert any(message.startswith("rand_like") and "test_torch_refusals.py" in message for message in messages)
    assert any("training mode: call module.eval()" in message and "'2'" in message for message in messages)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "cumulative product": (lambda x: torch.cumprod(x, 1), "cumprod"),
    "several inputs of a mask": (lambda x: x[x > 0], "index|export"),
    "dilated pooling": (lambda x: functional.max_pool2d(x, 2, dilation=2), "max_pool2d.*dilation"),
    "divisor": (lambda x: functional.avg_pool2d(x, 2, divisor_override=3), "avg_pool2d.*divisor_override"),
    "image without batch": (lambda x: functional.max_pool2d(x[0], 2), "max_pool2d.*batch axis"),
    "statistics of the batch": (lambda x: functional.batch_norm(x, None, None, training=True), "batch_norm.*eval"),
    "circular padding": (lambda x: functional.pad(x, (1, 1, 1, 1), mode="circular"), "pad|circular|slice_scatter|copy"),
    "decimals": (lambda x: torch.round(x, decimals=2), "round.*decimals"),
    "scaled elu": (lambda x: functional.elu(x, 2.0), "elu.*alpha"),
    "bits": (lambda x: x.to(torch.int32) & 3, "bitwise_and|__and__"),
    "data-dependent branch": (lambda x: x if x.sum() > 0 else -x, "torch.export cannot trace"),
    "threshold of softplus": (lambda x: functional.softplus(x, 1, 2), "softplus.*threshold"),
    "indices of maxima": (lambda x: functional.max_pool2d(x, 2, return_indices=True), "output_1"),
    "computing with these": (
        lambda x: functional.max_pool2d(x, 2, return_indices=True)[1].float(),
        "cannot be converted",
    ),
    "numbers as results": (lambda x: (x + 1, 3), "output_1"),
    "the name of an input": (lambda x: {"x": x + 1}, "name of an input"),
    "variance of one number": (lambda x: x[:, :1].var(1), "var"),
    "pixel shuffle without batch": (lambda x: functional.pixel_shuffle(x[0].repeat(4, 1, 1), 2), "pixel_shuffle"),
    "view as another type": (lambda x: x.view(torch.int64), "view"),
    "detach_": (lambda x: x.clone().detach_() * x, "detach_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_numbers_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(gr.errors.GradruleError, match=message):
        gr.from_torch(Call(function), _images())


def test_detaching_in_place_is_unsupported() -> None:
    with pytest.raises(gr.errors.UnsupportedError, match=r"Call: Tensor\.detach_\(\) is not supported"):
        gr.from_torch(Call(lambda x: x.clone().detach_() * x), _images())


def test_changed_buffers_are_refused() -> None:
    class Counter(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    with pytest.raises(gr.errors.UnsupportedError, match="calls"):
        gr.from_torch(Counter(), torch.randn(2, 3))


def _without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = x * 3
    return x * factor


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    view = y.view(2, -1)
    view += 1
    y.mul_(3).clamp_(min=-1)
    return torch.relu_(y) + view.sum()


EQUAL: dict[str, Callable[..., Any]] = {
    "detach": lambda x: x * x.detach() + x,
    "no_grad": _without_gradients,
    "in place": _in_place,
    "negative axes": lambda x: x.transpose(-1, -3).softmax(-2).sum(-1).unsqueeze(-2).flatten(-2, -1),
    "promotion": lambda x: torch.arange(4) * x + (x > 0) * 2 + torch.ones(4, dtype=torch.float32),
    "integer division": lambda x: x * (torch.arange(-2, 2) // 2 + torch.arange(-3, 1) % 2),
    "clamp at its bound": lambda x: torch.relu(x).clamp(0, 1) * 2,
    "reduced channels": lambda x, conv: conv(x).amax(1) + conv(x).mean((1, 3), keepdim=True).squeeze(1).sum(0),
    "slices": lambda x, conv: torch.cat([conv(x)[:, -1:, ::2], conv(x)[:, :1, 1::2]], 2)[..., -3:-1],
    "parts": lambda x: torch.stack(x.unbind(-1) + tuple(x.split([1, 3], 3)[1].chunk(3, -1)[0].squeeze(-1)[None]), 1),
    "chosen": lambda x: x[:, torch.tensor([2, -1])] + x.flip(1)[:, [0, 1]] * x.index_select(1, torch.tensor([0, 2])),
    "triangle": lambda x: x.tril() + x.triu(1) * 2,
    "statistics": lambda x: x.var(1, correction=1) + x.std((1,), unbiased=False) + torch.var_mean(x, (1,))[1],
    "norm": lambda x: functional.normalize(x, dim=1) + torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "attention with a mask": lambda x: functional.scaled_dot_product_attention(x, x, x, (x > -1).any(1, keepdim=True)),
    "causal attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "padding": lambda x: functional.pad(functional.pad(x, (1, -1, 2, 0), value=2.0), (1, 1, 1, 1), mode="reflect"),
    "uneven pooling": lambda x: functional.adaptive_avg_pool2d(x, (3, 2)) + functional.adaptive_max_pool2d(x, 1),
    "interpolation": lambda x: functional.interpolate(x, scale_factor=1.7, mode="bicubic") ** 2,
    "nearest": lambda x: functional.interpolate(x, size=(7, 3), mode="nearest-exact") * 1.5,
    "antialias": lambda x: functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True),
    "softplus": lambda x: functional.softplus(x) + functional.logsigmoid(x) + functional.softsign(x),
    "hard": lambda x: functional.hardswish(x) + functional.hardtanh(x, -0.5, 0.7),
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.1, 0.2, 0.3], dtype=x.dtype)),
    "shuffle": lambda x: functional.pixel_shuffle(torch.cat([x, x, x, x], 1), 2),
    "rounded quotient": lambda x: x * (torch.tensor([1.0, 2, 3, -1], dtype=x.dtype) // 0.1 + 7 // (x.detach() + 9)),
    "no axes": lambda x: torch.flip(x, []) + torch.squeeze(x[:, :1], ()),
    "steps of a fraction": lambda x: x + torch.arange(1, 1.3, 0.1),
    "scale of zero": lambda x: functional.scaled_dot_product_attention(x, x, x, scale=0.0),
    "numbers as mask": lambda x: functional.scaled_dot_product_attention(
        x, x, x, torch.where((x > -1).any(1, keepdim=True), x.detach().mean(), -torch.inf)
    ),
    "infinite numbers": lambda x: (x / 0.0 >= torch.inf).double() + (x / 0.0 > x.abs() / 0.0).double() + x,
    "norm of zeros": lambda x: torch.linalg.vector_norm(x * torch.tensor([0.0, 1, 1, 1]), dim=(1, 2)),
    "many nearest": lambda x: functional.interpolate(x[..., :2], size=(3, 82)).cumsum(-1),
    "exact nearest": lambda x: functional.interpolate(x[..., :2], size=(3, 49), mode="nearest-exact").cumsum(-1),
    "where": lambda x: torch.where(x > 0, x, 0.5).masked_fill(x < -1, 2.0) + torch.maximum(x, torch.zeros(())),
}


@pytest.mark.parametrize("name", EQUAL)
def test_edge_case_equals_torch(client: Any, name: str) -> None:
    function = EQUAL[name]
    layers = [nn.Conv2d(3, 2, 1).double()] if function.__code__.co_argcount == 2 else []
    check_against_torch(client, Call(function, *layers), (_images(),), tolerance=1e-10)


def test_batch_is_fixed_where_the_module_needs_it(client: Any) -> None:
    module = Call(lambda x: x * torch.ones(2, 3, 4, 4))
    graph = check_against_torch(client, module, (_images(),), tolerance=1e-10)
    assert graph.inputs["x"].shape == (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x: x.squeeze(0).sum(0), 1),
        (lambda x: x.squeeze(0).sum(0), 4),
        (lambda x: x.squeeze().softmax(0), 1),
        (lambda x: x * 2 if x.shape[0] == 1 else x * 3, 1),
        (lambda x: x * 2 if x.shape[0] == 1 else x * 3, 2),
        (lambda x: x * 2 if x.shape[0] > 4 else x * 3, 8),
        (lambda x: x * 2 if x.shape[0] <= 4 else x * 3, 3),
        (lambda x: x * 2 if x.shape[0] % 2 == 0 else x * 3, 4),
    ],
)
def test_batch_is_fixed_where_the_result_depends_on_it(client: Any, function: Callable[..., Any], size: int) -> None:
    graph = check_against_torch(client, Call(function), (_images(size, 3),), tolerance=1e-10)
    assert graph.inputs["x"].shape == (size, 3)


def test_modules_and_results_have_names(client: Any) -> None:
    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(3, 3)
            self.shared.weight.requires_grad_(requires_grad=False)
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: torch.Tensor, other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            h = self.shared(torch.relu(self.shared(x)))
            return {"sum": h + other["y"] + self.shift, "product": h * other["y"]}

    graph = gr.from_torch(Network(), torch.randn(2, 3), {"y": torch.randn(2, 3)})
    assert list(graph.inputs) == ["x", "other_y"]
    assert [spec.shape for spec in graph.inputs.values()] == [(None, 3), (None, 3)]
    assert list(graph.outputs) == ["sum", "product"]
    assert set(graph.variables) == {"shared.weight", "shared.bias", "shift"}
    assert graph.non_trainable == {"shared.weight", "shift"}
    (call,) = graph.layers
    assert call.path == "shared"
    assert call.outputs == ("shared/BiasAdd:0", "shared/BiasAdd_1:0")
    assert all(node.name.startswith("shared") for node in graph.find("MatMul"))


def test_missing_pytorch_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import gradrule as gr\n"
        "try: gr.from_torch(None)\n"
        "except gr.errors.UnsupportedError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gradrule[torch]" in done.stdout
