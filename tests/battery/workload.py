"""Generates load with known answers: programs of several kinds and sizes, with local TensorFlow's results."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service import generated, reference
from tests.service.graph_defs import all_nodes, build_graph_def, load_graph, placeholder

FEEDS = 6
SHARE = 0.999
"""Of the requests, those that must be answered."""
DEADLINE_S = 60.0
# A caller retries after the requested delay, as often as its deadline allows.
_PAUSE_S = 0.1


@dataclass(frozen=True)
class WorkItem:
    """Describes one program. feeds: some inputs; wanted: outputs and gradients for each, by name."""

    name: str
    graph: gr.Graph
    overrides: dict[str, gr.Rule]
    feeds: tuple[dict[str, Any], ...]
    wanted: tuple[dict[str, Any], ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of compiling and evaluating."""
        return {"fetches": ["y"], "ys": ["y"], "xs": ["x"], "overrides": self.overrides or None}

    def wrong(self, index: int, result: Any) -> str:
        """Returns what is wrong with the result for `feeds[index]`; empty if nothing."""
        wanted = self.wanted[index]
        for kind, got in (("output", result.outputs), ("gradient", result.gradients)):
            for name, value in wanted[kind].items():
                found = np.asarray(got.get(name))
                if found.shape != value.shape or not np.allclose(found, value, rtol=1e-4, atol=1e-5):
                    return f"{self.name}, feed {index}: {kind} {name!r} is {_shown(found)}, not {_shown(value)}"
        return ""


@cache
def work_items() -> tuple[WorkItem, ...]:
    """Returns all programs; the first use computes the answers."""
    window, guided, cosine = generated.UNARY_RULES[1], generated.UNARY_RULES[2], generated.UNARY_RULES[5]
    return (
        _work("tiny", _tiny, "Sign", window, (3,)),
        _work("dense", _dense, "Relu", guided, (16, 64)),
        _work("loop", _loop, "Tanh", cosine, (8,)),
        _work("function", _function, None, None, (5,)),
        _work("branch", _branch, "Sin", window, (7,)),
        _work("large", _large, "Sign", window, (256, 1024)),
    )


def _tiny(x: Any) -> Any:
    return tf.reduce_sum(tf.sign(x) * x)


def _dense(x: Any) -> Any:
    weights = np.random.default_rng(7).normal(0, 0.2, (2, 64, 64)).astype(np.float32)
    return tf.reduce_sum(tf.nn.relu(tf.nn.relu(x @ weights[0]) @ weights[1]), axis=1)


def _loop(x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 6, lambda i, value: (i + 1, tf.tanh(value) * 1.5), [0, x])[1]


def _function(x: Any) -> Any:
    inner = tf.function(lambda value: tf.sin(value) * value)
    return tf.function(lambda value: inner(value) + inner(value * 2.0))(x)


def _branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(x) * 2.0, lambda: x * x)


def _large(x: Any) -> Any:
    return tf.sign(x) * x + tf.square(x)


def _work(
    name: str,
    function: Callable[[Any], Any],
    op_type: str | None,
    rule: generated.Rule | None,
    shape: tuple[int, ...],
) -> WorkItem:
    def build() -> None:
        x = placeholder("x", shape=(None,) * len(shape))
        tf.identity(function(x), name="y")

    graph_def = build_graph_def(build)
    random = np.random.default_rng(len(name))
    feeds = tuple({"x": random.normal(0, 1.5, shape).astype(np.float32)} for _ in range(FEEDS))
    rules = {} if rule is None else {node.name: rule.python for node in all_nodes(graph_def) if node.op == op_type}
    wanted = []
    for given in feeds:
        result = reference.evaluate(graph_def, given, fetches=["y"], ys=["y"], xs=["x"], rules=rules)
        wanted.append({"output": result.outputs, "gradient": result.gradients})
    overrides = {} if rule is None or op_type is None else {op_type: gr.Rule(rule.expression)}
    return WorkItem(name, load_graph(graph_def), overrides, feeds, tuple(wanted))


