"""PyTorch twins of the Keras models that `keras_models` wrote, and zennit's relevances of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.peers.attribution import MergeBatchNorm
from tests.peers.captum_models import add_captum
from tests.peers.cases import Array, Collection
from tests.peers.libraries import Module, torch
from tests.peers.libraries import zennit_composites as composites
from tests.peers.network_notes import EXPLANATIONS
from tests.peers.torch_makers import MAKERS
from tests.peers.torch_modules import Weights, tensor

_FORWARD_TOLERANCES = {"float32": 1e-5, "float64": 1e-9}
_TOLERANCE = 1e-4
_NOTHING = 1e-12
_BOX = {"low": -4.0, "high": 4.0}


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
        # The gradient of an embedding's index is none, so that of its output is compared.
        self.x = next((step["name"] for step in steps if step["kind"] == "Embedding"), "input")
        self.steps = steps = _with_batch_norms_first(steps)
        self.parts = torch.nn.ModuleList()
        values = {"input": x}
        for step in steps:
            prefix = f"{step['name']}/"
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            inputs = [values[name] for name in step["inputs"]]
            self.parts.append(MAKERS[step["kind"]](own, step["config"], inputs[0].shape))
            with torch.no_grad():
                self.parts[-1].eval()
                values[step["name"]] = self.parts[-1](*inputs)
        self.eval()

    def forward(self, x: Any) -> Any:
        values = {self.x: x}
        for step, part in zip(self.steps, self.parts, strict=True):
            if step["name"] not in values:
                values[step["name"]] = part(*(values[name] for name in step["inputs"]))
        return values[self.last]

    def embedded(self, x: Any) -> Any:
        """Returns what the gradient is taken of: the input, or its embedding."""
        return x if self.x == "input" else self.parts[0](x)


@dataclass
class Model:
    """A model's twin, an input and its outputs in Keras.

    The twin is float64 always; dtype: of the Keras model.
    """

    name: str
    dtype: str
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
        dtype = str(arrays["outputs"].dtype)
        arrays = {
            key: value.astype(np.float64) if value.dtype == np.float32 else value for key, value in arrays.items()
        }
        x, outputs = arrays.pop("input"), arrays.pop("outputs")
        twin = Twin(description["steps"], arrays, tensor(x))
        with torch.no_grad():
            x = np.asarray(twin.embedded(tensor(x)).numpy())
        return cls(name, dtype, description, twin, x, outputs)

    @property
    def is_layer(self) -> bool:
        """Whether it is a model of one layer."""
        return bool(self.description["is_layer"])

    def forward(self) -> Array:
        """Returns the twin's outputs."""
        with torch.no_grad():
            return np.asarray(self.twin(tensor(self.x)).numpy())

    def one_hot(self) -> Array:
        """Returns the upstream gradient of one output per example; of a layer, some numbers."""
        if self.is_layer:
            return np.random.default_rng(zlib.crc32(self.name.encode())).normal(size=self.outputs.shape)
        return np.eye(self.outputs.shape[1])[np.arange(len(self.x))]

    def relevance(self, composite: Any, upstream: Array) -> Array:
        """Returns what flows back to the input under a composite."""
        x = tensor(self.x).requires_grad_()
        with composite.context(self.twin) as module:
            (gradient,) = torch.autograd.grad(module(x), x, tensor(upstream))
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
        if not difference <= _FORWARD_TOLERANCES[model.dtype]:
            raise ValueError(f"the outputs of the twin of {model.name} differ by {difference:.1e} from Keras's")
        if not model.is_layer:
            print(f"{model.name}: outputs differ by {difference:.1e}", flush=True)
        modules = {type(module).__name__ for module in model.twin.modules()}
        kinds = {step["kind"] for step in model.description["steps"]}
        one_hot = model.one_hot()
        relevance = one_hot if model.is_layer else one_hot * model.outputs
        _add(collection, model, "", composites.LayerMapComposite([]), one_hot, {})
        for preset, (composite, params) in _LRP.items():
            if model.is_layer and preset == "epsilon_alpha2_beta1_flat":
                # Its parts are those of two other presets.
                continue
            _add(collection, model, preset, composite(**params), relevance, params)
            if "BatchNormalization" in kinds:
                merged = composite(**params, canonizers=[MergeBatchNorm()])
                _add(collection, model, preset, merged, relevance, params, ("fold_batch_norm",))
        if "ReLU" in modules:
            for preset, (composite, params) in _OF_RELU.items():
                _add(collection, model, preset, composite(**params), one_hot, params)
        if not model.is_layer:
            add_captum(collection, model)


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
    if np.abs(reference).max() < _NOTHING * np.abs(upstream).max():
        # What flows back through a layer normalization sums to 0; a flat first layer spreads the sum.
        return
    if not np.isfinite(reference).all() or not reference.any():
        raise ValueError(f"zennit's {preset} on {model.name} gives nothing to compare")
    folded = ", batch norms folded" if rewrites else ""
    run = {
        "kind": "keras",
        "model": model.name,
        "is_layer": model.is_layer,
        "overrides": [{"preset": preset, "params": dict(params)}] if preset else [],
        "rewrites": list(rewrites),
    }
    collection.add(
        f"preset {preset}" if preset else "(true gradient)", "zennit" if preset else "torch",
        f"{model.name}{folded}", model.dtype, run, {"dy": upstream}, {"x": reference}, params, floor=1.0,
        tolerance=_TOLERANCE, explained=EXPLANATIONS.get((model.name, preset, bool(rewrites)), ""),
    )  # fmt: skip
