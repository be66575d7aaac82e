"""PyTorch twins of the Keras models that `keras_models` wrote, from one mapping of layers, and zennit's relevances.

Tensors keep Keras's layout, channels last: modules that want channels first stand between two transpositions. Each
Keras layer that zennit has a rule for becomes the module that the rule is for; other functions keep their gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.peers.attribution import MergeBatchNorm
from tests.peers.cases import Array, Collection
from tests.peers.libraries import Module, ZennitSum, torch
from tests.peers.libraries import zennit_composites as composites
from tests.peers.network_notes import EXPLANATIONS

_FORWARD_TOLERANCE = 1e-9
_TOLERANCE = 1e-4
_BOX = {"low": -4.0, "high": 4.0}

Weights = Mapping[str, Array]
Config = Mapping[str, Any]


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


class Convolution(torch.nn.Conv2d):  # type: ignore[misc]
    """A convolution that pads as Keras does: with "same", more zeros after than before."""

    def __init__(self, kernel: Any, bias: Any, config: Config, groups: int) -> None:
        out, inner, *size = kernel.shape
        super().__init__(
            inner * groups, out, size, config["strides"], dilation=config["dilation_rate"], groups=groups,
            bias=bias is not None, dtype=kernel.dtype,
        )  # fmt: skip
        self.is_same = config["padding"] == "same"
        self.weight.data = kernel
        if bias is not None:
            self.bias.data = bias

    def forward(self, x: Any) -> Any:
        if self.is_same:
            pads: list[int] = []
            for size, kernel, stride, dilation in zip(
                x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True
            ):
                total = max((math.ceil(size / stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
                pads = [total // 2, total - total // 2, *pads]
            x = torch.nn.functional.pad(x, pads)
        return super().forward(x)


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


class Mean(Module):  # type: ignore[misc]
    """The mean over all positions, as an average pooling."""

    def __init__(self, axes: int, keeps: bool) -> None:
        super().__init__()
        self.pool = torch.nn.AdaptiveAvgPool2d(1) if axes == 2 else torch.nn.AdaptiveAvgPool1d(1)
        self.keeps = keeps

    def forward(self, x: Any) -> Any:
        mean = self.pool(x.movedim(-1, 1))
        return mean.movedim(1, -1) if self.keeps else mean.flatten(1)


class Attention(Module):  # type: ignore[misc]
    """Multi-head attention: four linear modules, and functions between them."""

    def __init__(self, weights: Weights, config: Config) -> None:
        super().__init__()
        self.heads, self.size = config["num_heads"], config["key_dim"]
        # Keras rounds this number to float32.
        self.scale = float(np.float32(1 / math.sqrt(self.size)))
        self.query, self.key, self.value = (
            _linear(weights[f"{part}/kernel"].reshape(-1, self.heads * self.size), weights[f"{part}/bias"].ravel())
            for part in ("query", "key", "value")
        )
        kernel = weights["attention_output/kernel"]
        self.output = _linear(kernel.reshape(-1, kernel.shape[-1]), weights["attention_output/bias"])

    def forward(self, query: Any, value: Any) -> Any:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            for part, x in ((self.query, query), (self.key, value), (self.value, value))
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) * self.scale, dim=-1)
        return self.output((scores @ v).transpose(1, 2).flatten(2))


def _tensor(value: Array) -> Any:
    return torch.tensor(value)


def _linear(kernel: Array, bias: Array | None) -> Any:
    module = torch.nn.Linear(*kernel.shape, bias=bias is not None, dtype=torch.float64)
    module.weight.data = _tensor(kernel.T)
    if bias is not None:
        module.bias.data = _tensor(bias)
    return module


def _batch_norm(scale: Any, shift: Array, mean: Array, variance: Array, epsilon: float, rank: int) -> Any:
    module = (torch.nn.BatchNorm2d if rank == 4 else torch.nn.BatchNorm1d)(len(mean), eps=epsilon, dtype=torch.float64)
    module.weight.data, module.bias.data = _tensor(scale), _tensor(shift)
    module.running_mean, module.running_var = _tensor(mean), _tensor(variance)
    return ChannelsFirst(module) if rank > 2 else module


_ACTIVATIONS: Mapping[str, Callable[[], Any]] = {
    "linear": torch.nn.Identity,
    "relu": torch.nn.ReLU,
    "relu6": torch.nn.ReLU6,
    "silu": torch.nn.SiLU,
    "gelu": Gelu,
    "sigmoid": torch.nn.Sigmoid,
    "tanh": torch.nn.Tanh,
    "softmax": lambda: Function(lambda x: torch.softmax(x, dim=-1)),
}


def _with_activation(module: Any, config: Config) -> Any:
    name = config.get("activation", "linear")
    return module if name == "linear" else torch.nn.Sequential(module, _ACTIVATIONS[name]())


def _make_convolution(weights: Weights, config: Config, rank: int) -> Any:
    bias = _tensor(weights["bias"]) if "bias" in weights else None
    kernel = _tensor(weights["kernel"].transpose(3, 2, 0, 1))
    return _with_activation(ChannelsFirst(Convolution(kernel, bias, config, config["groups"])), config)


def _make_depthwise(weights: Weights, config: Config, rank: int) -> Any:
    kernel = weights["kernel"] if "kernel" in weights else weights["depthwise_kernel"]
    height, width, channels, multiplier = kernel.shape
    kernel = kernel.transpose(2, 3, 0, 1).reshape(channels * multiplier, 1, height, width)
    bias = _tensor(weights["bias"]) if "bias" in weights else None
    return _with_activation(ChannelsFirst(Convolution(_tensor(kernel), bias, config, channels)), config)


def _make_dense(weights: Weights, config: Config, rank: int) -> Any:
    return _with_activation(_linear(weights["kernel"], weights.get("bias")), config)


def _make_batch_norm(weights: Weights, config: Config, rank: int) -> Any:
    mean = weights["moving_mean"]
    scale, shift = weights.get("gamma", np.ones_like(mean)), weights.get("beta", np.zeros_like(mean))
    return _batch_norm(scale, shift, mean, weights["moving_variance"], config["epsilon"], rank)


def _make_normalization(weights: Weights, config: Config, rank: int) -> Any:
    # A function per channel, as a batch norm is.
    mean = weights["mean"]
    return _batch_norm(np.ones_like(mean), np.zeros_like(mean), mean, weights["variance"], 0.0, rank)


def _make_layer_norm(weights: Weights, config: Config, rank: int) -> Any:
    module = torch.nn.LayerNorm(len(weights["gamma"]), eps=config["epsilon"], dtype=torch.float64)
    module.weight.data, module.bias.data = _tensor(weights["gamma"]), _tensor(weights["beta"])
    return module


def _make_scale(weights: Weights, config: Config, rank: int) -> Any:
    (gamma,) = map(_tensor, weights.values())
    return Function(lambda x: x * gamma)


def _make_rescaling(weights: Weights, config: Config, rank: int) -> Any:
    # Keras rounds these numbers to float32.
    scale, offset = (torch.tensor(np.float32(config[name]), dtype=torch.float64) for name in ("scale", "offset"))
    return Function(lambda x: x * scale + offset)


def _make_relu(weights: Weights, config: Config, rank: int) -> Any:
    return _ACTIVATIONS["relu6" if config["max_value"] == 6 else "relu"]()


def _make_padding(weights: Weights, config: Config, rank: int) -> Any:
    (top, bottom), (left, right) = config["padding"]
    return ChannelsFirst(Function(lambda x: torch.nn.functional.pad(x, (left, right, top, bottom))))


def _make_max_pool(weights: Weights, config: Config, rank: int) -> Any:
    return ChannelsFirst(torch.nn.MaxPool2d(tuple(config["pool_size"]), tuple(config["strides"])))


def _make_average_pool(weights: Weights, config: Config, rank: int) -> Any:
    return ChannelsFirst(torch.nn.AvgPool2d(tuple(config["pool_size"]), tuple(config["strides"])))


def _make_positions(weights: Weights, config: Config, rank: int) -> Any:
    # As in torchvision's vision transformer: no module, so that zennit keeps its gradient.
    positions = _tensor(weights["positions"])
    return Function(lambda x: x + positions)


def _make_token(weights: Weights, config: Config, rank: int) -> Any:
    token = _tensor(weights["token"])
    return Function(lambda x: torch.cat([token.expand(len(x), -1, -1), x], dim=1))


_MAKERS: Mapping[str, Callable[[Weights, Config, int], Any]] = {
    "Conv2D": _make_convolution,
    "DepthwiseConv2D": _make_depthwise,
    "Dense": _make_dense,
    "BatchNormalization": _make_batch_norm,
    "Normalization": _make_normalization,
    "LayerNormalization": _make_layer_norm,
    "LayerScale": _make_scale,
    "Rescaling": _make_rescaling,
    "ReLU": _make_relu,
    "ZeroPadding2D": _make_padding,
    "MaxPooling2D": _make_max_pool,
    "AveragePooling2D": _make_average_pool,
    "AddToken": _make_token,
    "MultiHeadAttention": lambda weights, config, rank: Attention(weights, config),
    "Activation": lambda weights, config, rank: _ACTIVATIONS[config["activation"]](),
    "GlobalAveragePooling2D": lambda weights, config, rank: Mean(2, config["keepdims"]),
    "GlobalAveragePooling1D": lambda weights, config, rank: Mean(1, config["keepdims"]),
    "Add": lambda weights, config, rank: Sum(),
    "AddPositions": _make_positions,
    "Multiply": lambda weights, config, rank: Function(lambda x, y: x * y),
    "Concatenate": lambda weights, config, rank: Function(lambda *inputs: torch.cat(inputs, dim=config["axis"])),
    "Reshape": lambda weights, config, rank: Function(lambda x: x.reshape(len(x), *config["target_shape"])),
    "Flatten": lambda weights, config, rank: Function(lambda x: x.flatten(1)),
    "FirstPosition": lambda weights, config, rank: Function(lambda x: x[:, 0]),
    **dict.fromkeys(
        ("Dropout", "StochasticDepth", "Identity", "InputLayer"), lambda weights, config, rank: torch.nn.Identity()
    ),
}


def _with_batch_norms_first(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the steps, each followed by the batch norms that use it.

    zennit merges a batch norm with the module before it, whether that is its input or not.
    """
    norms: dict[str, list[Mapping[str, Any]]] = {}
    for step in steps:
        if step["kind"] == "BatchNormalization":
            norms.setdefault(step["inputs"][0], []).append(step)
    found = list(norms.get("input", ()))
    for step in steps:
        if step["kind"] != "BatchNormalization":
            found.append(step)
            found += norms.get(step["name"], ())
    return found


