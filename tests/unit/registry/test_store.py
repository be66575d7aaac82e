"""Tests the rows of registries, on either database."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gradrule_server.errors import GradruleError
from gradrule_server.quotas import Quota
from gradrule_server.registry.store import RuleRow, Store, UnreadableRowError, counted_size
from tests.unit.registry.rows import blob_count, content, counts, execute, kept_bytes, program, rule


def test_rows_survive_the_process(open_store: Callable[[], Store]) -> None:
    store = open_store()
    store.add_rule(rule("b"))
    store.add_rule(rule("a"))
    store.add_rule(rule("c"))
    store.remove_rule("c")
    store.add_program(program("p"), content())
    store.close()

    store = open_store()
    assert store.rules() == [rule("a"), rule("b")]
    assert store.program("p") == program("p")
    assert store.program("q") is None
    assert store.program_content("p", "same") == content()
    assert store.program_content("p", "other") is None


def test_failed_write_leaves_nothing(store: Store) -> None:
    assert store.add_program(program("p"), content(b"one"))
    assert not store.add_program(program("p"), content(b"two"))
    assert (blob_count(store), counts(store)) == (1, (0, 1))
    assert store.add_program(program("q"), content(b"two"))


def test_programs_share_a_graph_until_the_last_is_deleted(store: Store) -> None:
    store.add_program(program("p"), content())
    store.add_program(program("q"), content())
    assert blob_count(store) == 1
    store.remove_program("p")
    assert store.program_content("q", "same") == content()
    store.remove_program("q")
    assert blob_count(store) == 0


def test_counted_bytes_match_added_and_freed_bytes(store: Store) -> None:
    programs = [("p", b"graph", "ada"), ("q", b"graph", "ada"), ("r", b"another", "ada"), ("p", b"graph", "grace")]
    row = len(b"summary of p" + b"spec" + b"snapshot")
    for (name, graph, tenant), size in zip(programs, [row + 5, 2 * row + 5, 3 * row + 12, row + 5], strict=True):
        store.add_program(program(name), content(graph), tenant)
        assert kept_bytes(store, tenant) == size
    described = RuleRow("a", b"definition", "stra\N{LATIN SMALL LETTER SHARP S}e", 1)
    store.add_rule(described, "ada")
    assert counted_size(described) == 10 + 7
    assert kept_bytes(store, "ada") == 3 * row + 12 + 17
    assert kept_bytes(store) == 4 * row + 17 + 17
    store.add_rule(RuleRow("a", b"shorter", "", 2), "ada", replaces=True)
    assert (kept_bytes(store, "ada"), counts(store)) == (3 * row + 12 + 7, (1, 4))
    for (name, _, tenant), size in zip(programs, [2 * row + 12 + 7, row + 7 + 7, 7, 0], strict=True):
        assert store.remove_program(name, tenant)
        assert kept_bytes(store, tenant) == size
    assert not store.remove_program("p", "ada")
    store.remove_rule("a", "ada")
    store.remove_rule("a", "ada")
    assert (kept_bytes(store), counts(store)) == (0, (0, 0))


def test_what_exceeds_a_limit_is_not_added(store: Store) -> None:
    server = Quota(100, "bytes", "--max-registry-bytes")
    quotas = {
        "rules": Quota(1, "rules", "--tenant-rules"),
        "registry_bytes": Quota(80, "bytes", "--tenant-registry-bytes", within=server),
    }
    with pytest.raises(GradruleError, match="--tenant-registry-bytes"):
        store.add_program(program("p"), content(b"g" * 60), quotas=quotas)
    assert (counts(store), blob_count(store)) == ((0, 0), 0)
    store.add_rule(RuleRow("a", b"d" * 50, "", 1), quotas=quotas)
    with pytest.raises(GradruleError, match="--tenant-rules"):
        store.add_rule(RuleRow("b", b"", "", 1), quotas=quotas)
    # The server's limit counts what all tenants have.
    other = {"registry_bytes": Quota(80, "bytes", "--tenant-registry-bytes", within=server)}
    with pytest.raises(GradruleError, match="--max-registry-bytes"):
        store.add_rule(RuleRow("a", b"d" * 51, "", 1), "ada", quotas=other)
    store.add_rule(RuleRow("a", b"d" * 50, "", 1), "ada", quotas=other)
    assert (counts(store), kept_bytes(store), server.used) == ((2, 0), 100, 100)


def test_threads_write_and_read_at_the_same_time(store: Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for count in range(10):
                store.add_rule(rule(f"r{number}_{count}"))
                assert f"r{number}_{count}" in {row.name for row in store.rules()}
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.rules()) == 80


_CREATE_FOREVER = """
import itertools, os, sys
from pathlib import Path
from gradrule_server.registry.database import open_database
from gradrule_server.registry.store import ProgramContent, ProgramRow, RuleRow, Store

