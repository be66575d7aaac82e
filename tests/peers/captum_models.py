"""captum's attributions of whole networks, where captum knows all modules and gradrule has the same rules.

- Guided backpropagation and deconvolution: networks with ReLU.
- DeepLift: the same networks. Its rule for max pooling has no counterpart here, so max pools keep their gradients.
- LRP: VGG16 and ResNet50, the latter with its batch norms merged. captum's LRP refuses ReLU6, sigmoid, SiLU, GELU and
  layer norms, and treats a batch norm that is not merged as a linear layer, which no preset of gradrule does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.peers.attribution import MergeBatchNorm
from tests.peers.cases import Array, Collection
from tests.peers.libraries import captum_attr, captum_rules, torch
from tests.peers.torch_modules import Function

_TOLERANCE = 1e-4
# Of linear layers, and of the modules that captum has no rule of their own for, such as a reshaping or a max pooling.
_EPS, _SMALL_EPS = 1e-6, 1e-12
_OF_LRP: Mapping[str, Sequence[str]] = {"VGG16": (), "ResNet50": ("fold_batch_norm",)}
_RELU = {"op_type": "Relu"}
_KEPT = (torch.nn.ReLU, torch.nn.Dropout, torch.nn.Tanh)


def add_captum(collection: Collection, model: Any) -> None:
    """Adds captum's methods on a network."""
    if not any(type(module) is torch.nn.ReLU for module in model.twin.modules()):
        return
    for rule, method in (("guided_backprop", captum_attr.GuidedBackprop), ("deconvnet", captum_attr.Deconvolution)):
        _add(
            collection, model, rule, method.__name__, [_RELU | {"rule": rule}], _attribution(method, model.twin, model)
        )
    params = {"baseline": 0.0, "eps": 1e-10}
    overrides = [_RELU | {"rule": "deeplift_rescale", "params": params}]
    found = _attribution(captum_attr.DeepLift, _with_max_pools_as_functions(model.twin), model)
    _add(collection, model, "deeplift_rescale", "DeepLift", overrides, found, params, times=model.x)
    if model.name in _OF_LRP:
        _add_lrp(collection, model, _OF_LRP[model.name])


def _add_lrp(collection: Collection, model: Any, rewrites: Sequence[str]) -> None:
    params = {"eps": _EPS}
    overrides: list[dict[str, Any]] = [
        {"layer": "@linear", "rule": "lrp_epsilon", "params": params},
        {"layer": "@activation", "rule": "lrp_pass"},
        *({"op_type": word, "rule": "lrp_norm", "params": {"eps": _SMALL_EPS}} for word in ("@sum", "@pool")),
    ]
    overrides = [{**entry, "optional": True} for entry in overrides]
    merged = MergeBatchNorm().apply(model.twin)
    try:
        for module in model.twin.modules():
            if not list(module.children()) and type(module) not in _KEPT:
                is_linear = isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
                module.rule = captum_rules.EpsilonRule(_EPS if is_linear else _SMALL_EPS)
        found = _attribution(captum_attr.LRP, model.twin, model)
    finally:
        for instance in merged:
            instance.remove()
    _add(
        collection, model, "lrp_epsilon", "LRP, EpsilonRule", overrides, found, params, rewrites, scale=model.outputs
    )  # fmt: skip


def _with_max_pools_as_functions(twin: Any) -> Any:
    changed = copy.deepcopy(twin)
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.MaxPool2d):
                setattr(module, name, Function(child.forward))
    return changed


def _attribution(method: Any, module: Any, model: Any) -> Array:
    x = torch.tensor(model.x).requires_grad_()
    return np.asarray(method(module).attribute(x, target=0).detach().numpy())


def _add(
    collection: Collection,
    model: Any,
    rule: str,
    what: str,
    overrides: Sequence[Mapping[str, Any]],
    reference: Array,
    params: Mapping[str, Any] | None = None,
    rewrites: Sequence[str] = (),
    times: Array | None = None,
    scale: Array | float = 1.0,
) -> None:
    if not np.isfinite(reference).all() or not reference.any():
        raise ValueError(f"captum's {what} on {model.name} gives nothing to compare")
    run = {
        "kind": "keras",
        "model": model.name,
        "is_layer": False,
        "overrides": list(overrides),
        "rewrites": list(rewrites),
    }
    inputs = {"dy": model.one_hot() * scale} | ({} if times is None else {"times": times})
    collection.add(
        rule, "captum", f"{model.name}, {what}", model.dtype, run, inputs, {"x": reference}, params or {}, floor=1.0,
        tolerance=_TOLERANCE,
    )  # fmt: skip
