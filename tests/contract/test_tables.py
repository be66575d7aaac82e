"""The committed table of op definitions is what the installed TensorFlow says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gradrule import _opdefs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "tools/generate_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_table_is_current(generator: ModuleType) -> None:
    assert _opdefs.decode_table(generator.TARGET.read_bytes()) == _opdefs.decode_table(generator.table())


def test_generation_is_deterministic(generator: ModuleType) -> None:
    assert generator.table() == generator.table()


def test_table_holds_every_op(generator: ModuleType) -> None:
    definitions = generator.op_definitions()
    assert len(_opdefs.names()) == len(definitions) > 1900


def test_digest_equals_tensorflows(generator: ModuleType) -> None:
    assert _opdefs.digest() == _opdefs.digest_of(generator.op_definitions())


def test_digest_of_loaded_definitions_is_the_same() -> None:
    loaded = [op for name in _opdefs.names() if (op := _opdefs.find(name)) is not None]
    assert _opdefs.digest_of(loaded) == _opdefs.digest()


def test_digest_sees_one_changed_default(generator: ModuleType) -> None:
    definitions = generator.op_definitions()
    changed = [definitions[0].replace(definitions[0][2:4], b"Zz", 1), *definitions[1:]]
    assert _opdefs.digest_of(changed) != _opdefs.digest()


def test_gradients_are_those_that_tensorflow_can_call() -> None:
    import tensorflow as tf  # noqa: F401  # registers the gradients
    from tensorflow.python.framework import ops

    registry = ops.gradient_registry
    assert list(_opdefs.gradients()) == sorted(name for name in registry.list() if callable(registry.lookup(name)))
    assert all(_opdefs.find(name) is not None for name in _opdefs.gradients())
