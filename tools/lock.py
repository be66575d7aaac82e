"""Writes the lock files in requirements/ from pyproject.toml and requirements/*.in.

Run it with `make lock`, on the oldest Python that is supported. The files name packages, versions and hashes; where the
packages come from is the business of whoever installs them.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
FLAGS = [
    "--quiet",
    "--generate-hashes",
    "--strip-extras",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-emit-trusted-host",
]

# Dependencies that `make test-peers` and `make test-bridges` do without, see requirements/peers.in: these locks are
# installed with --no-deps.
LEFT_OUT_WITH_PEERS = ("torchvision", "torchaudio", "tensorboard")


def flatten(extra: str) -> list[str]:
    """The requirements of an extra and of the project itself, with the extras it names unfolded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found: set[str] = set(project["dependencies"])
    waiting = [extra]
    while waiting:
        for requirement in extras[waiting.pop()]:
            inner = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if inner:
                waiting.extend(inner[1].split(","))
            else:
                found.add(requirement)
    return sorted(found)


def build_tools() -> list[str]:
    """The requirements that building the project has: `make demo` installs it in editable form."""
    requires: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    return requires


def pip_compile(
    name: str, requirements: list[str], constraint: str | None = None, left_out: tuple[str, ...] = ()
) -> None:
    """Write requirements/NAME.txt; versions follow the file CONSTRAINT where one is named."""
    arguments = [sys.executable, "-m", "piptools", "compile", *FLAGS, "--output-file", f"requirements/{name}.txt", "-"]
    if constraint is not None:
        arguments += ["--constraint", f"requirements/{constraint}.txt"]
    # Packages that pip-tools calls unsafe, setuptools for one, are locked unless others are called so.
    arguments += [f"--unsafe-package={package}" for package in left_out] or ["--allow-unsafe"]
    environment = {**os.environ, "CUSTOM_COMPILE_COMMAND": "make lock"}
    subprocess.run(arguments, input="\n".join(requirements), text=True, check=True, cwd=ROOT, env=environment)


def main() -> None:
    """Lock everything; the server's versions are the ones that were tested."""
    pip_compile("tools", (LOCKS / "tools.in").read_text().splitlines())
    pip_compile("dev", flatten("dev"))
    pip_compile("demo", [*flatten("demo"), *build_tools()], constraint="dev")
    pip_compile("server", flatten("server"), constraint="dev")
    pip_compile("gpu", flatten("gpu"), constraint="dev")
    pip_compile("gpu-check", sorted({*flatten("gpu"), *flatten("test")}), constraint="dev")
    bridges = [*flatten("dev"), *(LOCKS / "bridges.in").read_text().splitlines()]
    pip_compile("bridges", bridges, constraint="dev", left_out=LEFT_OUT_WITH_PEERS)
    pip_compile("bench-peers", (LOCKS / "bench-peers.in").read_text().splitlines())
    pip_compile("peers", (LOCKS / "peers.in").read_text().splitlines(), left_out=LEFT_OUT_WITH_PEERS)


if __name__ == "__main__":
    main()
