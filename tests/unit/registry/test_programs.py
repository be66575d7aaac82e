from __future__ import annotations

import hashlib
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import errors_pb2, graph_pb2, override_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.quotas import Quota
from gradrule_server.registry import page_tokens, programs
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import NeededBlobs, ProgramRegistry, StoredProgram
from gradrule_server.registry.store import ProgramContent, ProgramRow, Store
from tests.unit.registry.rows import count_again, counts, execute, is_sqlite, kept_bytes

X, Y = graph_pb2.Node(name="x", op="Placeholder"), graph_pb2.Node(name="y", op="Sign", input=["x"])
GRAPH = graph_pb2.Graph(node=[X, Y])
# A message of 8 bytes, which are a message with b"1" before them too.
SNAPSHOT = rule_pb2.ListRulesResponse(next_page_token="rules1").SerializeToString()


_blob_folders: weakref.WeakKeyDictionary[Store, Path] = weakref.WeakKeyDictionary()


def registry_of(store: Store, **limits: Any) -> ProgramRegistry:
    if store not in _blob_folders:
        _blob_folders[store] = Path(tempfile.mkdtemp())
    return ProgramRegistry(store, BlobStore(_blob_folders[store], 1 << 20), **limits)


def spec(fetch: str = "y") -> program_pb2.ProgramSpec:
    return program_pb2.ProgramSpec(
        graph=rule_pb2.GraphSource(serialized=GRAPH.SerializeToString()),
        overrides=[override_pb2.GradientOverride(selector=override_pb2.Selector(op_type="Sign"), rule="ste")],
        fetches=[fetch],
        vjp=program_pb2.Vjp(ys=["y"], xs=["x"]),
    )


def compiled(digest: str = "d1") -> program_pb2.Program:
    return program_pb2.Program(
        digests=program_pb2.Digests(graph="g", program=digest),
        inputs=[tensor_pb2.TensorSpec(name="x", dtype=tensor_pb2.DT_FLOAT)],
        overrides=[override_pb2.Resolution(node="y", op_type="Sign", rule="ste")],
        default_gradient_nodes=["z"],
        device="CPU:0",
    )


def create(
    registry: ProgramRegistry,
    program_id: str | None = None,
    digest: str = "d1",
    snapshot: bytes = SNAPSHOT,
    values: bytes = b"",
) -> StoredProgram:
    return registry.create(program_id, spec(), snapshot, compiled(digest), values)


def refusal_of(registry: ProgramRegistry, program_id: str | None, digest: str = "d1") -> GradruleError:
    with pytest.raises(GradruleError) as refusal:
        create(registry, program_id, digest)
    return refusal.value


def test_stored_program_has_name_time_and_content(open_store: Callable[[], Store]) -> None:
    store = open_store()
    made = create(registry_of(store), "mnist-v1")
    assert made.program.name == "programs/mnist-v1"
    assert made.program.create_time.seconds > 1_600_000_000
    store.close()

    store = open_store()
    registry = registry_of(store)
    for name in ("programs/mnist-v1", "mnist-v1"):
        assert registry.get(name) == made
    assert registry.content(made) == (spec(), SNAPSHOT)
    assert create(registry, "mnist-v1") == made
    store.close()


def test_inline_graph_is_not_read_but_refused(store: Store) -> None:
    registry = registry_of(store)
    inline = spec()
    inline.graph.inline_graph.CopyFrom(GRAPH)
    with pytest.raises(ValueError, match="as bytes"):
        registry.create("p", inline, b"", compiled(), b"")
    assert len(registry) == 0


def test_default_id_is_derived_from_the_content(store: Store) -> None:
    registry = registry_of(store)
    made = create(registry)
    parts = b"".join(hashlib.sha256(part).digest() for part in (b"d1", SNAPSHOT, b""))
    assert made.id == "p" + hashlib.sha256(parts).hexdigest()[:32]
    assert create(registry) == made
    others = [
        create(registry, digest="d2"),
        create(registry, snapshot=b""),
        create(registry, values=b"alpha = 2"),
        create(registry, digest="d", snapshot=b"1" + SNAPSHOT),
    ]
    assert len({made.id, *(other.id for other in others)}) == 5
    # The made id is one that can be asked for.
    assert create(registry, made.id) == made


def test_id_of_another_program_is_refused(store: Store) -> None:
    registry = registry_of(store)
    made = create(registry, "p", "d1" * 32)
    refusal = refusal_of(registry, "p", "d2")
    assert refusal.reason == errors_pb2.ERROR_REASON_PROGRAM_EXISTS
    assert "d1d1d1d1d1d1" in refusal.message
    assert made.program.create_time.ToJsonString() in refusal.message
    assert refusal.resource is not None
    assert refusal.resource.name == "programs/p"