store, start = Store(open_database(sys.argv[1], Path(sys.argv[2]))), sys.argv[3]
for number in itertools.count():
    name = f"r{start}_{number}"
    store.add_rule(RuleRow(name, os.urandom(3000), "", number))
    content = ProgramContent(b"spec", name.encode() * 3000, b"snapshot")
    store.add_program(ProgramRow(name, name, b"summary", number), content)
    os.write(1, f"{name}\\n".encode())
"""


def test_kill_9_loses_nothing_that_was_acknowledged(
    open_store: Callable[[], Store], registry_url: str, tmp_path: Path
) -> None:
    acknowledged: set[str] = set()
    for start, count in enumerate((1, 7, 20, 3, 12)):
        command = [sys.executable, "-c", _CREATE_FOREVER, registry_url, str(tmp_path / "data"), str(start)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(count):
            acknowledged.add(child.stdout.readline().strip())
        child.send_signal(signal.SIGKILL)
        acknowledged.update(line.strip() for line in child.stdout if line.endswith("\n"))
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL

        store = open_store()
        rules = {row.name for row in store.rules()}
        programs = store.program_identities()
        # What was in flight may be there or not; what was acknowledged must.
        assert acknowledged <= rules
        assert acknowledged <= programs.keys()
        for name in acknowledged:
            kept = store.program_content(name, name)
            assert kept is not None
            assert kept.graph == name.encode() * 3000
        store.close()
    assert len(acknowledged) >= 43


def test_changed_graph_is_detected_when_it_is_read(store: Store) -> None:
    store.add_program(program("p"), content(b"graph"))
    execute(store, "UPDATE blobs SET content = :content", content=b"grapf")
    with pytest.raises(UnreadableRowError, match="its graph is damaged"):
        store.program_content("p", "same")


def test_texts_of_any_characters_are_stored_unchanged(store: Store) -> None:
    texts = ["", "a\0b", "\\0 \\x00 \\N", "%s %(name)s :name ?", "straße", "\N{GRINNING FACE}", "\ufffe\x7f\x01"]
    for number, text in enumerate(texts):
        store.add_rule(RuleRow(f"r{number}", bytes(range(256)), text, 2**62))
    assert [row.description for row in store.rules()] == texts
    assert {(row.definition, row.create_time_us) for row in store.rules()} == {(bytes(range(256)), 2**62)}
    assert kept_bytes(store) == sum(counted_size(row) for row in store.rules())


def test_names_sort_by_their_bytes(store: Store) -> None:
    names = ["A.b", "A_b", "Ab", "B", "Z", "_a", "a", "a-b", "a.B", "a.b", "a0", "a_b", "ab", "b"]
    for name in reversed(names):
        store.add_rule(rule(name), "\N{GREEK SMALL LETTER PI} tenant")
    assert [row.name for row in store.rules("\N{GREEK SMALL LETTER PI} tenant")] == sorted(names)
    assert sorted(names) != sorted(names, key=str.lower)
    ids = sorted(["a", "a-b", "a.b", "a0", "a_b", "ab", "a-", "a."])
    for program_id in ids:
        store.add_program(program(program_id), content())
    found: list[str] = []
    while True:
        rows, has_more = store.programs_after(found[-1] if found else "", 3, 1 << 20)
        found += [row.id for row in rows]
        if not has_more:
            break
    assert found == ids


def test_rows_can_be_read_by_name(store: Store) -> None:
    for name in ("a", "b", "c"):
        store.add_rule(rule(name))
        store.add_program(program(name, name), content())
    assert [row.name for row in store.rules(names=["c", "a", "none"])] == ["a", "c"]
    assert sorted(row[:3] for row in store.program_keys()) == [("default", name, name) for name in ("a", "b", "c")]
    assert store.program_spec("b", "b") == content().spec
    assert store.rules("ada", ["a"]) == []
    assert (store.program_spec("b", "a"), store.program_spec("b", "b", "ada")) == (None, None)


def test_large_graph_is_stored(store: Store) -> None:
    graph = bytes(range(256)) * (12 << 12)
    store.add_program(program("p"), content(graph))
    assert store.program_graph_bytes("p", "same") == len(graph)
    assert store.program_content("p", "same") == content(graph)
