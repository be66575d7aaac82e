"""Tests that a map's answer does not depend on the maps that the server saw before it.

One tenant evaluates sequences of maps over random graphs, in one engine that keeps what it has. Each answer must have
the same bits as that of a tenant who is new to the server, whose engine and compile worker have seen nothing; numbers
of rules that TensorFlow can express must be those of local TensorFlow. tests/unit/engine/test_gradient_templates.py
does the same to many more maps, without a server.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.samples import size
from tests.service import reference
from tests.service.answers import dense
from tests.service.guarded import Guarded
from tests.service.map_sequences import Map, MapSequence, plain_maps, same_bits, sequence

MAPS = 8
TOLERANCES = {"float16": 4e-2, "bfloat16": 1.5e-1, "float32": 1e-4, "float64": 1e-9}


def answer(client: gr.Client, item: MapSequence, asked: Map) -> dict[str, Any]:
    """Returns outputs, derivatives, and what became of the overrides; or the error."""
    words: dict[str, Any] = {
        name: getattr(asked.arguments, name) for name in ("ys", "xs", "overrides", "stop_gradients", "no_gradient")
    }
    words["params"] = asked.params or None
    if asked.kind != "jvp":
        words["unconnected_gradients"] = asked.arguments.unconnected_gradients
    try:
        if asked.kind in ("vjp", "stacked"):
            words |= {"fetches": asked.arguments.fetches, "dense_gradients": asked.arguments.dense_gradients}
            result = client.evaluate(
                item.graph, item.feeds, grad_ys=asked.grad_ys or None, stacked_grad_ys=asked.kind == "stacked", **words
            )
            found = {f"output {name}": value for name, value in result.outputs.items()}
            found |= {f"gradient {x}": result.gradients[x] for x in asked.xs}
            statuses = [(one.node, one.rule, one.label, one.status) for one in result.overrides]
            return found | {"overrides": statuses, "default": list(result.default_gradient_nodes)}
        if asked.kind == "jacobian":
            rows = client.jacobian(item.graph, item.feeds, **words)
            return {f"{y} by {x}": rows[y][x] for y in asked.ys for x in asked.xs}
        derive = client.hvp if asked.kind == "hvp" else client.jvp
        products = derive(item.graph, item.feeds, dict(asked.vectors), **words)
        names = asked.xs if asked.kind == "hvp" else asked.ys
        return {name: products[name] for name in names}
    except gr.GradruleError as error:
        return {"error": error.reason, "message": str(error), "details": error.details}


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Returns what differs between two answers, bit by bit."""
    if one.keys() != two.keys():
        return [f"{one} and {two}"]
    return [f"{name}: {one[name]} and {two[name]}" for name in one if not _is_same(one[name], two[name])]


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, gr.Sparse) and isinstance(two, gr.Sparse):
        return all(same_bits(getattr(one, part), getattr(two, part)) for part in ("values", "indices", "dense_shape"))
    if isinstance(one, np.ndarray | np.generic):
        return not isinstance(two, gr.Sparse) and same_bits(one, two)
    return bool(one == two)


def after_each_other(client: gr.Client, item: MapSequence) -> list[dict[str, Any]]:
    """Returns the answers to all maps of a sequence, in its order."""
    return [answer(client, item, asked) for asked in item.maps]


def assert_as_of_fresh_tenants(
    guarded: Guarded, name: str, item: MapSequence, found: list[dict[str, Any]], share: float
) -> None:
    """Compares some of the answers, and at least the last one, with those of tenants that the server has not seen."""
    rng = random.Random(name)
    faults, known = [], 0
    for number, asked in enumerate(item.maps):
        if number < len(item.maps) - 1 and rng.random() > share:
            continue
        known += "error" not in found[number]
        with guarded.connect(f"fresh {name} {number}", timeout=300.0) as fresh:
            for fault in differences(found[number], answer(fresh, item, asked)):
                faults.append(f"map {number}: {fault}\n  {asked}")
    assert not faults, "\n".join(faults[:4])


@pytest.mark.parametrize("number", range(size(3, 60)))
def test_sequences(guarded: Guarded, number: int) -> None:
    item = sequence(1000 + number, MAPS)
    with guarded.connect(f"maps {number}", timeout=300.0) as client:
        found = after_each_other(client, item)
        # The same maps later: answered by what is loaded, or built again after the others.
        again = after_each_other(client, item)
    faults = [fault for one, two in zip(found, again, strict=True) for fault in differences(one, two)]
    assert not faults, "\n".join(faults[:4])
    assert any("error" not in one for one in found)
    assert_as_of_fresh_tenants(guarded, f"sequence {number}", item, found, 0.5)


def test_two_sequences_at_once(guarded: Guarded) -> None:
    """Two graphs of one tenant, whose programs are built by one engine in turns."""
    items = [sequence(number, MAPS // 2) for number in (2000, 2001)]
    with guarded.connect("maps at once", timeout=300.0) as client, ThreadPoolExecutor(len(items)) as pool:
        answers = list(pool.map(lambda item: after_each_other(client, item), items))
    for item, found in zip(items, answers, strict=True):
        assert_as_of_fresh_tenants(guarded, f"at once {id(item)}", item, found, 0.3)


@pytest.mark.parametrize("number", range(size(3, 40)))
def test_numbers_of_local_tensorflow(guarded: Guarded, number: int) -> None:
    """The maps come one after the other, so the later ones may use what the earlier ones left."""
    item, rules = plain_maps(3000 + number, MAPS)
    dtype = item.feeds["x"].dtype.name
    with guarded.connect(f"plain {number}", timeout=300.0) as client:
        for asked, by_node in zip(item.maps, rules, strict=True):
            xs = list(asked.xs)
            wanted = reference.evaluate(item.graph_def, item.feeds, ["y"], ["y"], xs, rules=by_node)
            found = answer(client, item, asked)
            assert "error" not in found, found
            for x in xs:
                if x not in wanted.gradients:
                    assert found[f"gradient {x}"] is None
                    continue
                one, two = (
                    np.asarray(dense(value), np.float64) for value in (found[f"gradient {x}"], wanted.gradients[x])
                )
                scale = max(1.0, float(np.abs(two).max()))
                np.testing.assert_allclose(
                    one, two, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale, err_msg=str(asked)
                )
