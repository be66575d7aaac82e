"""The lock files of users name the versions that developers test with, and nothing that only developers need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "requirements"


def versions(name: str) -> dict[str, str]:
    """Packages and versions of a lock file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["demo", "server"])
def test_versions_are_those_of_developers(name: str) -> None:
    assert versions(name).items() <= versions("dev").items()


def test_the_demo_installs_what_it_needs() -> None:
    demo = versions("demo")
    assert versions("server").items() <= demo.items()
    assert {"matplotlib", "rich", "setuptools"} <= demo.keys()
    assert demo.keys().isdisjoint(
        {"hypothesis", "mypy", "opentelemetry-sdk", "pytest", "ruff", "scikit-learn", "scipy"}
    )


def test_tests_of_several_servers_run_the_versions_of_developers() -> None:
    locked = versions("cluster")
    # See tools/lock.py; python-dateutil 4 needs tzdata.
    assert {name for name, version in versions("dev").items() if locked.get(name) != version} == {
        "python-dateutil",
        "tzdata",
    }
    assert {"psycopg-binary", "s3fs", "ray", "moto"} <= locked.keys()
