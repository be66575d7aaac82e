"""The sync client: generated from the asyncio client, with the same methods and documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gradrule as gr
from gradrule import aio

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [
    (gr.Client, aio.AsyncClient),
    (gr.Program, aio.AsyncProgram),
    (gr.Session, gr.AsyncSession),
    (gr.ForwardHandle, gr.AsyncForwardHandle),
]


def test_sync_client_is_what_the_generator_writes() -> None:
    command = [sys.executable, "tools/generate_sync_client.py", "--check"]
    check = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_public_methods_have_the_same_parameters_and_a_documentation_of_their_own(
    sync: type, asynchronous: type
) -> None:
    for name, method in inspect.getmembers(asynchronous, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        twin = getattr(sync, name)
        assert list(inspect.signature(twin).parameters) == list(inspect.signature(method).parameters), name
        assert inspect.getdoc(method), name
        assert not inspect.iscoroutinefunction(twin), name
        documentation = inspect.getdoc(twin) or ""
        assert documentation and not any(word in documentation for word in ("await", "async", "Async")), name


@pytest.mark.parametrize("kind", [each for pair in PAIRS for each in pair])
def test_at_most_three_parameters_are_positional_and_every_parameter_is_documented(kind: type) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_"):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) <= 3, name
        documentation = inspect.getdoc(method) or ""
        assert [each.name for each in parameters if f"    {each.name}: " not in documentation.replace("*", "")] == [], (
            name
        )
        if "timeout" in (names := [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]):
            assert names[-1] == "timeout", name
