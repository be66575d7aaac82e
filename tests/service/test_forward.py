"""Forward once, pull back many times: values, expiry, limits, and lost engines and clients."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.rpc import status_pb2

import gradrule as gr
from gradrule._messages.error_status import error_from_status
from gradrule.v1 import evaluate_pb2
from tests.service import raw
from tests.service.answers import assert_close, provokes, refused
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.health import wait_for_another_engine
from tests.service.servers import RunningServer, running_server
from tests.service.streams import error_reason, open_stream
from tests.waiting import wait_until

X = np.float32([-2.0, 0.5, 3.0])


def straight() -> None:
    x = placeholder("x")
    tf.multiply(tf.sign(x), x * x, name="y")


def in_loop() -> None:
    x = placeholder("x", shape=(3,))
    _, last = tf.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, tf.sin(v) * tf.sign(v) * x), [0, x])
    tf.identity(last, name="y")


def in_branch() -> None:
    x = placeholder("x", shape=(3,))
    tf.identity(tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sign(x) * tf.exp(x), lambda: -x), name="y")


@pytest.mark.parametrize("build", [straight, in_loop, in_branch])
def test_each_pull_back_equals_an_evaluation(either: Any, build: Callable[[], None]) -> None:
    words = {"fetches": ["y"], "ys": ["y"], "xs": ["x"], "overrides": {"Sign": "ste"}}
    program = either.compile(build_graph_def(build), **words)
    with program.forward({"x": X}) as handle:
        assert_close(handle.outputs["y"], program.evaluate({"x": X}).outputs["y"])
        assert handle.bytes > 0
        assert_close(handle.vjp()["x"], program.evaluate({"x": X}).gradients["x"])
        for seed in range(3):
            dy = np.random.default_rng(seed).normal(size=3).astype(np.float32)
            wanted = program.evaluate({"x": X}, grad_ys={"y": dy}).gradients["x"]
            assert_close(handle.vjp({"y": dy})["x"], wanted)
        rows = np.eye(3, dtype=np.float32)
        wanted = program.evaluate({"x": X}, grad_ys=[rows], stacked_grad_ys=True).gradients["x"]
        assert_close(handle.vjp([rows], stacked_grad_ys=True)["x"], wanted)


def test_random_op_runs_once_per_forward(client: Any) -> None:
    def build() -> None:
        x = placeholder("x", shape=(1000,))
        tf.multiply(x, tf.random.uniform((1000,)), name="y")

    program = client.compile(build_graph_def(build), fetches=["y"], ys=["y"], xs=["x"])
    ones = np.ones(1000, np.float32)
    with program.forward({"x": ones}) as handle:
        assert_close(handle.vjp()["x"], handle.outputs["y"])
        assert_close(handle.vjp({"y": 2 * ones})["x"], 2 * handle.outputs["y"])


def random_graph() -> bytes:
    def build() -> None:
        x = placeholder("x", shape=(3,))
        tf.multiply(x, tf.cond(x[0] > 0, lambda: tf.random.uniform((3,)), lambda: x), name="y")

    return build_graph_def(build)


def test_program_says_whether_it_is_repeatable(client: Any) -> None:
    assert client.compile(build_graph_def(in_loop), fetches=["y"]).repeatable
    random = client.compile(random_graph(), fetches=["y", "x"])
    assert not random.repeatable
    assert not client.program(random.name).repeatable
    assert client.compile(random_graph(), fetches=["x"]).repeatable


def test_pull_back_closes_the_handle(client: Any) -> None:
    program = client.compile(build_graph_def(straight), fetches=["y"], ys=["y"], xs=["x"])
    (before,) = {tenant.handles.used for tenant in client.server_status().tenants if tenant.name == "default"}
    handle = program.forward({"x": X})
    with refused("INVALID_DERIVATIVE"):
        handle.vjp({"z": X}, close=True)
    assert handle.is_open
    assert_close(handle.vjp(close=True)["x"], 2 * np.abs(X))
    assert not handle.is_open
    (after,) = {tenant.handles.used for tenant in client.server_status().tenants if tenant.name == "default"}
    assert after == before
    assert_close(handle.vjp(close=True)["x"], 2 * np.abs(X))


def test_lost_run_with_random_numbers_is_not_repeated(client: Any) -> None:
    """A repeated run would give the gradient of other outputs than those that the client has."""
    program = client.compile(random_graph(), fetches=["y"], ys=["y"], xs=["x"])
    handle = program.forward({"x": np.abs(X)})
    client._sender._stream.close()
    with pytest.raises(gr.errors.HandleExpiredError, match="draws random numbers"):
        handle.vjp()


def test_run_is_not_repeated_on_request(client: Any) -> None:
    program = client.compile(build_graph_def(straight), fetches=["y"], ys=["y"], xs=["x"])
    handle = program.forward({"x": X}, repeat_if_lost=False)
    assert_close(handle.vjp()["x"], 2 * np.abs(X))
    client._sender._stream.close()
    with pytest.raises(gr.errors.HandleExpiredError, match="repeat_if_lost=False"):
        handle.vjp()


def test_pull_back_uses_the_params_of_the_forward_run(client: Any) -> None:
    program = client.compile(
        raw.sign_graph().SerializeToString(),
        fetches=["y"],
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override(gr.Rule("dy * k", params={"k": 2.0}), op_type="Sign", label="s")],
    )
    with program.forward({"x": X}, params={"s": {"k": 7.0}}) as handle:
        assert_close(handle.vjp()["x"], np.float32([7, 7, 7]))


def test_groups_of_xs_return_groups(client: Any) -> None:
    program = client.compile(build_graph_def(straight), ys=["y"], xs={"inputs": ["x"]})
    with program.forward({"x": X}) as handle:
        assert_close(handle.vjp()["inputs"]["x"], 2 * np.abs(X))


def test_invalid_pull_back_is_refused(either: Any) -> None:
    graph = build_graph_def(straight)
    forward_only = either.compile(graph, fetches=["y"])
    with refused("INVALID_DERIVATIVE"):
        forward_only.forward({"x": X})
    program = either.compile(graph, ys=["y"], xs=["x"])
    with refused("MISSING_FEED"):
        program.forward({})
    with program.forward({"x": X}) as handle:
        with refused("INVALID_DERIVATIVE") as refusal:
            handle.vjp({"z": X})
        refusal.says("'z'", "y")
        with refused("FEED_SHAPE"):
            handle.vjp({"y": np.float32([1, 2])})
        with refused("INVALID_DERIVATIVE"):
            handle.vjp(stacked_grad_ys=True)
        assert_close(handle.vjp()["x"], 2 * np.abs(X))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server that holds few handles for a short time."""
    flags = ("--max-handle-bytes", "1MiB", "--max-handles", "4", "--handle-ttl-s", "200")
    with running_server(tmp_path_factory.mktemp("small"), flags) as running:
        yield running


