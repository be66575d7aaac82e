"""Tests that three servers with one registry and one object store act as one service while one part of it fails."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import gradrule as gr
from tests.cluster.fault_load import (
    HEADER,
    NAMES,
    SERVERS,
    WEIGHTS,
    Cluster,
    Load,
    create,
    delete,
    gradient,
    model,
    options_of_clients,
)
from tests.cluster.postgres import PostgresServer
from tests.cluster.s3 import S3Server
from tests.service.answers import refused
from tests.waiting import wait_until

X = np.ones((2, len(WEIGHTS)), np.float32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer, s3: S3Server) -> Iterator[Cluster]:
    """Returns three servers that have the rule `Held` and the program `held`."""
    made = Cluster(tmp_path_factory.mktemp("servers"), postgres.create_database(), s3, s3.create_bucket())
    try:
        with gr.connect(made.target) as client:
            client.create_rule("Held", "2 * dy")
            client.compile(model(), overrides={"Sign": "Held"}, name="held", **NAMES)
        yield made
        assert sorted(made.running) == list(range(SERVERS))
    finally:
        made.close()
    for log in made.logs:
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Returns rows of outcomes, which are printed after the tests of this file."""
    rows = [HEADER, "|---" * HEADER.count(" | ") + "|---|"]
    yield rows
    print("", *rows, sep="\n")


@pytest.fixture
def load(cluster: Cluster, table: list[str], request: pytest.FixtureRequest) -> Iterator[Load]:
    """Returns calls that run during a test."""
    # So that clients leave a server that hangs within 4 s instead of 28 s.
    with options_of_clients(grpc_keepalive_time_ms=2500, grpc_http2_ping_timeout_ms=1500):
        running = Load(cluster.target)
    try:
        running.wait_for_calls()
        yield running
    finally:
        running.close()
        table.append(running.row(request.node.name.removeprefix("test_").replace("_", " ")))


def verify(load: Load, cluster: Cluster) -> None:
    """Asserts that no answer was wrong, no evaluation failed, and that every server has what was acknowledged.

    Leaves the registry as it was before the load.
    """
    load.stop()
    assert load.wrong == []
    assert [(kind, str(failure)) for kind, failure in load.failures if kind in load.evaluations] == []
    assert load.kept
    assert load.gone
    with ExitStack() as stack:
        clients = [stack.enter_context(gr.connect(target)) for target in cluster.targets]
        for client in clients:
            rules = {rule.name: rule.formula for rule in client.list_rules("user") if rule.name.startswith(load.prefix)}
            programs = {program.name.removeprefix("programs/") for program in client.list_programs()}
            load.lost.update(
                name
                for name, factor in load.kept.items()
                if rules.get(name) != f"{factor} * dy" or name.lower() not in programs
            )
            assert load.lost == set()
            assert not load.gone & set(rules)
            assert not {name.lower() for name in load.gone} & programs
            assert set(rules) <= {*load.kept, *load.unsure}
        # Every server runs one of the last programs, which another server may have created.
        name, factor = next(reversed(load.kept.items()))
        for client in clients:
            np.testing.assert_array_equal(
                client.program(name.lower()).evaluate({"x": X}).gradients["x"], gradient(factor, len(X))
            )
        # A change whose outcome is not known can be made again.
        for name, factor in load.unsure.items():
            create(clients[0], name, factor)
        for name in (*load.kept, *load.unsure):
            delete(clients[0], name)
        for client in clients:
            wait_until(functools.partial(has_no_rule, client, load.prefix), "the end of the rules")


def has_no_rule(client: gr.Client, prefix: str) -> bool | None:
    return not any(rule.name.startswith(prefix) for rule in client.list_rules("user")) or None


def holds_session(target: str) -> bool:
    with gr.connect(target) as client:
        return any(tenant.sessions.used for tenant in client.server_status().tenants)


def programs_in_engines(target: str) -> int:
    with gr.connect(target) as client:
        return sum(engine.programs for engine in client.server_status().engines)


def test_calls_are_spread_and_any_server_compiles_what_another_created(cluster: Cluster) -> None:
    before = [programs_in_engines(target) for target in cluster.targets]
    with gr.connect(cluster.targets[0]) as creator, gr.connect(cluster.target, stream=False) as client:
        create(creator, "Five", 5)
        program = client.program("five")

        def all_have_compiled() -> bool | None:
            np.testing.assert_array_equal(program.evaluate({"x": X}).gradients["x"], gradient(5, len(X)))
            return [programs_in_engines(target) for target in cluster.targets] == [
                count + 1 for count in before
            ] or None

        # A call at a time, until the client has called every server.
        wait_until(all_have_compiled, "the program at all servers")
        delete(client, "Five")


def test_server_is_killed_and_started_again(cluster: Cluster, load: Load) -> None:
    with gr.connect(cluster.target) as client, client.session(model()) as session:
        session.assign({"w": WEIGHTS + 1})
        saved = session.save()
        handle = client.program("held").forward({"x": X})
        (holder,) = (number for number, target in enumerate(cluster.targets) if holds_session(target))
        for number in range(SERVERS):
            cluster.kill(number, load)
            # The forward pass is repeated if the server had it.
            np.testing.assert_array_equal(handle.vjp()["x"], gradient(2, len(X)))
            if number < holder:
                np.testing.assert_array_equal(session.read()["w"], WEIGHTS + 1)
            else:
                with refused("SESSION_LOST"):
                    session.read()
            load.wait_for_calls()
            cluster.start(number)
            load.wait_for_calls()
        with client.session(saved) as continued:
            np.testing.assert_array_equal(continued.read()["w"], WEIGHTS + 1)
    verify(load, cluster)
    assert [str(failure) for _, failure in load.failures] == []


def test_all_servers_are_restarted_one_after_the_other(cluster: Cluster, load: Load) -> None:
    for number in range(SERVERS):
        cluster.terminate(number)
        load.wait_for_calls()
        cluster.start(number)
        load.wait_for_calls()
    verify(load, cluster)
    assert [str(failure) for _, failure in load.failures] == []


def test_server_hangs(cluster: Cluster, load: Load) -> None:
    hanging = cluster.running[1].process
    hanging.send_signal(signal.SIGSTOP)
    try:
        load.wait_for_calls(kinds=load.evaluations)
    finally:
        hanging.send_signal(signal.SIGCONT)
    load.wait_for_calls()
    verify(load, cluster)
    # A server that hangs while it writes holds the lock of writers, until the database ends its transaction.
    assert {failure.reason for _, failure in load.failures} <= {"UNAVAILABLE"}


def test_database_is_restarted(cluster: Cluster, load: Load, postgres: PostgresServer) -> None:
    postgres.stop()
    try:
        # It stays away until every writer was refused and evaluations went on.
        wait_until(lambda: len(load.failures) > 3 or None, "refused changes")
        load.wait_for_calls(kinds=load.evaluations)
    finally:
        postgres.start()
    load.wait_for_calls()
    verify(load, cluster)
    # Only what needs the database was refused.
    assert {failure.reason for _, failure in load.failures} == {"UNAVAILABLE"}


def test_object_store_is_away(cluster: Cluster, load: Load, s3: S3Server) -> None:
    with gr.connect(cluster.target) as client, s3.proxy.stopped():
        with refused("UNAVAILABLE"):
            client.compile(model(WEIGHTS + 2), name="new", **NAMES)
        load.wait_for_calls()
    with gr.connect(cluster.target) as client:
        client.compile(model(WEIGHTS + 2), name="new", **NAMES)
        client.delete_program("new")
    verify(load, cluster)
    assert [str(failure) for _, failure in load.failures] == []
