"""Every expression rule of the catalogue, compiled by XLA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.rules.catalogue import BUILTINS
from tests.rules.evaluation import BoundRule, feeds, graph_def, in_type, params_of, quarters, raw_values
from tests.rules.expression_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_rule_compiled_by_xla_gives_the_same_results(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=False)
    values = in_type(raw_values(case, (3, 4), quarters()), "float32")
    with BoundRule(rule, case, "float32") as ask:
        plain = [result for result in ask(values, params) if result is not None]
        rule_graph = ask.rule_graph

    # XLA has no placeholders, and unused imported ones stay in the graph.
    computing = graph_def(rule_graph)
    for index in reversed(range(len(computing.node))):
        if computing.node[index].op == "Placeholder":
            del computing.node[index]
    used = {f"{source}:0" for node in computing.node for source in node.input}

    @tf.function(jit_compile=True)
    def compiled(given: dict[str, Any]) -> list[Any]:
        wanted = [result for result in rule_graph.results if result is not None]
        computed = [result for result in wanted if result not in given]
        mapped = {tensor: value for tensor, value in given.items() if tensor in used}
        found = dict(zip(computed, tf.graph_util.import_graph_def(computing, mapped, computed), strict=True))
        return [found[result] if result in found else tf.identity(given[result]) for result in wanted]

    given = {tensor: tf.constant(value) for tensor, value in feeds(rule_graph, values, params).items()}
    results = [result.numpy() for result in compiled(given)]
    again = [result.numpy() for result in compiled(given)]
    for result, reference, repeated in zip(results, plain, again, strict=True):
        assert result.dtype == reference.dtype
        assert result.shape == reference.shape
        np.testing.assert_array_equal(result, repeated)
        if case.random:
            # XLA generates other random numbers than TensorFlow's kernels.
            assert np.isfinite(result).all()
        else:
            np.testing.assert_allclose(result, reference, rtol=2e-5, atol=2e-6)
