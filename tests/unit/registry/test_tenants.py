"""Tests rules, programs and blobs of several tenants in one store, and the migration of a store without tenants."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import errors_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore, folder_name
from gradrule_server.registry.programs import NeededBlobs, ProgramRegistry
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from tests.unit.registry.version_2 import DEFINITION

PAGE = 4096
"""What a file takes on a disk at least."""
READ_ONLY = ReadOnlyRules.from_op_types(["Sign"])


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(blobs: BlobStore, data: bytes) -> str:
    upload = blobs.upload(sha(data))
    try:
        upload.write(data)
        upload.finish()
    finally:
        upload.close()
    return sha(data)


def refusal(call: Any, *arguments: Any) -> GradruleError:
    with pytest.raises(GradruleError) as caught:
        call(*arguments)
    return caught.value


def test_tenants_have_separate_rules(store: Store) -> None:
    ada, grace = (RuleRegistry(store, READ_ONLY, tenant=name) for name in ("ada", "grace"))
    ada.create("Mine", DEFINITION, "ada's")
    assert (ada.revision, grace.revision) == (1, 0)
    found = refusal(grace.get, "Mime")
    assert "Mine" not in found.message
    assert refusal(grace.delete, "Mine").reason == errors_pb2.ERROR_REASON_UNKNOWN_RULE
    grace.create("Mine", rule_pb2.RuleDefinition(expression="5 * dy"), "grace's")
    assert (ada.get("Mine").message.formula, grace.get("Mine").message.formula) == ("3 * dy", "5 * dy")
    ada.delete("Mine")
    kept = RuleRegistry(store, READ_ONLY, tenant="grace").list(rule_pb2.RULE_KIND_USER, 0, "")[0]
    assert [(entry.name, entry.message.description) for entry in kept] == [("Mine", "grace's")]
    # What ships is one layer below all, not a copy for each.
    assert ada._names.builtin is grace._names.builtin


def test_tenants_have_separate_programs(store: Store, tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs", 1 << 20)
    spec = program_pb2.ProgramSpec(fetches=["y"])
    spec.graph.serialized = b"graph"
    made = program_pb2.Program(digests=program_pb2.Digests(program="d"))
    ada, grace = (ProgramRegistry(store, blobs.for_tenant(name), tenant=name) for name in ("ada", "grace"))
    stored = ada.create("mnist", spec, b"", made, b"")
    assert "mnist" not in refusal(grace.get, "mnits").message
    assert refusal(grace.content, stored).reason == errors_pb2.ERROR_REASON_PROGRAM_NOT_FOUND
    other = program_pb2.Program(digests=program_pb2.Digests(program="e"))
    assert grace.create("mnist", spec, b"", other, b"").identity != stored.identity
    assert (len(ada.list(0, "")[0]), len(grace.list(0, "")[0])) == (1, 1)
    ada.delete("mnist")
    # Each has the graph for itself.
    assert grace.content(grace.get("mnist"))[0].graph.serialized == b"graph"


def test_tenants_have_separate_blobs(tmp_path: Path) -> None:
    root = BlobStore(tmp_path / "blobs", 1 << 20)
    ada, grace = root.for_tenant("ada"), root.for_tenant("grace")
    name = put(ada, b"weights")
    assert grace.missing([name]) == root.missing([name]) == [name]
    assert refusal(grace.read, name).reason == errors_pb2.ERROR_REASON_BLOB_NOT_FOUND
    assert (tmp_path / "blobs" / folder_name("ada") / name).read_bytes() == b"weights"
    put(grace, b"weights")
    put(root, b"weights")
    assert (tmp_path / "blobs" / name).exists()
    again = BlobStore(tmp_path / "blobs", 1 << 20)
    assert [again.for_tenant(tenant).missing([name]) for tenant in ("default", "ada", "grace", "linus")] == [
        [],
        [],
        [],
        [name],
    ]
    assert again.for_tenant("ada").used.size == PAGE


@pytest.mark.parametrize("tenant", ["../../etc", "a/b", ".", "\N{GREEK SMALL LETTER PI}", "a" * 128])
def test_folder_of_a_tenant_is_within_the_common_folder(tmp_path: Path, tenant: str) -> None:
    blobs = BlobStore(tmp_path / "blobs", 1 << 20).for_tenant(tenant)
    put(blobs, b"1")
    assert blobs.folder.parent == tmp_path / "blobs"
    assert stat.S_IMODE(blobs.folder.stat().st_mode) == 0o700


def test_bytes_of_a_tenant_are_limited(tmp_path: Path) -> None:
    root = BlobStore(tmp_path / "blobs", 10 * PAGE)
    ada = root.for_tenant("ada", 2 * PAGE)
    first, second = put(ada, b"a" * PAGE), put(ada, b"b" * PAGE)
    third = put(ada, b"c" * PAGE)
    assert ada.missing([first, second, third]) == [first]
    with ada.pinned([second, third]):
        found = refusal(put, ada, b"d" * PAGE)
    assert "--tenant-blob-bytes" in found.message
    assert ada.used.size == 2 * PAGE


def test_tenant_with_most_bytes_loses_blobs_first(tmp_path: Path) -> None:
    root = BlobStore(tmp_path / "blobs", 4 * PAGE)
    ada, grace = root.for_tenant("ada"), root.for_tenant("grace")
    much = [put(ada, bytes([65 + number]) * PAGE) for number in range(3)]
    little = put(grace, b"g" * PAGE)
    newest = put(grace, b"h" * PAGE)
    assert ada.missing(much) == much[:1]
    assert grace.missing([little, newest]) == []
    with ada.pinned(much[1:]), grace.pinned([little, newest]):
        assert "--max-blob-bytes" in refusal(put, root, b"r" * PAGE).message


def test_blobs_of_programs_of_unloaded_tenants_are_not_removed(tmp_path: Path) -> None:
    store, root = Store(tmp_path), BlobStore(tmp_path / "blobs", 3 * PAGE)
    ada = root.for_tenant("ada")
    name = put(ada, b"w" * PAGE)
    spec = program_pb2.ProgramSpec()
    spec.variables.add(name="w", value={"blob": tensor_pb2.BlobTensor(sha256=name)})
    ProgramRegistry(store, ada, tenant="ada").create("p", spec, b"", program_pb2.Program(), b"")

    again = BlobStore(tmp_path / "blobs", 3 * PAGE, needed=NeededBlobs(store))
    grace = again.for_tenant("grace")
    put(grace, b"1" * PAGE)
    put(grace, b"2" * PAGE)
    put(grace, b"3" * PAGE)
    assert again.for_tenant("ada").missing([name]) == []
    ProgramRegistry(store, again.for_tenant("ada"), tenant="ada").delete("p")
    put(grace, b"4" * PAGE)
    put(grace, b"5" * PAGE)
    # Nothing holds it now: it may go as any other.
    with grace.pinned([sha(b"4" * PAGE), sha(b"5" * PAGE)]):
        put(grace, b"6" * PAGE)
        assert again.for_tenant("ada").missing([name]) == [name]
    store.close()


def test_rooms_are_counted_as_names_come_and_go(store: Store) -> None:
    server = Quota(2, "rules", "--max-rules")
    registries = [
        RuleRegistry(store, READ_ONLY, tenant=name, quota=Quota(2, "rules", "--tenant-rules", within=server))
        for name in ("ada", "grace")
    ]
    registries[0].create("a", DEFINITION, "")
    registries[0].create("a", DEFINITION, "")
    registries[1].create("b", DEFINITION, "")
    assert "--max-rules" in refusal(registries[0].create, "c", DEFINITION, "").message
    registries[1].delete("b")
    registries[0].create("c", DEFINITION, "")
    assert "--max-rules" in refusal(registries[1].create, "b", DEFINITION, "").message
    assert server.used == 2