def _shown(values: Any) -> str:
    return f"{np.asarray(values).ravel()[:4].tolist()}… of shape {np.shape(values)}"


@dataclass
class CallCounts:
    """Counts what callers saw.

    again: errors that a caller may retry, and did; errors: those that ended a request; ways: answers by kind of call.
    """

    asked: int = 0
    answered: int = 0
    at_once: int = 0
    cancelled: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Returns the share of requests that were answered."""
        return self.answered / self.asked if self.asked else 0.0

    @property
    def unused_ways(self) -> list[str]:
        """Returns the kinds of calls without any answer."""
        return [f"no answer came {way}" for way in WAYS if not self.ways[way]]

    def figures(self) -> Mapping[str, Any]:
        """Returns figures for reports."""
        return {
            "asked": self.asked,
            "answered_share": round(self.share, 6),
            "at_once_share": round(self.at_once / self.asked, 6) if self.asked else 0.0,
            "wrong": len(self.wrong),
            "cancelled": self.cancelled,
            "refused": self.refused,
            "told_to_retry": dict(self.again),
            "failed": dict(self.errors),
            "ways": dict(sorted(self.ways.items())),
            "p50_ms": round(self.quantile(0.5) * 1e3, 2),
            "p99_ms": round(self.quantile(0.99) * 1e3, 1),
        }

    def quantile(self, share: float) -> float:
        """Returns the seconds within which this share of the answers came."""
        return float(np.quantile(self.seconds, share)) if self.seconds else 0.0


class Load:
    """Runs callers that use inline graphs, programs by name, streams, forward and pull-back at random."""

    def __init__(
        self,
        target: str,
        seed: int,
        *,
        callers: int = 8,
        pause_s: float = 0.0,
        large: bool = True,
        cancelled: float = 0.0,
        wrong: float = 0.0,
        by_name: bool = True,
    ) -> None:
        """`cancelled`, `wrong`: shares of the requests that are given up on the way, and that are errors.

        by_name: also programs that are kept, which only the server that compiled them has.
        """
        self._target = target
        self._seed = seed
        self._cancelled = cancelled
        self._wrong = wrong
        self._by_name = by_name
        self._callers = callers
        self._pause_s = pause_s
        self._works = [work for work in work_items() if large or work.name != "large"]
        self._stopping = False
        self.seen = CallCounts()

    async def run(self) -> None:
        """Until `stop`; then what is under way is finished."""
        client = gr.aio.connect(self._target, timeout=DEADLINE_S)
        try:
            programs = {work.name: await self._compiled(client, work) for work in self._works} if self._by_name else {}
            await asyncio.gather(*(self._call(client, programs, number) for number in range(self._callers)))
        finally:
            await client.close()

    def stop(self) -> None:
        """Stops sending requests."""
        self._stopping = True

    async def _compiled(self, client: Any, work: WorkItem) -> Any:
        while True:
            try:
                return await client.compile(work.graph, name=f"work-{work.name}", **work.arguments)
            except gr.errors.GradruleError as refusal:
                if not _may_retry(refusal):
                    raise
                await asyncio.sleep(refusal.retry_delay or _PAUSE_S)

    async def _call(self, client: Any, programs: Mapping[str, Any], number: int) -> None:
        chance = Random(f"{self._seed}/{number}")
        while not self._stopping:
            work = chance.choice(self._works)
            index = chance.randrange(FEEDS)
            way = chance.choice(_WAYS if programs else (_inline,))
            build_graph_def = chance.random()
            if build_graph_def < self._cancelled:
                await self._give_up(way(client, programs.get(work.name), work, index), chance.uniform(0.0, 0.05))
            elif build_graph_def < self._cancelled + self._wrong:
                await self._send_invalid(client, work, chance)
            else:
                await self._ask(work, index, functools.partial(way, client, programs.get(work.name), work, index))
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    async def _give_up(self, call: Coroutine[Any, Any, Any], after_s: float) -> None:
        self.seen.cancelled += 1
        task = asyncio.ensure_future(call)
        await asyncio.wait({task}, timeout=after_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, gr.errors.GradruleError):
            await task

    async def _send_invalid(self, client: Any, work: WorkItem, chance: Random) -> None:
        """Sends an invalid request; it must be refused for its fault."""
        reason, words = chance.choice(_ERRORS)
        self.seen.refused += 1
        try:
            await client.evaluate(work.graph, **{"feeds": work.feeds[0], **work.arguments, **words})
        except gr.errors.GradruleError as refusal:
            if refusal.reason != reason and not _may_retry(refusal):
                self.seen.wrong.append(f"{work.name}: {refusal.reason} where {reason} was right")
        else:
            self.seen.wrong.append(f"{work.name}: an answer where {reason} was right")

    async def _ask(self, work: WorkItem, index: int, call: functools.partial[Any]) -> None:
        seen = self.seen
        seen.asked += 1
        started = time.monotonic()
        at_once = True
        while True:
            try:
                result = await call()
            except gr.errors.GradruleError as failure:
                if _may_retry(failure) and time.monotonic() - started < DEADLINE_S:
                    seen.again[failure.reason] += 1
                    at_once = False
                    await asyncio.sleep(failure.retry_delay or _PAUSE_S)
                    continue
                seen.errors[failure.reason] += 1
                return
            seen.seconds.append(time.monotonic() - started)
            fault = work.wrong(index, result)
            if fault:
                seen.wrong.append(fault)
            else:
                seen.answered += 1
                seen.ways[call.func.__name__.strip("_")] += 1
                seen.at_once += at_once
            return


def _may_retry(failure: gr.errors.GradruleError) -> bool:
    """Returns whether the contract allows the same request again, or, for a handle, a new forward run.

    The client itself repeats forward once; the engine may be lost once more meanwhile.
    """
    return failure.code_name == "UNAVAILABLE" or failure.reason in {"OVERLOADED", "HANDLE_EXPIRED"}


async def _inline(client: Any, program: Any, work: WorkItem, index: int) -> Any:
    return await client.evaluate(work.graph, feeds=work.feeds[index], **work.arguments)


async def _by_name(client: Any, program: Any, work: WorkItem, index: int) -> Any:
    return await program.evaluate(work.feeds[index])


async def _mapped(client: Any, program: Any, work: WorkItem, index: int) -> Any:
    """Sends three calls concurrently; all must have equal answers, because the caller compares them."""
    return _worst(work, index, [result async for result in program.map([work.feeds[index]] * 3)])


async def _streamed(client: Any, program: Any, work: WorkItem, index: int) -> Any:
    """Sends three calls concurrently over the client's stream, which otherwise carries only handles."""
    call = program._call(work.feeds[index], None, None)._replace(method="evaluate", on_stream=True)
    return _worst(work, index, await asyncio.gather(*(client._run(call, None) for _ in range(3))))


