"""`client.sweep`: one graph and one batch under many override maps, or under many values of params."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule._comparison.sweep import Sweep
from tests.service.answers import refused
from tests.service.servers import RunningServer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5)).astype(np.float32)
MAPS: dict[str, Any] = {
    "own": None,
    "guided": {"Relu": "guided_relu"},
    "formula": {"Relu": gr.Rule("dy * tanh(x)"), "Tanh": ("slope * dy", {"slope": 2.0})},
    "lrp": gr.Preset("epsilon_plus", eps=1e-4),
    "first": [gr.Override("guided_relu", op_type="Relu", position="nearest_xs"), gr.Override("ste", op_type="Tanh")],
}


def network() -> gr.Graph:
    """Makes x · w → relu → tanh → relu → y, and a weighted sum of y: loss."""
    g = gr.Graph()
    h = g.matmul(g.placeholder("x", "float32", [None, 5]), g.constant(RNG.normal(size=(5, 4)).astype(np.float32)))
    h = g.op("Relu", g.op("Tanh", g.op("Relu", h, name="r"), name="t") - 0.1, name="y")
    g.reduce_sum(h * g.constant(np.float32([1, -2, 3, -4])), axis=[0, 1], name="loss")
    return g


GRAPH = network()
WORDS: dict[str, Any] = {"fetches": ["y", "loss"], "ys": ["loss"], "xs": ["x", "r"]}


def assert_equal_results(found: gr.Result, wanted: gr.Result) -> None:
    assert found.outputs.keys() == wanted.outputs.keys() and found.gradients.keys() == wanted.gradients.keys()
    for name in wanted.outputs:
        np.testing.assert_array_equal(found.outputs[name], wanted.outputs[name])
    for x in wanted.gradients:
        np.testing.assert_array_equal(found.gradients[x], wanted.gradients[x])
    assert found.overrides == wanted.overrides


@pytest.mark.parametrize("in_flight", [1, 3, 16])
def test_each_result_is_that_of_evaluate(either: Any, in_flight: int) -> None:
    done = list(either.sweep(GRAPH, {"x": X}, MAPS, **WORDS, in_flight=in_flight))
    assert [item.label for item in done] == list(MAPS)
    assert [item.error for item in done] == [None] * len(MAPS)
    for item in done:
        assert_equal_results(item.result, either.evaluate(GRAPH, {"x": X}, **WORDS, overrides=MAPS[item.label]))
    gradients = [item.result.gradients["x"] for item in done]
    assert not any(np.array_equal(one, gradients[0]) for one in gradients[1:])


def test_labels_of_a_list_are_its_indices(either: Any) -> None:
    done = list(either.sweep(GRAPH.to_bytes(), {"x": X.tolist()}, list(MAPS.values()), **WORDS))
    assert [item.label for item in done] == [0, 1, 2, 3, 4]
    for item, overrides in zip(done, MAPS.values(), strict=True):
        assert_equal_results(item.result, either.evaluate(GRAPH, {"x": X}, **WORDS, overrides=overrides))


def test_params_compile_one_program(either: Any) -> None:
    overrides = {"Relu": gr.Rule("slope * dy", params={"slope": 1.0})}
    slopes = {slope: {"Relu": {"slope": slope}} for slope in RNG.normal(size=20).tolist()}
    done = list(either.sweep(GRAPH, {"x": X}, overrides=overrides, params=slopes, **WORDS))
    assert [item.label for item in done] == list(slopes)
    programs = {item.result.digests.program for item in done}
    again = [either.evaluate(GRAPH, {"x": X}, **WORDS, overrides=overrides, params=one) for one in slopes.values()]
    assert programs == {again[0].digests.program}
    assert all(result.timings.compile == 0 for result in again)
    for item, wanted in zip(done, again, strict=True):
        assert_equal_results(item.result, wanted)
    last = list(either.sweep(GRAPH, {"x": X}, overrides=overrides, params=[{}, {"Relu": {"slope": 0}}], **WORDS))
    assert [item.label for item in last] == [0, 1]
    assert not last[1].result.gradients["x"].any()


def test_a_map_that_fails_does_not_end_the_sweep(either: Any) -> None:
    maps = {
        "unknown": {"Relu": "guided_rel"},
        "guided": MAPS["guided"],
        "unmatched": {"Sigmoid": "ste"},
        "malformed": {7: "ste"},
        "own": None,
    }
    done = {item.label: item for item in either.sweep(GRAPH, {"x": X}, maps, **WORDS)}
    assert list(done) == list(maps)
    reasons = {label: item.error and item.error.reason for label, item in done.items()}
    assert reasons == {
        "unknown": "UNKNOWN_RULE", "guided": None, "unmatched": "UNMATCHED_OVERRIDE", "malformed": "INVALID_OVERRIDE",
        "own": None,
    }  # fmt: skip
    for label in ("guided", "own"):
        assert_equal_results(done[label].result, either.evaluate(GRAPH, {"x": X}, **WORDS, overrides=maps[label]))
    with pytest.raises(gr.errors.UnknownRuleError, match="'guided_relu'") as raised:
        _ = done["unknown"].result
    assert raised.value.__notes__ == ["at 'unknown' of the sweep"]


def test_params_that_are_not_valid_do_not_end_the_sweep(either: Any) -> None:
    params = [{"Relu": {"slop": 1.0}}, {"Relu": {"slope": "steep"}}, {"Relu": {"slope": 2.0}}]
    overrides = {"Relu": gr.Rule("slope * dy", params={"slope": 1.0})}
    done = list(either.sweep(GRAPH, {"x": X}, overrides=overrides, params=params, **WORDS))
    assert [item.error and item.error.reason for item in done] == ["UNKNOWN_PARAM", "INVALID_PARAM", None]


def test_wrong_usage_is_refused_before_anything_is_sent(either: Any) -> None:
    one_map = {"Relu": "guided_relu"}
    for words, says in (
        ({}, "several override maps"),
        ({"maps": one_map}, "'Relu' has 'guided_relu', which is no override map"),
        ({"maps": gr.Preset("epsilon_plus")}, "a dict of label to override map"),
        ({"maps": "guided_relu"}, "a dict of label to override map"),
        ({"maps": [one_map], "overrides": one_map}, "write both into the maps"),
        ({"maps": [one_map], "params": [{}]}, "give it as overrides"),
    ):
        with refused("INVALID_OVERRIDE") as refusal:
            list(either.sweep(GRAPH, {"x": X}, **words, **WORDS))
        refusal.says(says)
    for words, says in (
        ({"overrides": one_map, "params": {"Relu": {"slope": 1.0}}}, "'Relu' has {'slope': 1.0}"),
        ({"overrides": one_map, "params": 2.0}, "{2.0: {'Sign': {'clip': 2.0}}}"),
        ({"maps": [one_map], "in_flight": 0}, "at least 1"),
    ):
        with refused("INVALID_PARAM") as refusal:
            list(either.sweep(GRAPH, {"x": X}, **words, **WORDS))
        refusal.says(says)
    with refused("FEED_DTYPE"):
        list(either.sweep(GRAPH, {"x": np.float64([[0.1] * 5])}, [one_map], **WORDS))
    assert list(either.sweep(GRAPH, {"x": X}, {}, **WORDS)) == []


def test_large_values_are_sent_once(either: Any) -> None:
    values, upstream = RNG.normal(size=(70_000, 5)), RNG.normal(size=(70_000, 4)).astype(np.float32)
    x, dy = gr.Blob(values.astype(np.float32)), gr.Blob(upstream)
    assert set(either.find_missing_blobs([x.sha256, dy.sha256])) == {x.sha256, dy.sha256}
    reports: list[gr.ProgressReport] = []
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"], "grad_ys": [upstream]}
    done = list(either.sweep(GRAPH, {"x": values}, MAPS, **words, cast=True, progress=reports.append))
    assert either.find_missing_blobs([x.sha256, dy.sha256]) == []
    uploads = {report.total for report in reports if report.task == "uploading"}
    assert uploads == {len(x.data), len(dy.data)}
    assert sum(report.is_finished for report in reports if report.task == "uploading") == 2
    for item in done:
        wanted = either.evaluate(GRAPH, {"x": values}, **words, cast=True, overrides=MAPS[item.label])
        assert_equal_results(item.result, wanted)
    assert len(list(either.sweep(GRAPH, {"x": X + 1}, MAPS, ys="y", xs="x", grad_ys={"y": upstream[:3]}))) == 5


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Records the label and the number of fetches of each call."""
    made: list[tuple[Any, int]] = []
    real = Sweep.call

    def call(self: Sweep, run: Any) -> Any:
        found: Any = real(self, run)
        spec = found.request.spec
        made.append((run.label, len(spec.fetches)))
        return found

    monkeypatch.setattr(Sweep, "call", call)
    return made


