"""`make size` counts what people write, and fails above the budget."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.size import check, count, update

BUDGET = """[tool.gradrule.size]
modules = 3
lines = 6
front = 2
"graphs rules" = 3
root = 1

[tool.other]
lines = 9
"""


def server(folder: Path) -> Path:
    """A server of three modules and six lines, an empty file and a generated one."""
    for name, lines in {
        "app.py": 1,
        "front/a.py": 2,
        "rules/deep/b.py": 3,
        "front/__init__.py": 0,
        "v_pb2.py": 7,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)
    return folder


def budget(text: str) -> dict[str, int]:
    table: dict[str, int] = tomllib.loads(text)["tool"]["gradrule"]["size"]
    return table


def test_counts_lines_and_modules_of_packages(tmp_path: Path) -> None:
    lines, modules = count(server(tmp_path))
    assert lines == {"root": 1, "front": 2, "rules": 3}
    assert modules == {"root": 1, "front": 1, "rules": 1}


def test_size_within_the_budget_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*count(server(tmp_path)), budget(BUDGET)) == []
    assert "graphs rules" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("exceeded", "problem"),
    [
        ({"front": 1}, "front: 2 lines, the budget is 1"),
        ({"graphs rules": 2}, "graphs rules: 3 lines, the budget is 2"),
        ({"lines": 5}, "lines: 6 lines, the budget is 5"),
        ({"modules": 2}, "3 modules, the budget is 2"),
    ],
)
def test_what_exceeds_the_budget_is_named(tmp_path: Path, exceeded: dict[str, int], problem: str) -> None:
    assert check(*count(server(tmp_path)), budget(BUDGET) | exceeded) == [problem]


def test_package_without_a_budget_is_named(tmp_path: Path) -> None:
    (server(tmp_path) / "new").mkdir()
    (tmp_path / "new" / "c.py").write_text("x = 1\n")
    problems = check(*count(tmp_path), budget(BUDGET) | {"lines": 7, "modules": 4})
    assert problems == ["new: not in the budget"]


def test_update_sets_the_budget_to_what_was_counted(tmp_path: Path) -> None:
    zeros = BUDGET.replace("3", "0").replace("6", "0").replace("2", "0").replace("1", "0")
    assert update(zeros, *count(server(tmp_path))) == BUDGET
