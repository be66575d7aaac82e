"""Compares what a server answers with what the interpreter computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule.v1.tensor_pb2 import Dt
from tests.generated.cases import case
from tests.generated.expanded import Expanded, expand
from tests.generated.interpreter import Exploration, Interpreter
from tests.generated.requests import Request
from tests.generated.resolution import Resolution, Resolver, Unclear, Unit
from tests.generated.rules import REGISTERED, REGISTERED_EXPRESSION
from tests.generated.shrinking import shrink, text
from tests.generated.tape import Array, Pass, Value

GRADIENTS = {"vjp", "stacked"}


@dataclass
class Expected:
    """refusals: reasons of which one must be given; may_refuse: reasons that may be given as well.

    numbers: by name; for a Jacobian by `y|x`. None: unconnected.
    """

    resolution: Resolution
    refusals: set[str] = field(default_factory=set)
    may_refuse: set[str] = field(default_factory=set)
    numbers: dict[str, Array | None] = field(default_factory=dict)
    active: set[Unit] = field(default_factory=set)
    perhaps_active: set[Unit] = field(default_factory=set)


def expected(request: Request) -> Expected:
    """What design.md asks of a server. Raises `Unclear` for what it leaves open."""
    graph = expand(request.graph)
    resolution = Resolver(graph, request).resolve()
    found = Expected(resolution, {reason for reason, _ in resolution.refusals})
    if found.refusals:
        return found
    fine, coarse = (Exploration(graph, resolution, request, fine=value) for value in (True, False))
    found.active = fine.reached
    found.perhaps_active = fine.reached | {unit for unit in coarse.reached if unit.depends_on_xs}
    dependent = {unit.override for unit in resolution.units if unit.depends_on_xs}
    _refuse(request, found, fine.wrong_arity, coarse.wrong_arity & dependent)
    if not found.refusals:
        with np.errstate(all="ignore"):
            found.numbers = numbers(graph, resolution, request)
    return found


def _refuse(request: Request, found: Expected, wrong: set[int], perhaps_wrong: set[int]) -> None:
    if wrong:
        found.refusals = {"RULE_ARITY"}
        return
    if perhaps_wrong:
        found.may_refuse.add("RULE_ARITY")
    for number, override in enumerate(request.overrides):
        if override.optional:
            continue
        if request.kind == "hvp" and override.every_order and override.is_only_op_type:
            found.may_refuse.add("INACTIVE_OVERRIDE")
            continue
        _check_effect({unit for unit in found.resolution.units if unit.override == number}, found)
    carried: dict[tuple[str, str], set[Unit]] = {}
    for unit in found.resolution.units:
        if unit.override < 0:
            carried.setdefault((unit.shown.op, unit.rule.text), set()).add(unit)
    for units in carried.values():
        _check_effect(units, found)


def _check_effect(units: set[Unit], found: Expected) -> None:
    """Refuses what has no effect: an override, or a rule that nodes of one op type name themselves."""
    if not units & found.perhaps_active:
        found.refusals.add("INACTIVE_OVERRIDE")
    elif not units & found.active:
        found.may_refuse.add("INACTIVE_OVERRIDE")


def numbers(graph: Expanded, resolution: Resolution, request: Request) -> dict[str, Array | None]:
    """The derivative."""
    run = Interpreter(graph, resolution, request)
    ys, xs = ([run.value(name) for name in names] for names in (request.ys, request.xs))

    def pulled(upstream: list[Value | None]) -> list[Value | None]:
        return run.gradients(ys, upstream, xs, Pass.FIRST)

    ones: list[Value | None] = [Value(np.ones_like(y.data)) for y in ys]
    given = [Value(request.upstream[name]) if name in request.upstream else None for name in request.ys]
    if request.kind == "vjp":
        found = pulled([one if value is None else value for one, value in zip(ones, given, strict=True)])
        return {name: _data(value) for name, value in zip(request.xs, found, strict=True)}
    if request.kind == "stacked":
        rows = [pulled([None if value is None else Value(value.data[row]) for value in given]) for row in range(2)]
        return {name: _stack([row[place] for row in rows], xs[place]) for place, name in enumerate(request.xs)}
    if request.kind == "hvp":
        first = pulled(ones)
        there = [(dx, name) for dx, name in zip(first, request.xs, strict=True) if dx is not None]
        vectors: list[Value | None] = [Value(request.vectors[name]) for _, name in there]
        second = run.gradients([dx for dx, _ in there], vectors, xs, Pass.AGAIN)
        return {name: _data(value) for name, value in zip(request.xs, second, strict=True)}
    return _jacobians(request, ys, xs, pulled)


def _jacobians(request: Request, ys: list[Value], xs: list[Value], pulled: Any) -> dict[str, Array | None]:
    found: dict[str, Array | None] = {}
    for place, (y, name) in enumerate(zip(ys, request.ys, strict=True)):
        rows = []
        for index in np.ndindex(y.data.shape):
            unit = np.zeros_like(y.data)
            unit[index] = 1
            rows.append(pulled([Value(unit) if other == place else None for other in range(len(ys))]))
        for number, (x, x_name) in enumerate(zip(xs, request.xs, strict=True)):
            stack = _stack([row[number] for row in rows], x)
            if stack is not None:
                stack = stack.reshape(y.data.shape + x.data.shape)
                if request.kind == "batched":
                    stack = np.stack([stack[example, :, example] for example in range(len(stack))])
            found[f"{name}|{x_name}"] = stack
    return found


def _data(value: Value | None) -> Array | None:
    return None if value is None else value.data


def _stack(values: list[Value | None], x: Value) -> Array | None:
    if all(value is None for value in values):
        return None
    return np.stack([np.zeros_like(x.data) if value is None else value.data for value in values])


@dataclass
class Answer:
    """What the server gave: an error, or numbers as in `Expected`, and what it says of overrides."""

    error: gr.errors.GradruleError | None = None
    numbers: dict[str, Array | None] = field(default_factory=dict)
    overrides: list[Any] = field(default_factory=list)


def ask(client: Any, request: Request) -> Answer:
    graph = gr.Graph.from_bytes(request.graph.SerializeToString(deterministic=True))
    words: dict[str, Any] = {
        "ys": list(request.ys),
        "xs": list(request.xs),
        "overrides": [override.served() for override in request.overrides] or None,
        "stop_gradients": list(request.stopped),
        "params": {label: dict(values) for label, values in request.params.items()} or None,
    }
    feeds = dict(request.feeds.items())
    try:
        if request.kind in GRADIENTS:
            more = {"grad_ys": dict(request.upstream) or None, "stacked_grad_ys": request.kind == "stacked"}
            result = client.evaluate(graph, feeds, **words, **more)
            return Answer(None, {x: result.gradients[x] for x in request.xs}, list(result.overrides))
        if request.kind == "hvp":
            products = client.hvp(graph, feeds, dict(request.vectors), **words)
            return Answer(None, {x: products[x] for x in request.xs})
        rows = client.jacobian(graph, feeds, batched=request.kind == "batched", **words)
        return Answer(None, {f"{y}|{x}": rows[y][x] for y in request.ys for x in request.xs})
    except gr.errors.GradruleError as error:
        return Answer(error)


def differences(request: Request, wanted: Expected, answer: Answer) -> list[str]:
    """What is wrong with an answer."""
    if answer.error is not None:
        reasons = {detail.reason for detail in answer.error.details} | {answer.error.reason}
        if wanted.refusals and reasons & (wanted.refusals | wanted.may_refuse):
            return []
        if not wanted.refusals and reasons <= wanted.may_refuse:
            return []
        return [f"refused with {sorted(reasons)}, wanted {sorted(wanted.refusals) or 'an answer'}: {answer.error}"]
    if wanted.refusals:
        return [f"answered, wanted a refusal: {sorted(wanted.refusals)}"]
    found = []
    narrow = any("DstT" in node.attr and node.attr["DstT"].type == Dt.DT_FLOAT for node in _nodes(request))
    for name, number in wanted.numbers.items():
        text = _difference(answer.numbers[name], number, 1e-4 if narrow else 1e-8)
        if text:
            found.append(f"{request.kind} of {name}: {text}")
    if request.kind in GRADIENTS:
        found += _resolution_differences(wanted, answer)
    return found


def _nodes(request: Request) -> list[Any]:
    bodies = [request.graph.node, *(function.node_def for function in request.graph.library.function)]
    return [node for nodes in bodies for node in nodes]


def _difference(got: Any, wanted: Array | None, tolerance: float) -> str:
    """A loop or a branch gives zeros where what ran used nothing of it; then the interpreter has no gradient."""
    if got is None and wanted is None:
        return ""
    other = got if wanted is None else wanted
    got = np.zeros_like(other) if got is None else np.asarray(got)
    wanted = np.zeros_like(other) if wanted is None else wanted
    if got.shape != wanted.shape:
        return f"shape {got.shape}, wanted {wanted.shape}"
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    if np.allclose(got, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"{got.tolist()}, wanted {wanted.tolist()}"


def _resolution_differences(wanted: Expected, answer: Answer) -> list[str]:
    def key(unit: Unit) -> tuple[Any, ...]:
        nodes = tuple(sorted(unit.body.nodes[index].name for index in unit.members)) if unit.item is None else ()
        return unit.shown.name, unit.rule.name, unit.label, unit.shown.function, nodes

    expected_keys = Counter(key(unit) for unit in wanted.resolution.units)
    got = Counter((one.node, one.rule, one.label, one.function, tuple(sorted(one.nodes))) for one in answer.overrides)
    found = [f"no resolution {one}" for one in expected_keys - got] + [
        f"resolution {one} unwanted" for one in got - expected_keys
    ]
    statuses: dict[tuple[Any, ...], list[str]] = {}
    for one in answer.overrides:
        statuses.setdefault((one.node, one.rule, one.label, one.function, tuple(sorted(one.nodes))), []).append(
            one.status
        )
    for unit in wanted.resolution.units:
        given = statuses.get(key(unit), [])
        if len(given) != 1:
            continue
        inactive = "off_path" if unit.is_differentiable else "not_differentiable"
        allowed = {"active"} if unit in wanted.active else {inactive}
        if unit in wanted.perhaps_active:
            allowed.add("active")
        if given[0] not in allowed:
            found.append(f"{key(unit)} is {given[0]}, wanted {sorted(allowed)}")
    return found


def wrong(client: Any, request: Request) -> list[str]:
    """What is wrong with a server's answer to a request; nothing where the documents leave it open."""
    try:
        wanted = expected(request)
    except Unclear:
        return []
    return differences(request, wanted, ask(client, request))


def _kind(faults: Sequence[str]) -> str:
    """What a failure has in common with smaller ones: the reason of a refusal, or the first words."""
    return faults[0].partition(", wanted")[0].partition(" (")[0] if faults else ""


def compare_cases(client: Any, numbers: Sequence[int]) -> None:
    """Compares cases; the failure shows the first that differs, made smaller."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: wrong(client, case(number)), numbers))
    failed = [number for number, faults in zip(numbers, found, strict=True) if faults]
    if not failed:
        return

    kind = _kind(found[numbers.index(failed[0])])

    def fails(request: Request) -> bool:
        try:
            return _kind(wrong(client, request)) == kind
        except (ValueError, KeyError, IndexError, TypeError):
            # The interpreter cannot read a graph that shrinking has broken.
            return False

    small = shrink(case(failed[0]), fails)
    faults = "\n".join(wrong(client, small))
    pytest.fail(f"cases {failed} differ; case {failed[0]} made smaller:\n{text(small)}\n{faults}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def registered(client: Any) -> Iterator[None]:
    """The rule that cases use by name."""
    client.create_rule(REGISTERED, REGISTERED_EXPRESSION)
    yield
    client.delete_rule(REGISTERED)