class Twin(Module):  # type: ignore[misc]
    """A Keras model in PyTorch. Its modules stand in the order of the steps, but for batch norms."""

    def __init__(self, steps: Sequence[Mapping[str, Any]], weights: Weights, x: Any) -> None:
        super().__init__()
        self.last = steps[-1]["name"]
        self.steps = steps = _with_batch_norms_first(steps)
        self.parts = torch.nn.ModuleList()
        values = {"input": x}
        for step in steps:
            prefix = f"{step['name']}/"
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            inputs = [values[name] for name in step["inputs"]]
            self.parts.append(_MAKERS[step["kind"]](own, step["config"], inputs[0].ndim))
            with torch.no_grad():
                self.parts[-1].eval()
                values[step["name"]] = self.parts[-1](*inputs)
        self.eval()

    def forward(self, x: Any) -> Any:
        values = {"input": x}
        for step, part in zip(self.steps, self.parts, strict=True):
            values[step["name"]] = part(*(values[name] for name in step["inputs"]))
        return values[self.last]


@dataclass
class Model:
    """A model's twin, an input and its outputs in Keras."""

    name: str
    description: Mapping[str, Any]
    twin: Any
    x: Array
    outputs: Array

    @classmethod
    def load(cls, folder: Path, name: str) -> Model:
        """Reads what `keras_models` wrote."""
        description = json.loads((folder / f"{name}.json").read_text())
        with np.load(folder / f"{name}.npz") as stored:
            arrays = {key: stored[key] for key in stored.files}
        x, outputs = arrays.pop("input"), arrays.pop("outputs")
        return cls(name, description, Twin(description["steps"], arrays, _tensor(x)), x, outputs)

    def forward(self) -> Array:
        """Returns the twin's outputs."""
        with torch.no_grad():
            return np.asarray(self.twin(_tensor(self.x)).numpy())

    def relevance(self, composite: Any, upstream: Array) -> Array:
        """Returns what flows back to the input under a composite."""
        x = _tensor(self.x).requires_grad_()
        with composite.context(self.twin) as module:
            (gradient,) = torch.autograd.grad(module(x), x, _tensor(upstream))
        return np.asarray(gradient.numpy())


