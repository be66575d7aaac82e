"""Tests two servers that share a registry in PostgreSQL: changes of the other server, races, quotas, and faults."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gradrule as gr
from tests.cluster.postgres import PASSWORD, PostgresServer, running_postgres
from tests.service.answers import refused
from tests.service.graph_defs import SIGN_FEEDS, sign_graph
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

_NAMES: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"]}
_MAX_RULES = 12
_IMPORTED = re.compile(r"^import time:[ |\d]+ ([\w.]+)$", re.MULTILINE)
_PACKAGES_OF_EXTRAS = {"psycopg", "fsspec", "s3fs", "botocore", "aiobotocore", "aiohttp", "ray"}
_FLAGS = ("--max-rules", str(_MAX_RULES))


@dataclass
class Pair:
    """Two servers with one registry, and a client of each."""

    postgres: PostgresServer
    url: str
    servers: Sequence[RunningServer]
    here: gr.Client
    there: gr.Client


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Returns two servers on an empty database."""
    with running_pair(postgres, postgres.create_database(), tmp_path_factory.mktemp("servers"), _FLAGS) as made:
        yield made


@contextmanager
def running_pair(postgres: PostgresServer, url: str, folder: Path, flags: Sequence[str] = ()) -> Iterator[Pair]:
    """Starts two servers at once; checks at the end that no log holds the password or a traceback."""
    folders = [folder / name for name in ("here", "there")]
    with ExitStack() as stack:
        entered = ThreadPoolExecutor(2).map(
            lambda folder: stack.enter_context(running_server(folder, flags, {"GRADRULE_REGISTRY": url})), folders
        )
        servers = list(entered)
        here, there = (stack.enter_context(gr.connect(server.target)) for server in servers)
        yield Pair(postgres, url, servers, here, there)
    for server in servers:
        log = server.log.read_text()
        assert PASSWORD not in log
        assert "Traceback" not in log


@pytest.fixture
def clean(pair: Pair) -> Iterator[Pair]:
    """Deletes all rules and programs after a test."""
    yield pair
    for program in pair.here.list_programs():
        pair.here.delete_program(program.name)
    for rule in pair.here.list_rules("user"):
        pair.here.delete_rule(rule.name)


def gradient(client: gr.Client, rule: str) -> float:
    """Returns the gradient of sign(x) by a rule, of a program within the call."""
    return float(client.evaluate(sign_graph(), feeds=SIGN_FEEDS, overrides={"Sign": rule}, **_NAMES).gradients["x"][0])


def compile_with(client: gr.Client, rule: str, name: str) -> Any:
    """Stores a program of sign(x) with a rule."""
    return client.compile(sign_graph(), overrides={"Sign": rule}, name=name, **_NAMES)


def run(client: gr.Client, name: str) -> float:
    """Returns the gradient of a stored program."""
    return float(client.program(name).evaluate(SIGN_FEEDS).gradients["x"][0])


def outcomes(calls: Sequence[Callable[[], object]]) -> Counter[str]:
    """Runs calls at once and counts their reasons; "OK" for those that succeed."""
    start = threading.Barrier(len(calls))

    def outcome(call: Callable[[], object]) -> str:
        start.wait()
        try:
            call()
        except gr.errors.GradruleError as cause:
            return cause.reason
        return "OK"

    with ThreadPoolExecutor(len(calls)) as threads:
        return Counter(threads.map(outcome, calls))


def test_what_one_server_creates_the_other_uses_at_once(clean: Pair) -> None:
    for number in range(5):
        maker, user = (clean.here, clean.there) if number % 2 else (clean.there, clean.here)
        maker.create_rule(f"R{number}", f"{number + 2} * dy")
        assert gradient(user, f"R{number}") == number + 2
        assert user.get_rule(f"R{number}").formula == f"{number + 2} * dy"
        assert f"R{number}" in [rule.name for rule in user.list_rules("user")]
        compile_with(maker, f"R{number}", f"p{number}")
        assert run(user, f"p{number}") == number + 2
        assert f"programs/p{number}" in [program.name for program in user.list_programs()]


