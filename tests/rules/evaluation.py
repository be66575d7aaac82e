"""Evaluates expression rules for one element type and compares the results with their cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule_server.rules import RuleGraph, Signature
from gradrule_server.rules.catalogue import BuiltinRule
from tests.rules.expression_case import Array, Case, Results, Values
from tests.unit.rules.running import SALT, exact, number_of, numpy_type

# 16-bit types are computed in float32 and rounded once: half a unit of their last place, besides that of float32.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 2**-11 + 2e-5, "bfloat16": 2**-8 + 2e-5}
SMALLEST = {"float64": 1e-11, "float32": 2e-5, "float16": 2e-5, "bfloat16": 2e-5}
_COMPUTED_IN = {"float16": "float32", "bfloat16": "float32"}


def params_of(rule: BuiltinRule, case: Case, *, own: bool) -> dict[str, Any]:
    """Returns the rule's defaults with the case's values, or those only where there is no default (`own`)."""
    return {
        param.name: case.other[param.name]
        if param.default is None or (param.name in case.other and not own)
        else param.default
        for param in rule.params
    }


def raw_values(case: Case, shape: tuple[int, ...], draw: Callable[[tuple[int, ...]], Array]) -> Values:
    """Draws float64 values for every variable that a rule may use; the case adjusts them to each other."""
    shapes = {"same": shape, "scalar": ()}
    values = {f"x{index}": draw(shapes[kind]) for index, kind in enumerate(case.inputs)}
    values |= {f"default{index}": draw(shapes[kind]) for index, kind in enumerate(case.inputs)}
    values |= {name: draw(shapes[case.output]) for name in ("y0", "dy0")}
    if case.prepare is not None:
        case.prepare(values)
    return values


def quarters(seed: int = 7) -> Callable[[tuple[int, ...]], Array]:
    """Draws multiples of 1/4, exact in every dtype, so that edges and zeros occur."""
    random = np.random.default_rng(seed)
    return lambda shape: np.asarray(random.integers(-12, 13, shape) / 4, np.float64)


def smooth(seed: int = 11) -> Callable[[tuple[int, ...]], Array]:
    """Draws numbers with many digits, none near an edge of a rule."""
    random = np.random.default_rng(seed)
    return lambda shape: np.asarray(random.uniform(0.05, 0.2, shape) + random.integers(-10, 10, shape) / 4, np.float64)


def in_type(values: Values, dtype: str) -> Values:
    return {name: np.asarray(value).astype(numpy_type(dtype)) for name, value in values.items()}


def expected(case: Case, values: Values, params: Mapping[str, Any], dtype: str) -> Results:
    """Returns the results of the case for these values."""
    wide = {name: exact(value) for name, value in values.items()}
    if case.whole is not None:
        return case.whole(wide, SimpleNamespace(**params, dtype=_COMPUTED_IN.get(dtype, dtype)))
    element = case.element
    assert element is not None
    p = SimpleNamespace(**params)
    columns = (wide[name].ravel() for name in ("x0", "y0", "dy0", "default0"))
    gradients = [element(x, y, dy, own, p) for x, y, dy, own in zip(*columns, strict=True)]
    return (np.reshape(np.asarray(gradients, np.float64), wide["x0"].shape),)


def compare(results: Sequence[Array | None], wanted: Results, values: Values, dtype: str) -> None:
    """Asserts one gradient per input, with its dtype, shape and values."""
    assert len(results) == len(wanted)
    for index, (result, reference) in enumerate(zip(results, wanted, strict=True)):
        assert (result is None) == (reference is None)
        if result is None or reference is None:
            continue
        assert result.dtype == numpy_type(dtype)
        assert result.shape in (values[f"x{index}"].shape, ())
        # Values beyond float16's range become infinite.
        held = np.where(np.abs(reference) > 65504, np.copysign(np.inf, reference), reference)
        wide = np.broadcast_to(held if dtype == "float16" else reference, result.shape)
        np.testing.assert_allclose(exact(result), wide, rtol=TOLERANCE[dtype], atol=SMALLEST[dtype])


class BoundRule:
    """Binds a rule to one element type; calling it evaluates the rule. Holds a session until it is closed."""

    def __init__(self, rule: BuiltinRule, case: Case, dtype: str) -> None:
        number = number_of(dtype)
        self.rule_graph: RuleGraph = rule.content.bind(Signature((number,) * len(case.inputs), (number,)))
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.import_graph_def(graph_def(self.rule_graph), name="")
        options = tf.compat.v1.ConfigProto()
        # Optimizing the graph takes longer than running it.
        options.graph_options.rewrite_options.disable_meta_optimizer = True
        self._session = tf.compat.v1.Session(graph=self.graph, config=options)

    def __enter__(self) -> BoundRule:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def __call__(self, values: Values, params: Mapping[str, Any]) -> list[Array | None]:
        """Returns one gradient per input."""
        wanted = [name for name in self.rule_graph.results if name is not None]
        computed = iter(self.fetch(wanted, values, params))
        return [None if name is None else next(computed) for name in self.rule_graph.results]

    def fetch(self, tensors: Sequence[Any], values: Values, params: Mapping[str, Any]) -> list[Array]:
        """Evaluates any tensors of the graph."""
        given = feeds(self.rule_graph, values, params)
        return [np.asarray(value) for value in self._session.run(list(tensors), given)]

    def placeholder(self, variable: str) -> Any:
        """Returns the tensor for a variable; None if the rule does not use it."""
        name = self.rule_graph.inputs.get(variable)
        return None if name is None else self.graph.get_tensor_by_name(f"{name}:0")


def graph_def(rule_graph: RuleGraph) -> Any:
    return tf.compat.v1.GraphDef.FromString(rule_graph.graph.SerializeToString())


def feeds(rule_graph: RuleGraph, values: Values, params: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the tensors' names to values."""
    given: dict[str, Any] = dict(values) | {f"param/{name}": np.float64(value) for name, value in params.items()}
    given["salt"] = np.int64(SALT)
    return {f"{placeholder}:0": given[variable] for variable, placeholder in rule_graph.inputs.items()}
