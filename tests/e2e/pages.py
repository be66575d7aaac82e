"""Reads the examples in the documentation, and runs those of the shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs/guide"
ADDRESS = "localhost:8470"
"""Address of the server in all examples."""

_BLOCK = re.compile(r"<!-- (?:quickstart|example|guide): (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)


def read_example(page: Path, name: str) -> str:
    """Returns the blocks of a page that are marked with a name, as one text."""
    found = [code for marker, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if marker == name]
    assert found, f"{page.name} has no example {name}"
    return "\n".join(found)


def example_names(page: Path) -> set[str]:
    """Returns the names of all marked blocks of a page."""
    return {marker for marker, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))}


def run_shell(code: str, folder: Path, target: str = "") -> str:
    """Runs shell commands in a folder, with `gradrule` of this Python, and returns what they print."""
    command = folder / "bin" / "gradrule"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gradrule.cli "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "GRADRULE_TARGET": target,
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["sh", "-e", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