def test_what_one_server_deletes_or_replaces_is_gone_on_the_other(clean: Pair) -> None:
    clean.here.create_rule("R", "2 * dy")
    compile_with(clean.here, "R", "p")
    held = clean.there.program("p")
    for _ in range(3):
        assert gradient(clean.there, "R") == float(held.evaluate(SIGN_FEEDS).gradients["x"][0]) == 2
    clean.here.delete_rule("R")
    clean.here.delete_program("p")
    wait_until(lambda: reason_of(lambda: gradient(clean.there, "R")) == "UNKNOWN_RULE" or None, "end of the rule")
    wait_until(
        lambda: reason_of(lambda: held.evaluate(SIGN_FEEDS)) == "PROGRAM_NOT_FOUND" or None, "end of the program"
    )
    # A program that is stored now has the rule of now, also on a server that held the old one.
    clean.here.create_rule("R", "3 * dy")
    compile_with(clean.there, "R", "p")
    assert run(clean.here, "p") == run(clean.there, "p") == gradient(clean.there, "R") == 3


def reason_of(call: Callable[[], object]) -> str:
    """Returns the reason of the error that a call raises; "OK" if it raises none."""
    return next(iter(outcomes([call])))


def test_one_of_several_contents_wins_a_name(clean: Pair) -> None:
    both = (clean.here, clean.there)
    equal = outcomes([functools.partial(client.create_rule, "Equal", "2 * dy") for client in both * 4])
    assert equal == {"OK": 8}
    calls = [
        functools.partial(client.create_rule, "Different", f"{number} * dy") for number, client in enumerate(both * 4)
    ]
    assert outcomes(calls) == {"OK": 1, "RULE_EXISTS": 7}
    assert clean.here.get_rule("Different").formula == clean.there.get_rule("Different").formula
    assert outcomes([functools.partial(compile_with, client, "ste", "equal") for client in both * 3]) == {"OK": 6}
    calls = [
        functools.partial(compile_with, client, rule, "different")
        for client, rule in zip(both * 2, ("ste", "ste_sign", "Equal", "Different"), strict=True)
    ]
    assert outcomes(calls) == {"OK": 1, "PROGRAM_EXISTS": 3}
    assert run(clean.here, "different") == run(clean.there, "different")


def test_quota_counts_across_servers(clean: Pair) -> None:
    calls = [
        functools.partial((clean.here, clean.there)[number % 2].create_rule, f"R{number}", "2 * dy")
        for number in range(2 * _MAX_RULES)
    ]
    assert outcomes(calls) == {"OK": _MAX_RULES, "LIMIT_EXCEEDED": _MAX_RULES}
    names = [rule.name for rule in clean.there.list_rules("user")]
    assert len(names) == _MAX_RULES
    clean.there.delete_rule(names[0])
    clean.here.create_rule("Next", "2 * dy")
    with refused("LIMIT_EXCEEDED"):
        clean.there.create_rule("Last", "2 * dy")


