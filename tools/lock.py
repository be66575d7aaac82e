"""Writes the lock files in requirements/ from pyproject.toml and requirements/*.in.

Run it with `make lock`, on the oldest Python that is supported. The files name packages, versions and hashes; where the
packages come from is the business of whoever installs them.
"""

import os
import re
import subprocess
import sys
import tempfile
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

# s3fs needs python-dateutil 2.
NOT_FOR_S3 = ("python-dateutil",)


def flatten(*names: str) -> list[str]:
    """The requirements of extras and of the project itself, with the extras that these name unfolded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found: set[str] = set(project["dependencies"])
    waiting = list(names)
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
    name: str,
    requirements: list[str],
    constraint: str | None = None,
    left_out: tuple[str, ...] = (),
    other_versions: tuple[str, ...] = (),
) -> None:
    """Write requirements/NAME.txt; versions follow the file CONSTRAINT where one is named, except OTHER_VERSIONS."""
    arguments = [sys.executable, "-m", "piptools", "compile", *FLAGS, "--output-file", f"requirements/{name}.txt", "-"]
    if other_versions:
        # Without annotations, because they would name the temporary file.
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            pins = re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / f"{constraint}.txt").read_text(), re.MULTILINE)
            file.writelines(f"{package}=={version}\n" for package, version in pins if package not in other_versions)
            file.flush()
            _run([*arguments, "--constraint", file.name, "--no-annotate", "--allow-unsafe"], requirements)
        return
    if constraint is not None:
        arguments += ["--constraint", f"requirements/{constraint}.txt"]
    # Packages that pip-tools calls unsafe, setuptools for one, are locked unless others are called so.
    arguments += [f"--unsafe-package={package}" for package in left_out] or ["--allow-unsafe"]
    _run(arguments, requirements)


def _run(arguments: list[str], requirements: list[str]) -> None:
    environment = {**os.environ, "CUSTOM_COMPILE_COMMAND": "make lock"}
    subprocess.run(arguments, input="\n".join(requirements), text=True, check=True, cwd=ROOT, env=environment)


def main() -> None:
    """Lock everything; the server's versions are the ones that were tested."""
    pip_compile("tools", (LOCKS / "tools.in").read_text().splitlines())
    pip_compile("dev", flatten("dev"))
    pip_compile("demo", [*flatten("demo"), *build_tools()], constraint="dev")
    # For the images.
    pip_compile("server", flatten("server", "postgres", "s3"), constraint="dev", other_versions=NOT_FOR_S3)
    pip_compile("gpu", flatten("gpu", "postgres", "s3"), constraint="dev", other_versions=NOT_FOR_S3)
    pip_compile("gpu-check", sorted({*flatten("gpu"), *flatten("test")}), constraint="dev")
    bridges = [*flatten("dev"), *(LOCKS / "bridges.in").read_text().splitlines()]
    pip_compile("bridges", bridges, constraint="dev", left_out=LEFT_OUT_WITH_PEERS)
    cluster = [*flatten("dev", "postgres", "s3", "ray"), *(LOCKS / "cluster.in").read_text().splitlines()]
    pip_compile("cluster", cluster, constraint="dev", other_versions=NOT_FOR_S3)
    pip_compile("bench-peers", (LOCKS / "bench-peers.in").read_text().splitlines())
    pip_compile("peers", (LOCKS / "peers.in").read_text().splitlines(), left_out=LEFT_OUT_WITH_PEERS)


if __name__ == "__main__":
    main()
