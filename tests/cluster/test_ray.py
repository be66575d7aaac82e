"""Tests `gradrule.ray` on a Ray cluster of two nodes: the same answers as one server, through faults and scaling."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc
from tests.cluster.postgres import PostgresServer
from tests.e2e.pages import GUIDE, read_example
from tests.service import loop_graphs, raw
from tests.waiting import wait_until

with warnings.catch_warnings(action="ignore"):
    ray = pytest.importorskip("ray")
    from tests.cluster.ray_cluster import Load, RayCluster, free_ports, running_ray, sign_graph

# Ray leaves files and sockets open when it is shut down.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Returns a cluster of two nodes."""
    with running_ray() as running:
        yield running


@pytest.fixture(scope="module")
def settings(postgres: PostgresServer) -> dict[str, Any]:
    """Returns the settings of servers that share a registry."""
    return {"spares": 0, "registry": postgres.create_database()}


@pytest.fixture(scope="module")
def deployed(cluster: RayCluster, settings: dict[str, Any]) -> RayCluster:
    """Returns the cluster with one replica."""
    cluster.deploy(settings, num_replicas=1)
    return cluster


@pytest.fixture(scope="module")
def ray_client(deployed: RayCluster) -> Iterator[Any]:
    """Returns a client of the application."""
    with gr.connect(deployed.target) as client:
        yield client


ARGUMENTS: dict[str, Any] = {"feeds": {"x": [-2.0, 0.5, 3.0]}, "fetches": ["y"], "ys": ["y"], "xs": ["x"]}


def evaluates(client: Any) -> Any:
    result = client.evaluate(sign_graph(), **ARGUMENTS, overrides={"Sign": "ste_sign"})
    return result.outputs["y"].tolist(), result.gradients["x"].tolist(), [str(one) for one in result.overrides]


