"""Provides one real server for the whole run and clients of it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
import hypothesis
import pytest

import gradrule as gr
from gradrule.common.fast_paths import VARIABLE, disabled_paths
from tests.cluster.postgres import PostgresServer, running_postgres
from tests.service import blocking
from tests.service.guarded import Guarded, guarded_server
from tests.service.servers import RunningServer, running_server

# Machines may be busy: no time decides a test.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that selects the database of registries."""
    parser.addoption(
        "--registry-database",
        choices=("sqlite", "postgresql"),
        default="sqlite",
        help="database of registries in tests that can use either; PostgreSQL must be installed",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes invalid Unicode in captured output: pytest-xdist cannot send it between processes."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """Excludes TensorFlow's modules and the collected tests from garbage collection: they are never freed."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of fast paths that are turned off."""
    disabled = disabled_paths(os.environ.get(VARIABLE, ""))
    for item in items:
        off = disabled.intersection(name for mark in item.iter_markers("fast_path") for name in mark.args)
        if off:
            item.add_marker(pytest.mark.skip(reason=f"the fast path {min(off)} is off"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Returns a running PostgreSQL server. A test that stops it must start it again."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def new_database(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Returns a function that creates an empty database and returns the value of `--registry`; empty: SQLite."""
    if request.config.getoption("--registry-database") == "sqlite":
        return lambda: ""
    created: PostgresServer = request.getfixturevalue("postgres")
    return created.create_database


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[], str]) -> Iterator[RunningServer]:
    """Returns a server with default settings."""
    url = new_database()
    environment = {"GRADRULE_REGISTRY": url} if url else None
    with running_server(tmp_path_factory.mktemp("server"), environment=environment) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[Any]:
    """Returns a synchronous client."""
    connected = gr.connect(server.target)
    yield connected
    connected.close()


@pytest.fixture(scope="session")
def aio_client(server: RunningServer) -> Iterator[Any]:
    """Returns an asynchronous client whose calls block until they are done."""
    loop = blocking.LoopThread()
    connected = blocking.connect(server.target, loop)
    yield connected
    connected.close()
    loop.close()


@pytest.fixture(params=["client", "aio_client"])
def either(request: pytest.FixtureRequest) -> Any:
    """Returns the synchronous client, then the asynchronous one."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    """Returns a plain gRPC channel, for bytes that no client sends."""
    with grpc.insecure_channel(server.target) as opened:
        yield opened


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Returns a server that requires credentials and has low tenant quotas."""
    with guarded_server(tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.fixture
def rule(client: Any) -> Iterator[Callable[..., str]]:
    """Returns a function that registers a rule for one test: `rule("Name", "5 * dy")` returns the name."""
    names: list[str] = []

    def register(name: str, expression: str | None = None, **more: Any) -> str:
        client.create_rule(name, expression, **more)
        names.append(name)
        return name

    yield register
    for name in names:
        client.delete_rule(name)


@pytest.fixture(autouse=True)
def unregistered_gradients() -> Iterator[None]:
    """Removes gradients that a test registered from TensorFlow's process-wide registry."""
    yield
    ops: Any = sys.modules.get("tensorflow.python.framework.ops")
    if ops is not None:
        registered = ops.gradient_registry._registry
        for name in [name for name in registered if name.startswith(("GradruleReference", "CustomGradient-"))]:
            del registered[name]
