"""Tenants are loaded at their first call and unloaded when many are idle; their quotas stay correct."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ByteSize

from gradrule.common import op_definitions
from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server import graphs
from gradrule_server.errors import GradruleError
from gradrule_server.front import tenants as module
from gradrule_server.front.tenants import SharedResources, Tenant, Tenants
from gradrule_server.limits import QUOTA_RESOURCES, TENANT_RESOURCES
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape
from gradrule_server.programs.cache import SessionKey, StoredKey
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy")
READ_ONLY = ReadOnlyRules.from_op_types(op_definitions.gradients())


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedResources]:
    """Shared resources with a fake engine pool, which these tests do not use."""
    pool: Any = SimpleNamespace(on_removed=[], workers=None, memory_limit=0, is_kept_waiting_by=lambda owner: False)
    with contextlib.closing(Store(tmp_path)) as store:
        blobs = BlobStore(tmp_path / "blobs", 1000)
        yield SharedResources(
            store,
            blobs,
            LoadedPrograms(pool, blobs, 10, 1000),
            graphs.Limits(nodes=10, inlined_nodes=10, call_depth=2, graph_bytes=100),
            Settings(
                **{resource.max_setting: 6 for resource in QUOTA_RESOURCES} | {"max_registry_bytes": 60},
                **{resource.tenant_setting: 4 for resource in QUOTA_RESOURCES}
                | {"tenant_registry_bytes": 40, "tenant_blob_bytes": 500, "tenant_blobs": 10},
                program_cache=10,
                program_cache_bytes=1000,
                handle_ttl_s=1.0,
                session_idle_s=0.0,
            ),
        )


@pytest.fixture
async def found(shared: SharedResources) -> Tenants:
    return Tenants(shared, READ_ONLY, asyncio.get_running_loop())


def pass_by(found: Tenants, tenant: Tenant) -> None:
    """One call, a while ago."""
    found.retain(tenant)
    found.release(tenant)
    tenant.idle_since -= 1000


@pytest.fixture
def trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for idle tenants at each call, and keeps few."""
    monkeypatch.setattr(module, "_TRIM_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_MAX_IDLE", 5)


async def test_concurrent_callers_get_the_same_tenant(found: Tenants) -> None:
    one, other = await asyncio.gather(found.load("ada"), found.load("ada"))
    assert one is other is found.get_loaded("ada")
    assert found.get_loaded("grace") is None
    assert await found.load("default") is found.default


