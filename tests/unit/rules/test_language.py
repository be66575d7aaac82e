"""Tests every row of docs/reference/expression-language.md against TensorFlow and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from gradrule.v1 import rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.rules import RuleContent, Signature
from gradrule_server.rules.language import Formula, lower, parse
from gradrule_server.rules.language.functions import BINARY, COMPARISONS, FUNCTIONS, LOGIC
from tests.unit.rules.language_table import DOCUMENT, Refusal, Row, code, expression_rows, refusal, rows
from tests.unit.rules.running import Array, Draws, exact, run

ROWS = expression_rows()
TOLERANCE = {
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "float32": 2e-6,
    "float64": 1e-12,
    "complex64": 2e-6,
    "complex128": 1e-12,
}
ELEMENTWISE = [row for row in ROWS if row.id.startswith("fn-") and not row.inputs and isinstance(row.gives, str)]

# Functions whose formula in the table has a meaning for complex numbers, too.
_COMPLEX = (
    "sign exp log log1p expm1 sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid div-no-nan zeros-like ones-like stop-gradient conj-of-real"
)


def check(row: Row, dtype: str | None = None) -> None:
    """Runs a row with its own types, or all of them replaced by `dtype`."""
    formula = parse(row.expression, list(row.params))
    graph = lower(formula, Signature(row.types("x", dtype), row.types("y", dtype)))
    values = row.values(dtype)
    results = run(graph, values)
    expected = reference(row, values)
    assert len(results) == len(expected)
    specs = row.specs(dtype)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if result is None or wanted is None:
            assert result is None
            assert wanted is None
            continue
        kind, _ = specs[f"x{index}"]
        assert tf.as_dtype(result.dtype).name == kind
        assert result.shape == np.shape(wanted)
        tolerance = TOLERANCE[kind] * (4 if dtype else 1)
        np.testing.assert_allclose(exact(result), wanted, rtol=tolerance, atol=tolerance)
        if graph.shape_sources[index] == {f"x{index}"}:
            assert result.shape == values[f"x{index}"].shape
        elif not graph.shape_sources[index]:
            assert result.shape == ()


def reference(row: Row, values: dict[str, Array]) -> tuple[Any, ...]:
    """What the row's NumPy formula gives, one entry per input."""
    assert isinstance(row.gives, str)
    names: dict[str, Any] = {name: exact(value) for name, value in values.items()}
    names |= {family: names[f"{family}0"] for family in ("x", "y", "dy", "default")}
    with np.errstate(all="ignore"):
        result = eval(row.gives, {"np": np, "sp": scipy.special, "rng": Draws()}, names)
    return result if isinstance(result, tuple) else (result,)


def check_refusal(wanted: Refusal, error: GradruleError) -> None:
    assert reason_name(error.reason) == wanted.reason
    assert wanted.words in error.message
    if wanted.column is not None:
        assert f"(column {wanted.column})" in error.message
        *_, line, caret = error.message.splitlines()
        assert len(caret) - 1 == 4 + wanted.column - 1
        assert caret.endswith("^")
        assert line.startswith("    ")


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row.gives, str)], ids=lambda row: row.id)
def test_row_equals_numpy(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row.gives, Refusal)], ids=lambda row: row.id)
def test_row_is_refused(row: Row) -> None:
    assert isinstance(row.gives, Refusal)
    if row.gives.reason == "FAILS":
        graph = lower(parse(row.expression, list(row.params)), Signature(row.types("x"), row.types("y")))
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=row.gives.words):
            run(graph, row.values())
        return
    with pytest.raises(GradruleError) as caught:
        lower(parse(row.expression, list(row.params)), Signature(row.types("x"), row.types("y")))
    check_refusal(row.gives, caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.id)
def test_function_in_other_float_types(row: Row, dtype: str) -> None:
    check(row, dtype)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", _COMPLEX.split())
def test_function_of_complex_numbers(name: str, dtype: str) -> None:
    row = next(row for row in ELEMENTWISE if row.id == f"fn-{name}")
    if name in ("conj-of-real", "sign"):
        row = Row(
            row.id, row.section, row.expression.replace(" + 0 * dy", ""), "np.conj(x) * dy" if name != "sign" else SIGN
        )
    check(row, dtype)


SIGN = "np.where(x == 0, 0, x / np.where(x == 0, 1, np.abs(x)))"


@pytest.mark.parametrize("cells", rows("id, param, gives"), ids=lambda cells: cells[1][0])
def test_names_of_params_are_checked(cells: tuple[str, list[str]]) -> None:
    name = code(cells[1][1]).strip()
    definition = rule_pb2.RuleDefinition(expression="dy", params=[rule_pb2.RuleParam(name=name)])
    wanted = refusal(cells[1][2])
    if wanted is None:
        assert RuleContent.from_definition(definition).params[0].name == name
        return
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_definition(definition)
    check_refusal(wanted, caught.value)


@pytest.mark.parametrize("cells", rows("id, expression, per sample"), ids=lambda cells: cells[1][0])
def test_per_sample_is_derived_from_axes(cells: tuple[str, list[str]]) -> None:
    formula = parse(code(cells[1][1]), ["alpha"])
    assert formula.per_sample is {"yes": True, "no": False}[cells[1][2]]


def test_every_row_of_the_document_is_a_test() -> None:
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    tables = ("id, expression, inputs, gives", "id, param, gives", "id, expression, per sample")
    read = [cells[0] for columns in tables for _, cells in rows(columns)]
    headers = sum(line.startswith("|---") for line in lines)
    assert len(read) == len(lines) - 2 * headers
    assert len(set(read)) == len(read)


def test_every_function_and_operator_has_a_row() -> None:
    text = "\n".join(row.expression for row in ROWS if isinstance(row.gives, str))
    missing = [name for name in FUNCTIONS if f"{name}(" not in text]
    missing += [symbol for symbol in (*BINARY, *COMPARISONS, *LOGIC) if symbol not in text]
    assert missing == []


def test_comparison_detects_a_wrong_formula() -> None:
    wrong = Row("planted", "", "dy * 1.001 + x", "dy + x")
    with pytest.raises(AssertionError):
        check(wrong, "float32")


def test_properties_of_a_formula() -> None:
    formula: Formula = parse("where(x > alpha, default, dy1 * y)", ["alpha", "beta"])
    assert formula.variables == {"x0", "default0", "dy1", "y0"}
    assert formula.params_used == {"alpha"}
    assert formula.uses_default
    assert not parse("dy * x").uses_default


def test_sizes_of_a_formula_are_limited() -> None:
    """Within the limits that the page states, and just above them."""
    parse("dy" + " " * 4094)
    parse("-" * 64 + "dy")
    assert parse("dy\n*\r\nx").variables == {"dy0", "x0"}
    for text, words in (("dy" + " " * 4095, "4,096"), ("-" * 65 + "dy", "nested more than 64 deep")):
        with pytest.raises(GradruleError) as caught:
            parse(text)
        assert reason_name(caught.value.reason) == "INVALID_EXPRESSION"
        assert words in caught.value.message