@pytest.mark.parametrize("program_id", ["a", "a" * 63, "a-b_c.9"])
def test_valid_ids_are_accepted(store: Store, program_id: str) -> None:
    assert create(registry_of(store), program_id).id == program_id


@pytest.mark.parametrize("program_id", ["", "A", "9a", "-a", "a" * 64, "a/b", "programs/a", "a\n", "é"])
def test_invalid_ids_are_refused(store: Store, program_id: str) -> None:
    refusal = refusal_of(registry_of(store), program_id)
    assert refusal.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST
    assert refusal.findings[0].field == "program_id"


def test_error_for_an_unknown_program_suggests_similar_names(store: Store) -> None:
    registry = registry_of(store)
    create(registry, "mnist")
    for call in (registry.get, registry.delete):
        with pytest.raises(GradruleError) as refusal:
            call("programs/mnits")
        assert refusal.value.reason == errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND
        assert "Did you mean 'mnist'?" in refusal.value.message


def test_graph_that_no_database_can_store_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(store)
    monkeypatch.setattr(programs, "_MAX_GRAPH_BYTES", 4)
    assert refusal_of(registry, "p").reason == errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert len(registry) == 0


@pytest.mark.parametrize("name", ["programs/a\0b", "", "A", "p" * 100_000])
def test_name_that_is_no_id_is_an_unknown_program(store: Store, name: str) -> None:
    registry = registry_of(store)
    for call in (registry.get, registry.delete):
        with pytest.raises(GradruleError) as refusal:
            call(name)
        assert refusal.value.reason == errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND


def test_id_of_a_deleted_program_can_be_used_again(open_store: Callable[[], Store]) -> None:
    store = open_store()
    registry = registry_of(store)
    made = create(registry, "p")
    registry.delete("programs/p")
    for call in (lambda: registry.get("p"), lambda: registry.content(made)):
        with pytest.raises(GradruleError) as refusal:
            call()
        assert refusal.value.reason == errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND
    again = create(registry, "p", "d2")
    assert again.program.digests.program == "d2"
    # An answer from before never gets the content of the program that has its id now.
    with pytest.raises(GradruleError):
        registry.content(made)
    store.close()


def test_limit_refuses_only_new_programs(store: Store) -> None:
    registry = registry_of(
        store, quota=Quota(2, "programs", "--max-programs", reason=errors_pb2.ERROR_REASON_LIMIT_EXCEEDED)
    )
    create(registry, "a")
    create(registry, "b")
    assert refusal_of(registry, "c").reason == errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
    create(registry, "b")
    registry.delete("a")
    create(registry, "c")


def test_pages_are_ordered_by_id_and_complete(store: Store) -> None:
    registry = registry_of(store)
    for program_id in ("c", "a", "e", "b", "d"):
        create(registry, program_id)
    first, token = registry.list(2, "")
    assert [item.id for item in first] == ["a", "b"]
    assert [item.program for item in first] == [registry.get(item.id).program for item in first]
    assert first[0].program.overrides == compiled().overrides
    assert first[0].program.default_gradient_nodes == compiled().default_gradient_nodes
    # What comes and goes between pages neither repeats nor hides anything else.
    registry.delete("b")
    create(registry, "aa")
    second, token = registry.list(2, token)
    assert [item.id for item in second] == ["c", "d"]
    third, token = registry.list(2, token)
    assert ([item.id for item in third], token) == (["e"], "")
    exact, token = registry.list(5, "")
    assert (len(exact), token) == (5, "")
    with pytest.raises(GradruleError) as refusal:
        registry.list(2, "nonsense")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST


def test_bytes_of_programs_are_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The time of creation is part of what is kept, and does not always take as many bytes.
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_123_456_789)
    quota = Quota(10_000, "bytes of rules and programs", "--tenant-registry-bytes")
    registry = registry_of(store, bytes_quota=quota)
    create(registry, "a")
    one = quota.used
    assert one == kept_bytes(store)
    create(registry, "a")
    create(registry, "b")
    # The graph is there already.
    assert quota.used == kept_bytes(store) == 2 * one - len(GRAPH.SerializeToString())
    large = spec()
    large.graph.serialized += bytes(10_000)
    with pytest.raises(GradruleError, match="--tenant-registry-bytes") as refusal:
        registry.create("c", large, b"", compiled(), b"")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_QUOTA_EXCEEDED
    assert (len(registry), quota.used) == (2, kept_bytes(store))
    registry.delete("a")
    registry.delete("b")
    assert quota.used == kept_bytes(store) == 0


