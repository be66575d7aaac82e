"""Makes the PyTorch twin of a Keras layer, by the kind of the layer, from its configuration and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.peers.libraries import Module, torch
from tests.peers.torch_modules import (
    Attention,
    Average,
    ChannelsFirst,
    Config,
    Function,
    Gelu,
    Global,
    GruStep,
    LstmStep,
    Recurrent,
    SimpleStep,
    Sum,
    Weights,
    convolution,
    functional,
    linear,
    nn,
    tensor,
)  # fmt: skip

# Gets the layer's weights, its configuration, and the shape of its first input.
Maker = Callable[[Weights, Config, Sequence[int]], Any]

_ACTIVATIONS: Mapping[str, Callable[[], Any]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "exponential": lambda: Function(torch.exp),
    "gelu": Gelu,
    "glu": lambda: nn.GLU(dim=-1),
    "hard_shrink": nn.Hardshrink,
    "hard_sigmoid": nn.Hardsigmoid,
    "hard_silu": nn.Hardswish,
    "hard_tanh": nn.Hardtanh,
    # Keras rounds this number to float32.
    "leaky_relu": lambda: nn.LeakyReLU(float(np.float32(0.2))),
    "linear": nn.Identity,
    "log_sigmoid": nn.LogSigmoid,
    "log_softmax": lambda: nn.LogSoftmax(dim=-1),
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "soft_shrink": nn.Softshrink,
    "softmax": lambda: nn.Softmax(dim=-1),
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
    "tanh_shrink": nn.Tanhshrink,
}


def _with_activation(module: Any, config: Config) -> Any:
    name = config.get("activation", "linear")
    return module if name == "linear" else nn.Sequential(module, _ACTIVATIONS[name]())


def _convolution(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    kernel = weights["kernel"].transpose(-1, -2, *range(weights["kernel"].ndim - 2))
    return _with_activation(convolution(kernel, weights.get("bias"), config, config["groups"]), config)


def _transposed(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    kernel = weights["kernel"].transpose(-1, -2, *range(weights["kernel"].ndim - 2))
    return _with_activation(convolution(kernel, weights.get("bias"), config, transposed=True), config)


def _depthwise(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    kernel = weights["kernel"] if "kernel" in weights else weights["depthwise_kernel"]
    *size, channels, multiplier = kernel.shape
    kernel = kernel.transpose(-2, -1, *range(len(size))).reshape(channels * multiplier, 1, *size)
    return _with_activation(convolution(kernel, weights.get("bias"), config, channels), config)


def _separable(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    depthwise = _depthwise({"kernel": weights["depthwise_kernel"]}, {**config, "activation": "linear"}, shape)
    once = [1] * len(config["strides"])
    pointwise = {"kernel": weights["pointwise_kernel"], "bias": weights["bias"]}
    rest = {"strides": once, "dilation_rate": once, "groups": 1, "padding": "valid"}
    return nn.Sequential(depthwise, _convolution(pointwise, {**config, **rest}, shape))


def _dense(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    return _with_activation(linear(weights["kernel"], weights.get("bias")), config)


def _batch_norm(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    # Normalization has no moving averages.
    mean, variance = (weights.get(f"moving_{name}", weights.get(name)) for name in ("mean", "variance"))
    rank = max(len(shape) - 2, 1)
    module = getattr(nn, f"BatchNorm{rank}d")(len(mean), eps=config.get("epsilon", 0.0), dtype=torch.float64)
    module.weight.data = tensor(weights.get("gamma", np.ones_like(mean)))
    module.bias.data = tensor(weights.get("beta", np.zeros_like(mean)))
    module.running_mean, module.running_var = tensor(mean), tensor(variance)
    return ChannelsFirst(module) if len(shape) > 2 else module


def _layer_norm(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    module = nn.LayerNorm(len(weights["gamma"]), eps=config["epsilon"], dtype=torch.float64)
    module.weight.data, module.bias.data = tensor(weights["gamma"]), tensor(weights["beta"])
    return module


def _group_norm(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    module = nn.GroupNorm(config["groups"], shape[-1], eps=config["epsilon"], dtype=torch.float64)
    module.weight.data, module.bias.data = tensor(weights["gamma"]), tensor(weights["beta"])
    return ChannelsFirst(module)


def _rms_norm(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    module = nn.RMSNorm(shape[-1], eps=config["epsilon"], dtype=torch.float64)
    module.weight.data = tensor(weights["scale"])
    return module


def _scale(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    (gamma,) = map(tensor, weights.values())
    return Function(lambda x: x * gamma)


def _rescaling(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    # Keras rounds these numbers to float32.
    scale, offset = (torch.tensor(np.float32(config[name]), dtype=torch.float64) for name in ("scale", "offset"))
    return Function(lambda x: x * scale + offset)


def _prelu(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    alpha = weights["alpha"].ravel()
    module = nn.PReLU(len(alpha), dtype=torch.float64)
    module.weight.data = tensor(alpha)
    return ChannelsFirst(module)


def _by_axis(config: Config, name: str) -> list[int]:
    """Returns what is cut or added before and after each axis, last axis first, as PyTorch wants it."""
    pairs = config[name] if isinstance(config[name][0], list) else [config[name]]
    return [number for pair in reversed(pairs) for number in pair]


def _padding(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    pads = _by_axis(config, "padding")
    return ChannelsFirst(Function(lambda x: functional.pad(x, pads)))


def _cropping(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    pads = [-number for number in _by_axis(config, "cropping")]
    return ChannelsFirst(Function(lambda x: functional.pad(x, pads)))


def _pool(kind: str) -> Maker:
    def make(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
        size = tuple(config["pool_size"])
        options: dict[str, Any] = {}
        if config["padding"] == "same":
            # Keras pads on both sides alike if the strides are 1 and the size is odd.
            options = {"padding": tuple(number // 2 for number in size), "count_include_pad": False}
        return ChannelsFirst(getattr(nn, f"{kind}Pool{len(size)}d")(size, tuple(config["strides"]), **options))

    return make


def _adaptive(kind: str) -> Maker:
    def make(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
        size = config["output_size"]
        return ChannelsFirst(getattr(nn, f"Adaptive{kind}Pool{len(shape) - 2}d")(size))

    return make


def _global(kind: str) -> Maker:
    def make(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
        return Global(getattr(nn, f"Adaptive{kind}Pool{len(shape) - 2}d")(1), config["keepdims"])

    return make


def _up_sampling(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    size = config["size"]
    mode = config.get("interpolation", "nearest")
    factors = tuple(map(float, size)) if isinstance(size, list) else float(size)
    return ChannelsFirst(nn.Upsample(scale_factor=factors, mode=mode))


def _embedding(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    return nn.Embedding.from_pretrained(tensor(weights["embeddings"]))


def _positions(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    # As in torchvision's vision transformer: no module, so that zennit keeps its gradient.
    positions = tensor(weights["positions"])
    return Function(lambda x: x + positions)


def _token(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    token = tensor(weights["token"])
    return Function(lambda x: torch.cat([token.expand(len(x), -1, -1), x], dim=1))


_STEPS: Mapping[str, tuple[Callable[[Weights], Any], int]] = {
    "SimpleRNN": (SimpleStep, 1),
    "LSTM": (LstmStep, 2),
    "GRU": (GruStep, 1),
}


def _recurrent(kind: str, prefix: str = "") -> Maker:
    make_step, states = _STEPS[kind]

    def make(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
        own = {name.rpartition("/")[2]: value for name, value in weights.items() if name.startswith(prefix)}
        return Recurrent(lambda: make_step(own), shape[1], states, config, bool(config["go_backwards"]))

    return make


class _BothWays(Module):  # type: ignore[misc]
    """A recurrent layer forwards and one backwards."""

    def __init__(self, weights: Weights, config: Config, shape: Sequence[int]) -> None:
        super().__init__()
        parts = (("forward_", config["layer"]), ("backward_", config["backward_layer"] or config["layer"]))
        self.ways = nn.ModuleList(
            _recurrent(layer["class_name"], prefix)(
                weights, layer["config"] | {"go_backwards": prefix == "backward_"}, shape
            )
            for prefix, layer in parts
        )

    def forward(self, x: Any) -> Any:
        return torch.cat([way(x) for way in self.ways], dim=-1)


def _attention(weights: Weights, config: Config, shape: Sequence[int]) -> Any:
    return Attention(weights, config)


def _function(function: Callable[..., Any]) -> Maker:
    return lambda weights, config, shape: Function(function)


def _scores(query: Any, value: Any) -> Any:
    return torch.softmax(query @ value.transpose(1, 2), dim=-1) @ value


MAKERS: Mapping[str, Maker] = {
    **{f"Conv{rank}D": _convolution for rank in (1, 2, 3)},
    **{f"Conv{rank}DTranspose": _transposed for rank in (1, 2, 3)},
    **{f"DepthwiseConv{rank}D": _depthwise for rank in (1, 2)},
    **{f"SeparableConv{rank}D": _separable for rank in (1, 2)},
    **{f"ZeroPadding{rank}D": _padding for rank in (1, 2, 3)},
    **{f"Cropping{rank}D": _cropping for rank in (1, 2, 3)},
    **{f"UpSampling{rank}D": _up_sampling for rank in (1, 2, 3)},
    **{f"MaxPooling{rank}D": _pool("Max") for rank in (1, 2, 3)},
    **{f"AveragePooling{rank}D": _pool("Avg") for rank in (1, 2, 3)},
    **{f"AdaptiveMaxPooling{rank}D": _adaptive("Max") for rank in (1, 2, 3)},
    **{f"AdaptiveAveragePooling{rank}D": _adaptive("Avg") for rank in (1, 2, 3)},
    **{f"GlobalMaxPooling{rank}D": _global("Max") for rank in (1, 2, 3)},
    **{f"GlobalAveragePooling{rank}D": _global("Avg") for rank in (1, 2, 3)},
    **{kind: _recurrent(kind) for kind in _STEPS},
    "Dense": _dense,
    "EinsumDense": _dense,
    "TimeDistributed": lambda weights, config, shape: _dense(
        {name.rpartition("/")[2]: value for name, value in weights.items()}, config["layer"]["config"], shape
    ),
    "Bidirectional": _BothWays,
    "MultiHeadAttention": _attention,
    "GroupedQueryAttention": _attention,
    "Attention": _function(_scores),
    "Embedding": _embedding,
    "AddPositions": _positions,
    "AddToken": _token,
    "FirstPosition": _function(lambda x: x[:, 0]),
    "BatchNormalization": _batch_norm,
    # A function per channel, as a batch norm is.
    "Normalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "RMSNormalization": _rms_norm,
    "UnitNormalization": _function(lambda x: functional.normalize(x, dim=-1)),
    "LayerScale": _scale,
    "Rescaling": _rescaling,
    "Activation": lambda weights, config, shape: _ACTIVATIONS[config["activation"]](),
    "ELU": lambda weights, config, shape: nn.ELU(config["alpha"]),
    "LeakyReLU": lambda weights, config, shape: nn.LeakyReLU(float(np.float32(config["negative_slope"]))),
    "PReLU": _prelu,
    "ReLU": lambda weights, config, shape: _ACTIVATIONS["relu6" if config["max_value"] == 6 else "relu"](),
    "Softmax": lambda weights, config, shape: nn.Softmax(dim=-1),
    "Add": lambda weights, config, shape: Sum(),
    "Average": lambda weights, config, shape: Average(),
    "Concatenate": lambda weights, config, shape: Function(lambda *inputs: torch.cat(inputs, dim=config["axis"])),
    "Dot": _function(lambda x, y: (x * y).sum(dim=1, keepdim=True)),
    "Maximum": _function(torch.maximum),
    "Minimum": _function(torch.minimum),
    "Multiply": _function(lambda x, y: x * y),
    "Subtract": _function(lambda x, y: x - y),
    "Flatten": _function(lambda x: x.flatten(1)),
    "Permute": lambda weights, config, shape: Function(lambda x: x.permute(0, *config["dims"])),
    "RepeatVector": lambda weights, config, shape: Function(lambda x: x[:, None].expand(-1, config["n"], -1)),
    "Reshape": lambda weights, config, shape: Function(lambda x: x.reshape(len(x), *config["target_shape"])),
    **dict.fromkeys(
        (
            *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "Identity"),
            *("InputLayer", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "StochasticDepth"),
        ),
        lambda weights, config, shape: nn.Identity(),
    ),
}
