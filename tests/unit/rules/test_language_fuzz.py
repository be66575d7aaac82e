"""Tests that any text is a typed error or a formula that computes what NumPy computes."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.rules import Signature
from gradrule_server.rules.language import lower, parse
from gradrule_server.rules.language.functions import CONSTANTS, FUNCTIONS
from tests.samples import size
from tests.unit.rules.running import number_of, run

FLOAT, DOUBLE, INT, COMPLEX = (number_of(name) for name in ("float32", "float64", "int32", "complex64"))
SIGNATURES = [
    Signature((DOUBLE,), (DOUBLE,)),
    Signature((FLOAT, INT), (FLOAT,)),
    Signature((COMPLEX, COMPLEX), (COMPLEX, COMPLEX)),
    Signature((INT,), (FLOAT,)),
    Signature((FLOAT, DOUBLE, number_of("bool"), number_of("string")), ()),
]

_SYMBOLS = "( ( ( ) ) ) , , + - * / // % ** < <= == != and or not if else in is for = : [ ] { } . @ ~ & :="
_WORDS = "x x1 y dy default alpha 0 1 2.5 1e9 1j 'float32' \"sample\" axis None lambda"
TOKENS = st.sampled_from([*FUNCTIONS, *CONSTANTS, *_SYMBOLS.split(), *_WORDS.split()])


def try_everything(text: str) -> None:
    """Reads and lowers; only a typed error may come out, and it must fit into a trailer."""
    try:
        formula = parse(text, ["alpha", "beta"])
    except GradruleError as error:
        assert len(error.message.encode("utf-8", "replace")) < 2000
        assert reason_name(error.reason) in ("INVALID_EXPRESSION", "INVALID_RULE")
        return
    assert isinstance(formula.per_sample, bool)
    for signature in SIGNATURES:
        try:
            graph = lower(formula, signature)
        except GradruleError as error:
            assert reason_name(error.reason) in ("RULE_ARITY", "RULE_NOT_APPLICABLE", "RULE_OUTPUT")
        else:
            assert len(graph.results) == len(graph.shape_sources) == len(signature.inputs)


@given(st.text(st.characters(), max_size=80))
@settings(max_examples=size(133, 400), deadline=None)
def test_any_text_is_a_typed_error(text: str) -> None:
    try_everything(text)


@given(st.lists(TOKENS, max_size=14).map(" ".join))
@settings(max_examples=size(266, 800), deadline=None)
@example("1 if x else y")
@example("0x1for x in dy")
@example("sum(dy, axis=-x)")
def test_any_words_are_a_typed_error(text: str) -> None:
    try_everything(text)


PATHOLOGICAL = {
    "parentheses": "(" * 4000,
    "closed parentheses": "(" * 2000 + "x" + ")" * 2000,
    "parentheses within bounds": "(" * 60 + "x" + ")" * 60,
    "minus signs": "-" * 4000 + "x",
    "nots": "not " * 1000 + "x",
    "sum": "x+" * 2000 + "x",
    "powers": "x**" * 1300 + "x",
    "comparisons": "x<" * 2000 + "x",
    "ands": "x>0 and " * 500 + "x>0",
    "choices": "x if x>0 else " * 290 + "x",
    "calls": "abs(" * 63 + "x" + ")" * 63,
    "deeper calls": "abs(" * 900 + "x" + ")" * 900,
    "nested comparisons": "(" * 62 + "x" + "<x<x)" * 62,
    "nested maxima": "maximum(x, " * 60 + "x" + ")" * 60,
    "nested softmax": "softmax(" * 60 + "x" + ", axis=0)" * 60,
    "tower": "9**9**9**9**9*x",
    "tower of calls": "pow(9, pow(9, pow(9, 9)))*x",
    "long integer": "9" * 4090 + "*x",
    "hexadecimal": "0x" + "f" * 4000 + "*x",
    "fraction": "." + "9" * 4000 + "*x",
    "long name": "x" * 4096,
    "long index": "x" + "9" * 4000,
    "long tuple": "x," * 2040,
    "wide call": "maximum(" + "x," * 2000 + "x)",
    "strings": '"a"' * 1000,
    "too long": "x+" * 2500,
    "nul": "x\0y",
    "surrogate": "x\ud800",
    "byte order mark": "\ufeffx",
    "escape": "cast(x, '\\d')",
    "line separators": "x\x0c+\u2028y",
    "unclosed string": "'x",
    "unclosed triple string": "'''x",
    "f-string": "f'{x}'",
    "full width": "ｘ + 0",
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
@pytest.mark.timeout(60)
def test_pathological_text_is_a_typed_error(name: str) -> None:
    try_everything(PATHOLOGICAL[name])


def test_pathological_text_on_a_small_stack() -> None:
    failures: list[str] = []

    def read_all() -> None:
        for name, text in PATHOLOGICAL.items():
            try:
                try_everything(text)
            except BaseException as error:
                failures.append(f"{name}: {error!r}")

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=read_all)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert failures == []


def test_deep_text_where_the_stack_is_nearly_used_up() -> None:
    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            with pytest.raises(GradruleError):
                parse("-" * 4000 + "x")

    descend(sys.getrecursionlimit() // 2)


@dataclass(frozen=True)
class Pair:
    """One formula in the language and in NumPy."""

    ours: str
    numpy: str


def pair(ours: str, numpy: str, *parts: Pair) -> Pair:
    return Pair(ours.format(*(part.ours for part in parts)), numpy.format(*(part.numpy for part in parts)))


# Numbers stay small multiples of 1/4, so that float64 is exact and comparisons cannot tip over.
NUMBERS = st.sampled_from([Pair(name, name) for name in ("x", "dy", "y", "x", "dy", "alpha", "2", "0.5", "3", "0")])
MASKS = st.sampled_from([Pair("x > 0", "(x > 0)"), Pair("dy <= y", "(dy <= y)"), Pair("True", "np.bool_(True)")])


def numbers(inner: st.SearchStrategy[Pair], masks: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    """A formula one step larger."""
    twos = [
        ("({}) + ({})", "(({}) + ({}))"),
        ("({}) - ({})", "(({}) - ({}))"),
        ("({}) * ({})", "(({}) * ({}))"),
        ("maximum({}, {})", "np.maximum({}, {})"),
        ("minimum({}, {})", "np.minimum({}, {})"),
    ]
    ones = [
        ("-({})", "(-({}))"),
        ("abs({})", "np.abs({})"),
        ("({}) ** 2", "(({}) * ({}))"),
        ("floor({})", "np.floor({})"),
        ("sign({})", "np.sign({})"),
        ("sum({} + 0 * x, axis=0)", "np.sum(({}) + 0 * x, axis=0, keepdims=True)"),
        ('max({} + 0 * x, axis="sample")', "np.max(({}) + 0 * x, axis=1, keepdims=True)"),
        ("sum({})", "np.sum({})"),
        ("clip({}, -1, 2)", "np.clip({}, -1, 2)"),
    ]
    masked = [
        ("where({1}, {0}, dy)", "np.where({1}, {0}, dy)"),
        ("({0}) * ({1})", "(({0}) * ({1}))"),
        ("x if {1} else {0}", "np.where({1}, x, {0})"),
    ]
    one = st.builds(
        lambda form, a: pair(form[0], form[1].replace("({}) * ({})", "({0}) * ({0})"), a), st.sampled_from(ones), inner
    )
    two = st.builds(lambda form, a, b: pair(*form, a, b), st.sampled_from(twos), inner, inner)
    choice = st.builds(lambda form, a, mask: pair(*form, a, mask), st.sampled_from(masked), inner, masks)
    return one | two | choice


def masks_of(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    compare = [("({}) < ({})", "(({}) < ({}))"), ("({}) >= ({})", "(({}) >= ({}))"), ("({}) == ({})", "(({}) == ({}))")]
    logic = [
        ("({}) and ({})", "(({}) & ({}))"),
        ("({}) or ({})", "(({}) | ({}))"),
        ("not ({}) or ({})", "(~({}) | ({}))"),
    ]
    compared = st.builds(lambda form, a, b: pair(*form, a, b), st.sampled_from(compare), inner, inner)
    return MASKS | compared | st.builds(lambda form, a, b: pair(*form, a, b), st.sampled_from(logic), MASKS, compared)


FORMULAS = st.recursive(NUMBERS, lambda inner: numbers(inner, masks_of(inner)), max_leaves=7)


@given(FORMULAS)
@settings(max_examples=150, deadline=None)
def test_generated_formula_equals_numpy(formula: Pair) -> None:
    text = f"({formula.ours}) + 0 * dy"
    random = np.random.default_rng(3)
    x, y, dy = (random.integers(-8, 9, (2, 3)) / 4 for _ in range(3))
    graph = lower(parse(text, ["alpha"]), SIGNATURES[0])
    values = {"x0": x, "y0": y, "dy0": dy, "param/alpha": np.float64(1.5)}
    (result,) = run(graph, values)
    names = {"np": np, "x": x, "y": y, "dy": dy, "alpha": 1.5}
    expected = np.broadcast_to(eval(formula.numpy, names), (2, 3))
    np.testing.assert_array_equal(np.asarray(result), expected, err_msg=text)