_LRP: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "epsilon_plus": (composites.EpsilonPlus, {}),
    "epsilon_plus_flat": (composites.EpsilonPlusFlat, {}),
    "epsilon_alpha2_beta1": (composites.EpsilonAlpha2Beta1, {}),
    "epsilon_alpha2_beta1_flat": (composites.EpsilonAlpha2Beta1Flat, {}),
    "epsilon_gamma_box": (composites.EpsilonGammaBox, _BOX),
    "excitation_backprop": (composites.ExcitationBackprop, {}),
}
_OF_RELU: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "guided_backprop": (composites.GuidedBackprop, {}),
    "deconvnet": (composites.DeconvNet, {}),
    "beta_smooth": (composites.BetaSmooth, {}),
}


def add_models(collection: Collection, folder: Path) -> None:
    """Adds all presets on all models that `keras_models` wrote."""
    for path in sorted(folder.glob("*.json")):
        model = Model.load(folder, path.stem)
        difference = np.abs(model.forward() - model.outputs).max() / np.abs(model.outputs).max()
        if not difference <= _FORWARD_TOLERANCE:
            raise ValueError(f"the outputs of the twin of {model.name} differ by {difference:.1e} from Keras's")
        print(f"{model.name}: outputs differ by {difference:.1e}", flush=True)
        modules = {type(module).__name__ for module in model.twin.modules()}
        kinds = {step["kind"] for step in model.description["steps"]}
        one_hot = np.eye(model.outputs.shape[1])[np.arange(len(model.x))]
        _add(collection, model, "", composites.LayerMapComposite([]), one_hot, {})
        for preset, (composite, params) in _LRP.items():
            _add(collection, model, preset, composite(**params), one_hot * model.outputs, params)
            if "BatchNormalization" in kinds:
                merged = composite(**params, canonizers=[MergeBatchNorm()])
                _add(collection, model, preset, merged, one_hot * model.outputs, params, ("fold_batch_norm",))
        if "ReLU" in modules:
            for preset, (composite, params) in _OF_RELU.items():
                _add(collection, model, preset, composite(**params), one_hot, params)


def _add(
    collection: Collection,
    model: Model,
    preset: str,
    composite: Any,
    upstream: Array,
    params: Mapping[str, Any],
    rewrites: Sequence[str] = (),
) -> None:
    reference = model.relevance(composite, upstream)
    if not np.isfinite(reference).all() or not reference.any():
        raise ValueError(f"zennit's {preset} on {model.name} gives nothing to compare")
    folded = ", batch norms folded" if rewrites else ""
    run = {"kind": "keras", "model": model.name, "preset": preset, "rewrites": list(rewrites)}
    collection.add(
        f"preset {preset}" if preset else "(true gradient)", "zennit" if preset else "torch",
        f"{model.name}{folded}", "float64", run, {"dy": upstream}, {"x": reference}, params, floor=1.0,
        tolerance=_TOLERANCE, explained=EXPLANATIONS.get((model.name, preset, bool(rewrites)), ""),
    )  # fmt: skip