def test_large_outputs_are_fetched_once(either: Any, fetches: list[tuple[Any, int]]) -> None:
    values = RNG.normal(size=(70_000, 5)).astype(np.float32)
    maps = {"bad": {"Relu": "guided_rel"}, **MAPS, "none": {"Sigmoid": "ste"}}
    done = {item.label: item for item in either.sweep(GRAPH, {"x": values}, maps, **WORDS)}
    assert [item.label for item in done.values() if item.error] == ["bad", "none"]
    # The second call is the first that succeeds.
    assert fetches == [("bad", 2), ("own", 2), *((label, 0) for label in [*list(MAPS)[1:], "none"])]
    for label, overrides in MAPS.items():
        assert_equal_results(done[label].result, either.evaluate(GRAPH, {"x": values}, **WORDS, overrides=overrides))
    assert done["lrp"].result.outputs is done["own"].result.outputs


def test_small_outputs_and_those_of_params_are_fetched_by_each_call(
    client: gr.Client, fetches: list[tuple[Any, int]]
) -> None:
    values = RNG.normal(size=(70_000, 5)).astype(np.float32)
    list(client.sweep(GRAPH, {"x": X}, MAPS, **WORDS))
    list(client.sweep(GRAPH, {"x": values}, overrides={"Relu": "relu_beta_smooth"}, params=[{}, {}], **WORDS))
    assert [count for _, count in fetches] == [2] * 7


