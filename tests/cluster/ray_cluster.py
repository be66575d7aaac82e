"""Starts Ray clusters of two nodes on this machine, with gradrule deployed by Ray Serve, and calls them under load."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

import gradrule as gr
from tests.processes import children, resident_bytes
from tests.waiting import wait_until

APP = "gradrule"
ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "deploy/ray/serve.yaml"
READY_S = 180.0
"""Time that Ray gets for anything, in seconds; it takes a small part of it on a machine that is idle."""
_SERVER = b"gradrule_server"
# Below the range of Linux for ports that a program does not choose, and above the ports of well-known services.
_PORTS = range(20_000, 32_000)
_QUICK = {"health_check_period_s": 1, "graceful_shutdown_timeout_s": 10, "graceful_shutdown_wait_loop_s": 0.2}


class RayCluster:
    """A head node and a second node, each with a gRPC proxy. CPUs are numbers for Ray; it reserves none.

    Args:
        environment: Variables of all processes of Ray.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Ray makes sockets there, whose paths must be short.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        self._ports = free_ports(4)
        self._environment = {
            "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(self._ports[1]),
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self._ports[3]),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        self._nodes: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # `stop` closes it

    @property
    def target(self) -> str:
        """Both proxies; clients use them in turn."""
        return "ipv4:" + ",".join(self.proxies)

    @property
    def proxies(self) -> tuple[str, str]:
        """Addresses of the proxies."""
        return f"127.0.0.1:{self._ports[0]}", f"127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Starts Ray and Ray Serve."""
        self._nodes = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_nodes", self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **self._environment},
            cwd=ROOT,
        )
        self._address = self._answer()
        self.add_node()
        ray.init(address=self._address, namespace="serve", log_to_driver=False, logging_level="error")
        serve.start(
            proxy_location="EveryNode",
            http_options={"port": self._ports[2], "host": "127.0.0.1"},
            grpc_options=gRPCOptions(port=self._ports[0], grpc_servicer_functions=["gradrule.ray.add_services"]),
            controller_options=yaml.safe_load(CONFIGURATION.read_text())["controller_options"],
        )

    def stop(self) -> None:
        """Ends Ray and all its processes."""
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        if self._nodes is not None:
            # It ends the nodes when its input ends.
            self._nodes.communicate(timeout=READY_S)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_node(self) -> None:
        """Adds a node."""
        self._command("add")

    def kill_node(self) -> None:
        """Kills all processes of the node that was added last."""
        self._command("kill")

    def kill_head(self) -> None:
        """Kills the process that controls the cluster (the GCS). Calls of `ray` wait until it is back."""
        self._command("kill-head")

    def start_head(self) -> None:
        """Starts the process that controls the cluster, on the same port."""
        self._command("start-head")

    @staticmethod
    def status() -> Any:
        """Returns what Ray Serve says of the application."""
        return serve.status().applications[APP]

    def proxy_bytes(self) -> int:
        """Returns the resident memory of both proxies."""
        assert self._nodes is not None
        pids, total = [self._nodes.pid], 0
        for pid in pids:
            pids += children(pid)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ProxyActor"):
                    total += resident_bytes(pid)
        assert total
        return total

    def _command(self, command: str) -> None:
        assert self._nodes is not None
        assert self._nodes.stdin is not None
        self._nodes.stdin.write(f"{command}\n")
        self._nodes.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._nodes is not None
        assert self._nodes.stdout is not None
        line = self._nodes.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"the nodes did not start:\n{self._log.read().decode()[-4000:]}")
        return line.strip()

    def end_serve(self) -> None:
        """Ends Ray Serve, but not Ray."""
        serve.shutdown()

    @contextlib.contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[None]:
        """Runs a module that connects to this cluster, and ends it as Ctrl-C does."""
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **self._environment, "RAY_ADDRESS": self._address}
        # The test process may ignore SIGINT, and child processes inherit that.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment, cwd=ROOT)
        finally:
            signal.signal(signal.SIGINT, previous)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(READY_S)

    def deploy(self, settings: Mapping[str, Any], **options: Any) -> None:
        """Deploys the application of deploy/ray/serve.yaml, or changes its options, and waits until it is ready."""
        self.start_deploying(settings, **options)
        wait_until(lambda: self.status().status == "RUNNING" or None, "running application", READY_S)

    def start_deploying(self, settings: Mapping[str, Any], **options: Any) -> None:
        """Tells Ray Serve to deploy the application.

        Args:
            settings: Arguments of the application instead of those of the file.
            options: Of the deployment, such as `num_replicas`, instead of those of the file.
        """
        config = yaml.safe_load(CONFIGURATION.read_text())
        config["grpc_options"]["port"] = self._ports[0]
        config["http_options"]["port"] = self._ports[2]
        (application,) = config["applications"]
        (deployment,) = application["deployments"]
        application["args"] = dict(settings)
        application["deployments"] = [
            {"name": deployment["name"], "ray_actor_options": {"num_cpus": 1}, **_QUICK, **options}
        ]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)

    def replicas(self) -> dict[str, Any]:
        """Returns the actors of the replicas that take calls, by name."""
        named = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        found = {}
        for name in named:
            if name.startswith(f"SERVE_REPLICA::{APP}#"):
                with contextlib.suppress(ValueError):
                    found[name] = ray.get_actor(name, namespace="serve")
        return found

    def running_replicas(self) -> int:
        """Returns the number of replicas that are ready."""
        (deployment,) = self.status().deployments.values()
        return int(deployment.replica_states.get("RUNNING", 0))

    def nodes_of_replicas(self) -> list[str]:
        """Returns the ID of the node of each replica."""
        return [ray.get(replica.is_allocated.remote())[3] for replica in self.replicas().values()]

    def calls_of_replicas(self) -> list[int]:
        """Returns the number of calls in progress on each replica."""
        return ray.get([replica.get_num_ongoing_requests.remote() for replica in self.replicas().values()])

    def wait_for_replicas(self, count: int, timeout_s: float = READY_S) -> None:
        """Waits until exactly so many replicas run."""
        wait_until(lambda: self.running_replicas() == count or None, f"{count} replicas", timeout_s)

    def server_pid(self, replica: Any) -> int:
        """Returns the process id of the server of a replica."""
        pids = [ray.get(replica.is_allocated.remote())[0]]
        for pid in pids:
            for child in children(pid):
                with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
                    if _SERVER in arguments and b"-S" not in arguments:
                        return child
                pids.append(child)
        raise AssertionError("the replica has no server")


