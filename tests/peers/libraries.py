"""The peers, imported, for a process of their own."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any


def _stand_in_for_torchvision() -> None:
    """Puts two empty classes where zennit looks for torchvision's, of which no build fits the CPU build of torch."""
    names = ("torchvision", "torchvision.models", "torchvision.models.resnet")
    modules = {name: ModuleType(name) for name in names}
    modules["torchvision"].__dict__["models"] = modules["torchvision.models"]
    modules["torchvision.models"].__dict__["resnet"] = modules["torchvision.models.resnet"]
    for name in ("BasicBlock", "Bottleneck"):
        modules["torchvision.models.resnet"].__dict__[name] = type(name, (), {})
    sys.modules.update(modules)


_stand_in_for_torchvision()

import captum.attr  # type: ignore[import-not-found]  # noqa: E402
import captum.attr._utils.lrp_rules  # type: ignore[import-not-found]  # noqa: E402
import snntorch.surrogate  # type: ignore[import-not-found]  # noqa: E402
import spikingjelly.activation_based.surrogate  # type: ignore[import-not-found]  # noqa: E402
import torch as _torch  # noqa: E402
import zennit.canonizers  # type: ignore[import-not-found]  # noqa: E402
import zennit.composites  # type: ignore[import-not-found]  # noqa: E402
import zennit.layer  # type: ignore[import-not-found]  # noqa: E402
import zennit.rules  # type: ignore[import-not-found]  # noqa: E402
import zennit.types  # type: ignore[import-not-found]  # noqa: E402

torch: Any = _torch
Module: Any = _torch.nn.Module
captum_attr: Any = captum.attr
captum_rules: Any = captum.attr._utils.lrp_rules
snn_neurons: Any = snntorch
snn: Any = snntorch.surrogate
jelly: Any = spikingjelly.activation_based.surrogate
zennit_canonizers: Any = zennit.canonizers
zennit_composites: Any = zennit.composites
zennit_rules: Any = zennit.rules
zennit_types: Any = zennit.types
ZennitSum: Any = zennit.layer.Sum

# Formulas of the last two are written out in formulas.py: they need a TensorFlow, or a torch, of their own.
VERSIONS = {name: version(name) for name in ("torch", "snntorch", "spikingjelly", "captum", "zennit")} | {
    "norse": "1.1.0, formulas",
    "larq": "0.14.0, formulas",
    "paper": "formulas",
}
