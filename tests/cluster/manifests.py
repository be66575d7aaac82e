"""Renders the manifests of deploy/kubernetes, as `kubectl apply -k` does, and finds objects and fields in them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
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

Manifest = dict[str, Any]


def command() -> list[str] | None:
    """Returns the command that renders a folder; None if this machine has none.

    Components need kustomize 3.7 or kubectl 1.21. Debian 12 has neither.
    """
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def combinations() -> Iterator[tuple[str, ...]]:
    """Returns all sets of components that make sense, in the order of deploy/README.md."""
    free = ("tls", "gpu", "http", "monitoring")
    for present in itertools.product((False, True), repeat=len(free)):
        first = tuple(name for name, chosen in zip(free, present, strict=True) if chosen)
        for replicas in ((), ("ha",), ("ha", "hpa"), ("ha", "keda")):
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
        pytest.skip("needs kubectl 1.21 or kustomize 3.7 on the PATH; Debian 12 has none that is new enough")
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
