"""Tests `gradrule.ray` on a Ray cluster of two nodes: the same answers as one server, through faults and scaling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc, program_pb2, program_pb2_grpc
from tests.cluster.http2_pings import send_pings
from tests.cluster.postgres import PostgresServer
from tests.cluster.refused_calls import refusal, refusal_reason, refused_calls
from tests.cluster.s3 import S3Server
from tests.e2e.pages import GUIDE, read_example
from tests.service import loop_graphs, raw
from tests.service.certificates import Authority
from tests.service.guarded import token_command
from tests.waiting import wait_until

with warnings.catch_warnings(action="ignore"):
    ray = pytest.importorskip("ray")
    from tests.cluster import ray_nodes
    from tests.cluster.nginx import running_nginx
    from tests.cluster.ray_cluster import READY_S, Load, RayCluster, free_ports, running_ray, sign_graph

# Ray leaves files and sockets open when it is shut down.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster(s3: S3Server) -> Iterator[RayCluster]:
    """Returns a cluster of two nodes, which can reach the object store."""
    with running_ray(s3.environment) as running:
        yield running


@pytest.fixture(scope="module")
def settings(postgres: PostgresServer, s3: S3Server) -> dict[str, Any]:
    """Returns the settings of servers that share a registry and blobs."""
    return {"spares": 0, "registry": postgres.create_database(), "blobs": f"s3://{s3.create_bucket()}/gradrule"}


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


def test_refused_calls_end_as_on_one_server(deployed: RayCluster, channel: grpc.Channel) -> None:
    with grpc.insecure_channel(deployed.target) as proxies:
        answers = [refusal(proxies, *call) for call in refused_calls()]
    assert answers == [refusal(channel, *call) for call in refused_calls()]
    assert len({text for _, text, _, _ in answers}) > 10


def test_requests_above_the_message_limit_travel_in_chunks(ray_client: Any) -> None:
    graph = gr.Graph()
    y = graph.op("Mul", graph.placeholder("x", "float32", [None]), graph.placeholder("k", "float32", []), name="y")
    x = np.arange(18 << 20, dtype=np.float32)
    result = ray_client.evaluate(graph, feeds={"x": x, "k": 3.0}, fetches=["y"], timeout=300.0)
    np.testing.assert_array_equal(result.outputs[y], 3 * x)


def test_blobs_are_in_the_object_store(ray_client: Any, settings: dict[str, Any], s3: S3Server) -> None:
    bucket = settings["blobs"].removeprefix("s3://").split("/")[0]
    before = set(s3.keys(bucket))
    graph = gr.Graph()
    values = np.arange(1 << 19, dtype=np.float32) + 0.5
    y = graph.op("Mul", graph.placeholder("x", "float32", []), graph.constant(values), name="y")
    program = ray_client.compile(graph, fetches=["y"])
    np.testing.assert_array_equal(program(x=2.0).outputs[y], 2 * values)
    assert set(s3.keys(bucket)) - before


def test_proxies_forget_requests_that_were_answered(deployed: RayCluster) -> None:
    x = np.ones(1 << 19, np.float32)
    with gr.connect(deployed.target, stream=False) as client:
        for _ in range(10):
            client.evaluate(sign_graph(), feeds={"x": x}, fetches=["y"])
        before = deployed.proxy_bytes()
        for _ in range(100):
            client.evaluate(sign_graph(), feeds={"x": x}, fetches=["y"])
    # The requests had 200 MiB.
    assert deployed.proxy_bytes() - before < 100 << 20


def test_proxies_let_idle_clients_send_pings(deployed: RayCluster) -> None:
    # By default, gRPC closes the connection at the third.
    assert send_pings(deployed.proxies[0], count=5, pause_s=1.1)


async def test_thousands_of_calls_may_start_at_once(deployed: RayCluster) -> None:
    async with grpc.aio.insecure_channel(deployed.proxies[0]) as channel:
        stub: Any = program_pb2_grpc.ProgramServiceStub(channel)
        requests = [program_pb2.GetProgramRequest(name="programs/none") for _ in range(3000)]
        calls = [stub.GetProgram(request, timeout=120) for request in requests]
        # The server may refuse some, with its own reason; gRPC would cancel them without one.
        assert {await refusal_reason(call) for call in calls} <= {
            ("NOT_FOUND", "PROGRAM_NOT_FOUND"),
            ("RESOURCE_EXHAUSTED", "OVERLOADED"),
        }


async def test_replica_takes_more_streams_than_ray_serve_gives_it_threads(deployed: RayCluster) -> None:
    message = evaluate_pb2.StreamEvaluateRequest(request_id=1, evaluate=evaluate_pb2.EvaluateRequest())
    async with grpc.aio.insecure_channel(deployed.proxies[0]) as channel:
        stub: Any = evaluate_pb2_grpc.GradientServiceStub(channel)
        streams = [stub.StreamEvaluate() for _ in range(1010)]
        for stream in streams:
            await stream.write(message)
        answers = await asyncio.wait_for(asyncio.gather(*(stream.read() for stream in streams)), 120)
        assert all(answer.HasField("status") for answer in answers)
        for stream in streams:
            stream.cancel()


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
            folder = Path(environment(orphan)["GRADRULE_DATA_DIR"]).parent
            assert folder.exists()
            # A server that hangs does not obey SIGTERM.
            os.kill(orphan, signal.SIGSTOP)
            ray.kill(victim)
            load.wait_for_answers(20)
            cluster.wait_for_replicas(2)
            os.kill(cluster.server_pid(other), signal.SIGKILL)
            load.wait_for_answers(20)
            wait_until(lambda: not before.keys() & cluster.replicas().keys() or None, "end of the replica", READY_S)
            cluster.wait_for_replicas(2)
            with pytest.raises(gr.errors.SessionLostError):
                session.read(["w"])
        for _ in range(8):
            tripled = client.evaluate(sign_graph(), **ARGUMENTS, overrides={"Sign": "TripleGrad"})
            assert tripled.gradients["x"].tolist() == [3.0, 3.0, 3.0]
    assert not load.failures
    wait_until(lambda: not Path(f"/proc/{orphan}").exists() or None, "end of the hanging server", READY_S)
    wait_until(lambda: not folder.exists() or None, "removal of its folder", READY_S)


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
        wait_until(lambda: cluster.replicas().keys() - before or None, "another replica", READY_S)
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
            # One client that waits for each answer never has more than one request.
            "target_ongoing_requests": 1,
            "metrics_interval_s": 0.2,
            "look_back_period_s": 1.0,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.0,
            "policy": {"policy_function": "gradrule.ray.autoscaling:autoscaling_policy"},
        },
    )
    with Load(cluster.target, clients=1, pause_s=0.2) as calls:
        cluster.wait_for_replicas(1)
        # Each session counts as a request while it is open, however long calls take on this machine.
        with Load(cluster.target, clients=8) as load, open_sessions(cluster.target, 4):
            cluster.wait_for_replicas(4)
            load.wait_for_answers(100)
        assert not load.failures
        cluster.wait_for_replicas(1)
        calls.wait_for_answers(5)
    assert not calls.failures


@contextlib.contextmanager
def open_sessions(target: str, count: int) -> Iterator[None]:
    """Opens sessions, and closes them at the end."""
    graph = gr.Graph()
    graph.variable("w", [4.0])
    with gr.connect(target) as client, contextlib.ExitStack() as sessions:
        for _ in range(count):
            sessions.enter_context(client.session(graph))
        yield


def test_one_program_uses_all_replicas(cluster: RayCluster, settings: dict[str, Any]) -> None:
    cluster.deploy(settings, num_replicas=4)
    cluster.wait_for_replicas(4)
    # The loop ends after less than a second, so that the engine needs no restart when a call is cancelled.
    request = raw.request(loop_graphs.counted(30_000).SerializeToString(), {"x": raw.tensor(1.0)})

    with grpc.insecure_channel(cluster.proxies[0]) as channel:
        stub = evaluate_pb2_grpc.GradientServiceStub(channel)

        def place(count: int, *, cancel: bool = False) -> list[int] | None:
            """Starts calls at once, and returns how many each replica has; None if some ended before."""
            placed = None
            calls = [stub.Evaluate.future(request, timeout=READY_S) for _ in range(count)]
            while not all(call.done() for call in calls):
                found = cluster.calls_of_replicas()
                if placed is None and sum(found) == count:
                    placed = sorted(found)
                    for call in calls if cancel else ():
                        call.cancel()
                time.sleep(0.05)
            assert all(call.cancelled() or call.result() for call in calls)
            wait_until(lambda: not sum(cluster.calls_of_replicas()) or None, "end of all calls", READY_S)
            return placed

        def on_all() -> list[int] | None:
            return found if (found := place(16)) and min(found) else None

        # A replica takes up to 25 % more than the average of 4, rounded up.
        assert max(wait_until(on_all, "calls on all replicas", READY_S)) <= 6
        # The proxy counts calls no longer soon after they have ended.
        wait_until(lambda: place(2, cancel=True) == [0, 0, 0, 2] or None, "both calls on one replica", READY_S)
        wait_until(lambda: place(2) == [0, 0, 0, 2] or None, "both calls on one replica again", READY_S)


def test_tokens_tls_with_nginx_and_gpus(cluster: RayCluster, settings: dict[str, Any], tmp_path: Path) -> None:
    """With the configuration of the guide: nginx decrypts, the servers authenticate, and Ray chooses their GPU."""
    tokens = tmp_path / "tokens"
    token = token_command("new", "--tenant", "ada", "--file", str(tokens)).strip()
    # GPUs are numbers for Ray, which tells processes by a variable which ones they have.
    options = {"num_cpus": 1, "num_gpus": 1}
    cluster.deploy(
        {**settings, "tokens": str(tokens), "insecure_tokens": True}, num_replicas=1, ray_actor_options=options
    )
    cluster.wait_for_replicas(1)
    (replica,) = cluster.replicas().values()
    assert environment(cluster.server_pid(replica))["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    authority = Authority(tmp_path, "authority")
    tls: dict[str, Any] = {"credentials": gr.tls(authority.file), "timeout": 60.0}
    with running_nginx(authority.server("server"), cluster.proxies, tmp_path) as target:
        with gr.connect(target, token="wrong", **tls) as stranger, pytest.raises(gr.errors.UnauthenticatedError):
            stranger.evaluate(sign_graph(), **ARGUMENTS)
        with gr.connect(target, token=token, **tls) as client:
            for call in (evaluates, repeats_calls_over_a_stream, uploads_large_values, trains_a_session):
                call(client)
            with pytest.raises(gr.errors.UnknownOpTypeError) as raised:
                unknown_op_type(client)
            assert raised.value.details
            client.create_rule("OfAda", "3 * dy")
        with gr.connect(cluster.target, token=token) as client:
            assert client.get_rule("OfAda")


def environment(pid: int) -> dict[str, str]:
    """Returns the variables of a process."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