def repeats_calls_over_a_stream(client: Any) -> Any:
    program = client.compile(sign_graph(), ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"})
    return [program(x=[float(n)]).gradients["x"].tolist() for n in range(8)]


def uploads_large_values(client: Any) -> Any:
    graph = gr.Graph()
    values = np.arange(3 << 19, dtype=np.float32)
    y = graph.op("Mul", graph.placeholder("x", "float32", []), graph.constant(values), name="y")
    result = client.evaluate(graph, feeds={"x": 2.0}, fetches=["y"], ys=["y"], xs=["x"])
    np.testing.assert_array_equal(result.outputs[y], 2 * values)
    return result.outputs[y][-1], result.gradients["x"]


def keeps_forward_handles(client: Any) -> Any:
    program = client.compile(sign_graph(), fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"})
    with program.forward({"x": [0.5, 4.0]}) as handle:
        return [handle.vjp({"y": [upstream, 1.0]})["x"].tolist() for upstream in (1.0, 2.0)]


def trains_a_session(client: Any) -> Any:
    graph = gr.Graph()
    w = graph.variable("w", [4.0])
    loss = graph.op("Square", w, name="loss")
    with client.session(graph) as session:
        for _ in range(3):
            session.step({}, loss="loss", optimizer=gr.optimizers.SGD(0.25))
        return session.read(["w"])["w"].tolist(), str(loss)


def creates_and_lists_rules(client: Any) -> Any:
    client.create_rule("HalfGrad", "0.5 * dy")
    return [rule.name for rule in client.list_rules(kind="user")]


def unknown_op_type(client: Any) -> Any:
    client.evaluate(sign_graph(), **ARGUMENTS, overrides={"Sing": "ste_sign"})


def missing_feed(client: Any) -> Any:
    client.evaluate(sign_graph(), **{**ARGUMENTS, "feeds": {}}, overrides={"Sign": "ste_sign"})


def refused_start_of_a_session(client: Any) -> Any:
    with client.session(sign_graph(), overrides={"Sing": "ste_sign"}) as session:
        session.read(["w"])


CALLS = [
    evaluates,
    repeats_calls_over_a_stream,
    uploads_large_values,
    keeps_forward_handles,
    trains_a_session,
    creates_and_lists_rules,
    unknown_op_type,
    missing_feed,
    refused_start_of_a_session,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_answer_is_that_of_one_server(ray_client: Any, client: Any, call: Callable[[Any], Any]) -> None:
    assert outcome(call, ray_client) == outcome(call, client)


def outcome(call: Callable[[Any], Any], client: Any) -> Any:
    """Returns what a call returns, or its typed error."""
    try:
        return call(client)
    except gr.errors.GradruleError as error:
        return error.reason, error.code, str(error), error.details


def test_cancelled_calls_end_on_the_server(deployed: RayCluster, ray_client: Any) -> None:
    request = raw.request(loop_graphs.endless().SerializeToString(), {"x": raw.tensor(loop_graphs.ENDLESS)})

    def wait_for_running(count: int) -> None:
        wait_until(
            lambda: sum(engine.running for engine in ray_client.server_status().engines) == count or None,
            f"{count} running calls",
        )

    with grpc.insecure_channel(deployed.target) as channel:
        calls = evaluate_pb2_grpc.GradientServiceStub(channel)
        call = calls.Evaluate.future(request, timeout=60)
        wait_for_running(1)
        call.cancel()
        wait_for_running(0)
        ended = threading.Event()

        def messages() -> Iterator[evaluate_pb2.StreamEvaluateRequest]:
            yield evaluate_pb2.StreamEvaluateRequest(evaluate=request)
            ended.wait()

        stream = calls.StreamEvaluate(messages())
        wait_for_running(1)
        stream.cancel()
        wait_for_running(0)
        ended.set()


def test_killed_replicas_and_servers_are_replaced_without_a_failed_call(
    cluster: RayCluster, settings: dict[str, Any]
) -> None:
    cluster.deploy(settings, num_replicas=2)
    before = cluster.replicas()
    victim, other = before.values()
    graph = gr.Graph()
    graph.op("Square", graph.variable("w", [4.0]), name="loss")
    with gr.connect(cluster.target) as client, Load(cluster.target, clients=4) as load:
        client.create_rule("TripleGrad", "3 * dy")
        with client.session(graph) as session:
            session.step({}, loss="loss", optimizer=gr.optimizers.SGD(0.25))
            load.wait_for_answers(20)
            orphan = cluster.server_pid(victim)
            ray.kill(victim)
            wait_until(lambda: not Path(f"/proc/{orphan}").exists() or None, "end of the server of a killed replica")
            load.wait_for_answers(20)
            cluster.wait_for_replicas(2)
            os.kill(cluster.server_pid(other), signal.SIGKILL)
            load.wait_for_answers(20)
            wait_until(lambda: not before.keys() & cluster.replicas().keys() or None, "end of the replica", 60.0)
            cluster.wait_for_replicas(2)
            with pytest.raises(gr.errors.SessionLostError):
                session.read(["w"])
        for _ in range(8):
            tripled = client.evaluate(sign_graph(), **ARGUMENTS, overrides={"Sign": "TripleGrad"})
            assert tripled.gradients["x"].tolist() == [3.0, 3.0, 3.0]
    assert not load.failures


def test_killed_node_is_survived_without_a_failed_call(cluster: RayCluster, settings: dict[str, Any]) -> None:
    cluster.deploy(settings, num_replicas=2)
    cluster.wait_for_replicas(2)
    before = cluster.replicas().keys()
    # Ray Serve spreads replicas over nodes.
    assert len(set(cluster.nodes_of_replicas())) == 2
    with Load(cluster.target, clients=4) as load:
        load.wait_for_answers(20)
        cluster.kill_node()
        load.wait_for_answers(50)
        wait_until(lambda: cluster.replicas().keys() - before or None, "another replica", 60.0)
        cluster.wait_for_replicas(2)
        load.wait_for_answers(20)
    cluster.add_node()
    assert not load.failures


def test_replicas_follow_the_load_without_a_failed_call(cluster: RayCluster, settings: dict[str, Any]) -> None:
    cluster.deploy(
        settings,
        num_replicas="auto",
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": 4,
            # Any load means four replicas: how long calls take differs between machines.
            "target_ongoing_requests": 0.25,
            "metrics_interval_s": 0.2,
            "look_back_period_s": 1.0,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.0,
            "policy": {"policy_function": "gradrule.ray.autoscaling:autoscaling_policy"},
        },
    )
    with Load(cluster.target, clients=1, pause_s=0.2) as calls:
        cluster.wait_for_replicas(1)
        with Load(cluster.target, clients=8) as load:
            cluster.wait_for_replicas(4)
            load.wait_for_answers(100)
        assert not load.failures
        cluster.wait_for_replicas(1)
        calls.wait_for_answers(5)
    assert not calls.failures


def test_serve_run_starts_ray_serve_with_a_grpc_port(cluster: RayCluster, settings: dict[str, Any]) -> None:
    cluster.end_serve()
    command = read_example(GUIDE / "ray.md", "run").split()
    assert command[:3] == ["serve", "run", "gradrule.ray:app"]
    port = free_ports(1)[0]
    arguments = [f"registry={settings['registry']}", "spares=0", "admin=false", f"port={port}"]
    with cluster.running("ray.serve.scripts", *command[1:3], *arguments), gr.connect(f"localhost:{port}") as client:
        client.wait_ready(timeout=100.0)
        assert evaluates(client)[:2] == ([-1.0, 1.0, 1.0], [0.0, 1.0, 0.0])
