"""The examples in deploy/ name settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradrule_server.settings import Settings
from gradrule_server.settings_reading import environment_name, flag_name

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted([*DEPLOY.glob("*.yaml"), *DEPLOY.glob("Dockerfile*"), DEPLOY / "README.md"])

OF_CLIENTS = {"GRADRULE_TLS_CA", "GRADRULE_TOKEN"}
OF_COMMANDS = {
    # docker, kubectl
    "--build", "--build-arg", "--from-file", "--gpus", "--interval", "--secret", "--start-period", "--timeout",
    # gradrule
    "--admin", "--file", "--insecure-token", "--target", "--tenant", "--tls-ca", "--token",
}  # fmt: skip


def test_every_example_is_looked_at() -> None:
    assert {"Dockerfile", "Dockerfile.gpu", "compose.yaml", "compose.tls.yaml", "kubernetes.yaml"} < {
        file.name for file in FILES
    }
    assert set(FILES) == set(DEPLOY.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_settings_that_are_named_are_there(file: Path) -> None:
    text = file.read_text()
    variables = set(re.findall(r"\bGRADRULE_[A-Z_]+\b", text))
    assert variables <= {environment_name(name) for name in Settings.model_fields} | OF_CLIENTS
    if file.suffix != ".md":
        return
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b", text))
    known = {flag_name(name) for name in Settings.model_fields}
    assert flags <= known | {flag.replace("--", "--no-", 1) for flag in known} | OF_COMMANDS | {"--tenant", "--max"}


def test_all_that_a_secret_mounts_is_used() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    names = re.findall(r"secretName: (\S+)", text)
    assert names == ["gradrule-tls", "gradrule-tokens"]
    for name in ("data", "tmp", "tls", "tokens"):
        assert f"- {{ name: {name}, mountPath:" in text
        assert re.search(rf"^ +- name: {name}$", text, re.MULTILINE)
