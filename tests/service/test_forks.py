"""Processes that the front end forks have no threads of gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.service.servers import server_environment

# Returns the number of threads of a forked process as exit code.
_FORK = """
import asyncio, os, sys
from gradrule_server import __main__

async def fork():
    # The command sets how gRPC behaves before it imports it.
    import grpc

    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # While threads call gRPC, it does nothing at a fork.
    await asyncio.sleep(0.5)
    child = os.fork()
    if child == 0:
        os._exit(len(os.listdir("/proc/self/task")))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    await server.stop(None)

def run(runner, serve, *, original=asyncio.Runner.run):
    serve.close()
    return original(runner, fork())

asyncio.Runner.run = run
sys.exit(__main__.main(["serve", "--data-dir", sys.argv[1]]))
"""


def test_grpc_starts_no_threads_in_forked_processes(tmp_path: Path) -> None:
    """They may wait for each other before the process becomes an engine, and the front end for it: for ever."""
    environment = server_environment({"GRPC_ENABLE_FORK_SUPPORT": "1"})
    command = [sys.executable, "-c", _FORK, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "1\n"
