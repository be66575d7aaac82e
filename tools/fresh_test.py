"""Shows that gradrule works on a machine where nothing ever ran: README's commands, the built wheel, odd machines.

`make fresh-test` runs it. Each scenario has the programs of a minimal Debian (made by debootstrap, which needs root;
without root this machine's own programs), an empty home, an ordinary user, Python and make: see tools/fresh_root.py.
How this machine's pip and npm reach their registries is passed on. `--quick` is the part that CI runs, with this
machine's own programs. One line for each scenario; exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tools.fresh_root import USER_ID, Machine, fault
from tools.fresh_scenarios import QUICK, SCENARIOS, Failure, Skipped, Stage, check, make_folder

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "out" / "fresh"
PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")


def debian() -> Path:
    """Returns the folder of a minimal Debian with Python and make; made once, by debootstrap."""
    folder = CACHE / "debian"
    if not folder.exists():
        if shutil.which("debootstrap") is None:
            install = "apt-get update -qq && apt-get install --yes -qq --no-install-recommends debootstrap"
            subprocess.run(["sh", "-c", install], check=True, stdout=sys.stderr)
        unfinished = CACHE / "debian.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        packages = "--include=python3,python3-venv,make,ca-certificates"
        with (CACHE / "debootstrap.log").open("wb") as log:
            command = ["debootstrap", "--variant=minbase", packages, "bookworm", str(unfinished)]
            made = subprocess.run(command, check=False, stdout=log, stderr=log)
        check(made.returncode == 0, "debootstrap fails", (CACHE / "debootstrap.log").read_text())
        unfinished.rename(folder)
    return folder


def registry_access() -> tuple[dict[str, str], list[Path]]:
    """Returns how this machine's pip and npm reach their registries: variables, and the files that these name."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        # `:env:` comes last and wins, as it does in pip.
        key, _, quoted = line.partition("=")
        variable = "PIP_" + key.rpartition(".")[2].upper().replace("-", "_")
        environment[variable] = " ".join(str(ast.literal_eval(quoted)).split())
    environment["PIP_CONFIG_FILE"] = os.devnull
    environment["PIP_CACHE_DIR"] = str(CACHE / "pip")
    if shutil.which("npm"):
        for key in ("registry", "cafile"):
            got = subprocess.run(["npm", "config", "get", key], capture_output=True, text=True, check=True)
            if got.stdout.strip() not in ("null", "undefined", ""):
                environment[f"NPM_CONFIG_{key.upper()}"] = got.stdout.strip()
    environment["NPM_CONFIG_CACHE"] = str(CACHE / "npm")
    words = [word.removeprefix("file://") for value in environment.values() for word in value.split()]
    named = {Path(word) for word in words if word.startswith("/") and word != os.devnull}
    # A local index keeps its files beside its pages.
    wanted = {path.parent if path.name == "simple" else path for path in named}
    return environment, sorted(path for path in wanted if path.exists())


def find_pythons(machine: Machine) -> tuple[dict[str, str], list[Path]]:
    """Returns interpreters by version that work in the machine, and the folders that they need bound."""
    found, folders = {}, []
    for version in ("3.11", "3.12", "3.13"):
        name = f"python{version}"
        candidates: list[tuple[str, list[Path]]] = [(f"/usr/bin/{name}", [])]
        tell = [name, "-c", "import sys; print(sys.base_prefix)"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            # pyenv has versions that run only where they are named.
            named = {**os.environ, "PYENV_VERSION": version}
            prefix = subprocess.run(tell, capture_output=True, text=True, check=True, env=named).stdout.strip()
            candidates.append((f"{prefix}/bin/{name}", [Path(prefix)] if not prefix.startswith("/usr") else []))
        for python, needed in candidates:
            with_python = replace(machine, binds=(*machine.binds, *needed))
            if with_python.run(python, "-c", "import ssl, sqlite3, venv, ensurepip", cwd="/").returncode == 0:
                found[version] = python
                folders += needed
                break
    return found, folders


@contextlib.contextmanager
def prepared(system: Path, revision: str) -> Iterator[Stage]:
    """Makes what all scenarios share; removes it at the end."""
    environment, binds = registry_access()
    for name in ("pip", "npm"):
        binds.append(make_folder(CACHE / name, USER_ID))
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
    folder.chmod(0o755)
    try:
        source = folder / "source.tar"
        subprocess.run(["git", "archive", "--output", str(source), revision], cwd=ROOT, check=True)
        source.chmod(0o644)
        readme = subprocess.run(["git", "show", f"{revision}:README.md"], cwd=ROOT, capture_output=True, check=True)
        binds.append(source)
        scratch = folder / "scratch"
        scratch.mkdir()
        machine = Machine(system, scratch, tuple(binds), environment)
        pythons, folders = find_pythons(machine)
        check(bool(pythons), "no Python from 3.11 to 3.13 works in the machine")
        path = ":".join(dict.fromkeys([*(os.path.dirname(python) for python in pythons.values()), "/usr/bin:/bin"]))
        machine = Machine(system, folder, (*binds, *folders), {**environment, "PATH": path})
        yield Stage(machine, pythons, source, readme.stdout.decode())
    finally:
        shutil.rmtree(folder)


def run_scenario(name: str, stage: Stage) -> bool:
    """Runs one and prints its line; whether it did not fail."""
    begun = time.monotonic()
    try:
        SCENARIOS[name](stage)
        verdict = "ok"
    except Skipped as reason:
        verdict = f"skipped: {reason}"
    except (Failure, OSError, subprocess.SubprocessError) as failure:
        verdict = "FAILED: " + str(failure).replace("\n", "\n    ")
    print(f"{name:16}{time.monotonic() - begun:8.1f} s  {verdict}", flush=True)
    return not verdict.startswith("FAILED")


def main() -> int:
    """Runs the chosen scenarios; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", choices=SCENARIOS, action="append", help="run this; may be repeated")
    parser.add_argument("--quick", action="store_true", help="run what fits into three minutes, as CI does")
    parser.add_argument("--source", metavar="REVISION", default="HEAD", help="commit to test [default: HEAD]")
    parser.add_argument("--system", choices=("debian", "own"), help="whose programs [default: debian as root]")
    options = parser.parse_args()
    # So that folders are removed and machines end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    CACHE.mkdir(parents=True, exist_ok=True)
    wrong = fault()
    if wrong is not None:
        # CI runs this on whatever it has.
        print(f"fresh-test: not run: {wrong}", file=sys.stderr)
        return 0 if options.quick else 1
    own = options.system == "own" or (options.system is None and (options.quick or os.geteuid() != 0))
    try:
        with prepared(Path("/") if own else debian(), options.source) as stage:
            names = options.only or (QUICK if options.quick else SCENARIOS)
            results = [run_scenario(name, stage) for name in names]
    except Failure as failure:
        print(f"fresh-test: {failure}", file=sys.stderr)
        return 1
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