class Load:
    """Calls both servers in threads until `stop`, with programs that they hold, and checks every answer."""

    def __init__(self, pair: Pair) -> None:
        self.calls = 0
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in (pair.here, pair.there)]
        for client in (pair.here, pair.there):
            assert gradient(client, "Held") == run(client, "held") == 2
        for thread in self._threads:
            thread.start()

    def _run(self, client: gr.Client) -> None:
        program = client.program("held")
        while not self._stop.is_set():
            try:
                assert gradient(client, "Held") == float(program.evaluate(SIGN_FEEDS).gradients["x"][0]) == 2
                self.calls += 2
            except BaseException as failure:
                self.failures.append(failure)
                return

    def wait_for_calls(self, count: int = 20) -> None:
        """Waits until calls that started now have been answered."""
        wanted = self.calls + count
        wait_until(lambda: self.calls >= wanted or self.failures or None, "answers")
        assert self.failures == []

    def stop(self) -> None:
        """Stops, and asserts that no call failed."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []


@pytest.fixture
def load(clean: Pair) -> Iterator[Load]:
    """Runs calls of a rule and a program that both servers hold."""
    clean.here.create_rule("Held", "2 * dy")
    compile_with(clean.here, "Held", "held")
    running = Load(clean)
    running.wait_for_calls()
    yield running
    running.stop()


def registry_of(server: RunningServer) -> Any:
    """Returns the state of the registry, as a server reports it."""
    with gr.connect(server.target) as client:
        return client.server_status().registry


def test_status_shows_where_the_registry_is_and_since_when_it_is_away(pair: Pair) -> None:
    server = pair.servers[0]
    shown = pair.url.replace(f":{PASSWORD}", "")
    before = registry_of(server)
    assert (before.database, before.problem, before.unavailable_for) == (shown, "", None)
    assert before.blobs == str(server.data_dir / "registry" / "blobs")
    pair.postgres.stop()
    try:
        first = wait_until(lambda: found if (found := registry_of(server)).problem else None, "a database that is away")
        later = wait_until(
            lambda: found if (found := registry_of(server)).unavailable_for > first.unavailable_for + 1 else None,
            "a longer time without the database",
        )
    finally:
        pair.postgres.start()
    assert shown in later.problem
    assert PASSWORD not in later.problem
    wait_until(lambda: registry_of(server) == before or None, "the database")


def create_until_ok(client: gr.Client, name: str) -> None:
    """Creates a rule as soon as the database can be used."""
    wait_until(lambda: reason_of(lambda: client.create_rule(name, "5 * dy")) == "OK" or None, "created rule", 60)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_calls_go_on_while_the_database_is_away(clean: Pair, load: Load, how: str) -> None:
    clean.here.create_rule("Before", "4 * dy")
    described = clean.here.program("held")
    try:
        clean.postgres.stop() if how == "stopped" else clean.postgres.kill()
        for client in (clean.here, clean.there):
            with refused("UNAVAILABLE") as refusal:
                client.create_rule("Meanwhile", "3 * dy")
            assert "database" in refusal.message
            with refused("UNAVAILABLE"):
                client.get_rule("Unknown")
            with refused("UNAVAILABLE"):
                gradient(client, "Unknown")
            with refused("UNAVAILABLE"):
                client.program("unknown")
            # A new client may use a program that the server has in memory, also one that another server created.
            found = client.program("held").message
            assert (found.name, found.digests, found.overrides) == (
                described.message.name,
                described.message.digests,
                described.message.overrides,
            )
            assert run(client, "held") == 2
            # A server that holds the rule needs no database for a new program.
            assert gradient(client, "Held") == 2
        load.wait_for_calls()
    finally:
        clean.postgres.start()
    create_until_ok(clean.here, "After")
    assert gradient(clean.there, "After") == 5
    names = {rule.name for rule in clean.there.list_rules("user")}
    assert {"Before", "After", "Held"} <= names
    load.wait_for_calls()


def test_calls_go_on_while_the_database_hangs(clean: Pair, load: Load) -> None:
    with clean.postgres.frozen():
        started = time.monotonic()
        found = outcomes([lambda: clean.here.create_rule("Meanwhile", "3 * dy", timeout=60)] * 8)
        # A call waits for seconds, not for its deadline.
        assert found == {"UNAVAILABLE": 8}
        assert time.monotonic() - started < 50
        load.wait_for_calls()
    create_until_ok(clean.there, "After")
    assert gradient(clean.here, "After") == 5


def test_ended_connections_do_no_harm(clean: Pair, load: Load) -> None:
    for number in range(3):
        clean.postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'gradrule'"
        )
        create_until_ok(clean.there, f"R{number}")
        assert gradient(clean.here, f"R{number}") == 5
    load.wait_for_calls()


def test_nothing_that_was_acknowledged_is_lost_with_a_server(clean: Pair, tmp_path: Path) -> None:
    acknowledged: list[str] = []
    with (
        running_server(tmp_path, _FLAGS, {"GRADRULE_REGISTRY": clean.url}) as third,
        gr.connect(third.target) as client,
    ):

        def create_all() -> None:
            for number in range(1000):
                name = f"R{number % 5}"
                try:
                    client.create_rule(name, f"{number} * dy", timeout=10)
                    acknowledged.append(f"{number} * dy")
                    client.delete_rule(name, timeout=10)
                    acknowledged.pop()
                except gr.errors.GradruleError:
                    return

        thread = threading.Thread(target=create_all)
        thread.start()
        wait_until(lambda: acknowledged or None, "created rule")
        third.kill()
        thread.join()
    # At most one rule was acknowledged; what was not may be there too. Nothing hinders the others.
    formulas = {rule.formula for rule in clean.here.list_rules("user")}
    assert not acknowledged or formulas <= set(acknowledged)
    assert len(formulas) <= 1
    clean.here.create_rule("After", "2 * dy")
    assert gradient(clean.there, "After") == 2


def test_another_database_server_takes_over(tmp_path: Path) -> None:
    """A synchronous standby has every acknowledged write, and the servers find it after its promotion."""
    with running_postgres() as primary, running_postgres(standby_of=primary) as standby:
        url = primary.create_database()
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        query = "SELECT sync_state FROM pg_stat_replication"
        wait_until(lambda: primary.execute(query) == ["sync"] or None, "synchronous standby")
        hosts = f"127.0.0.1:{primary.port}"
        url = url.replace(hosts, f"{hosts},127.0.0.1:{standby.port}")
        with running_pair(primary, url, tmp_path) as pair:
            pair.here.create_rule("Held", "2 * dy")
            compile_with(pair.here, "Held", "held")
            load = Load(pair)
            acknowledged: list[str] = []

            def create_rules(client: gr.Client, prefix: str) -> None:
                for number in range(1000):
                    try:
                        client.create_rule(f"{prefix}{number}", f"{number} * dy", timeout=30)
                    except gr.errors.GradruleError as cause:
                        assert cause.reason == "UNAVAILABLE", cause
                        return
                    acknowledged.append(f"{prefix}{number}")

            writers = [
                threading.Thread(target=create_rules, args=(client, prefix))
                for client, prefix in ((pair.here, "A"), (pair.there, "B"))
            ]
            try:
                for writer in writers:
                    writer.start()
                wait_until(lambda: len(acknowledged) >= 5 or None, "created rules")
                primary.kill()
                for writer in writers:
                    writer.join()
                load.wait_for_calls()
                standby.promote()
                for client in (pair.here, pair.there):
                    create_until_ok(client, "After")
                    assert {*acknowledged, "After", "Held"} <= {rule.name for rule in client.list_rules("user")}
                    assert run(client, "held") == 2
                load.wait_for_calls()
            finally:
                load.stop()


def test_server_without_shared_registry_imports_no_package_of_an_extra(tmp_path: Path) -> None:
    assert all(importlib.util.find_spec(name) for name in _PACKAGES_OF_EXTRAS)
    with (
        running_server(tmp_path, (), {"PYTHONPROFILEIMPORTTIME": "1"}) as server,
        gr.connect(server.target) as client,
    ):
        client.create_rule("R", "2 * dy")
        compile_with(client, "R", "p")
        client.upload(b"a blob")
        assert run(client, "p") == 2
    imported = {name.partition(".")[0] for name in _IMPORTED.findall(server.log.read_text())}
    assert {"gradrule_server", "sqlalchemy", "grpc"} <= imported
    assert not imported & _PACKAGES_OF_EXTRAS
