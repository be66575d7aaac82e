"""Tests a registry in PostgreSQL as several servers use it: starting, migrating, changes of others, refusing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DataError

from gradrule.v1 import errors_pb2, program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.quotas import Quota
from gradrule_server.registry import database, postgres_database, schema
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.postgres_database import PostgresDatabase
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store
from tests.cluster.postgres import PASSWORD, PostgresServer
from tests.unit.registry.rows import counts, execute, kept_bytes
from tests.waiting import wait_until

T = TypeVar("T")


def rule(name: str) -> RuleRow:
    return RuleRow(name, b"definition", "", 1)


@pytest.fixture
def open_another(database_url: str) -> Iterator[Callable[[], Store]]:
    """Returns a function that opens the registry as one more server does."""
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(Store(PostgresDatabase(database_url)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def at_once(function: Callable[[], T], count: int = 8) -> list[T]:
    """Calls a function in several threads at once."""
    start = threading.Barrier(count)

    def call(_: int) -> T:
        start.wait()
        return function()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))


def wait_for_availability(store: Store, *, is_available: bool = True) -> None:
    """Checks the database until it can be used, or cannot."""

    def is_reached() -> bool | None:
        store.database.check()
        return (not store.database.away) == is_available or None

    wait_until(is_reached, "change of the database")


def test_servers_that_start_at_once_create_one_registry(open_another: Callable[[], Store]) -> None:
    stores = at_once(open_another)
    assert len({tuple(execute(store, "SELECT key, value FROM meta ORDER BY key")) for store in stores}) == 1
    stores[0].add_rule(rule("a"))
    assert [row.name for row in stores[-1].rules()] == ["a"]


def test_servers_that_migrate_at_once_migrate_once(
    postgres: PostgresServer,
    database_url: str,
    open_another: Callable[[], Store],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = database_url.rpartition("/")[2]
    old = open_another()
    old.add_rule(rule("a"))
    steps = {3: ("ALTER TABLE rules ADD COLUMN added INTEGER DEFAULT 7", "SELECT pg_sleep(0.1)")}
    monkeypatch.setattr(schema, "_STEPS", steps)
    for module in (schema, database):
        monkeypatch.setattr(module, "SCHEMA_VERSION", 4)
    new = at_once(open_another, 4)
    assert execute(new[0], "SELECT name, added FROM rules") == [("a", 7)]
    assert execute(new[0], "SELECT value FROM meta WHERE key = 'schema_version'") == [("4",)]
    # The older server notices it, and refuses to write tables that it does not know.
    monkeypatch.setattr(database, "SCHEMA_VERSION", 3)
    with pytest.raises(GradruleError, match="newer release") as refusal:
        old.add_rule(rule("b"))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    for use in (old.rules, lambda: old.add_rule(rule("b"))):
        # Each call looks whether the tables are readable again.
        monkeypatch.setattr(old.database, "_probe_at", 0.0)
        with pytest.raises(GradruleError, match="newer release"):
            use()
        assert old.database.away
    # The tables of before were restored.
    postgres.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'", database=name)
    wait_for_availability(old)
    assert [row.name for row in old.rules()] == ["a"]
    postgres.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'", database=name)
    monkeypatch.setattr(schema, "_STEPS", {"postgresql": {}})
    with pytest.raises(StoreError, match=r"has schema version 4, and this release reads version 3"):
        open_another()


def test_database_of_another_program_is_refused_unchanged(postgres: PostgresServer, database_url: str) -> None:
    name = database_url.rpartition("/")[2]
    postgres.execute("CREATE TABLE photographs (id integer)", database=name)
    with pytest.raises(StoreError, match=r"database of another program .*photographs"):
        PostgresDatabase(database_url)
    found = postgres.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", database=name)
    assert found == ["photographs"]


def test_database_of_another_encoding_is_refused(postgres: PostgresServer) -> None:
    url = postgres.create_database(options="ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    with pytest.raises(StoreError, match="has the encoding LATIN1; create a database with ENCODING 'UTF8'"):
        PostgresDatabase(url)


def test_refusals_hold_no_password(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    for url in (
        database_url + "x",
        database_url.replace("127.0.0.1", "host.invalid"),
        database_url + f"?password={PASSWORD}&sslmode=verify-full",
    ):
        with pytest.raises(StoreError) as refusal:
            PostgresDatabase(url)
        assert PASSWORD not in str(refusal.value)
    assert PASSWORD not in caplog.text


def test_one_data_folder_belongs_to_one_server(database_url: str, tmp_path: Path) -> None:
    with closing(PostgresDatabase(database_url, tmp_path)):
        with pytest.raises(StoreError, match="in use by another server"):
            PostgresDatabase(database_url, tmp_path)
        PostgresDatabase(database_url, tmp_path / "other").close()
    PostgresDatabase(database_url, tmp_path).close()


def test_registry_of_the_last_release_is_counted_and_loses_its_log(open_another: Callable[[], Store]) -> None:
    old = open_another()
    old.add_rule(RuleRow("a", b"definition", "d", 1), "ada")
    old.add_program(ProgramRow("p", "i", b"12", 1), ProgramContent(b"3", b"456", b""))
    before = old.usage(["ada", "default"])
    for statement in (
        "DROP TABLE tenant_usage, blob_usage",
        "CREATE TABLE changes (number bigint PRIMARY KEY)",
        "CREATE TABLE program_blobs (name text PRIMARY KEY)",
        "UPDATE meta SET value = '2' WHERE key = 'schema_version'",
    ):
        execute(old, statement)
    new = at_once(open_another, 4)[0]
    found = new.usage(["ada", "default"])
    assert [(item.rules, item.programs, item.registry_bytes) for item in found.values()] == [
        (item.rules, item.programs, item.registry_bytes) for item in before.values()
    ]
    tables = execute(new, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
    assert [name for (name,) in tables] == ["blob_usage", "blobs", "meta", "programs", "rules", "tenant_usage"]


def test_other_servers_learn_changes(open_another: Callable[[], Store], tmp_path: Path) -> None:
    one, two = open_another(), open_another()
    first, second = RuleRegistry(one, []), RuleRegistry(two, [])
    for number in range(3):
        first.create(f"R{number}", rule_pb2.RuleDefinition(expression="2 * dy"), "")
    first.create("R0", rule_pb2.RuleDefinition(expression="3 * dy"), "", may_replace=True)
    first.delete("R1")
    assert second.find("R0") is None
    revision = second.revision
    assert second.get("R0").message.formula == "3 * dy"
    assert [second.find(f"R{number}") is not None for number in range(3)] == [True, False, True]
    assert (second.revision, len(second)) == (revision + 1, 2)
    # Nothing is read again.
    assert second.refresh()
    assert second.revision == revision + 1

    changed: list[str] = []
    blobs = BlobStore(tmp_path, 0)
    ours, theirs = ProgramRegistry(one, blobs), ProgramRegistry(two, blobs)
    theirs.on_changed = changed.append
    for name in ("kept", "deleted", "replaced"):
        create_program(ours, name)
        theirs.get(name)
    ours.delete("deleted")
    ours.delete("replaced")
    create_program(ours, "replaced", "other")
    create_program(ours, "unknown")
    ours.delete("unknown")
    theirs.apply_changes()
    assert sorted(changed) == ["programs/deleted", "programs/replaced"]
    theirs.apply_changes()
    assert len(changed) == 2


def test_program_that_is_replaced_while_it_is_read_is_noticed(
    open_another: Callable[[], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = open_another(), open_another()
    blobs, changed = BlobStore(tmp_path, 0), list[str]()
    ours, theirs = ProgramRegistry(one, blobs), ProgramRegistry(two, blobs)
    theirs.on_changed = changed.append
    create_program(ours, "p")

    def late(*arguments: str) -> ProgramRow | None:
        row = read(*arguments)
        ours.delete("p")
        theirs.apply_changes()
        return row

    read = two.program
    monkeypatch.setattr(two, "program", late)
    theirs.get("p")
    assert changed == ["programs/p"]


def create_program(registry: ProgramRegistry, name: str, digest: str = "d") -> None:
    spec, program = program_pb2.ProgramSpec(), program_pb2.Program()
    spec.graph.serialized = b"graph"
    program.digests.program = digest
    registry.create(name, spec, b"", program, b"")


def test_quotas_are_exact_across_servers(open_another: Callable[[], Store]) -> None:
    stores = iter([open_another() for _ in range(3)])
    registries = [RuleRegistry(store, [], quota=Quota(5, "rules", "--tenant-rules")) for store in stores]
    numbers = iter(range(24))

    def create() -> str:
        number = next(numbers)
        definition = rule_pb2.RuleDefinition(expression="2 * dy")
        try:
            registries[number % 3].create(f"R{number // 2}", definition, "")
        except GradruleError as cause:
            return reason_name(cause.reason)
        return "OK"

    # Two servers may create equal rules at the same time.
    found = Counter(at_once(create, 24))
    assert set(found) == {"OK", "QUOTA_EXCEEDED"}
    assert {registry.refresh() for registry in registries} == {True}
    assert {len(registry) for registry in registries} == {5}


def test_writer_that_waits_too_long_is_refused(
    postgres: PostgresServer, open_another: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_another()
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with store.database.write() as connection:
            store.database.lock(connection)
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        with pytest.raises(GradruleError, match="is busy; try again") as refusal:
            store.add_rule(rule("a"))
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
        assert refusal.value.retry_after_s
        # Reading goes on.
        assert store.rules() == []
    finally:
        release.set()
        thread.join()
    store.add_rule(rule("a"))


def test_more_writers_than_connections_take_turns(open_another: Callable[[], Store]) -> None:
    store = open_another()
    numbers = iter(range(100))

    def add_program() -> None:
        number = next(numbers)
        source = ProgramContent(b"", b"graph %d" % number, b"")
        row = ProgramRow(f"p{number}", "i", b"", 1)
        for _ in range(3):
            assert store.add_program(row, source)
            with store.database.exclusively():
                assert store.remove_program(row.id)

    at_once(add_program, 20)
    assert counts(store) == (0, 0)


def test_refused_statement_is_reported_once(
    postgres: PostgresServer, database_url: str, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    name = database_url.rpartition("/")[2]
    postgres.execute("ALTER TABLE meta RENAME TO moved", database=name)
    for _ in range(3):
        store.database.check()
        with pytest.raises(GradruleError, match="cannot be used now") as refusal:
            store.add_rule(rule("a"))
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    [line] = caplog.messages
    assert 'relation "meta" does not exist' in line
    postgres.execute("ALTER TABLE moved RENAME TO meta", database=name)
    wait_for_availability(store)
    store.add_rule(rule("b"))


def test_number_out_of_range_in_a_statement_of_the_server_is_reported(
    postgres: PostgresServer, database_url: str, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    name = database_url.rpartition("/")[2]
    postgres.execute("ALTER TABLE rules ALTER COLUMN create_time_us TYPE smallint", database=name)
    with pytest.raises(GradruleError, match="cannot be used now") as refusal:
        store.add_rule(RuleRow("a", b"definition", "", 1 << 40))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    store.database.check()
    assert "smallint out of range" in store.database.away or "smallint out of range" in caplog.text
    postgres.execute("ALTER TABLE rules ALTER COLUMN create_time_us TYPE bigint", database=name)
    wait_for_availability(store)
    store.add_rule(RuleRow("a", b"definition", "", 1 << 40))


def test_connections_that_the_database_has_ended_are_replaced(
    postgres: PostgresServer, open_another: Callable[[], Store]
) -> None:
    store = open_another()
    store.add_rule(rule("a"))
    at_once(store.rules, 4)
    postgres.restart()
    # No call fails.
    store.add_rule(rule("b"))
    assert at_once(lambda: [row.name for row in store.rules()], 4) == [["a", "b"]] * 4


def test_calls_wait_once_for_a_database_that_hangs(
    postgres: PostgresServer,
    open_another: Callable[[], Store],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_another()
    # Several connections: threads read at once.
    at_once(lambda: [row.name for _ in range(5) for row in store.rules()], 4)
    waits: Counter[int] = Counter()

    def counting(method: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: Any, **options: Any) -> T:
            try:
                return method(*arguments, **options)
            except psycopg.OperationalError:
                waits[threading.get_ident()] += 1
                raise

        return call

    driver = postgres_database._BoundedConnection
    monkeypatch.setattr(driver, "wait", counting(driver.wait))
    monkeypatch.setattr(driver, "connect", counting(driver.connect))
    numbers = iter(range(12))

    def call() -> str:
        number = next(numbers)
        work = (lambda: store.add_rule(rule(f"r{number}"))) if number % 2 else store.rules
        with pytest.raises(GradruleError) as refusal:
            work()
        store.database.check()
        return str(refusal.value)

    with postgres.frozen():
        messages = at_once(call, 12)
    assert {message for message in messages if "cannot be used now" not in message} == set()
    assert "busy" not in caplog.text
    assert any("no answer within 6 s" in line for line in caplog.messages)
    assert max(waits.values()) == 1
    wait_for_availability(store)
    assert store.rules() == []


def test_role_that_may_no_longer_log_in_is_reported_once(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.execute("CREATE ROLE former LOGIN PASSWORD 'former'")
    name = postgres.create_database(options="OWNER former").rpartition("/")[2]
    with closing(Store(PostgresDatabase(postgres.url(name, user="former", password="former")))) as store:
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'former'"
        postgres.execute("ALTER ROLE former NOLOGIN", end)
        wait_for_availability(store, is_available=False)
        for _ in range(3):
            store.database.check()
            assert store.database.away
        assert len([line for line in caplog.messages if "not permitted to log in" in line]) == 1
        postgres.execute("ALTER ROLE former LOGIN")
        wait_for_availability(store)
        store.add_rule(rule("a"))


@contextmanager
def lost_answer() -> Iterator[None]:
    """Ends a connection when it commits, after PostgreSQL has committed: the writer cannot know that it has."""

    def commit_and_end(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.commit()
        driver.pgconn.finish()

    event.listen(Engine, "commit", commit_and_end)
    try:
        yield
    finally:
        event.remove(Engine, "commit", commit_and_end)


def test_lost_acknowledgement_changes_no_count(open_another: Callable[[], Store]) -> None:
    store, other = open_another(), open_another()
    number, size = Quota(2, "rules", "--max-rules"), Quota(1000, "bytes", "--max-registry-bytes")
    registry = RuleRegistry(store, [], quota=number, bytes_quota=size)
    definition = rule_pb2.RuleDefinition(expression="2 * dy")

    with lost_answer(), pytest.raises(GradruleError, match="cannot be used now"):
        registry.create("R", definition, "")
    wait_for_availability(store)
    # It was stored, so that creating it again changes nothing.
    assert registry.create("R", definition, "").name == "R"
    assert (number.used, size.used) == (1, kept_bytes(store))
    with lost_answer(), pytest.raises(GradruleError, match="cannot be used now"):
        registry.delete("R")
    wait_for_availability(store)
    with pytest.raises(GradruleError, match="there is no rule 'R'"):
        registry.delete("R")
    assert (counts(store), kept_bytes(store)) == ((0, 0), 0)
    assert other.rules() == []


def test_server_with_fewer_connections_than_it_wants_goes_on(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.execute("CREATE ROLE limited LOGIN PASSWORD 'limited' CONNECTION LIMIT 2")
    name = postgres.create_database(options="OWNER limited").rpartition("/")[2]
    with closing(Store(PostgresDatabase(postgres.url(name, user="limited", password="limited")))) as store:
        store.add_rule(rule("a"))
        with store.database.read():
            for _ in range(3):
                with pytest.raises(GradruleError, match="has no free connection") as refusal:
                    at_once(store.rules, 2)
                assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
            # The other connection is used by one call after the other.
            store.add_rule(rule("b"))
            store.database.check()
            assert not store.database.away
        assert len(store.rules()) == 2
    assert len([line for line in caplog.messages if "too few connections" in line]) == 1


def test_value_that_the_database_refuses_concerns_its_caller_only(open_another: Callable[[], Store]) -> None:
    store = open_another()
    with pytest.raises(DataError):
        store.program("a\0b")
    assert not store.database.away
    assert store.rules() == []


@contextmanager
def noted_timeouts() -> Iterator[list[int]]:
    """Provides the time limits of statements that are set within the context, milliseconds."""
    found: list[int] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        if statement.startswith("SET LOCAL statement_timeout = "):
            found.append(int(statement.rpartition(" ")[2]))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_large_program_with_a_small_graph_gets_the_time_that_it_needs(
    open_another: Callable[[], Store],
) -> None:
    store = open_another()
    # A spec may hold values of variables.
    source = ProgramContent(bytes(5 << 20), b"graph", bytes(5 << 20))
    with noted_timeouts() as timeouts:
        store.add_program(ProgramRow("p", "i", b"", 1), source)
        assert store.program_content("p", "i") == source
        assert store.program_spec("p", "i") == source.spec
    assert timeouts == [7000, 7000, 6000]


def test_database_that_is_away_is_reported_once(
    postgres: PostgresServer, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    postgres.stop()
    try:
        for _ in range(5):
            store.database.check()
        with pytest.raises(GradruleError, match="cannot be used now; try again"):
            store.rules()
        [line] = caplog.messages
        assert "goes on with what it has in memory" in line
        assert PASSWORD not in line
    finally:
        postgres.start()
    other = open_another()
    other.add_rule(rule("a"))
    caplog.set_level(logging.INFO)
    wait_for_availability(store)
    assert "can be used again" in caplog.text
    assert store.rules() == [rule("a")]


def test_server_of_sqlite_does_not_load_the_driver(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gradrule_server import app\n"
        "from gradrule_server.registry.store import Store; Store(Path(sys.argv[1])).close()\n"
        "assert not {'psycopg', 'fsspec', 's3fs', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