def test_replicas_without_a_shared_registry_are_refused(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.start_deploying({"spares": 0, "data_dir": str(tmp_path)}, num_replicas=2)
    status = wait_until(
        lambda: status if (status := cluster.status()).status == "DEPLOY_FAILED" else None, "failed deployment", READY_S
    )
    (deployment,) = status.deployments.values()
    assert "2 replicas need a registry that they share" in deployment.message


def test_a_node_that_starts_too_late_is_killed_before_the_next_try() -> None:
    started = []

    def start(**_: object) -> int:
        started.append(subprocess.Popen(["sleep", "60"]))
        if len(started) == 1:
            raise TimeoutError("The current node timed out during startup.")
        return len(started)

    assert ray_nodes.add_node(SimpleNamespace(add_node=start)) == 2
    late, node = started
    assert late.wait(10) == -signal.SIGKILL
    assert node.poll() is None
    node.kill()
    node.wait()


def test_serve_run_starts_ray_serve_with_a_grpc_port(cluster: RayCluster, settings: dict[str, Any]) -> None:
    cluster.end_serve()
    command = read_example(GUIDE / "ray.md", "run").split()
    assert command[:3] == ["serve", "run", "gradrule.ray:app"]
    port = free_ports(1)[0]
    arguments = [f"registry={settings['registry']}", "spares=0", "admin=false", f"port={port}"]
    with cluster.running("ray.serve.scripts", *command[1:3], *arguments), gr.connect(f"localhost:{port}") as client:
        client.wait_ready(timeout=100.0)
        assert evaluates(client)[:2] == ([-1.0, 1.0, 1.0], [0.0, 1.0, 0.0])
