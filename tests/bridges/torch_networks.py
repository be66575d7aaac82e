"""Builds small networks of PyTorch that have the layers of well-known architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ResNet(nn.Module):  # type: ignore[misc]
    """He et al. 2016: a stem, a basic block and a bottleneck, with strides and shortcuts."""

    class Bottleneck(nn.Module):  # type: ignore[misc]
        """Three convolutions with a shortcut."""

        def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
            self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
            shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            self.downsample = shortcut if stride != 1 or inputs != outputs else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.relu(self.bn1(self.conv1(x)))
            h = self.relu(self.bn2(self.conv2(h)))
            h = self.bn3(self.conv3(h))
            h += x if self.downsample is None else self.downsample(x)
            y: torch.Tensor = self.relu(h)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(self.Bottleneck(8, 4, 16, 1), self.Bottleneck(16, 4, 16, 1))
        self.layer2 = nn.Sequential(self.Bottleneck(16, 8, 24, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer2(self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        y: torch.Tensor = self.fc(torch.flatten(self.avgpool(h), 1))
        return y


def vgg() -> nn.Module:
    """Simonyan and Zisserman 2015."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2), nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten()),
        *(nn.Linear(12 * 49, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5)),
    )


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """Sandler et al. 2018, Howard et al. 2019, Tan and Le 2019: depthwise convolutions, gates, and a shortcut."""

    def __init__(self, width: int, inner: int, stride: int, activation: Callable[[], nn.Module], gate: Any) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), activation())
        self.depthwise = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), activation()
        )
        self.gate = None if gate is None else self.Gate(inner, gate)
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.stride = stride

    class Gate(nn.Module):  # type: ignore[misc]
        """Hu et al. 2018: squeeze and excitation."""

        def __init__(self, width: int, gate: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.avgpool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
            self.gate = gate()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.gate(self.fc2(torch.relu(self.fc1(self.avgpool(x))))) * x
            return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.depthwise(self.expand(x))
        h = self.project(h if self.gate is None else self.gate(h))
        y: torch.Tensor = x + h if self.stride == 1 else h
        return y


def _mobile(activation: Callable[[], nn.Module], gate: Any = None) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), activation()),
        *(InvertedResidual(8, 16, 1, activation, gate), InvertedResidual(8, 16, 2, activation, gate)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5)),
    )


