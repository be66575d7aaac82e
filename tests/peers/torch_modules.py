"""PyTorch modules for Keras layers, from their configurations and weights.

Tensors keep Keras's layout, channels last: modules that want channels first stand between two transpositions. Each
Keras layer that zennit has a rule for becomes the module that the rule is for; other functions keep their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.peers.cases import Array
from tests.peers.libraries import Module, ZennitSum, torch

Weights = Mapping[str, Array]
Config = Mapping[str, Any]
nn, functional = torch.nn, torch.nn.functional


class Function(Module):  # type: ignore[misc]
    """A function as a leaf of the module tree; zennit keeps its gradient."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class ChannelsFirst(Module):  # type: ignore[misc]
    """Applies a module for channels first to channels last."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x.movedim(-1, 1)).movedim(1, -1)


class _Padded:
    """Pads as Keras does: with "same", more zeros after than before; with "causal", before only."""

    def forward(self, x: Any) -> Any:
        module: Any = self
        if module.keras_padding == "valid":
            return super().forward(x)  # type: ignore[misc]
        pads: list[int] = []
        for size, kernel, stride, dilation in zip(
            x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True
        ):
            span = dilation * (kernel - 1) + 1
            total = max((math.ceil(size / stride) - 1) * stride + span - size, 0)
            pads = ([span - 1, 0] if module.keras_padding == "causal" else [total // 2, total - total // 2]) + pads
        return super().forward(functional.pad(x, pads))  # type: ignore[misc]


class _Cropped:
    """A transposed convolution that crops as Keras does: with "same", to the size of the input times the strides."""

    def forward(self, x: Any) -> Any:
        module: Any = self
        y = super().forward(x)  # type: ignore[misc]
        if module.keras_padding == "same":
            for axis, (kernel, stride) in enumerate(zip(module.kernel_size, module.stride, strict=True), 2):
                size = x.shape[axis] * stride
                y = y.narrow(axis, max(kernel - stride, 0) // 2, size)
        return y


_CONVOLUTIONS = {
    (rank, transposed): type(
        f"Keras{name}", (_Cropped if transposed else _Padded, getattr(nn, name)), {"__module__": __name__}
    )
    for rank in (1, 2, 3)
    for transposed in (False, True)
    for name in [f"Conv{'Transpose' if transposed else ''}{rank}d"]
}


def convolution(kernel: Array, bias: Array | None, config: Config, groups: int = 1, transposed: bool = False) -> Any:
    """Returns a convolution on channels last; `kernel` is (out, in / groups, …) or, transposed, (in, out, …)."""
    out, inner, *size = kernel.shape
    channels = (out, inner) if transposed else (inner * groups, out)
    module: Any = _CONVOLUTIONS[len(size), transposed](
        *channels, tuple(size), tuple(config["strides"]), dilation=tuple(config["dilation_rate"]), groups=groups,
        bias=bias is not None, dtype=torch.float64,
    )  # fmt: skip
    module.keras_padding = config["padding"]
    module.weight.data = tensor(kernel)
    if bias is not None:
        module.bias.data = tensor(bias)
    return ChannelsFirst(module)


class Gelu(torch.nn.GELU):  # type: ignore[misc]
    """x·Φ(x) with TensorFlow's number for 1/sqrt(2), which is rounded to float32."""

    def forward(self, x: Any) -> Any:
        return 0.5 * x * torch.erfc(-x * float(np.float32(math.sqrt(0.5))))


class Sum(Module):  # type: ignore[misc]
    """The sum of tensors, as zennit's Sum."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = ZennitSum(dim=-1)

    def forward(self, *inputs: Any) -> Any:
        return self.sum(torch.stack(inputs, dim=-1))


class Average(Module):  # type: ignore[misc]
    """The mean of tensors: zennit's Sum, and a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()

    def forward(self, *inputs: Any) -> Any:
        return self.sum(*inputs) / len(inputs)


class Global(Module):  # type: ignore[misc]
    """A pooling over all positions."""

    def __init__(self, pool: Any, keeps: bool) -> None:
        super().__init__()
        self.pool = pool
        self.keeps = keeps

    def forward(self, x: Any) -> Any:
        y = self.pool(x.movedim(-1, 1))
        return y.movedim(1, -1) if self.keeps else y.flatten(1)


