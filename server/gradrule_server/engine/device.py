"""Which device an engine runs on."""

from __future__ import annotations

import tensorflow as tf


class DeviceRefused(Exception):
    """The device that was asked for is not there; the message says what is."""


def choose_device(wanted: str) -> str:
    """Makes TensorFlow use `auto` (the first GPU, else the CPU), `cpu` or `gpu:N`; returns its name, like `CPU:0`."""
    gpus = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        tf.config.set_visible_devices([], "GPU")
        return "CPU:0"
    index = 0 if wanted == "auto" else int(wanted.removeprefix("gpu:"))
    if index >= len(gpus):
        there = f"TensorFlow sees {len(gpus)} GPUs" if gpus else "TensorFlow sees no GPU"
        raise DeviceRefused(f"device {wanted!r} was asked for, but {there}; use --device cpu or --device auto")
    tf.config.set_visible_devices([gpus[index]], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return f"GPU:{index}"