async def _pulled_back(client: Any, program: Any, work: WorkItem, index: int) -> Any:
    """Runs forward once and back twice; the client renews a handle that was lost with its engine."""
    async with await program.forward(work.feeds[index]) as handle:
        back = [SimpleNamespace(outputs=handle.outputs, gradients=await handle.vjp()) for _ in range(2)]
    return _worst(work, index, back)


def _worst(work: WorkItem, index: int, results: Sequence[Any]) -> Any:
    return next((result for result in results if work.wrong(index, result)), results[0])


_ERRORS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("UNKNOWN_TENSOR", {"fetches": ["nowhere"]}),
    ("MISSING_FEED", {"feeds": {}}),
    ("FEED_DTYPE", {"feeds": {"x": np.full(3, 0.1)}}),
    ("INVALID_EXPRESSION", {"overrides": {"Sum": gr.Rule("dy +")}}),
    ("UNMATCHED_OVERRIDE", {"overrides": {"Conv2D": gr.Rule("2 * dy")}}),
    ("UNKNOWN_RULE", {"overrides": {"Identity": "NobodyHasThisRule"}}),
)

_WAYS = (_inline, _by_name, _mapped, _streamed, _pulled_back)

WAYS = tuple(way.__name__.strip("_") for way in _WAYS)
"""How a request may go."""
