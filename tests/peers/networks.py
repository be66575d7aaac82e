"""Small networks for the attribution rules: their description, which both sides read, and PyTorch's form of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.peers.cases import Array
from tests.peers.libraries import Module, ZennitSum, torch


def dense(units: int, bias: bool = True) -> dict[str, Any]:
    return {"kind": "dense", "units": units, "bias": bias}


def conv(channels: int, stride: int = 1, padding: str = "SAME", bias: bool = True) -> dict[str, Any]:
    return {"kind": "conv", "channels": channels, "stride": stride, "padding": padding, "bias": bias}


def layer(kind: str) -> dict[str, Any]:
    return {"kind": kind}


_RELU, _FLATTEN, _BATCH_NORM = layer("relu"), layer("flatten"), layer("batch_norm")
_HEAD = [_FLATTEN, dense(10), _RELU, dense(5)]

NETWORKS: dict[str, dict[str, Any]] = {
    "dense": {"input": [12], "layers": [dense(10), _RELU, dense(8), _RELU, dense(5)]},
    # No biases and no negative inputs: there captum's rules mean what zennit's mean.
    "dense without biases, x >= 0": {
        "input": [12],
        "positive": True,
        "layers": [dense(10, False), _RELU, dense(8, False), _RELU, dense(5, False)],
    },
    "convolutional": {
        "input": [3, 9, 9],
        "layers": [conv(6), _RELU, conv(8, 2, "VALID"), _RELU, layer("avg_pool"), *_HEAD],
    },
    "convolutional without biases, x >= 0": {
        "input": [3, 9, 9],
        "positive": True,
        "layers": [
            conv(6, bias=False),
            _RELU,
            conv(8, 2, "VALID", bias=False),
            _RELU,
            layer("avg_pool"),
            _FLATTEN,
            dense(5, False),
        ],
    },
    "max pooling": {
        "input": [3, 8, 8],
        "layers": [conv(6), _RELU, layer("max_pool"), conv(8), _RELU, layer("max_pool"), *_HEAD],
    },
    "batch norm": {
        "input": [3, 8, 8],
        "layers": [
            conv(6, bias=False),
            _BATCH_NORM,
            _RELU,
            conv(8),
            _BATCH_NORM,
            _RELU,
            layer("avg_pool"),
            *_HEAD,
        ],
    },
    "residual": {
        "input": [12],
        "layers": [
            dense(8),
            _RELU,
            {"kind": "residual", "layers": [dense(8), _RELU, dense(8)]},
            _RELU,
            dense(5),
        ],
    },
    "smooth": {
        "input": [12],
        "layers": [
            dense(10),
            layer("tanh"),
            dense(8),
            layer("sigmoid"),
            dense(8),
            layer("softplus"),
            dense(6),
            layer("elu"),
            dense(5),
        ],
    },
}
BATCH_NORM_EPSILON = 1e-3


class Residual(Module):  # type: ignore[misc]
    """x + layers(x), the sum as zennit wants it: a module of its own."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        self.sum = ZennitSum(-1)

    def forward(self, x: Any) -> Any:
        return self.sum(torch.stack([self.layers(x), x], -1))


class Flatten(Module):  # type: ignore[misc]
    """Axis 0 stays; without a module of torch's own, since captum's LRP knows none for it."""

    def __init__(self, layers: Sequence[Any], at: int) -> None:
        super().__init__()
        self.before = torch.nn.Sequential(*layers[:at])
        self.after = torch.nn.Sequential(*layers[at:])

    def forward(self, x: Any) -> Any:
        return self.after(torch.flatten(self.before(x), 1))


class Builder:
    """Makes the modules of a network, its weights by its name only, and notes shapes in the description."""

    def __init__(self, name: str) -> None:
        self.description = NETWORKS[name]
        self.random = np.random.default_rng(sum(name.encode()))
        self.weights: dict[str, Array] = {}

    def module(self) -> Any:
        """The network in float64, ready for inference."""
        layers = self.description["layers"]
        flatten = [index for index, layer in enumerate(layers) if layer["kind"] == "flatten"]
        modules = self._modules(layers, "", list(self.description["input"]))
        network = Flatten(modules, flatten[0]) if flatten else torch.nn.Sequential(*modules)
        return network.double().eval()

    def inputs(self, batch: int = 4) -> Array:
        """Of both signs, unless the network is for positive ones."""
        x = self.random.normal(size=(batch, *self.description["input"]))
        return np.abs(x) if self.description.get("positive") else x

    def _modules(self, layers: Sequence[dict[str, Any]], prefix: str, shape: list[int]) -> list[Any]:
        modules = []
        for index, layer in enumerate(layers):
            path = f"{prefix}{index}"
            if layer["kind"] == "flatten":
                self.description["flattened"] = list(shape)
                shape[:] = [int(np.prod(shape))]
                continue
            if layer["kind"] == "residual":
                modules.append(Residual(torch.nn.Sequential(*self._modules(layer["layers"], f"{path}/", list(shape)))))
                continue
            module = self._module(layer, path, shape)
            modules.append(module.double())
            with torch.no_grad():
                shape[:] = list(module.eval()(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
        return modules

    def _module(self, layer: dict[str, Any], path: str, shape: Sequence[int]) -> Any:
        kind, nn = layer["kind"], torch.nn
        if kind == "dense":
            return self._filled(nn.Linear(shape[0], layer["units"], bias=layer["bias"]), path)
        if kind == "conv":
            padding = 1 if layer["padding"] == "SAME" else 0
            module = nn.Conv2d(shape[0], layer["channels"], 3, layer["stride"], padding, bias=layer["bias"])
            return self._filled(module, path)
        if kind == "batch_norm":
            self.description["batch_norm_epsilon"] = BATCH_NORM_EPSILON
            module = nn.BatchNorm2d(shape[0], eps=BATCH_NORM_EPSILON).double()
            values = {
                "weight": self.random.uniform(0.5, 1.5, shape[0]) * self.random.choice([-1, 1, 1], shape[0]),
                "bias": self.random.normal(size=shape[0]) / 4,
                "running_mean": self.random.normal(size=shape[0]) / 4,
                "running_var": self.random.uniform(0.5, 2, shape[0]),
            }
            for name, value in values.items():
                getattr(module, name).data = self._keep(f"{path}/{name}", value)
            return module
        simple = {
            "relu": nn.ReLU,
            "tanh": nn.Tanh,
            "sigmoid": nn.Sigmoid,
            "softplus": nn.Softplus,
            "elu": nn.ELU,
            "avg_pool": lambda: nn.AvgPool2d(2),
            "max_pool": lambda: nn.MaxPool2d(2),
        }
        return simple[kind]()

    def _filled(self, module: Any, path: str) -> Any:
        shape = tuple(module.weight.shape)
        spread = np.sqrt(2 / np.prod(shape[1:]))
        module.weight.data = self._keep(f"{path}/weight", self.random.normal(size=shape) * spread)
        if module.bias is not None:
            module.bias.data = self._keep(f"{path}/bias", self.random.normal(size=shape[0]) / 4)
        return module

    def _keep(self, name: str, value: Array) -> Any:
        # float32 numbers, so that both precisions compute the same network.
        value = value.astype(np.float32).astype(np.float64)
        self.weights[name] = value
        return torch.tensor(value)
