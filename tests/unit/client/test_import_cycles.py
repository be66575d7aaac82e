"""Checks that the client's files import each other without a cycle."""

from __future__ import annotations

import ast
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import gradrule

ROOT = Path(gradrule.__file__).parent


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(node: ast.AST, modules: Set[str]) -> set[str]:
    """Returns the modules that the code below a node imports, inside functions too; TYPE_CHECKING blocks do not count.

    `from package import module` imports the module, `from package import name` the package.
    """
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            found.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None, "use absolute imports"
            for alias in child.names:
                submodule = f"{child.module}.{alias.name}"
                found.add(submodule if submodule in modules else child.module)
        else:
            found |= imported_modules(child, modules)
    return found & modules


def import_graph(root: Path) -> dict[str, set[str]]:
    files = {module_name(path, root): path for path in root.rglob("*.py") if "_pb2" not in path.name}
    # Every file imports the top package, which loads the others at their first use.
    return {
        name: imported_modules(ast.parse(path.read_text()), files.keys()) - {name, root.name}
        for name, path in files.items()
    }


def test_files_import_each_other_without_a_cycle() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 90
    TopologicalSorter(graph).prepare()


def test_a_cycle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from package import second\n")
    (package / "second.py").write_text("def late():\n    from package.first import name\n")
    try:
        TopologicalSorter(import_graph(package)).prepare()
    except CycleError as cycle:
        assert {"package.first", "package.second"} <= set(cycle.args[1])
    else:
        raise AssertionError("the cycle was not found")
