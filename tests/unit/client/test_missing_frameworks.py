"""Modules for frameworks that are not installed say how to install them."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("framework", ["torch", "jax", "pytensor"])
def test_missing_frameworks_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.setitem(sys.modules, f"{framework}.tensor", None)
    monkeypatch.delitem(sys.modules, f"gradrule.{framework}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'gradrule\[{framework}\]'"):
        importlib.import_module(f"gradrule.{framework}")
