"""Client features beyond single calls: maps, deadlines, readiness, local servers."""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.service.servers import RunningServer


def squares() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.square(x, name="y")
    g.log(g.reduce_max(x), name="z")
    return g


@pytest.fixture
def program(either: Any) -> Iterator[Any]:
    compiled = either.compile(squares(), ys=["y"], xs=["x"], fetches=["y"])
    yield compiled
    compiled.delete()


def test_map_keeps_the_order(program: Any) -> None:
    found = [r.outputs["y"].tolist() for r in program.map(({"x": [float(n)]} for n in range(50)), in_flight=7)]
    assert found == [[float(n * n)] for n in range(50)]


def test_map_raises_an_error_at_its_position(program: Any) -> None:
    feeds: Any = [{"x": [1.0]}, {"x": np.float64([0.1])}, {"x": [3.0]}]
    with pytest.raises(gr.errors.FeedDtypeError):
        list(program.map(feeds, in_flight=2))
    with pytest.raises(gr.errors.InvalidParamError, match="at least 1"):
        list(program.map([{"x": [1.0]}], in_flight=0))
    assert program(x=[2.0]).outputs["y"].tolist() == [4.0]


def test_map_is_lazy(client: gr.Client) -> None:
    compiled = client.compile(squares(), ys=["y"], xs=["x"], fetches=["y"])
    taken = []

    def feeds() -> Iterator[Any]:
        for n in range(1000):
            taken.append(n)
            yield {"x": [float(n)]}

    results = compiled.map(feeds(), in_flight=4)
    next(results)
    assert len(taken) <= 6
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert compiled(x=[2.0]).outputs["y"].tolist() == [4.0]
    compiled.delete()


def test_async_map_of_an_async_iterable(server: RunningServer) -> None:
    async def run() -> list[float]:
        async with gr.aio.connect(server.target) as client:
            compiled = await client.compile(squares(), fetches=["y"])

            async def feeds() -> Any:
                for n in range(20):
                    yield {"x": [float(n)]}

            found = [float(r.outputs["y"][0]) async for r in compiled.map(feeds(), in_flight=3)]
            await compiled.delete()
            return found

    assert asyncio.run(run()) == [float(n * n) for n in range(20)]


def test_program_describes_itself(program: Any, either: Any) -> None:
    assert list(program.inputs) == ["x"]
    assert program.inputs["x"].dtype == "float32"
    assert list(program.outputs) == ["y"]
    again = either.program(program.name.removeprefix("programs/"))
    assert (again.name, again.digests) == (program.name, program.digests)
    assert program.name in [listed.name for listed in either.list_programs()]
    r = program({"x": [3.0]})
    assert (r.gradients["x"].tolist(), r.default_gradient_nodes) == ([6.0], program.default_gradient_nodes)
    assert program.default_gradient_nodes == ["y"]


def test_values_get_the_programs_dtypes_unless_they_would_change(program: Any) -> None:
    assert program(x=[1, 2]).outputs["y"].tolist() == [1.0, 4.0]
    assert program(x=np.float64([1, 2])).outputs["y"].dtype == np.float32
    with pytest.raises(gr.errors.FeedDtypeError, match=r"float64.*float32: 0.1 .*astype.*cast=True"):
        program(x=np.float64([1, 0.1]))
    rounded = program.evaluate({"x": np.float64([0.1])}, grad_ys=[np.float64([0.1])], cast=True)
    assert rounded.gradients["x"] == np.float32(0.1) * 2 * np.float32(0.1)
    (mapped,) = program.map([{"x": np.float64([0.1])}], grad_ys=[[np.float64([0.1])]], cast=True)
    assert mapped.outputs["y"] == rounded.outputs["y"]
    assert mapped.gradients["x"] == rounded.gradients["x"]
    with pytest.raises(gr.errors.UnknownFeedError, match="twice"):
        program({"x": [1.0]}, x=[2.0])
    assert program.evaluate({"x": [1, 2]}, grad_ys={"y": [1, 10]}).gradients["x"].tolist() == [2.0, 40.0]
    with pytest.raises(gr.errors.InvalidDerivativeError, match="compile"):
        program.evaluate({"x": [1, 2]}, grad_ys={"y": "x"})


