"""Builds small networks like VGG and ResNet for images of 3×16×16, with batch norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tests.peers.libraries import ZennitSum


class Same(nn.Module):  # type: ignore[misc]
    """Returns a copy: captum's hooks take two modules with one output tensor for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.first_relu = nn.ReLU()
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else Same()
        self.sum = ZennitSum()
        self.last_relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first_relu(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        y: torch.Tensor = self.last_relu(self.sum(torch.stack([h, self.shortcut(x)], -1)))
        return y


def vgg() -> nn.Module:
    """Returns convolutions with batch norms, max pooling, average pooling, and two dense layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 5)),
    )


def resnet() -> nn.Module:
    """Returns three residual blocks, one of them with a convolution in its shortcut."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1)),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)),
    )


MODELS: Mapping[str, Callable[[], nn.Module]] = {"VGG": vgg, "ResNet": resnet}


def build(name: str, dtype: torch.dtype, *, fused: bool = False) -> nn.Module:
    """Returns a model in evaluation mode with random weights and statistics.

    fused: Whether each batch norm is multiplied into the convolution before it.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_(0, 0.3)
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
    model = model.eval().double()
    if fused:
        _fuse(model)
    return model.to(dtype)


def _fuse(model: nn.Module) -> None:
    for parent in model.modules():
        previous = ""
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, previous, fuse_conv_bn_eval(getattr(parent, previous), child))
                setattr(parent, name, Same())
            previous = name


def images(dtype: torch.dtype) -> Any:
    """Returns two images."""
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