def test_outputs_of_random_numbers_belong_to_their_gradients(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    noise = g.op("RandomUniform", g.op("Shape", x), dtype="float32", name="noise")
    g.op("Mul", g.op("Tanh", x, name="t"), noise, name="y")
    feeds = {"x": np.ones(400_000, np.float32)}
    slopes = {slope: {"Tanh": gr.Rule(f"{slope} * dy")} for slope in (2, 3, 4)}
    done = list(either.sweep(g, feeds, slopes, fetches="noise", ys="y", xs="x"))
    assert [item.result.repeatable for item in done] == [False] * 3
    for item in done:
        np.testing.assert_array_equal(item.result.gradients["x"], item.label * item.result.outputs["noise"])
    assert len({item.result.outputs["noise"][0] for item in done}) == 3
    program = either.compile(g, ys="y", xs="x")
    assert (program(feeds).repeatable, program.repeatable) == (False, False)
    program.delete()


def test_packed_values_are_those_of_packed_calls(either: Any) -> None:
    values = RNG.normal(size=(60_000, 5)).astype(np.float32)
    transfer = gr.Transfer(wire_dtype="bfloat16")
    for item in either.sweep(GRAPH, {"x": values}, MAPS, **WORDS, transfer=transfer):
        wanted = either.evaluate(GRAPH, {"x": values}, **WORDS, transfer=transfer, overrides=MAPS[item.label])
        assert_equal_results(item.result, wanted)


def test_progress_is_reported_for_each_result(either: Any) -> None:
    reports: list[gr.ProgressReport] = []
    list(either.sweep(GRAPH, {"x": X}, [None, {"Relu": "nothing"}], **WORDS, progress=reports.append))
    assert [(item.task, item.done, item.total, item.unit) for item in reports] == [
        ("running", done, 2, "calls") for done in (0, 1, 2, 2)
    ]
    assert reports[-1].is_finished


def test_batch_norms_are_folded_for_every_map(either: Any) -> None:
    g = gr.Graph()
    h = g.op(
        "Conv2D", g.placeholder("x", "float32", [None, 4, 4, 1]), RNG.normal(size=(3, 3, 1, 2)).astype(np.float32),
        strides=[1, 1, 1, 1], padding="SAME",
    )  # fmt: skip
    constants = [g.constant(np.float32(values)) for values in ([1, 2], [0, 1], [0.5, 0], [1, 2])]
    g.op("Relu", g.op("FusedBatchNormV3", h, *constants, is_training=False, name="bn")[0], name="y")
    feeds = {"x": RNG.normal(size=(2, 4, 4, 1)).astype(np.float32)}
    maps = {name: gr.Preset(name) for name in ("epsilon_plus", "epsilon_alpha2_beta1")}
    words: dict[str, Any] = {"ys": "y", "xs": "x", "rewrites": ["fold_batch_norm"]}
    for item in either.sweep(g, feeds, maps, **words):
        assert "bn" in item.result.rewritten
        assert_equal_results(item.result, either.evaluate(g, feeds, **words, overrides=maps[item.label]))


def test_arguments_may_be_iterators_and_feeds_may_change_meanwhile(client: gr.Client) -> None:
    feed = X.copy()

    def names() -> Iterator[str]:
        yield from ("x", "r")

    wanted = client.evaluate(GRAPH, {"x": X}, ys=["loss"], xs=["x", "r"], overrides=MAPS["guided"])
    maps = iter([MAPS["guided"]] * 3)
    for item in client.sweep(GRAPH, {"x": feed}, maps, ys=iter(["loss"]), xs=names(), in_flight=1):
        assert_equal_results(item.result, wanted)
        feed += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the labels of the runs whose calls were made."""
    made: list[Any] = []
    real = Sweep.call

    def call(self: Sweep, run: Any) -> Any:
        made.append(run.label)
        return real(self, run)

    monkeypatch.setattr(Sweep, "call", call)
    return made


def test_a_loop_that_ends_early_starts_no_more_calls(client: gr.Client, calls: list[Any]) -> None:
    maps = [{"Relu": gr.Rule(f"{factor} * dy")} for factor in range(2, 30)]
    for item in client.sweep(GRAPH, {"x": X}, maps, ys="loss", xs="x", in_flight=3):
        assert item.label == 0
        break
    assert calls == [0, 1, 2]
    assert client.evaluate(GRAPH, {"x": X}, "y").outputs["y"].shape == (3, 4)


def test_a_loop_of_asyncio_that_ends_early_starts_no_more_calls(server: RunningServer, calls: list[Any]) -> None:
    maps = [{"Relu": gr.Rule(f"{factor} * dy")} for factor in range(30, 50)]

    async def run() -> None:
        async with gr.aio.connect(server.target) as client:
            async for item in client.sweep(GRAPH, {"x": X}, maps, ys="loss", xs="x", in_flight=3):
                assert item.result.gradients["x"].shape == X.shape
                break

    asyncio.run(run())
    assert calls == [0, 1, 2]
