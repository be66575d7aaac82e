"""Runs the nodes of a Ray cluster until standard input ends: `python -m tests.cluster.ray_nodes FOLDER`.

Ray forks to start a node, which can crash in a process that makes gRPC calls, as tests do. Each line of the input is a
command, `add`, `kill`, `kill-head` or `start-head`, and is answered by a line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from typing import Any

with warnings.catch_warnings(action="ignore"):
    from ray.cluster_utils import Cluster

from tests.processes import children

_OBJECT_STORE_BYTES = 80 << 20
_TRIES = 3


def main(folder: str) -> None:
    """Starts the head node, says its address, and obeys commands."""
    # Ray writes to standard output, which is for answers here.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Ray writes the address of the cluster there, into a folder that it expects.
    os.environ["RAY_TMPDIR"] = folder
    os.makedirs(f"{folder}/ray")
    cluster = Cluster()
    nodes: list[Any] = []
    with contextlib.ExitStack() as stops:
        stops.callback(cluster.shutdown)
        add_node(cluster, num_cpus=2, include_dashboard=False, temp_dir=folder)
        print(cluster.address, file=answers)
        for line in sys.stdin:
            match line.strip():
                case "add":
                    # GPUs are numbers for Ray too.
                    nodes.append(add_node(cluster, num_cpus=4, num_gpus=2))
                case "kill":
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                case "kill-head":
                    cluster.head_node.kill_gcs_server()
                case "start-head":
                    cluster.head_node.start_gcs_server()
            print("done", file=answers)


def add_node(cluster: Any, **options: Any) -> Any:
    """Starts a node. Tries again, since Ray gives a node 30 seconds to start, which a busy machine may need."""
    for _ in range(_TRIES - 1):
        before = children(os.getpid())
        with contextlib.suppress(Exception):
            return cluster.add_node(object_store_memory=_OBJECT_STORE_BYTES, **options)
        # They would become a further node.
        for late in set(children(os.getpid())).difference(before):
            os.kill(late, signal.SIGKILL)
    return cluster.add_node(object_store_memory=_OBJECT_STORE_BYTES, **options)


if __name__ == "__main__":
    main(sys.argv[1])
