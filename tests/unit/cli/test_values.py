from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradrule.cli import parsing


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.array([1, 2], np.int64))
    np.savez("one.npz", only=np.float32([1.5]))
    np.savez("two.npz", x=np.float32([1]), w=np.float32([2]))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("text.npy").write_text("no array")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x=[1, 2.5]", "x", [1, 2.5]),
        ("x=2", "x", 2),
        ("layer/x:0=[[true], [false]]", "layer/x:0", [[True], [False]]),
        ('x="a=b"', "x", "a=b"),
    ],
)
def test_inline_values(text: str, name: str, expected: object) -> None:
    assert parsing.feed(text) == {name: expected}


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("x=x.npy", "x", np.array([1, 2], np.int64)),
        ("y=one.npz", "y", np.float32([1.5])),
        ("w=two.npz", "w", np.float32([2])),
        ("other=two.npz:x", "other", np.float32([1])),
    ],
)
def test_values_from_files_keep_their_type(files: Path, text: str, name: str, expected: Any) -> None:
    value = parsing.feed(text)[name]
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def test_a_npz_file_alone_feeds_all_that_it_holds(files: Path) -> None:
    assert {name: list(value) for name, value in parsing.feed("two.npz").items()} == {"x": [1], "w": [2]}


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (parsing.feed, "x", "expected NAME=VALUE"),
        (parsing.feed, "=1", "no name before the ="),
        (parsing.feed, "x=[1,", "JSON value"),
        (parsing.feed, "x=missing.npy", "no file 'missing.npy'"),
        (parsing.feed, "x=text.npy", "cannot read 'text.npy'"),
        (parsing.feed, "x=objects.npy", "cannot read 'objects.npy'"),
        (parsing.feed, "y=two.npz", "no array 'y'; it has 'x', 'w'"),
        (parsing.feed, "y=two.npz:z", "no array 'z'"),
        (parsing.variable, "z=1", "'z' is no variable"),
        (parsing.call_param, "alpha=2", "expected LABEL.PARAM=VALUE"),
        (parsing.call_param, ".alpha=2", "expected LABEL.PARAM=VALUE"),
        (parsing.call_param, "Sign.alpha=two", "JSON value"),
        (parsing.rule_param, "a=", "expected NAME=VALUE"),
    ],
)
def test_what_cannot_be_read_says_what_would_be_right(
    files: Path, read: Callable[[str], object], text: str, words: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(words)):
        read(text)


def test_params_upstream_gradients_and_declared_params() -> None:
    assert parsing.call_param("layer.1/*.alpha=2") == ("layer.1/*", "alpha", 2)
    assert parsing.call_param("Sign.w=[1, 2]") == ("Sign", "w", [1, 2])
    assert parsing.grad_y("y=tensor:upstream:1") == ("y", "upstream:1")
    assert parsing.grad_y("y:1=[1, 10]") == ("y:1", [1, 10])
    assert parsing.rule_param("a=0.5") == ("a", 0.5)
    assert parsing.rule_param("a") == ("a", None)
