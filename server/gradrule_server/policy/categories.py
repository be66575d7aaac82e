"""The categories of denied ops: what they are in a word, and what a caller can do instead."""

from __future__ import annotations

from collections.abc import Mapping

from gradrule_server.policy.table import NOT_REVIEWED

_FEED = "feed what comes out of it in its place"
_NONE = "leave it out"

# By category of denied ops: a clause that says what to do instead.
REMEDIES: Mapping[str, str] = {
    "TPU": "trace the model for a CPU or a GPU",
    "across runs": _FEED,
    "code": "write it in TensorFlow's ops, or feed its result",
    "codec": "decode before sending, and feed what comes out of it in its place",
    "compiler": "write it in TensorFlow's ops; the compiler needs no ops of its own in the graph",
    "control": "build the graph with control flow of version 2",
    "dataset": _FEED,
    "debug": _NONE,
    "distributed": "trace the model for one device",
    "file read": "read the file where you are, and feed what is in it",
    "file write": _NONE,
    "internal": "send the graph as it was before TensorFlow optimised it",
    "memory": "use Fill, and ConcatV2 to join tensors",
    "network": _FEED,
    "no kernel": "use another op",
    "process": _NONE,
    "queue": _FEED,
    "resource": _FEED,
    "table": _FEED,
    "tensor array": "use TensorArrayV3, or tensor lists",
    "test": _NONE,
    "training": "ask for gradients, and train with those",
    "variable": "ask for gradients, and let a session apply them",
    NOT_REVIEWED: "use an op that has been reviewed",
}
