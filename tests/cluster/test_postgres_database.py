"""Tests a registry's database in PostgreSQL as several servers use it: starting, migrating, following, refusing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DataError

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.quotas import Quota
from gradrule_server.registry import change_log, postgres_connection, postgres_database, schema
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.database import Change
from gradrule_server.registry.postgres_copy import export_registry, import_registry
from gradrule_server.registry.postgres_database import PostgresDatabase
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store
from tests.cluster.postgres import PASSWORD, PostgresServer
from tests.unit.registry.rows import execute
from tests.waiting import wait_until

T = TypeVar("T")


def rule(name: str) -> RuleRow:
    return RuleRow(name, b"definition", "", 1)


class Follower:
    """Records the changes that a database reports."""

    def __init__(self) -> None:
        self.seen: list[Change | str] = []

    def apply(self, changes: Sequence[Change]) -> None:
        self.seen += changes

    def reload(self) -> None:
        self.seen.append("reload")


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


def follow(store: Store) -> Follower:
    """Starts to follow a registry."""
    follower = Follower()
    store.consistently(lambda: store.follow(follower))
    return follower


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
        store.check()
        return (not store.database.away) == is_available or None

    wait_until(is_reached, "change of the database")


def test_servers_that_start_at_once_create_one_registry(open_another: Callable[[], Store]) -> None:
    stores = at_once(open_another)
    assert len({tuple(execute(store, "SELECT key, value FROM meta ORDER BY key")) for store in stores}) == 1
    stores[0].add_rule(rule("a"))
    assert [row.name for row in stores[-1].rules()] == ["a"]


def test_servers_that_migrate_at_once_migrate_once(
    open_another: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = open_another()
    old.add_rule(rule("a"))
    follower = follow(old)
    steps = {"postgresql": {2: ("ALTER TABLE rules ADD COLUMN added INTEGER DEFAULT 7", "SELECT pg_sleep(0.1)")}}
    monkeypatch.setattr(schema, "_STEPS", steps)
    for module in (schema, change_log, postgres_database):
        monkeypatch.setattr(module, "SCHEMA_VERSION", 3)
    new = at_once(open_another, 4)
    assert execute(new[0], "SELECT name, added FROM rules") == [("a", 7)]
    assert execute(new[0], "SELECT value FROM meta WHERE key = 'schema_version'") == [("3",)]
    # The older server notices it, and refuses to write tables that it does not know.
    monkeypatch.setattr(change_log, "SCHEMA_VERSION", 2)
    with pytest.raises(GradruleError, match="newer release"):
        old.refresh()
    with pytest.raises(GradruleError) as refusal:
        old.exclusively(lambda: old.add_rule(rule("b")))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    for use in (old.rules, lambda: old.add_rule(rule("b"))):
        # Each call looks whether the tables are readable again.
        monkeypatch.setattr(old.database, "_probe_at", 0.0)
        with pytest.raises(GradruleError, match="newer release"):
            use()
        assert old.database.away
    assert follower.seen == []
    # The tables of before were restored.
    execute(new[0], "UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    wait_for_availability(old)
    assert [row.name for row in old.rules()] == ["a"]
    execute(new[0], "UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    monkeypatch.setattr(postgres_database, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "_STEPS", {"postgresql": {}})
    with pytest.raises(StoreError, match=r"has schema version 3, and this release reads version 2"):
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


def test_other_servers_learn_changes_in_their_order(open_another: Callable[[], Store]) -> None:
    one, two = open_another(), open_another()
    first, second = follow(one), follow(two)
    one.exclusively(lambda: one.add_rule(rule("a"), "ada"))
    two.exclusively(lambda: two.add_program(ProgramRow("p", "i", b"12", 1), ProgramContent(b"3", b"456", b"")))
    # A writer has applied all earlier changes before it writes.
    assert second.seen == [Change("rule", "ada", "a", 1, 10)]
    one.exclusively(lambda: one.remove_rule("a", "ada"))
    assert first.seen == [Change("program", "default", "p", 1, 6)]
    two.exclusively(lambda: two.remove_program("p"))
    for store in (one, two, one):
        store.refresh()
    assert first.seen[1:] == [Change("program", "default", "p", -1, -6)]
    assert second.seen[1:] == [Change("rule", "ada", "a", -1, -10)]


def test_threads_that_refresh_at_once_share_a_query(open_another: Callable[[], Store]) -> None:
    one, two = open_another(), open_another()
    follower = follow(two)
    for number in range(20):
        one.add_rule(rule(f"r{number}"))
        at_once(two.refresh, 4)
        assert [change.name for change in follower.seen if isinstance(change, Change)][-1] == f"r{number}"
    assert len(follower.seen) == 20


@pytest.mark.parametrize("how", ["restored", "pruned", "emptied"])
def test_log_that_does_not_continue_makes_a_server_read_everything(open_another: Callable[[], Store], how: str) -> None:
    one, two = open_another(), open_another()
    one.add_rule(rule("a"))
    follower = follow(two)
    if how == "restored":
        # An older state of the database, in which others have written since.
        execute(one, "DELETE FROM changes WHERE name = 'a'")
        one.add_rule(rule("b"))
    elif how == "pruned":
        for name in "bcd":
            one.add_rule(rule(name))
        execute(one, "DELETE FROM changes WHERE name IN ('', 'a', 'b')")
    else:
        execute(one, "DELETE FROM changes")
    two.refresh()
    assert follower.seen == ["reload"]
    one.add_rule(rule("z"))
    two.refresh()
    assert len(follower.seen) == 2


def test_log_keeps_the_last_rows(open_another: Callable[[], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "_KEPT_ROWS", 5)
    monkeypatch.setattr(change_log, "_PRUNE_EVERY", 10)
    store = open_another()
    for number in range(20):
        store.add_rule(rule(f"r{number}"))
    [(oldest, newest)] = execute(store, "SELECT min(number), max(number) FROM changes")
    assert newest == 21
    assert oldest > 10


def test_log_with_the_largest_number_starts_again(open_another: Callable[[], Store]) -> None:
    one, two = open_another(), open_another()
    follower = follow(two)
    one.add_rule(rule("a"))
    two.refresh()
    execute(one, f"INSERT INTO changes SELECT {2**63 - 1}, mark, kind, tenant, name, count, size FROM changes LIMIT 1")
    for name in "bcd":
        one.exclusively(lambda name=name: one.add_rule(rule(name)))  # type: ignore[misc]
    two.refresh()
    assert follower.seen[-1] == "reload"
    two.exclusively(lambda: two.add_rule(rule("e")))
    one.exclusively(lambda: one.add_rule(rule("f")))
    two.refresh()
    assert [change.name for change in follower.seen if isinstance(change, Change)][-1] == "f"
    assert [row.name for row in two.rules()] == list("abcdef")
    assert execute(one, "SELECT min(number), max(number) FROM changes") == [(1, 5)]


def test_failing_follower_reads_everything_next_time(open_another: Callable[[], Store]) -> None:
    one, two = open_another(), open_another()
    follower = follow(two)
    one.add_rule(rule("a"))
    applied = follower.apply
    follower.apply = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        two.refresh()
    follower.apply = applied  # type: ignore[method-assign]
    two.refresh()
    assert follower.seen == ["reload"]


def test_deadlock_is_tried_again(open_another: Callable[[], Store]) -> None:
    store = open_another()
    attempts = []

    def work() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            with store.database.write() as connection:
                connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"))
        store.add_rule(rule("a"))

    store.exclusively(work)
    assert len(attempts) == 3
    assert [row.name for row in store.rules()] == ["a"]
    with pytest.raises(GradruleError, match="busy"):
        store.exclusively(lambda: execute(store, "DO $$ BEGIN RAISE EXCEPTION '' USING ERRCODE = '40001'; END $$"))


def test_writer_that_waits_too_long_is_refused(
    postgres: PostgresServer, open_another: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_another()
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with store.database.write():
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        with pytest.raises(GradruleError, match="is busy; try again") as refusal:
            store.exclusively(lambda: store.add_rule(rule("a")))
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
        assert refusal.value.retry_after_s
        # Reading goes on.
        assert store.rules() == []
    finally:
        release.set()
        thread.join()
    store.exclusively(lambda: store.add_rule(rule("a")))


def test_more_writers_than_connections_take_turns(open_another: Callable[[], Store]) -> None:
    store = open_another()
    numbers = iter(range(100))

    def add_program() -> None:
        number = next(numbers)
        source = ProgramContent(b"", b"graph %d" % number, b"")
        row = ProgramRow(f"p{number}", "i", b"", 1)
        for _ in range(3):
            store.exclusively(
                lambda: store.add_program(row, source, is_graph_added=True), first=lambda: store.add_graph(source.graph)
            )
            store.exclusively(lambda: store.remove_program(row.id))
            store.refresh()

    at_once(add_program, 20)
    assert store.counts() == (0, 0)


def test_refused_statement_is_reported_once(
    postgres: PostgresServer, database_url: str, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    follower = follow(store)
    name = database_url.rpartition("/")[2]
    postgres.execute("ALTER TABLE changes RENAME TO moved", database=name)
    for _ in range(3):
        store.check()
        with pytest.raises(GradruleError, match="cannot be used now") as refusal:
            store.exclusively(lambda: store.add_rule(rule("a")))
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    [line] = caplog.messages
    assert 'relation "changes" does not exist' in line
    postgres.execute("ALTER TABLE moved RENAME TO changes", database=name)
    wait_for_availability(store)
    store.add_rule(rule("b"))
    store.refresh()
    assert [change.name for change in follower.seen if isinstance(change, Change)] == ["b"]


def test_number_out_of_range_in_a_statement_of_the_server_is_reported(
    postgres: PostgresServer, database_url: str, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    name = database_url.rpartition("/")[2]
    postgres.execute("ALTER TABLE rules ALTER COLUMN create_time_us TYPE smallint", database=name)
    with pytest.raises(GradruleError, match="cannot be used now") as refusal:
        store.add_rule(RuleRow("a", b"definition", "", 1 << 40))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
    store.check()
    assert "smallint out of range" in store.database.away or "smallint out of range" in caplog.text
    postgres.execute("ALTER TABLE rules ALTER COLUMN create_time_us TYPE bigint", database=name)
    wait_for_availability(store)
    store.add_rule(RuleRow("a", b"definition", "", 1 << 40))


def test_connections_that_the_database_has_ended_are_replaced(
    postgres: PostgresServer, open_another: Callable[[], Store]
) -> None:
    store = open_another()
    store.exclusively(lambda: store.add_rule(rule("a")))
    at_once(store.rules, 4)
    postgres.restart()
    # No call fails.
    store.exclusively(lambda: store.add_rule(rule("b")))
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

    driver = postgres_connection._BoundedConnection
    monkeypatch.setattr(driver, "wait", counting(driver.wait))
    monkeypatch.setattr(driver, "connect", counting(driver.connect))
    numbers = iter(range(12))

    def call() -> str:
        number = next(numbers)
        work = (lambda: store.exclusively(lambda: store.add_rule(rule(f"r{number}")))) if number % 2 else store.rules
        with pytest.raises(GradruleError) as refusal:
            work()
        store.check()
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
            store.check()
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

    class Counter(Follower):
        def apply(self, changes: Sequence[Change]) -> None:
            super().apply(changes)
            registry.apply([change.name for change in changes])
            for change in changes:
                number.adjust(change.count)
                size.adjust(change.size)

    follower = Counter()
    store.consistently(lambda: store.follow(follower))
    with lost_answer(), pytest.raises(GradruleError, match="cannot be used now"):
        registry.create("R", definition, "")
    wait_for_availability(store)
    # It was stored, so that creating it again changes nothing.
    assert registry.create("R", definition, "").name == "R"
    assert (number.used, size.used) == (1, store.kept_bytes())
    with lost_answer(), pytest.raises(GradruleError, match="cannot be used now"):
        registry.delete("R")
    wait_for_availability(store)
    with pytest.raises(GradruleError, match="there is no rule 'R'"):
        registry.delete("R")
    assert (number.used, size.used) == (0, 0)
    assert [change.count for change in follower.seen if isinstance(change, Change)] == [1, -1]
    assert other.rules() == []


def test_server_with_fewer_connections_than_it_wants_goes_on(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.execute("CREATE ROLE limited LOGIN PASSWORD 'limited' CONNECTION LIMIT 2")
    name = postgres.create_database(options="OWNER limited").rpartition("/")[2]
    with closing(Store(PostgresDatabase(postgres.url(name, user="limited", password="limited")))) as store:
        store.exclusively(lambda: store.add_rule(rule("a")))
        with store.database.read():
            for _ in range(3):
                with pytest.raises(GradruleError, match="has no free connection") as refusal:
                    at_once(store.rules, 2)
                assert refusal.value.reason == errors_pb2.ERROR_REASON_UNAVAILABLE
            # Writing and following go on.
            store.exclusively(lambda: store.add_rule(rule("b")))
            store.check()
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


def test_many_rows_get_the_time_that_they_need(open_another: Callable[[], Store]) -> None:
    store = open_another()
    definition = bytes(700_000)
    for number in range(3):
        store.add_rule(RuleRow(f"r{number}", definition, "", 1))
        source = ProgramContent(definition, b"", b"")
        store.add_program(ProgramRow(f"p{number}", "i", b"", 1), source)
    with noted_timeouts() as timeouts:
        assert len(store.rules()) == 3
        assert len(store.program_specs()) == 3
    # Longer before the rows, and back afterwards.
    assert timeouts == [5401, 5000] * 2


def test_large_program_with_a_small_graph_gets_the_time_that_it_needs(
    open_another: Callable[[], Store], database_url: str, tmp_path: Path
) -> None:
    store = open_another()
    # A spec may hold values of variables.
    source = ProgramContent(bytes(5 << 20), b"graph", bytes(5 << 20))
    with noted_timeouts() as timeouts:
        store.add_program(ProgramRow("p", "i", b"", 1), source)
        assert store.program_content("p", "i") == source
    assert timeouts == [7000, 5000] * 2
    with noted_timeouts() as timeouts:
        export_registry(database_url, tmp_path / "file")
        store.remove_program("p")
        import_registry(tmp_path / "file", database_url)
    assert timeouts == [7000, 5000] * 2
    assert store.program_content("p", "i") == source


def test_database_that_is_away_is_reported_once(
    postgres: PostgresServer, open_another: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_another()
    follower = follow(store)
    postgres.stop()
    try:
        for _ in range(5):
            store.check()
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
    while not follower.seen:
        store.check()
    assert "can be used again" in caplog.text
    assert store.rules() == [rule("a")]


def test_server_of_sqlite_does_not_load_the_driver(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gradrule_server import app\n"
        "from gradrule_server.registry.store import Store; Store(Path(sys.argv[1])).close()\n"
        "assert not {'psycopg', 'fsspec', 's3fs', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