def compiled(client: gr.Client) -> gr.Program:
    return client.compile(build_graph_def(straight), fetches=["y"], ys=["y"], xs=["x"])


def run_forward(name: str, values: Any) -> evaluate_pb2.ForwardRequest:
    feeds = raw.feeds({"x": raw.tensor(values)})
    return evaluate_pb2.ForwardRequest(evaluate=evaluate_pb2.EvaluateRequest(program=name, feeds=feeds))


@provokes("HANDLE_EXPIRED")
def test_handle_expires_after_its_last_use(small: RunningServer) -> None:
    with (
        gr.connect(small.target) as client,
        grpc.insecure_channel(small.target) as channel,
        open_stream(channel) as stream,
    ):
        forward = run_forward(compiled(client).name, X)
        stream.send(1, forward=forward)
        assert stream.receive().forward.ttl.ToNanoseconds() == 200e9
        forward.ttl.FromMilliseconds(50)
        stream.send(1, forward=forward)
        answer = stream.receive().forward
        assert answer.ttl.ToNanoseconds() == 5e7

        def is_expired() -> status_pb2.Status | None:
            # Each look starts the 50 ms anew.
            time.sleep(0.1)
            stream.send(2, pull_back=evaluate_pb2.PullBackRequest(handle=answer.handle))
            response = stream.receive()
            return response.status if response.HasField("status") else None

        status = wait_until(is_expired, "the handle to lapse")
        with refused("HANDLE_EXPIRED") as refusal:
            raise error_from_status(status)
        refusal.says(answer.handle, "run forward again")


def test_client_renews_an_expired_handle(small: RunningServer) -> None:
    with gr.connect(small.target) as client, compiled(client).forward({"x": X}, ttl=0.05) as handle:
        first = handle._handle

        def renewed() -> bool | None:
            time.sleep(0.3)
            assert_close(handle.vjp()["x"], 2 * np.abs(X))
            return handle._handle != first or None

        assert wait_until(renewed, "a handle in the first one's place")


@provokes("QUOTA_EXCEEDED")
def test_bytes_and_number_of_handles_are_limited(small: RunningServer) -> None:
    with gr.connect(small.target) as client:
        program = compiled(client)
        big = np.ones(200_000, np.float32)
        with refused("QUOTA_EXCEEDED") as refusal:
            program.forward({"x": big})
        refusal.says("bytes", "1048576")
        with futures.ThreadPoolExecutor(12) as pool:
            found = [pool.submit(program.forward, {"x": X}) for _ in range(12)]
        handles = [one.result() for one in found if one.exception() is None]
        assert len(handles) == 4
        with refused("QUOTA_EXCEEDED") as refusal:
            program.forward({"x": X})
        refusal.says("4 forward handles")
        for handle in handles:
            handle.close()
        program.forward({"x": X}).close()


