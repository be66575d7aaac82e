"""The committed table of op definitions equals that of the installed TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradrule.common import op_definitions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "tools/generate_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Runs in a new Python process, where no other test has registered gradients.
_IN_A_FRESH_PYTHON = """
import importlib.util, json
spec = importlib.util.spec_from_file_location("generate_tables", "tools/generate_tables.py")
generator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generator)
from gradrule.common.op_definitions import decode_table
registry = generator.ops.gradient_registry
print(json.dumps({
    "is_current": decode_table(generator.TARGET.read_bytes()) == decode_table(generator.table()),
    "callable": sorted(name for name in registry.list() if callable(registry.lookup(name))),
}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_FRESH_PYTHON], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_committed_table_is_current(fresh: dict[str, Any]) -> None:
    assert fresh["is_current"]


def test_generation_is_deterministic(generator: ModuleType) -> None:
    assert generator.table() == generator.table()


def test_table_contains_every_op(generator: ModuleType) -> None:
    definitions = generator.tensorflow_op_definitions()
    assert len(op_definitions.names()) == len(definitions) > 1900


def test_digest_equals_tensorflows(generator: ModuleType) -> None:
    assert op_definitions.digest() == op_definitions.digest_of(generator.tensorflow_op_definitions())


def test_digest_of_loaded_definitions_is_equal() -> None:
    loaded = [op for name in op_definitions.names() if (op := op_definitions.find(name)) is not None]
    assert op_definitions.digest_of(loaded) == op_definitions.digest()


def test_digest_changes_with_one_default(generator: ModuleType) -> None:
    definitions = generator.tensorflow_op_definitions()
    changed = [definitions[0].replace(definitions[0][2:4], b"Zz", 1), *definitions[1:]]
    assert op_definitions.digest_of(changed) != op_definitions.digest()


def test_listed_gradients_can_be_called(fresh: dict[str, Any]) -> None:
    assert list(op_definitions.gradients()) == fresh["callable"]
    assert all(op_definitions.find(name) is not None for name in op_definitions.gradients())
