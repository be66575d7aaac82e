"""The examples in deploy/ name existing settings, and are as strict as the guide's command for strangers.

tests/cluster/test_kubernetes.py renders the manifests for Kubernetes; it needs kubectl.
"""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradrule_server.settings import (
    PRESETS,
    SOURCE_NAMES,
    Settings,
    environment_name,
    flag_name,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
GUIDE = Path(__file__).parents[2] / "docs/guide/operating.md"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
MANIFESTS = [path for path in FILES if path.is_relative_to(DEPLOY / "kubernetes") and path.suffix == ".yaml"]

OF_CLIENTS = {"GRADRULE_TLS_CA", "GRADRULE_TOKEN"}
OF_COMMANDS = {
    # docker, kubectl
    "--build", "--build-arg", "--from-file", "--gpus", "--interval", "--secret", "--start-period", "--timeout",
    # gradrule
    "--admin", "--file", "--insecure-token", "--target", "--tenant", "--tls-ca", "--token",
}  # fmt: skip

QUERIES = ("keda/scaledobject.yaml", "monitoring/rules.yaml")

COMPOSITIONS = {
    "alone": ("compose.yaml",),
    "tls": ("compose.yaml", "compose.tls.yaml"),
    "ha": ("compose.yaml", "compose.ha.yaml"),
}


def test_every_example_is_checked() -> None:
    own = {path.name for path in DEPLOY.iterdir() if path.is_file()}
    composed = {name for names in COMPOSITIONS.values() for name in names}
    assert own == composed | {"Dockerfile", "Dockerfile.gpu", "README.md"}
    assert {path.name for path in DEPLOY.iterdir() if path.is_dir()} == {"grafana", "kubernetes", "ray"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_named_settings_exist(file: Path) -> None:
    text = file.read_text()
    variables = set(re.findall(r"\bGRADRULE_[A-Z_]+\b", text))
    known = {environment_name(name) for name in (*SOURCE_NAMES, *Settings.model_fields)}
    assert variables <= known | OF_CLIENTS
    if file.suffix != ".md":
        return
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b", text))
    own = {flag_name(name) for name in Settings.model_fields}
    assert flags <= own | {flag.replace("--", "--no-", 1) for flag in own} | OF_COMMANDS | {"--tenant", "--max"}


def test_no_component_weakens_the_base() -> None:
    dangerous = ("hostNetwork", "hostPID", "hostIPC", "hostPath", "hostPort", "privileged")
    of_the_base = ("automountServiceAccount", "securityContext", "GRADRULE_SANDBOX", "enableServiceLinks", "Probe:")
    base = yaml.safe_load((DEPLOY / "kubernetes/base/deployment.yaml").read_text())["spec"]["template"]["spec"]
    for file in MANIFESTS:
        text = file.read_text()
        assert not [word for word in dangerous if word in text], file
        if file.parent.name == "base":
            continue
        if "kind: CronJob" not in text:
            assert not [word for word in of_the_base if word in text], file
            continue
        own = yaml.safe_load(text)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for name in ("automountServiceAccountToken", "enableServiceLinks"):
            assert own[name] is base[name] is False
        assert own["securityContext"].items() <= base["securityContext"].items()
        assert own["securityContext"]["runAsNonRoot"] is True
        assert [item["securityContext"] for item in own["containers"]] == [
            item["securityContext"] for item in base["containers"]
        ]


def test_the_guide_creates_the_secrets_of_the_overlay() -> None:
    code = (GUIDE.parent / "clusters.md").read_text().replace("\\\n", " ")
    created = {
        line.split(" create secret ")[1].split()[1]: set(re.findall(r"--from-(?:literal|file)=([\w-]+)", line))
        for line in code.splitlines()
        if " create secret " in line
    }
    created["gradrule-tls"] = {"tls.crt", "tls.key"}
    components = DEPLOY / "kubernetes/components"
    needed: dict[str, set[str]] = {}
    known: dict[str, set[str]] = {}
    (server,) = yaml.safe_load((components / "ha/deployment.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ]
    for variable in server["env"]:
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            known.setdefault(reference["name"], set()).add(reference["key"])
            if not reference.get("optional"):
                needed.setdefault(reference["name"], set()).add(reference["key"])
    for volume in yaml.safe_load((components / "tls/deployment.yaml").read_text())["spec"]["template"]["spec"][
        "volumes"
    ]:
        # `test_settings_are_accepted_and_match_the_pod` checks the paths.
        needed[volume["secret"]["secretName"]] = set()
    assert needed.keys() == created.keys()
    for name, keys in needed.items():
        assert keys <= created[name]
        assert created[name] <= known.get(name, created[name])


@pytest.mark.parametrize("name", ["grafana/gradrule.json", *(f"kubernetes/components/{name}" for name in QUERIES)])
def test_queries_name_documented_metrics(name: str) -> None:
    """tests/cluster/test_monitoring.py parses the queries and asks a server."""
    documented = set(re.findall(r"^\| `(gradrule_\w+)` \|", GUIDE.read_text(), re.MULTILINE))
    histograms = {f"{metric}{suffix}" for metric in documented for suffix in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\b(gradrule_\w+)\{", (DEPLOY / name).read_text()))
    assert named
    assert named <= documented | histograms


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads Compose's tag `!override`, which replaces a list instead of extending it."""


class Override(list[Any]):
    """A list that replaces the list of an earlier file."""


_Loader.add_constructor("!override", lambda loader, node: Override(loader.construct_sequence(node, deep=True)))


def merge(before: Any, after: Any) -> Any:
    """Returns the merge of two Compose files: of mappings and lists, and of volumes by the path in the container."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = before | {key: merge(before[key], value) if key in before else value for key, value in after.items()}
        if isinstance(found.get("volumes"), list):
            found["volumes"] = list({target(volume): volume for volume in found["volumes"]}.values())
        return found
    if isinstance(before, list) and isinstance(after, list) and not isinstance(after, Override):
        return [*before, *after]
    return after


def target(volume: str) -> str:
    """Returns the path of a volume in the container."""
    return volume.split(":")[1] if ":" in volume else volume


@pytest.fixture(params=COMPOSITIONS)
def composition(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A name of `COMPOSITIONS`, and the merged files."""
    files = [yaml.load((DEPLOY / name).read_text(), _Loader) for name in COMPOSITIONS[request.param]]
    return request.param, reduce(merge, files)


def test_files_are_merged_like_compose_does() -> None:
    before = {"a": [1], "b": [1], "volumes": ["x:/p", "y:/q:ro"], "c": {"d": 1, "e": 1}}
    after = yaml.load("{a: [2], b: !override [2], volumes: [/p], c: {d: 2}}", _Loader)
    assert merge(before, after) == {"a": [1, 2], "b": [2], "volumes": ["/p", "y:/q:ro"], "c": {"d": 2, "e": 1}}


def settings(composed: dict[str, Any]) -> Settings:
    """Loads the settings as the server of the image does."""
    command = json.loads((DEPLOY / "Dockerfile").read_text().splitlines()[-1].removeprefix("CMD "))
    return Settings.load(command[1:], composed["services"]["gradrule"]["environment"])


def test_compositions_are_complete(composition: tuple[str, dict[str, Any]]) -> None:
    name, composed = composition
    services = composed["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        volumes = [volume.split(":")[0] for volume in service.get("volumes", ()) if not volume.startswith((".", "/"))]
        assert set(volumes) <= composed["volumes"].keys()
        assert {config["source"] for config in service.get("configs", ())} <= composed.get("configs", {}).keys()
        # Images of others have a version; ours is built.
        assert service["image"] == "gradrule" or re.search(r":\d", service["image"])
    own = services["gradrule"]
    assert "/var/lib/gradrule" in map(target, own["volumes"])
    published = {int(port.rpartition(":")[2]) for port in own["ports"]}
    found = settings(composed)
    assert published == {found.port, found.http_port} - ({found.http_port} if name == "tls" else set())


def test_compositions_are_hardened(composition: tuple[str, dict[str, Any]]) -> None:
    name, composed = composition
    for service in composed["services"].values():
        if service["image"] == "gradrule":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"cap_add", "privileged", "network_mode", "pid", "ipc"} & service.keys()
    own, found = composed["services"]["gradrule"], settings(composed)
    # The server is restarted after every exit code except 0.
    assert own["restart"] == "unless-stopped"
    assert int(own["stop_grace_period"].removesuffix("s")) >= 2 * found.drain_s + 15
    if found.is_open:
        # Without credentials, only this machine may connect.
        assert all(port.startswith("127.0.0.1:") for port in own["ports"])
    else:
        assert found.sandbox == "on"
        assert {"mem_limit", "pids_limit"} <= own.keys()
    assert found.is_open == (name != "tls")


def test_replicas_share_no_volume() -> None:
    composed = yaml.load((DEPLOY / "compose.ha.yaml").read_text(), _Loader)
    own = composed["services"]["gradrule"]
    replicas = own["deploy"]["replicas"]
    assert replicas == 2
    # An anonymous volume, and a range of ports with one for each.
    assert own["volumes"] == ["/var/lib/gradrule"]
    for port in own["ports"]:
        first, last = map(int, port.split(":")[1].split("-"))
        assert last - first + 1 == replicas
    (identity,) = json.loads(composed["configs"]["s3"]["content"])["identities"]
    (key,) = identity["credentials"]
    for service in ("gradrule", "bucket"):
        variables = composed["services"][service]["environment"]
        given = variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"]
        assert given == (key["accessKey"], key["secretKey"])
    # The program that creates the bucket.
    compile(composed["services"]["bucket"]["entrypoint"][-1], "bucket", "exec")
    database = composed["services"]["postgres"]["environment"]
    assert own["environment"]["GRADRULE_REGISTRY"] == (
        f"postgresql://{database['POSTGRES_USER']}:{database['POSTGRES_PASSWORD']}@postgres:5432/gradrule"
    )


def test_guides_command_for_strangers_sets_the_same() -> None:
    command = re.search(r"gradrule serve --host :: .*", GUIDE.read_text())
    assert command is not None
    words = command[0].split()
    assert {"--tls-cert", "--tls-key", "--tokens"} <= set(words)
    assert words[words.index("--for") + 1] == "strangers"
    assert PRESETS["strangers"].values["sandbox"] == "on"
