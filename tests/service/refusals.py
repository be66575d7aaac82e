"""Records which test provokes which error reason, and provides a small graph for such tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import gradrule as gr
from tests.service import answers

Test = TypeVar("Test", bound=Callable[..., None])

PROVOKED: dict[str, Callable[..., None]] = {}
"""Reason → a test that provokes it at a real server."""

fine = pytest.mark.usefixtures("same_engine")
"""After the test the same engine still answers right."""

X = {"x": [1.0, -2.0]}


def provokes(*reasons: str) -> Callable[[Test], Test]:
    """Registers a test for error reasons and asserts that it met one of them."""

    def enter(test: Test) -> Test:
        @functools.wraps(test)
        def proven(*args: Any, **kwargs: Any) -> None:
            before = len(answers.RECORDED)
            test(*args, **kwargs)
            assert set(reasons) & set(answers.RECORDED[before:])

        for reason in reasons:
            PROVOKED[reason] = proven
        return proven  # type: ignore[return-value]  # wraps keeps the signature

    return enter


def sign() -> gr.Graph:
    """Makes y = sign(x)."""
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    return g
