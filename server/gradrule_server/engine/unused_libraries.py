"""Keeps libraries that an engine does not use from being imported.

TensorFlow imports Keras, and Keras imports whatever it finds installed: matplotlib (which looks for a folder to write
to, and fails in the sandbox), pandas, scikit-learn, h5py. All of them are optional to TensorFlow and Keras.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NEVER_USED = frozenset({"IPython", "PIL", "h5py", "jax", "matplotlib", "pandas", "pydot", "scipy", "sklearn", "torch"})
_KERAS = "keras.src"


class _Refusing(MetaPathFinder):
    """Reports modules as not installed."""

    def __init__(self) -> None:
        self.refuses_keras = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises `ModuleNotFoundError` for a refused module; None leaves it to the other finders."""
        if fullname in _NEVER_USED or (fullname == _KERAS and self.refuses_keras):
            raise ModuleNotFoundError(f"engines do not use {fullname}", name=fullname)
        return None


@contextlib.contextmanager
def without_libraries() -> Iterator[None]:
    """Refuses imports of the libraries that engines never use, for good, and of Keras within the context.

    Keras is needed for the optimizers of sessions only, which import it with their first step.
    """
    refusing = _Refusing()
    sys.meta_path.insert(0, refusing)
    refusing.refuses_keras = True
    try:
        yield
    finally:
        refusing.refuses_keras = False
