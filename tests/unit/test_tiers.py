"""Each folder of tests belongs to one tier, which one target of the Makefile runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CHECK = {"unit", "contract", "rules"}
DEFAULT = {"policy", "xla", "service", "e2e", "examples"}
"""What `make test` adds to `make check`."""
LONG = {"battery", "benchmarks", "generated", "models", "peers"}
"""What `make test-all` adds to `make test`."""
FRAMEWORKS = {"bridges"}
"""What `make test-bridges` runs, in an environment with the frameworks."""
CLUSTER = {"cluster"}
"""What `make cluster-test` runs, with PostgreSQL and in an environment with the extras for several servers."""


def paths_of(target: str) -> set[str]:
    """Returns the paths that a target of the Makefile passes to pytest."""
    recipe = re.search(rf"^{target}:.*\n\t\$\(PYTEST\)(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return {word for word in recipe[1].split() if word.startswith("tests")}


def test_each_folder_with_tests_is_in_one_tier() -> None:
    found = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    tiers = (CHECK, DEFAULT, LONG, FRAMEWORKS, CLUSTER)
    assert found == set().union(*tiers)
    assert len(found) == sum(map(len, tiers))


def test_the_tiers_are_what_make_and_pytest_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert paths_of("check") == {f"tests/{folder}" for folder in CHECK}
    # Without paths, pytest takes those of its settings.
    assert paths_of("test") == set()
    assert set(settings["testpaths"]) == {f"tests/{folder}" for folder in CHECK | DEFAULT}
    assert paths_of("test-all") == {"tests"}
