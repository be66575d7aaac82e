"""Signal handlers that interrupt calls: no lock stays locked, and calls in handlers do not wait for ever.

In processes of their own, with a time limit.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.service.servers import RunningServer, server_environment

_START = """
import random, signal, sys, threading, time
import numpy as np
import gradrule as gr
from gradrule.errors import UnsupportedError

g = gr.Graph()
x = g.placeholder("x", "float32", [None])
g.multiply(g.op_output("Square", x), 0.5, name="y")
client = gr.connect(sys.argv[1], shared_memory=False)
program = client.compile(g, fetches=["y"], ys=["y"], xs=["x"])
small, large = np.ones(10, np.float32), np.ones(200_000, np.float32)
signal.signal(signal.SIGALRM, signal.default_int_handler)

def training(**options):
    g = gr.Graph()
    g.reduce_mean(g.op_output("Square", g.placeholder("x", "float32", [None]) * g.variable("w", np.float32(1.0))),
                  axis=[0], name="loss")
    return client.session(g, **options)
"""

_INTERRUPTS = """
draw = random.Random(1)
for _ in range(60):
    try:
        # Again: Python only prints exceptions within finalizers.
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.03), 2)
        while True:
            program.evaluate({"x": VALUE})
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    # Answers come to other threads only if the main thread holds no lock.
    other = threading.Thread(target=program.evaluate, args=({"x": small},), daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive()
"""

_CALLS_IN_HANDLER = """
handle = program.forward({"x": small})
done = []

def call(*_):
    done.append(program.evaluate({"x": 2 * small}).outputs["y"][0])
    try:
        handle.vjp()
    except UnsupportedError as refusal:
        done.append(refusal)
    signal.setitimer(signal.ITIMER_REAL, 0.02)

signal.signal(signal.SIGALRM, call)
signal.setitimer(signal.ITIMER_REAL, 0.05)
until = time.monotonic() + 2
while time.monotonic() < until:
    for value in (small, large):
        program.evaluate({"x": value})
signal.setitimer(signal.ITIMER_REAL, 0)
assert 2.0 in done and any(isinstance(one, UnsupportedError) for one in done), done
handle.vjp()
"""

_SESSION_IN_HANDLER = """
refused = []
with training() as session:
    def save(*_):
        try:
            session.save()
        except UnsupportedError as refusal:
            refused.append(refusal)

    signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.02)
    until = time.monotonic() + 60
    while not refused and time.monotonic() < until:
        session.step({"x": small}, "loss", gr.optimizers.SGD(0.01))
    signal.setitimer(signal.ITIMER_REAL, 0)
    session.save()
assert refused
"""

_SESSION_IN_PROGRESS = """
seen = []

def read(report):
    if report.done and not report.is_finished:
        seen.append(session.read()["w"])

with training(progress=read) as session:
    for _ in range(2):
        session.step({"x": small}, "loss", gr.optimizers.SGD(0.01))
assert len(seen) == 2
"""


_FORK = """
import os
stop = threading.Event()

def call():
    while not stop.is_set():
        program.evaluate({"x": small})

threads = [threading.Thread(target=call) for _ in range(6)]
for thread in threads:
    thread.start()
while len(client._channel.guard._threads_in_grpc) + len(client._channel.guard._threads) < 6:
    time.sleep(0.01)
child = os.fork()
if not child:
    # These threads are not in the child, where new ones may get their ids.
    os._exit(len(client._channel.guard._threads | client._channel.guard._threads_in_grpc))
_, status = os.waitpid(child, 0)
stop.set()
assert status == 0
"""


@pytest.mark.parametrize(
    "script",
    [
        _INTERRUPTS.replace("VALUE", "small"),
        _INTERRUPTS.replace("VALUE", "large"),
        _CALLS_IN_HANDLER,
        _SESSION_IN_HANDLER,
        _SESSION_IN_PROGRESS,
        _FORK,
    ],
    ids=[
        *("small calls", "large calls", "calls in a handler", "a session in a handler", "a session in its progress"),
        "a fork",
    ],
)
def test_no_call_waits_for_ever_after_or_in(server: RunningServer, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _START + script, server.target],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