class Load:
    """Calls a server from several threads until it is stopped, and checks each answer.

    Each thread has a client of its own; every second client sends each call alone, the others use streams.

    Args:
        target: Of the server.
        clients: Number of threads.
        pause_s: Pause between two calls of a client.
    """

    def __init__(self, target: str, clients: int, pause_s: float = 0.0) -> None:
        self.answers = 0
        self.failures: list[Exception] = []
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._target = target
        self._threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self, count: int) -> None:
        """Waits for so many further answers."""
        before = self.answers
        wait_until(lambda: self.failures or self.answers >= before + count or None, f"{count} answers", 60.0)

    def _call(self, number: int) -> None:
        graph = sign_graph()
        generator = np.random.default_rng(number)
        clip = np.float32(1 + number)
        with gr.connect(self._target, stream=number % 2 == 0) as client:
            while not self._stop.wait(self._pause_s):
                x = generator.uniform(-5, 5, 16).astype(np.float32)
                try:
                    result = client.evaluate(
                        graph,
                        feeds={"x": x},
                        fetches=["y"],
                        ys=["y"],
                        xs=["x"],
                        overrides={"Sign": ("ste_sign", {"clip": float(clip)})},
                    )
                    # The formula of the straight-through estimator, in NumPy.
                    np.testing.assert_array_equal(result.gradients["x"], (np.abs(x) <= clip).astype(np.float32))
                    np.testing.assert_array_equal(result.outputs["y"], np.sign(x))
                except Exception as failure:
                    with self._lock:
                        self.failures.append(failure)
                else:
                    with self._lock:
                        self.answers += 1


def sign_graph() -> gr.Graph:
    """Returns y = sign(x)."""
    graph = gr.Graph()
    graph.op("Sign", graph.placeholder("x", "float32", [None]), name="y")
    return graph


@contextlib.contextmanager
def running_ray(environment: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    """Starts a cluster of two nodes, and ends it."""
    cluster = RayCluster(environment or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nothing listens on.

    The system does not give them to connections or to Ray, which takes many ports before Ray Serve starts.
    """
    with contextlib.ExitStack() as sockets:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            probe = sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")
