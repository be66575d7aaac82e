"""Runs graphs of each dangerous category in an engine without checks, confined by the sandbox alone.

Target: no canary is read, written, listed or connected to. Without the sandbox each graph reaches its canary, which
proves that it would do harm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gradrule_server.engine.sandbox import landlock_version
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.serving import data_folder
from tests.service.escape_graphs import ESCAPES, Escape
from tests.service.test_escapes import SandboxedEngine

TARGET = "0 canaries reached with the sandbox, all of them without it"
CASES = tuple((escape, place) for escape in ESCAPES for place in escape.places)

Case = tuple[Escape, str]


def run(scale: Scale) -> Figures:
    """Runs all graphs, for any scale."""
    return attempt(scale, CASES)


def attempt(scale: Scale, cases: Sequence[Case]) -> Figures:
    """Runs each case with and without the sandbox."""
    confined, reached = _reached(scale, "on", cases)
    _, free = _reached(scale, "off", cases)
    return judge(cases, confined, reached, free)


def judge(cases: Sequence[Case], confined: bool, reached: set[str], free: set[str]) -> Figures:
    """Returns the row's figures. confined: whether the kernel can confine; reached: with the sandbox; free: without."""
    findings = Findings()
    if not confined:
        findings.add("this kernel has no Landlock: engines cannot be kept from files here")
    for name in sorted(reached):
        findings.add(f"{name}: the canary was reached through the sandbox")
    for name in sorted({_name(case) for case in cases} - free):
        findings.add(f"{name}: the canary was not reached without the sandbox either, so nothing is shown")
    return Figures(
        target=TARGET,
        cases=len(cases),
        failures=findings.count,
        met=not findings.count,
        details={"reached": len(reached), "reached_without": len(free), "landlock": landlock_version()},
        findings=findings.lines,
    )


def _reached(scale: Scale, sandbox: str, cases: Sequence[Case]) -> tuple[bool, set[str]]:
    with _engine(scale, sandbox) as engine:
        reached = {_name((escape, place)) for escape, place in cases if engine.attempt(escape, place)}
        return landlock_version() > 0, reached


@contextlib.contextmanager
def _engine(scale: Scale, sandbox: str) -> Iterator[SandboxedEngine]:
    folder = data_folder(scale, f"escapes-{sandbox}")
    folder.mkdir(parents=True)
    engine = SandboxedEngine(folder, sandbox)
    try:
        yield engine
    finally:
        engine.close()


def _name(case: Case) -> str:
    return f"{case[0].name} ({case[1]})"
