"""Counts the server's lines and modules, and compares them with the budget in pyproject.toml.

Run it with `make size`; `make lint` runs it too. A change that needs more lines moves the budget in its own commit.
`make size ARGS=--update` sets the budget to what was counted.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVER = ROOT / "server" / "gradrule_server"
BUDGET = ROOT / "pyproject.toml"
TOP = "root"
"""The name in the budget of the modules that are in no package."""


def count(server: Path) -> tuple[Counter[str], Counter[str]]:
    """Counts lines and modules of each package; generated stubs and empty files do not count."""
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path in server.rglob("*.py"):
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length and not path.stem.endswith(("_pb2", "_pb2_grpc")):
            inside = path.relative_to(server)
            package = inside.parts[0] if len(inside.parts) > 1 else TOP
            lines[package] += length
            modules[package] += 1
    return lines, modules


def check(lines: Counter[str], modules: Counter[str], budget: dict[str, int]) -> list[str]:
    """Prints a table, and returns what exceeds the budget.

    A key of the budget is `modules` or `lines`, for all packages, or names packages that share a number of lines.
    """
    problems = []
    print(f"{'package':<34}{'modules':>8}{'lines':>8}{'budget':>8}")
    counted = {name: name.split() for name in budget if name not in ("lines", "modules")}
    counted["lines"] = list(lines)
    for name, packages in counted.items():
        total, allowed = sum(lines[package] for package in packages), budget[name]
        print(f"{name:<34}{sum(modules[package] for package in packages):>8,}{total:>8,}{allowed:>8,}")
        if total > allowed:
            problems.append(f"{name}: {total:,} lines, the budget is {allowed:,}")
    if modules.total() > budget["modules"]:
        problems.append(f"{modules.total()} modules, the budget is {budget['modules']}")
    budgeted = " ".join(budget).split()
    problems += [f"{package}: not in the budget" for package in sorted(lines) if package not in budgeted]
    return problems


def update(text: str, lines: Counter[str], modules: Counter[str]) -> str:
    """Returns the text of pyproject.toml with a budget of what was counted."""
    head, table, rest = re.split(
        r"(^\[tool\.gradrule\.size\]\n(?:.*\n)*?(?=\n|\Z))", text, maxsplit=1, flags=re.MULTILINE
    )
    totals = {"modules": modules.total(), "lines": lines.total()}

    def counted(row: re.Match[str]) -> str:
        name = row[1].strip('"')
        return f"{row[1]} = {totals.get(name, sum(lines[package] for package in name.split()))}"

    return head + re.sub(r'^("[^"]+"|\w+) = \d+', counted, table, flags=re.MULTILINE) + rest


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the size of the server with its budget.")
    parser.add_argument("--update", action="store_true", help="set the budget in pyproject.toml to what was counted")
    arguments = parser.parse_args()
    lines, modules = count(SERVER)
    if arguments.update:
        BUDGET.write_text(update(BUDGET.read_text(encoding="utf-8"), lines, modules), encoding="utf-8")
    problems = check(lines, modules, tomllib.loads(BUDGET.read_text(encoding="utf-8"))["tool"]["gradrule"]["size"])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
