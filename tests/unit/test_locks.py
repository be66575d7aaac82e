"""The lock files of users name the versions that developers test with, and nothing that only developers need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "requirements"


def versions(name: str) -> dict[str, str]:
    """Packages and versions of a lock file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE))


# See tools/lock.py; python-dateutil 4 needs tzdata.
NOT_FOR_S3 = {"python-dateutil", "tzdata"}


def test_versions_are_those_of_developers() -> None:
    dev = versions("dev")
    assert versions("demo").items() <= dev.items()
    shared = versions("server").items() & dev.items()
    differing = {name for name, version in versions("server").items() if dev.get(name, version) != version}
    assert differing <= NOT_FOR_S3
    assert {"tensorflow-cpu", "grpcio", "sqlalchemy", "starlette"} <= dict(shared).keys()


@pytest.mark.parametrize("name", ["server", "gpu"])
def test_images_have_the_clients_of_databases_and_object_stores(name: str) -> None:
    assert {"psycopg-binary", "s3fs"} <= versions(name).keys()
    assert versions(name).keys().isdisjoint({"pytest", "ruff", "ray", "matplotlib"})


def test_the_demo_installs_what_it_needs() -> None:
    demo = versions("demo")
    assert {"grpcio", "matplotlib", "rich", "setuptools", "sqlalchemy", "starlette", "tensorflow-cpu"} <= demo.keys()
    assert demo.keys().isdisjoint(
        {"hypothesis", "mypy", "opentelemetry-sdk", "pytest", "ruff", "scikit-learn", "scipy"}
    )


def test_tests_of_several_servers_run_the_versions_of_developers() -> None:
    locked = versions("cluster")
    assert {name for name, version in versions("dev").items() if locked.get(name) != version} == NOT_FOR_S3
    assert {"psycopg-binary", "s3fs", "ray", "moto"} <= locked.keys()