def test_call_past_its_deadline_is_refused(either: Any) -> None:
    graph = squares()
    # A program that the server has compiled, after an earlier deadline perhaps, may be answered before a timer fires.
    graph.placeholder(f"p{uuid.uuid4().hex}", "float32", [])
    with pytest.raises(gr.errors.DeadlineExceededError):
        either.evaluate(graph, {"x": [1.0]}, fetches=["y"], timeout=1e-6)


def test_wait_ready_returns_or_fails(either: Any) -> None:
    either.wait_ready(timeout=10)


def test_local_server_serves_and_stops(tmp_path: Path) -> None:
    with gr.local(engine_threads=1, reflection=False, data_dir=tmp_path / "kept") as client:
        client.create_rule("Twice", "2 * dy")
        r = client.evaluate(squares(), {"x": [3.0]}, ys="y", xs="x", overrides={"Square": "Twice"})
        assert r.gradients["x"].tolist() == [2.0]
    assert any((tmp_path / "kept").iterdir())
    with pytest.raises(gr.errors.UnavailableError):
        client.wait_ready(timeout=0.2)

    async def run() -> str:
        async with gr.aio.local(data_dir=tmp_path / "kept") as other:
            return (await other.get_rule("Twice")).expression or ""

    assert asyncio.run(run()) == "2 * dy"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data_dri": "x"}, r"(?s)--data-dir is data_dir here.*'--data-dri'.*Did you mean '--data-dir'"),
        ({"default_deadline_s": float("nan")}, "--default-deadline-s"),
        ({"device": "tpu"}, "--device"),
    ],
)
def test_unknown_setting_of_a_local_server_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match=says), gr.local(**settings):
        pass


def test_local_server_that_cannot_start_reports_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(gr.errors.UnavailableError, match=r"(?s)exit code 1.*file"),
        gr.local(data_dir=tmp_path / "file"),
    ):
        pass


def test_explain_checks_the_params_of_a_call(either: Any) -> None:
    words: dict[str, Any] = {"ys": "y", "xs": "x", "overrides": {"Square": (gr.Rule("a * dy"), {"a": 1.0})}}
    explained = either.explain(squares(), {"x": [1.0]}, params={"Square": {"a": 2.0}}, grad_ys={"y": [1.0]}, **words)
    assert [item.status for item in explained.overrides] == ["active"]
    with pytest.raises(gr.errors.UnknownFeedError, match="Did you mean 'x'"):
        either.explain(squares(), {"xx": [1.0]}, **words)
    with pytest.raises(gr.errors.UnknownParamError, match=r"'Squares'.*Did you mean 'Square'"):
        either.explain(squares(), params={"Squares": {"a": 1.0}}, **words)


def test_clients_and_programs_can_be_pickled(server: RunningServer, client: gr.Client) -> None:
    compiled = client.compile(squares(), ys=["y"], xs=["x"], fetches=["y"])
    with pickle.loads(pickle.dumps(client)) as other:
        assert (other.target, other.list_rules(kind="user")) == (client.target, client.list_rules(kind="user"))
    loaded = pickle.loads(pickle.dumps(compiled))
    assert (loaded.name, loaded(x=[3.0]).gradients["x"].tolist()) == (compiled.name, [6.0])
    loaded._client.close()
    with gr.connect(server.target, token="secret", timeout=7.0, stream=False) as given:
        loaded = pickle.loads(pickle.dumps(given))
        assert (loaded._metadata, loaded._timeout) == (given._metadata, 7.0)
        loaded.close()
    with (
        gr.connect(server.target, credentials=gr.tls()) as secret,
        pytest.raises(gr.errors.UnsupportedError, match="credentials cannot be pickled"),
    ):
        pickle.dumps(secret)