async def test_cancelled_caller_does_not_cancel_the_loading_for_others(found: Tenants) -> None:
    first = asyncio.ensure_future(found.load("ada"))
    second = asyncio.ensure_future(found.load("ada"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "ada"


@pytest.mark.usefixtures("trimming")
async def test_idle_tenants_are_unloaded(found: Tenants) -> None:
    busy = await found.load("busy")
    found.retain(busy)
    pass_by(found, found.default)
    for number in range(1000):
        pass_by(found, await found.load(f"t{number}"))
    names = {status.name for status in found.status()}
    assert {"busy", "default", "t999"} <= names
    assert len(names) <= 8


@pytest.mark.usefixtures("trimming")
async def test_compilations_of_an_unloaded_tenant_end(found: Tenants) -> None:
    """They go on after the deadlines of its calls, but nobody would find their programs."""
    ada = await found.load("ada")
    cancelled = asyncio.Event()

    async def compile(recovery: CallRecovery[Engine]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    recovery = ada.program_service.runner.recovery(asyncio.get_running_loop().time() + 0.05)
    with pytest.raises(GradruleError, match="this goes on"):
        await ada.program_service.compile_tasks.run("program", recovery, compile)
    pass_by(found, ada)
    for number in range(10):
        pass_by(found, await found.load(f"t{number}"))
    assert found.get_loaded("ada") is None
    await asyncio.wait_for(cancelled.wait(), 60)


@pytest.mark.usefixtures("trimming")
async def test_reloaded_tenant_has_its_stored_rules_and_programs(found: Tenants, shared: SharedResources) -> None:
    ada = await found.load("ada")
    ada.rules.create("Mine", DEFINITION, "")
    ada.quotas["rules"].reserve(2)
    ada.quotas["rules"].release(2)
    pass_by(found, ada)
    for number in range(10):
        pass_by(found, await found.load(f"t{number}"))
    assert found.get_loaded("ada") is None
    again = await found.load("ada")
    assert again is not ada
    assert again.rules.get("Mine").message.formula == "3 * dy"
    status = next(status for status in found.status() if status.name == "ada")
    assert (status.used["rules"], status.used["programs"], status.used["requests"]) == (1, 0, 0)
    # The whole goes on counting what a tenant left there.
    await fill_up(found)
    assert shared.store.total_usage().rules == 6


@pytest.mark.usefixtures("trimming")
async def test_programs_of_all_tenants_are_limited_together(found: Tenants) -> None:
    program: Any = SimpleNamespace(size=400, loadable=SimpleNamespace(files=()))
    for name in ("ada", "bob"):
        tenant = await found.load(name)
        found.retain(tenant)
        tenant.program_service.cache.put(SessionKey(name, b"", CallShape()), program)
        tenant.program_service.cache.put(StoredKey(name, CallShape()), program)
    assert found.cache_usage()[:2] == (4, 1600)
    pass_by(found, found.default)
    assert found.cache_usage()[:2] == (2, 800)


async def test_bytes_of_rules_are_limited_and_counted_after_reloading(shared: SharedResources, trimming: None) -> None:
    size = DEFINITION.ByteSize()
    limits = {"max_registry_bytes": ByteSize(5 * size), "tenant_registry_bytes": ByteSize(3 * size)}
    settings = shared.settings.model_copy(update=limits)
    found = Tenants(replace(shared, settings=settings), READ_ONLY, asyncio.get_running_loop())
    ada = await found.load("ada")
    ada.rules.create("a", DEFINITION, "")
    ada.rules.create("b", DEFINITION, "")
    pass_by(found, ada)
    for number in range(10):
        pass_by(found, await found.load(f"t{number}"))
    assert found.get_loaded("ada") is None
    again, other = await found.load("ada"), await found.load("other")
    assert again.quotas["registry_bytes"].used == 2 * size
    with pytest.raises(GradruleError, match="--tenant-registry-bytes"):
        again.rules.create("c", DEFINITION, "d" * (size + 1))
    again.rules.create("c", DEFINITION, "")
    with pytest.raises(GradruleError, match="--max-registry-bytes"):
        other.rules.create("c", DEFINITION, "d" * (size + 1))
    # A server that starts again has counted the same.
    less = settings.model_copy(update={"max_registry_bytes": ByteSize(4 * size)})
    restarted = Tenants(replace(shared, settings=less), READ_ONLY, asyncio.get_running_loop())
    (await restarted.load("other")).rules.create("c", DEFINITION, "")
    with pytest.raises(GradruleError, match="--max-registry-bytes"):
        (await restarted.load("other")).rules.create("d", DEFINITION, "")


async def fill_up(found: Tenants) -> None:
    """Rules of others until the server has no more room."""
    refusals = []
    for number in range(6):
        tenant = await found.load(f"other{number}")
        try:
            tenant.rules.create("Mine", DEFINITION, "")
        except GradruleError as refusal:
            refusals.append(refusal)
    assert [refusal.reason for refusal in refusals] == [errors_pb2.ERROR_REASON_LIMIT_EXCEEDED]
    assert "--max-rules" in refusals[0].message


async def test_read_only_rules_reach_loaded_and_new_tenants(found: Tenants) -> None:
    ada = await found.load("ada")
    found.set_read_only(READ_ONLY.with_op_rules(["Sign"]))
    grace = await found.load("grace")
    op = rule_pb2.RULE_KIND_OP
    assert len({len(tenant.rules.list(op, 1000, "")[0]) for tenant in (found.default, ada, grace)}) == 1


async def test_status_reports_every_limited_resource(found: Tenants) -> None:
    assert set(found.default.status().used) == {resource.name for resource in TENANT_RESOURCES}