class Attention(Module):  # type: ignore[misc]
    """Multi-head attention: four linear modules, and functions between them."""

    def __init__(self, weights: Weights, config: Config) -> None:
        super().__init__()
        self.heads = weights["query/kernel"].shape[1:]
        # Keras rounds this number to float32.
        self.scale = float(np.float32(1 / math.sqrt(self.heads[1])))
        self.query, self.key, self.value = (
            linear(kernel.reshape(len(kernel), -1), weights[f"{part}/bias"].ravel())
            for part in ("query", "key", "value")
            for kernel in [weights[f"{part}/kernel"]]
        )
        self.repeats = weights["query/kernel"].shape[1] // weights["key/kernel"].shape[1]
        kernel = weights["attention_output/kernel"]
        self.output = linear(kernel.reshape(-1, kernel.shape[-1]), weights["attention_output/bias"])

    def forward(self, query: Any, value: Any) -> Any:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.heads[1])).transpose(1, 2)
            for part, x in ((self.query, query), (self.key, value), (self.value, value))
        )
        k, v = (part.repeat_interleave(self.repeats, dim=1) for part in (k, v))
        scores = torch.softmax(q @ k.transpose(-1, -2) * self.scale, dim=-1)
        return self.output((scores @ v).transpose(1, 2).flatten(2))


class Recurrent(Module):  # type: ignore[misc]
    """A recurrent layer. Each step has modules of its own, since zennit keeps the last input of a module only."""

    def __init__(self, step: Callable[[], Any], steps: int, states: int, config: Config, backwards: bool) -> None:
        super().__init__()
        self.steps = nn.ModuleList(step() for _ in range(steps))
        self.shape = states, config["units"]
        self.keeps = config["return_sequences"]
        self.backwards = backwards

    def forward(self, x: Any) -> Any:
        states = [x.new_zeros(len(x), self.shape[1]) for _ in range(self.shape[0])]
        outputs = []
        for step, part in zip(self.steps, x.flip(1).unbind(1) if self.backwards else x.unbind(1), strict=True):
            states = step(part, *states)
            outputs.append(states[0])
        return torch.stack(outputs, dim=1) if self.keeps else outputs[-1]


class SimpleStep(Module):  # type: ignore[misc]
    """A step of a simple recurrent layer."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.input, self.hidden = linear(weights["kernel"], weights["bias"]), linear(weights["recurrent_kernel"], None)
        self.sum, self.tanh = Sum(), nn.Tanh()

    def forward(self, x: Any, h: Any) -> Any:
        return [self.tanh(self.sum(self.input(x), self.hidden(h)))]


class LstmStep(Module):  # type: ignore[misc]
    """A step of an LSTM. The bias is added to the sum of two products, so that it is part of neither."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.input, self.hidden = linear(weights["kernel"], None), linear(weights["recurrent_kernel"], None)
        self.bias = tensor(weights["bias"])
        self.sum, self.carried = Sum(), Sum()
        self.gates = nn.ModuleList([nn.Sigmoid(), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid()])
        self.tanh = nn.Tanh()

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        parts = (self.sum(self.input(x), self.hidden(h)) + self.bias).chunk(4, dim=1)
        i, f, g, o = (gate(part) for gate, part in zip(self.gates, parts, strict=True))
        c = self.carried(f * c, i * g)
        return [o * self.tanh(c), c]


class GruStep(Module):  # type: ignore[misc]
    """A step of a GRU that resets after the product."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        biases = weights["bias"]
        self.input, self.hidden = linear(weights["kernel"], biases[0]), linear(weights["recurrent_kernel"], biases[1])
        self.sums = nn.ModuleList(Sum() for _ in range(4))
        self.update, self.reset, self.tanh = nn.Sigmoid(), nn.Sigmoid(), nn.Tanh()

    def forward(self, x: Any, h: Any) -> Any:
        (x_z, x_r, x_h), (h_z, h_r, h_h) = (y.chunk(3, dim=1) for y in (self.input(x), self.hidden(h)))
        z, r = self.update(self.sums[0](x_z, h_z)), self.reset(self.sums[1](x_r, h_r))
        return [self.sums[3](z * h, (1 - z) * self.tanh(self.sums[2](x_h, r * h_h)))]


def tensor(value: Array) -> Any:
    """Returns a tensor of PyTorch."""
    return torch.tensor(value)


def linear(kernel: Array, bias: Array | None) -> Any:
    """Returns a linear module; `kernel` is (in, out)."""
    module = nn.Linear(*kernel.shape, bias=bias is not None, dtype=torch.float64)
    module.weight.data = tensor(kernel.T)
    if bias is not None:
        module.bias.data = tensor(bias)
    return module
