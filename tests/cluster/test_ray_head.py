"""Tests that calls go on while the head of a Ray cluster is gone, and that faults are repaired after its return."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.postgres import PostgresServer
from tests.cluster.redis import running_redis
from tests.waiting import wait_until

with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("ray")
    from tests.cluster.ray_cluster import CONFIGURATION, READY_S, Load, RayCluster, free_ports, running_ray

# Ray leaves files and sockets open when it is shut down.
pytestmark = pytest.mark.filterwarnings("ignore")

# By default, the nodes of Ray end 60 s after their head.
_OUTAGE_S = 75.0


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Returns a cluster with the variables of deploy/ray, and a Redis server for its state."""
    lines = CONFIGURATION.with_name("ray.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    with running_redis(free_ports(1)[0]) as address, pytest.MonkeyPatch.context() as patch:
        # The test process is a part of the cluster too.
        for name, value in {**environment, "RAY_REDIS_ADDRESS": address}.items():
            patch.setenv(name, value)
        with running_ray() as running:
            yield running


def test_calls_go_on_without_the_head_and_replicas_are_replaced_after_its_return(
    cluster: RayCluster, postgres: PostgresServer
) -> None:
    settings: dict[str, Any] = {"spares": 0, "registry": postgres.create_database()}
    cluster.deploy(settings, num_replicas=2)
    cluster.wait_for_replicas(2)
    before = cluster.replicas()
    servers = [cluster.server_pid(replica) for replica in before.values()]
    with Load(cluster.target, clients=4) as load:
        load.wait_for_answers(20)
        cluster.kill_head()
        until = time.monotonic() + _OUTAGE_S
        while time.monotonic() < until:
            load.wait_for_answers(20)
        cluster.start_head()
        load.wait_for_answers(20)
        os.kill(servers[0], signal.SIGKILL)
        wait_until(lambda: cluster.replicas().keys() - before or None, "another replica", READY_S)
        cluster.wait_for_replicas(2)
        load.wait_for_answers(20)
    assert not load.failures
