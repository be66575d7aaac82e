"""Finds the paths of the Keras variables that a traced function uses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import keras

from gradrule._tracing import tf_private

# Held while a property of Keras's class of variables is replaced.
_PATCHING = threading.RLock()


@contextlib.contextmanager
def paths_of_used_variables() -> Iterator[dict[Hashable, str]]:
    """Yields a dict that receives the path of each Keras variable used in the context, by identity of the handle.

    TensorFlow's variables do not know the layers between a model and a layer within another layer.
    """
    found: dict[Hashable, str] = {}
    kind: Any = keras.Variable

    def read(variable: Any) -> Any:
        handle = getattr(variable._value, "handle", None)
        if handle is not None and tf_private.is_eager(handle):
            found[tf_private.identity_of(handle)] = variable.path
        return value.fget(variable)

    with _PATCHING:
        value: Any = kind.value
        is_own = "value" in vars(kind)
        kind.value = property(read)
        try:
            yield found
        finally:
            if is_own:
                kind.value = value
            else:
                del kind.value
