"""Every rule of the catalogue against its case, with its own params and with others, in float64 and float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.rules import Param, RuleContent, Signature
from gradrule_server.rules.catalogue import BUILTINS, BuiltinRule, Catalogue
from tests.unit.rules.catalogue_cases import CASES, Case
from tests.unit.rules.running import Array, number_of, run

SHAPE = (6, 20)
TOLERANCE = {"float64": 1e-11, "float32": 2e-5}
PRIMITIVES = [name for name, case in CASES.items() if case.primitive is not None]


def params_of(rule: BuiltinRule, case: Case, *, own: bool) -> dict[str, Any]:
    """The rule's defaults, the case's values over them (or only where there is no default, with `own`)."""
    values = {param.name: param.default for param in rule.params}
    return {
        name: case.other[name] if default is None or (name in case.other and not own) else default
        for name, default in values.items()
    }


def values_for(case: Case, dtype: str) -> dict[str, Array]:
    """Multiples of 1/4, so that edges and zeros are hit, in no order."""
    names = [f"{family}{index}" for family in ("x", "default") for index in range(case.inputs)] + ["y0", "dy0"]
    random = np.random.default_rng(7)
    return {name: (random.integers(-12, 13, SHAPE) / 4).astype(dtype) for name in names}


def gradients(rule: BuiltinRule, case: Case, values: dict[str, Any], params: dict[str, Any]) -> list[Array | None]:
    dtype = number_of(values["x0"].dtype.name)
    graph = rule.content.bind(Signature((dtype,) * case.inputs, (dtype,)))
    return run(graph, values | {f"param/{name}": np.float64(value) for name, value in params.items()})


def expected(case: Case, values: dict[str, Array], params: dict[str, Any]) -> tuple[Any, ...]:
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    if case.whole is not None:
        return case.whole(wide, SimpleNamespace(**params))
    element = case.element
    assert element is not None
    xs, ys, dys, owns = (wide[name].ravel() for name in ("x0", "y0", "dy0", "default0"))
    p = SimpleNamespace(**params)
    return (np.reshape([element(*entry, p) for entry in zip(xs, ys, dys, owns, strict=True)], SHAPE),)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("own", [True, False], ids=["defaults", "other"])
@pytest.mark.parametrize("name", CASES)
def test_rule_is_what_its_source_says(name: str, own: bool, dtype: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    values, params = values_for(case, dtype), params_of(rule, case, own=own)
    results = gradients(rule, case, values, params)
    wanted = expected(case, values, params)
    assert len(results) == len(wanted)
    for result, reference in zip(results, wanted, strict=True):
        if reference is None:
            assert result is None
            continue
        assert result is not None
        assert result.dtype == np.dtype(dtype)
        assert result.shape == SHAPE
        np.testing.assert_allclose(result, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", PRIMITIVES)
def test_surrogate_is_the_slope_of_its_primitive(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    primitive = case.primitive
    assert primitive is not None
    params = params_of(rule, case, own=False)
    # Away from kinks, where central differences mean nothing.
    x = np.array([-2.3, -1.7, -0.61, -0.27, 0.13, 0.43, 0.83, 1.31, 2.9])
    step = 1e-5
    slopes = [
        (primitive(at + step, SimpleNamespace(**params)) - primitive(at - step, SimpleNamespace(**params))) / (2 * step)
        for at in x
    ]
    values = {"x0": x, "y0": np.zeros_like(x), "dy0": np.ones_like(x), "default0": np.zeros_like(x)}
    (result,) = gradients(rule, case, values, params)
    np.testing.assert_allclose(np.asarray(result), slopes, rtol=1e-6, atol=1e-9)


def test_every_rule_has_a_case_and_a_source() -> None:
    assert [rule.name for rule in BUILTINS] == list(CASES)
    for rule in BUILTINS:
        assert rule.description.endswith(".")
        assert rule.reference
        assert all(param.description for param in rule.params), rule.name
        assert {param.name for param in rule.params} == rule.content.formula.params_used  # type: ignore[union-attr]
        assert set(CASES[rule.name].other) == {param.name for param in rule.params}, rule.name


def test_a_case_notices_a_wrong_rule() -> None:
    wrong = BuiltinRule("wrong", "dy * 1.001 / square(1 + slope * abs(x))", ".", ".", params=(Param("slope", 25.0),))
    case = CASES["fast_sigmoid"]
    values = values_for(case, "float64")
    (result,) = gradients(wrong, case, values, {"slope": 25.0})
    assert not np.allclose(np.asarray(result), expected(case, values, {"slope": 25.0})[0], rtol=1e-4)


def test_names_and_aliases_find_their_rule() -> None:
    assert BUILTINS["superspike"] is BUILTINS["fast_sigmoid"]
    assert BUILTINS["straight_through"].name == "ste"
    assert "guided_backprop" in BUILTINS
    assert BUILTINS.family_of(BUILTINS["log1pexp"]) == "stable"
    with pytest.raises(KeyError, match="Did you mean 'ste_sign'"):
        BUILTINS["ste_sgn"]


@pytest.mark.parametrize("taken", ["one", "uno"])
def test_a_name_is_taken_once(taken: str) -> None:
    first = BuiltinRule("one", "dy", ".", ".", aliases=("uno",))
    second = BuiltinRule("two", "dy", ".", ".", aliases=(taken,))
    with pytest.raises(ValueError, match=rf"'{taken}' of the rule 'two' \(late\) is taken by the rule 'one' \(early\)"):
        Catalogue([("early", [first]), ("late", [second])])


@pytest.mark.parametrize("rule", list(BUILTINS), ids=lambda rule: rule.name)
def test_a_rule_survives_the_wire(rule: BuiltinRule) -> None:
    content = RuleContent.from_definition(rule.content.to_definition())
    assert content.digest == rule.content.digest
    assert content.to_definition() == rule.content.to_definition()


def test_step_rules_work_where_numbers_are_extreme() -> None:
    x = np.array([-200.0, -3.6, 0.0, 3.6, 200.0], np.float32)
    values = {"x0": x, "y0": x, "dy0": np.ones_like(x), "default0": x}
    for name in ("sigmoid_surrogate", "fast_sigmoid", "erf", "atan", "log1pexp", "s2nn", "swish_sign"):
        rule = BUILTINS[name]
        (result,) = gradients(rule, CASES[name], values, {param.name: param.default for param in rule.params})
        assert np.isfinite(np.asarray(result)).all(), name
    (slope,) = gradients(BUILTINS["log1pexp"], CASES["log1pexp"], values | {"x0": np.float32([100.0])}, {})
    assert np.asarray(slope)[0] == 1.0


def test_zeros_and_not_finite_numbers() -> None:
    dy = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0])
    values = {"x0": np.zeros(5), "y0": np.zeros(5), "dy0": dy, "default0": np.zeros(5)}
    (kept,) = gradients(BUILTINS["nan_to_zero"], CASES["nan_to_zero"], values, {})
    np.testing.assert_array_equal(np.asarray(kept), [0, 0, 0, 0, 2])
    (outside,) = gradients(BUILTINS["ste_sign"], CASES["ste_sign"], values | {"x0": np.full(5, 2.0)}, {"clip": 1.0})
    np.testing.assert_array_equal(np.asarray(outside), np.zeros(5))
    (root,) = gradients(BUILTINS["safe_sqrt"], CASES["safe_sqrt"], values, {})
    np.testing.assert_array_equal(np.asarray(root), np.zeros(5))
    zero = values | {"dy0": np.zeros(5)}
    for name, params in (("gradient_clip_norm", {"norm": 1.0}), ("gradient_normalize", {"eps": 1e-6})):
        (result,) = gradients(BUILTINS[name], CASES[name], zero, params)
        np.testing.assert_array_equal(np.asarray(result), np.zeros(5))


def test_broadcast_inputs_of_a_division_get_sums() -> None:
    x0, x1 = np.array([[1.0], [2.0]]), np.array([1.0, 0.0, 4.0])
    dy, y = np.full((2, 3), 3.0), np.array([[1.0, 0.0, 0.25], [2.0, 0.0, 0.5]])
    graph = BUILTINS["safe_div"].content.bind(Signature((number_of("float64"),) * 2, (number_of("float64"),)))
    first, second = run(graph, {"x0": x0, "x1": x1, "y0": y, "dy0": dy})
    np.testing.assert_allclose(np.asarray(first), [[3.75], [3.75]])
    np.testing.assert_allclose(np.asarray(second), [-9.0, 0.0, -0.5625])


def test_zero_is_a_gradient_for_every_input() -> None:
    float32, int32 = number_of("float32"), number_of("int32")
    graph = BUILTINS["gradient_zero"].content.bind(Signature((float32, int32, float32), (float32,)))
    assert [result is None for result in graph.results] == [False, True, False]


def test_a_rule_for_one_input_says_so() -> None:
    float32 = number_of("float32")
    with pytest.raises(GradruleError) as caught:
        BUILTINS["gradient_reversal"].content.bind(Signature((float32, float32), (float32,)))
    assert reason_name(caught.value.reason) == "RULE_ARITY"