class ConvNeXtBlock(nn.Module):  # type: ignore[misc]
    """Liu et al. 2022."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y: torch.Tensor = x + self.scale * self.down(self.act(self.up(h))).permute(0, 3, 1, 2)
        return y


class DenseBlock(nn.Module):  # type: ignore[misc]
    """Huang et al. 2017: each layer takes the results of all layers before it."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + growth * index), nn.ReLU(), nn.Conv2d(width + growth * index, growth, 3, 1, 1)
            )
            for index in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class ViT(nn.Module):  # type: ignore[misc]
    """Dosovitskiy et al. 2021."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], 1) + self.positions
        y: torch.Tensor = self.head(self.norm(self.encoder(h))[:, 0])
        return y


class SwinBlock(nn.Module):  # type: ignore[misc]
    """Liu et al. 2021: attention within windows that are shifted, with a bias for each pair of positions."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        distance = grid[:, :, None] - grid[:, None] + window - 1
        self.register_buffer("pairs", distance[0] * (2 * window - 1) + distance[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        size, heads = self.window, self.heads
        h = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        h = h.view(batch, height // size, size, width // size, size, channels).transpose(2, 3)
        h = h.reshape(-1, size * size, channels)
        query, key, value = self.qkv(h).reshape(-1, size * size, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (channels // heads) ** -0.5
        scores = scores + self.bias[self.pairs].permute(2, 0, 1).unsqueeze(0)
        h = self.out((functional.softmax(scores, -1) @ value).transpose(1, 2).reshape(-1, size * size, channels))
        h = h.view(batch, height // size, width // size, size, size, channels).transpose(2, 3)
        y: torch.Tensor = x + torch.roll(h.reshape(x.shape), (self.shift, self.shift), (1, 2))
        return y


class Swin(nn.Module):  # type: ignore[misc]
    """Two blocks with windows of 4×4, and a merge of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(SwinBlock(8, 2, 4, 0), SwinBlock(8, 2, 4, 2))
        self.norm, self.reduction, self.head = nn.LayerNorm(32), nn.Linear(32, 16, bias=False), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.patches(x).permute(0, 2, 3, 1))
        parts = [h[:, row::2, column::2, :] for column in (0, 1) for row in (0, 1)]
        h = self.reduction(self.norm(torch.cat(parts, -1)))
        y: torch.Tensor = self.head(h.mean((1, 2)))
        return y


class UNet(nn.Module):  # type: ignore[misc]
    """Ronneberger et al. 2015, with all ways to enlarge an image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1, padding_mode="reflect")
        self.dilated = nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2)
        self.norm, self.up = nn.GroupNorm(4, 8), nn.ConvTranspose2d(8, 6, 4, 2, 1)
        self.odd = nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1, groups=2, dilation=1)
        self.head = nn.Conv2d(6 + 4 + 8 * 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.silu(self.norm(self.dilated(functional.mish(self.down(x)))))
        size = x.shape[-2:]
        larger = [
            functional.interpolate(h, size, mode="bilinear", align_corners=False),
            functional.interpolate(h, scale_factor=2.0, mode="nearest"),
            functional.interpolate(h, scale_factor=2.0, mode="bicubic", align_corners=True),
        ]
        y: torch.Tensor = self.head(torch.cat([self.up(h), self.odd(h), *larger], 1))
        return y


class Sequences(nn.Module):  # type: ignore[misc]
    """Convolutions, pooling and padding of one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 5, 2, 2, groups=1), nn.BatchNorm1d(8)
        self.depthwise, self.up = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8), nn.ConvTranspose1d(8, 4, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.leaky_relu(self.norm(self.conv(x)), 0.2)
        h = functional.elu(self.depthwise(functional.pad(h, (1, -1))))
        h = functional.avg_pool1d(functional.max_pool1d(h, 3, 1, 1), 3, 2, 1, ceil_mode=True, count_include_pad=False)
        y: torch.Tensor = torch.tanh(self.up(h))
        return y


class Volumes(nn.Module):  # type: ignore[misc]
    """Convolutions and pooling of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv3d(2, 4, 3, 2, 1), nn.Conv3d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose3d(4, 2, 3, 2, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.max_pool3d(self.grouped(torch.relu(self.conv(x))), 2, ceil_mode=True)
        y: torch.Tensor = functional.avg_pool3d(self.up(h), 2, 2, 1)
        return y


IMAGES = (3, 16, 16)
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet": (ResNet, (3, 32, 32)),
    "VGG": (vgg, (3, 28, 28)),
    "MobileNetV2": (lambda: _mobile(nn.ReLU6), IMAGES),
    "MobileNetV3": (lambda: _mobile(nn.Hardswish, nn.Hardsigmoid), IMAGES),
    "EfficientNet": (lambda: _mobile(nn.SiLU, nn.Sigmoid), IMAGES),
    "ConvNeXt": (lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8)), IMAGES),
    "DenseNet": (lambda: nn.Sequential(DenseBlock(3, 4), nn.AvgPool2d(2, 2), nn.BatchNorm2d(15)), IMAGES),
    "ViT": (ViT, IMAGES),
    "Swin": (Swin, IMAGES),
    "UNet": (UNet, IMAGES),
    "Sequences": (Sequences, (3, 20)),
    "Volumes": (Volumes, (2, 9, 8, 7)),
}
"""Networks by name, with the shape of one example."""


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """Returns a network in evaluation mode, with random weights and statistics, and a batch of three inputs."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_(0, 0.3)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
    return model.eval().to(dtype), torch.randn(3, *shape, dtype=torch.float64).to(dtype)