def test_handles_of_a_session_count_and_end_with_it(small: RunningServer) -> None:
    def program() -> None:
        w = tf.compat.v1.get_variable("w", initializer=tf.constant(X), use_resource=True)
        tf.multiply(placeholder("x", shape=(None,)), tf.square(w)[:1], name="y")

    def forward(x: Any, **words: Any) -> gr.ForwardHandle:
        return s.forward({"x": x}, ys="y", xs="w", **words)

    graph = build_graph_def(program)
    with gr.connect(small.target) as client, client.session(graph) as other:
        with client.session(graph) as s:
            with refused("QUOTA_EXCEEDED") as refusal:
                forward(np.ones(300_000, np.float32))
            refusal.says("bytes", "1048576")
            handles = [forward(X) for _ in range(4)]
            with refused("QUOTA_EXCEEDED") as refusal:
                forward(X)
            refusal.says("4 forward handles")
            with refused("QUOTA_EXCEEDED"):
                compiled(client).forward({"x": X})
            handles[0].close()
            short = forward(X, ttl=0.05)

            def is_expired() -> bool | None:
                # Each look starts the 50 ms anew.
                time.sleep(0.1)
                try:
                    short.vjp()
                except gr.errors.HandleExpiredError:
                    return True
                return None

            assert wait_until(is_expired, "the handle to expire")

        def free() -> bool | None:
            try:
                found = [other.forward({"x": X}, ys="y", xs="w") for _ in range(4)]
            except gr.errors.QuotaExceededError:
                return None
            for handle in found:
                handle.close()
            return True

        assert wait_until(free, "room for four handles")
        with refused("UNAVAILABLE"):
            handles[1].vjp()


def test_handles_of_a_disconnected_client_are_released(small: RunningServer) -> None:
    with gr.connect(small.target) as client:
        name = compiled(client).name
        with grpc.insecure_channel(small.target) as channel:
            for _ in range(3):
                with open_stream(channel) as stream:
                    for number in range(4):
                        stream.send(number, forward=run_forward(name, X))
                    # Handles of a stream cancelled just before may still count.
                    assert {error_reason(stream.receive()) for _ in range(4)} <= {"", "QUOTA_EXCEEDED"}

        def free() -> bool | None:
            try:
                handles = [client.program(name).forward({"x": X}, ttl=1.0) for _ in range(4)]
            except gr.errors.QuotaExceededError:
                return None
            for handle in handles:
                handle.close()
            return True

        assert wait_until(free, "room for four handles")


def test_handle_belongs_to_its_stream(small: RunningServer) -> None:
    with gr.connect(small.target) as client, grpc.insecure_channel(small.target) as channel:
        name = compiled(client).name
        with open_stream(channel) as owner, open_stream(channel) as other:
            owner.send(1, forward=run_forward(name, X))
            pull_back = evaluate_pb2.PullBackRequest(handle=owner.receive().forward.handle)
            other.send(1, pull_back=pull_back)
            assert error_reason(other.receive()) == "HANDLE_EXPIRED"
            owner.send(2, pull_back=pull_back)
            assert error_reason(owner.receive()) == ""
            owner.send(3, close_handle=evaluate_pb2.CloseHandleRequest(handle=pull_back.handle))
            assert owner.receive().WhichOneof("response") == "close_handle"
            owner.send(4, pull_back=pull_back)
            assert error_reason(owner.receive()) == "HANDLE_EXPIRED"


def test_lost_engine_requires_a_new_forward_run(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as server,
        gr.connect(server.target) as client,
        compiled(client).forward({"x": X}) as handle,
    ):
        engine = server.wait_for_engine()
        os.kill(engine, signal.SIGKILL)
        wait_for_another_engine(server, engine)
        assert_close(handle.vjp()["x"], 2 * np.abs(X))


def test_too_large_stack_of_pull_backs_is_refused_before_running(client: Any) -> None:
    """A few bytes of upstream gradients request 3 GB."""
    x = np.ones(1_500_000, np.float32)
    rows = np.ones(500, np.float32)
    program = client.compile(
        build_graph_def(lambda: tf.reduce_sum(tf.square(placeholder("x")), name="y")), ys=["y"], xs=["x"]
    )
    started = time.monotonic()
    with program.forward({"x": x}) as handle:
        with refused("MESSAGE_TOO_LARGE") as refusal:
            handle.vjp([rows], stacked_grad_ys=True)
        refusal.says("3000000000")
        assert handle.vjp([rows[:2]], stacked_grad_ys=True)["x"].shape == (2, x.size)
    with refused("MESSAGE_TOO_LARGE"):
        program.evaluate({"x": x}, grad_ys=[rows], stacked_grad_ys=True)
    assert time.monotonic() - started < 30
