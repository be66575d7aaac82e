"""Renders the manifests of deploy/kubernetes, as `kubectl apply -k` does, and finds objects and fields in them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())

FREE = ("tls", "gpu", "http", "monitoring")
"""Components that combine with all others."""

REPLICAS = ("ha", "hpa", "keda")
"""Components with several servers, which exclude each other: the autoscalers contain `ha`."""

Manifest = dict[str, Any]


def command() -> list[str] | None:
    """Returns the command that renders a folder; None if this machine has none.

    Components need kubectl 1.21 or kustomize 3.7. `make kubectl` installs kubectl beside Python.
    """
    kubectl = shutil.which("kubectl", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if kubectl:
        return [kubectl, "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def combinations() -> Iterator[tuple[str, ...]]:
    """Returns all sets of components that combine, in the order of deploy/README.md."""
    for present in itertools.product((False, True), repeat=len(FREE)):
        first = tuple(name for name, chosen in zip(FREE, present, strict=True) if chosen)
        for replicas in ((), *((name,) for name in REPLICAS)):
            yield (*first, *replicas)


@cache
def overlay(name: str) -> list[Manifest]:
    """Returns the manifests of an overlay."""
    return _render(KUBERNETES / "overlays" / name)


@cache
def combined(components: Sequence[str]) -> list[Manifest]:
    """Returns the manifests of the base with components."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.relpath(KUBERNETES, os.path.realpath(folder))
        return render_text(
            yaml.safe_dump(
                {
                    "resources": [f"{path}/base"],
                    "components": [f"{path}/components/{name}" for name in components],
                }
            ),
            Path(folder),
        )


def render_text(kustomization: str, folder: Path) -> list[Manifest]:
    """Returns the manifests of a kustomization that is written to a folder."""
    (folder / "kustomization.yaml").write_text(kustomization)
    return _render(folder)


def _render(folder: Path) -> list[Manifest]:
    found = command()
    if found is None:
        pytest.skip("needs kubectl 1.21 or kustomize 3.7; make kubectl installs it")
    done = subprocess.run([*found, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # kustomize warns about deprecated fields.
    assert done.stderr == ""
    return list(yaml.safe_load_all(done.stdout))


def find(manifests: Sequence[Manifest], kind: str, name: str = "gradrule") -> Manifest:
    """Returns the one manifest of a kind and name."""
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def kinds(manifests: Sequence[Manifest]) -> set[str]:
    return {each["kind"] for each in manifests}


def pod(manifests: Sequence[Manifest]) -> Manifest:
    """Returns the specification of the server's pod."""
    return find(manifests, "Deployment")["spec"]["template"]["spec"]


def container(manifests: Sequence[Manifest]) -> Manifest:
    (found,) = pod(manifests)["containers"]
    return found
