"""Supports Keras models: makes overrides by layer, and runs layers on a server.

    import gradrule as gr

    graph = gr.from_keras(model)
    relus = gr.keras.layers(graph, keras.layers.ReLU)
    overrides = gr.keras.overrides(graph, {relus[-1]: "default", keras.layers.ReLU: "guided_relu"})

    remote = gr.keras.RemoteLayer(middle, client, overrides={"Sign": "ste_sign"})
    model = keras.Sequential([first, remote, last])

The first use of a name that needs Keras or TensorFlow imports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradrule._builder.specs import LayerCall
    from gradrule.keras._remote import RemoteLayer
    from gradrule.keras._selection import layers, overrides

__all__ = ["LayerCall", "RemoteLayer", "layers", "overrides"]

_MODULES = {
    "LayerCall": "gradrule._builder.specs",
    "RemoteLayer": "gradrule.keras._remote",
    "layers": "gradrule.keras._selection",
    "overrides": "gradrule.keras._selection",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'gradrule.keras' has no attribute {name!r}")
    if name == "RemoteLayer":
        from gradrule._tracing import require

        require("keras.RemoteLayer")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