def test_page_of_large_programs_ends_early(store: Store) -> None:
    registry = registry_of(store)
    large = compiled()
    large.default_gradient_nodes.append("z" * (page_tokens.MAX_PAGE_BYTES // 3))
    for number in range(7):
        registry.create(f"p{number}", spec(), b"", large, b"")
    huge = compiled()
    huge.default_gradient_nodes.append("z" * (page_tokens.MAX_PAGE_BYTES + 1))
    registry.create("p1-huge", spec(), b"", huge, b"")
    pages: list[list[str]] = []
    token = ""
    while not pages or token:
        page, token = registry.list(1000, token)
        pages.append([item.id for item in page])
    assert pages == [["p0", "p1"], ["p1-huge"], ["p2", "p3"], ["p4", "p5"], ["p6"]]


def change(store: Store, column: str, value: Any, program_id: str = "p") -> None:
    """Changes a row behind the server's back; skips the test if the database refuses the value."""
    if not is_sqlite(store) and (value == 7 or (column == "id" and value == b"\xff")):
        pytest.skip("PostgreSQL refuses values of other types")
    if column == "content":
        execute(store, "UPDATE blobs SET content = :value", value=value)
    else:
        execute(store, f"UPDATE programs SET {column} = :value WHERE id = :id", value=value, id=program_id)


JUNK = [("summary", b"\xff\xff"), ("summary", 7), ("spec", b"\xff\xff"), ("snapshot", b"\xff"), ("content", b"grapf")]


@pytest.mark.parametrize(("column", "value"), JUNK)
def test_unreadable_row_affects_only_its_program(
    store: Store, caplog: pytest.LogCaptureFixture, column: str, value: Any
) -> None:
    quota, bytes_quota = (Quota(1 << 20, "", "") for _ in range(2))
    create(registry_of(store), "other", "d2")
    create(registry_of(store), "p")
    if column == "content":
        # Its graph is the other's too.
        registry_of(store).delete("other")
    change(store, column, value)
    # A start, and the first call of the tenant.
    registry = registry_of(store, quota=quota, bytes_quota=bytes_quota)
    listed = [item.id for item in registry.list(0, "")[0]]
    assert ("p" in listed) == (column != "summary")
    assert ("other" in listed) == (column != "content")
    with pytest.raises(GradruleError, match=r"'p' cannot be read: .*; compile it again, or delete it") as refusal:
        registry.content(registry.get("p"))
    assert refusal.value.reason == errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND
    assert "program 'p' of tenant 'default' cannot be read" in caplog.text
    if column != "content":
        assert registry.content(registry.get("other"))[0] == spec()
    # Compiling it once more repairs it, and no count is wrong then.
    count_again(store)
    made = create(registry, "p")
    assert registry.content(registry.get("p")) == (spec(), SNAPSHOT)
    assert create(registry, "p") == made
    assert (quota.used, bytes_quota.used) == (len(registry), kept_bytes(store))


@pytest.mark.parametrize(("column", "value"), JUNK)
def test_unreadable_program_can_be_deleted(store: Store, column: str, value: Any) -> None:
    create(registry_of(store), "p")
    change(store, column, value)
    registry = registry_of(store)
    count_again(store)
    registry.delete("p")
    assert registry.list(0, "") == ([], "")
    assert counts(store) == (0, 0)


def test_removed_row_can_be_created_again(store: Store) -> None:
    registry = registry_of(store)
    create(registry, "p")
    execute(store, "DELETE FROM programs")
    with pytest.raises(GradruleError, match=r"there is no program 'p'\.$"):
        registry.get("p")
    made = create(registry, "p")
    assert registry.get("p") == made


def test_spec_of_each_program_is_read_once_for_the_needed_blobs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_blob(name: str) -> program_pb2.ProgramSpec:
        found = spec()
        found.variables.add(name="w", value=tensor_pb2.TensorSource(blob=tensor_pb2.BlobTensor(sha256=name)))
        return found

    reads: list[str] = []
    read_spec = Store.program_spec

    def counted(self: Store, program_id: str, identity: str, tenant: str) -> bytes | None:
        reads.append(program_id)
        return read_spec(self, program_id, identity, tenant)

    monkeypatch.setattr(Store, "program_spec", counted)
    needed, source = NeededBlobs(store), ProgramContent(with_blob("1" * 64).SerializeToString(), b"graph", b"")
    store.add_program(ProgramRow("a", "i", b"", 1), source)
    assert needed() == needed() == {("", "1" * 64)}
    other = ProgramContent(with_blob("2" * 64).SerializeToString(), b"graph", b"")
    store.add_program(ProgramRow("b", "i", b"", 1), other)
    assert needed() == {("", "1" * 64), ("", "2" * 64)}
    store.remove_program("a")
    # Another program of the same id.
    store.add_program(ProgramRow("a", "j", b"", 1), other)
    assert needed() == {("", "2" * 64)}
    assert reads == ["a", "b", "a"]
