"""The page of ONNX operations agrees with the table of conversions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnx
import pytest

from gradrule._models.onnx_table import all_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools/generate_onnx_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current(generator: Any) -> None:
    assert generator.TARGET.read_text(encoding="utf-8") == generator.reference(), "run `make docs`"


def test_every_operation_of_onnx_is_on_the_page(generator: Any) -> None:
    page = generator.reference()
    definitions: Any = onnx.defs.get_all_schemas()
    names = {schema.name for schema in definitions if schema.domain == ""}
    assert not [name for name in names if f"`{name}`" not in page]
    assert not set(all_rows()) - names - {"Scatter", "Upsample"}
