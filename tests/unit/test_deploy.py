"""The examples in deploy/ name existing settings, and are as strict as the guide's command for strangers."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from gradrule_server.settings import (
    PRESETS,
    SOURCE_NAMES,
    Settings,
    environment_name,
    flag_name,
    kubernetes_service_variables,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted([*DEPLOY.glob("*.yaml"), *DEPLOY.glob("Dockerfile*"), DEPLOY / "README.md"])

OF_CLIENTS = {"GRADRULE_TLS_CA", "GRADRULE_TOKEN"}
OF_COMMANDS = {
    # docker, kubectl
    "--build", "--build-arg", "--from-file", "--gpus", "--interval", "--secret", "--start-period", "--timeout",
    # gradrule
    "--admin", "--file", "--insecure-token", "--target", "--tenant", "--tls-ca", "--token",
}  # fmt: skip


def test_every_example_is_checked() -> None:
    assert {"Dockerfile", "Dockerfile.gpu", "compose.yaml", "compose.tls.yaml", "kubernetes.yaml"} < {
        file.name for file in FILES
    }
    assert set(FILES) == set(DEPLOY.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_named_settings_exist(file: Path) -> None:
    text = file.read_text()
    variables = set(re.findall(r"\bGRADRULE_[A-Z_]+\b", text))
    assert variables <= {environment_name(name) for name in (*SOURCE_NAMES, *Settings.model_fields)} | OF_CLIENTS
    if file.suffix != ".md":
        return
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b", text))
    known = {flag_name(name) for name in Settings.model_fields}
    assert flags <= known | {flag.replace("--", "--no-", 1) for flag in known} | OF_COMMANDS | {"--tenant", "--max"}


def test_every_secret_is_mounted() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    names = re.findall(r"secretName: (\S+)", text)
    assert names == ["gradrule-tls", "gradrule-tokens"]
    for name in ("data", "tmp", "tls", "tokens"):
        assert f"- {{ name: {name}, mountPath:" in text
        assert re.search(rf"^ +- name: {name}$", text, re.MULTILINE)


GUIDE = Path(__file__).parents[2] / "docs/guide/operating.md"


def under(text: str, *keys: str) -> str:
    """Returns the lines below nested keys of a YAML file, without the indent of the first line."""
    for key in keys:
        lines = iter(text.splitlines())
        start = next(line for line in lines if line.removeprefix("- ") == f"{key}:")
        indent = "  " if start.startswith("- ") else ""
        found = []
        for line in lines:
            if line.strip() and not line.startswith((f"{indent}  ", f"{indent}- ")):
                break
            found.append(line)
        text = dedent("\n".join(found))
    return text


def test_yaml_reader_finds_nested_keys() -> None:
    text = "a:\n  b:\n    c: 1\n    d:\n      - e\n  f:\n    c: 2\ng: 3"
    assert under(text, "a", "b") == "c: 1\nd:\n  - e"
    assert under(text, "a", "f") == "c: 2"
    assert under(text, "a", "b", "d") == "- e"
    with pytest.raises(StopIteration):
        under(text, "b")


def test_pod_is_hardened() -> None:
    documents = (DEPLOY / "kubernetes.yaml").read_text().split("\n---\n")
    deployment = next(text for text in documents if "\nkind: Deployment\n" in text)
    pod = under(deployment, "spec", "template", "spec")
    for line in ("automountServiceAccountToken: false", "enableServiceLinks: false", "restartPolicy: Always"):
        assert re.search(rf"^{line}$", pod, re.MULTILINE), line
    rights = under(pod, "securityContext")
    assert "runAsNonRoot: true" in rights
    assert "type: RuntimeDefault" in under(rights, "seccompProfile")
    for word in ("hostNetwork", "hostPID", "hostIPC", "hostPath", "privileged", "hostPort"):
        assert word not in deployment
    container = dedent(re.sub(r"^- ", "  ", under(pod, "containers"), count=1, flags=re.MULTILINE))
    rights = under(container, "securityContext")
    assert "allowPrivilegeEscalation: false" in rights
    assert "readOnlyRootFilesystem: true" in rights
    assert "drop: [ALL]" in under(rights, "capabilities")
    assert "add" not in under(rights, "capabilities")
    assert "memory:" in under(container, "resources").partition("limits:")[2]
    variables = dict(re.findall(r"\{ name: (GRADRULE_\w+), value: (.+) \}", container))
    assert variables["GRADRULE_SANDBOX"] == '"on"'
    assert {"GRADRULE_TLS_CERT", "GRADRULE_TLS_KEY", "GRADRULE_TOKENS"} < variables.keys()
    # Probes detect a server that clients cannot reach.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert under(container, probe)
    # Files are written to a volume, or their size is limited.
    assert "sizeLimit:" in under(pod, "volumes")


def test_variables_of_the_example_service_are_ignored() -> None:
    documents = (DEPLOY / "kubernetes.yaml").read_text().split("\n---\n")
    service = next(text for text in documents if "\nkind: Service\n" in text)
    assert "name: gradrule" in under(service, "metadata")
    assert kubernetes_service_variables({"GRADRULE_SERVICE_HOST": "None", "GRADRULE_PORT": "tcp://10.0.0.1:8470"})


def test_composition_is_hardened() -> None:
    base, tls = ((DEPLOY / name).read_text() for name in ("compose.yaml", "compose.tls.yaml"))
    own, added = under(base, "services", "gradrule"), under(tls, "services", "gradrule")
    assert "read_only: true" in own
    assert "cap_drop: [ALL]" in own
    assert "- no-new-privileges:true" in under(own, "security_opt")
    # The server is restarted after every exit code except 0.
    assert "restart: unless-stopped" in own
    for name in ("read_only", "cap_drop", "cap_add", "security_opt", "restart", "privileged", "network_mode", "pid"):
        assert not re.search(rf"^{name}:", added, re.MULTILINE)
    assert 'GRADRULE_SANDBOX: "on"' in under(added, "environment")
    assert re.search(r"^mem_limit: ", added, re.MULTILINE)
    assert re.search(r"^pids_limit: ", added, re.MULTILINE)
    # Without credentials, only this machine may connect.
    assert '- "127.0.0.1:' in under(own, "ports")


def test_guides_command_for_strangers_sets_the_same() -> None:
    command = re.search(r"gradrule serve --host 0\.0\.0\.0 .*", GUIDE.read_text())
    assert command is not None
    words = command[0].split()
    assert {"--tls-cert", "--tls-key", "--tokens"} <= set(words)
    assert words[words.index("--for") + 1] == "strangers"
    assert PRESETS["strangers"].values["sandbox"] == "on"
