"""Links and file names in the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PREFIXES = ("", "server/gradrule_server/", "client/python/", "client/python/gradrule/")


def pages() -> list[Path]:
    """All Markdown files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def named_files(page: Path) -> set[str]:
    """The files and folders that a page names in code style."""
    named = re.findall(r"`([\w./…*-]+)`", _FENCE.sub("", page.read_text(encoding="utf-8")))
    return {
        name
        for name in named
        if re.search(r"\.(py|ts|tsv|proto|md|toml|yaml|binpb)$", name) or name.startswith(("…/", "docs/", "tests/"))
    }


# Pages of which at least one name of a file is tested; the changelog names files of old releases.
NAMING_FILES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reference/faults.md", "docs/design/decisions.md")


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")], ids=page_id
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    # A user chooses the names of some files.
    named = named_files(page) - {"server.toml", "graph.pb"}
    assert named or page_id(page) not in NAMING_FILES
    for path in named:
        short = path.removeprefix("…/")
        found = any((ROOT / prefix / short).exists() for prefix in _PREFIXES)
        # A name without a folder stands beside the folder that the sentence names.
        found = found or ("/" not in short and any(any(ROOT.glob(f"{top}/**/{short}")) for top in ("server", "client")))
        assert found, path


def test_commands_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    tests = re.findall(r"\btests/[\w/.]*\w", text)
    assert len(tests) > 5
    for path in tests:
        assert (ROOT / path).exists() or (ROOT / "client/node" / path).exists(), path


def named_modules(page: Path) -> set[str]:
    """The modules of the server that a page names in code style: `engine.arguments`."""
    packages = [path.parent.name for path in (ROOT / "server/gradrule_server").glob("*/__init__.py")]
    return set(re.findall(rf"`((?:{'|'.join(packages)})\.[a-z_.]+)`", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page",
    [ROOT / "ARCHITECTURE.md", *(ROOT / "docs/design").glob("*.md")],
    ids=page_id,
)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    for name in named_modules(page):
        package, module, *_ = name.split(".")
        folder = ROOT / "server/gradrule_server" / package
        in_face = module in (folder / "__init__.py").read_text(encoding="utf-8")
        assert in_face or (folder / f"{module}.py").exists() or (folder / module).is_dir(), name


def test_every_page_of_docs_is_in_a_folder() -> None:
    """A reader looks in guide/ (how to use it), reference/ (to look something up) or design/ (why it is so)."""
    assert not list((ROOT / "docs").glob("*.md"))
    assert {path.name for path in (ROOT / "docs").iterdir()} == {"design", "guide", "reference"}


def test_every_guide_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _LINK.findall(text)}
    reached = set(linked)
    for page in linked:
        if page.suffix == ".md" and page.is_file():
            links = _LINK.findall(page.read_text(encoding="utf-8"))
            reached |= {(page.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link}
    assert not {
        page_id(page) for page in (ROOT / "docs").rglob("*.md") if page not in reached and page.parent not in reached
    }
