"""All overlays and combinations of components of deploy/kubernetes: valid for Kubernetes, hardened, and consistent."""

from __future__ import annotations

import itertools
import json
import re
import socket
import ssl
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import gradrule as gr
from gradrule_server.settings import Settings, kubernetes_service_variables
from tests.cluster import manifests
from tests.cluster.manifests import DEPLOY, ROOT, Manifest, container, find, kinds, pod
from tests.cluster.s3 import S3Server
from tests.service.certificates import Authority
from tests.service.guarded import token_command
from tests.service.servers import running_server

RELEASES = [f"1.{minor}" for minor in range(30, int(kubernetes_validate.latest_version().split(".")[1]) + 1)]

COMBINATIONS = ["+".join(combination) for combination in manifests.combinations()]
# What the kinds of others need; deploy/README.md names the releases whose own schemas were checked.
FOREIGN = {
    "ScaledObject": ("keda.sh/v1alpha1", {"scaleTargetRef", "triggers"}),
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
    "PrometheusRule": ("monitoring.coreos.com/v1", {"groups"}),
}
SECRETS = {
    "gradrule-registry": {
        "url": "postgresql://u:p@db:5432/n?sslmode=verify-full&sslrootcert=/run/gradrule/registry/ca.crt",
        "ca.crt": "",
    },
    "gradrule-blobs": {
        "url": "s3://bucket/prefix",
        "access-key-id": "a",
        "secret-access-key": "b",
        "region": "c",
        "endpoint-url": "https://d",
    },
}


@pytest.fixture(params=COMBINATIONS, scope="module")
def combination(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(filter(None, request.param.split("+")))


@pytest.fixture(scope="module")
def rendered(combination: tuple[str, ...]) -> list[Manifest]:
    return manifests.combined(combination)


def check_schemas(documents: Sequence[Manifest], releases: Sequence[str] = (RELEASES[0], RELEASES[-1])) -> None:
    for document in documents:
        if document["kind"] in FOREIGN:
            version, fields = FOREIGN[document["kind"]]
            assert document["apiVersion"] == version
            assert fields <= document["spec"].keys()
            continue
        for release in releases:
            kubernetes_validate.validate(document, release, strict=True)


def environment(documents: Sequence[Manifest]) -> dict[str, str]:
    """Returns the variables of the container as the kubelet sets them, with values for the secrets."""
    found: dict[str, str] = {}
    for variable in container(documents)["env"]:
        name, source = variable["name"], variable.get("valueFrom", {})
        assert name not in found
        if "secretKeyRef" in source:
            found[name] = SECRETS[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.namespace"
            found[name] = "gradients"
        else:
            # The kubelet replaces only variables that are declared before.
            found[name] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
    return found


def settings(documents: Sequence[Manifest], dockerfile: str = "Dockerfile") -> Settings:
    """Loads the settings as the server of the image does."""
    last = (DEPLOY / dockerfile).read_text().splitlines()[-1]
    command = json.loads(last.removeprefix("CMD "))
    assert command[0] == "serve"
    assert "args" not in container(documents)
    assert "command" not in container(documents)
    return Settings.load(command[1:], environment(documents))


def test_resources_are_valid_without_kubectl() -> None:
    found = 0
    for file in sorted(manifests.KUBERNETES.rglob("kustomization.yaml")):
        resources = [file.parent / name for name in yaml.safe_load(file.read_text()).get("resources", ())]
        for resource in resources:
            if resource.is_file():
                check_schemas(list(yaml.safe_load_all(resource.read_text())))
                found += 1
    assert found == 11


@pytest.mark.parametrize("name", manifests.OVERLAYS)
def test_overlays_are_valid_and_have_one_namespace(name: str) -> None:
    documents = manifests.overlay(name)
    check_schemas(documents, RELEASES)
    assert {each["metadata"]["namespace"] for each in documents} == {"gradrule"}


def test_overlays_are_combinations_that_are_tested() -> None:
    for name in manifests.OVERLAYS:
        file = DEPLOY / "kubernetes/overlays" / name / "kustomization.yaml"
        components = [Path(each).name for each in yaml.safe_load(file.read_text()).get("components", ())]
        assert "+".join(components) in COMBINATIONS


def test_the_releases_are_those_of_the_readme() -> None:
    (oldest,) = re.findall(r"for Kubernetes (\S+) and newer", (DEPLOY / "README.md").read_text())
    assert oldest == RELEASES[0]
    assert len(RELEASES) >= 8


@pytest.mark.parametrize(
    "pair",
    [*itertools.combinations(manifests.FREE, 2), *itertools.product(manifests.FREE, manifests.REPLICAS)],
    ids="+".join,
)
def test_the_order_of_components_has_no_effect(pair: tuple[str, str]) -> None:
    first, second = (
        {(each["kind"], each["metadata"]["name"]): sorted_lists(each) for each in manifests.combined(order)}
        for order in (pair, pair[::-1])
    )
    assert first == second


def sorted_lists(value: Any) -> Any:
    """Returns a value whose lists, of variables, ports, volumes and rules, are sorted."""
    if isinstance(value, dict):
        return {name: sorted_lists(each) for name, each in value.items()}
    return sorted(map(sorted_lists, value), key=json.dumps) if isinstance(value, list) else value


def test_manifests_are_valid(rendered: list[Manifest]) -> None:
    check_schemas(rendered)
    for document in rendered:
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "gradrule", document["kind"]


def test_a_wrong_manifest_is_found(tmp_path: Path) -> None:
    (tmp_path / "patch").write_text("")
    path = Path(*[".."] * (len(tmp_path.parts) - 1)) / manifests.KUBERNETES.relative_to("/")
    patch = "- op: add\n  path: /spec/template/spec/enableServiceLink\n  value: false"
    text = {"resources": [f"{path}/base"], "patches": [{"target": {"kind": "Deployment"}, "patch": patch}]}
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        check_schemas(manifests.render_text(yaml.safe_dump(text), tmp_path))


def test_pods_are_hardened(rendered: list[Manifest]) -> None:
    spec, server = pod(rendered), container(rendered)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert environment(rendered)["GRADRULE_SANDBOX"] == "on"
    assert not re.search(r"hostNetwork|hostPID|hostIPC|hostPath|hostPort|privileged", json.dumps(rendered))
    # Memory and files are limited.
    assert "memory" in server["resources"]["limits"]
    for volume in spec["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], volume


def test_the_image_has_the_version_of_this_release(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container(rendered)["image"] == f"gradrule:{version}{'-gpu' if 'gpu' in combination else ''}"


def test_settings_are_accepted_and_match_the_pod(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    found = settings(rendered, "Dockerfile.gpu" if "gpu" in combination else "Dockerfile")
    ports = {port["name"]: port["containerPort"] for port in container(rendered)["ports"]}
    expected = {"grpc": found.port, "metrics": found.metrics_port}
    assert ports == (expected | {"http": found.http_port} if "http" in combination else expected)
    assert found.http_port is None or "http" in combination
    assert found.host == found.metrics_host == "::"
    assert found.is_open == ("tls" not in combination)
    assert found.device == ("gpu:0" if "gpu" in combination else "auto")
    assert container(rendered)["resources"]["limits"].get("nvidia.com/gpu") == ("1" if "gpu" in combination else None)
    mounts = {mount["mountPath"] for mount in container(rendered)["volumeMounts"]}
    assert str(found.data_dir) in mounts
    for path in (found.tls_cert, found.tls_key, found.tokens):
        assert path is None or str(path.parent) in mounts
    variables = set(environment(rendered))
    assert ("GRADRULE_REGISTRY" in variables) == ("GRADRULE_BLOBS" in variables) == has_replicas(combination)


def test_replicas_have_a_job_that_deletes_unneeded_blobs(
    rendered: list[Manifest], combination: tuple[str, ...]
) -> None:
    if not has_replicas(combination):
        assert "CronJob" not in kinds(rendered)
        return
    template = find(rendered, "CronJob", "gradrule-gc")["spec"]["jobTemplate"]["spec"]["template"]
    # The Service must not send calls to it.
    assert template["metadata"]["labels"]["app"] != "gradrule"
    spec = template["spec"]
    (job,) = spec["containers"]
    assert job["args"] == ["registry", "gc"]
    server = {each["name"]: each for each in container(rendered)["env"]}
    assert all(server[each["name"]] == each for each in job["env"])
    assert {"GRADRULE_REGISTRY", "GRADRULE_BLOBS", "AWS_ACCESS_KEY_ID"} <= {each["name"] for each in job["env"]}
    # It needs no GPU.
    assert job["image"] == container(rendered)["image"].removesuffix("-gpu")
    assert job["securityContext"] == container(rendered)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_pod_gets_the_time_that_the_server_needs_to_stop(
    rendered: list[Manifest], combination: tuple[str, ...]
) -> None:
    sleep = container(rendered)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains = 2 if "http" in combination else 1
    # Engines stop after the drain.
    needed = sleep + drains * settings(rendered).drain_s + 15
    assert pod(rendered)["terminationGracePeriodSeconds"] >= needed


def test_probes_need_neither_tls_nor_a_token(rendered: list[Manifest]) -> None:
    server = container(rendered)
    paths = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        paths[name] = server[name]["httpGet"]["path"]
        assert server[name]["httpGet"] == {"path": paths[name], "port": "metrics"}
    assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    # A pause of a few seconds must not restart a server, but take it out of service.
    period = {name: server[name]["periodSeconds"] * server[name]["failureThreshold"] for name in paths}
    assert period["readinessProbe"] <= 10 < 60 <= period["livenessProbe"]
    assert period["startupProbe"] >= 300


def test_names_refer_to_something(rendered: list[Manifest]) -> None:
    labels = find(rendered, "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container(rendered)["ports"]}
    numbers = {port["containerPort"] for port in container(rendered)["ports"]}
    for document in rendered:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
            for port in spec["ports"]:
                assert port["name"] in ports
                assert port.get("targetPort", port["port"]) in ports | numbers
        elif document["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            selector = spec.get("podSelector") or spec["selector"]
            assert selector["matchLabels"].items() <= labels.items()
        elif document["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert spec["scaleTargetRef"]["name"] == find(rendered, "Deployment")["metadata"]["name"]
        elif document["kind"] == "ServiceMonitor":
            (endpoint,) = spec["endpoints"]
            service = find(rendered, "Service")
            assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    mounts = [mount["name"] for mount in container(rendered)["volumeMounts"]]
    assert sorted(mounts) == sorted(volume["name"] for volume in pod(rendered)["volumes"])
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod(rendered)["volumes"]
        if len(volume) == 2 and "persistentVolumeClaim" in volume
    }
    assert claims == {each["metadata"]["name"] for each in rendered if each["kind"] == "PersistentVolumeClaim"}


def test_the_network_policy_allows_what_is_served(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    policy = find(rendered, "NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    calls, *others = policy["ingress"]
    assert {port["port"] for port in calls["ports"]} == ({"grpc", "http"} if "http" in combination else {"grpc"})
    # Without tokens, only pods with a label may call.
    assert ("from" in calls) == ("tls" not in combination)
    assert [[port["port"] for port in other["ports"]] for other in others] == (
        [["metrics"]] if "monitoring" in combination else []
    )
    assert all(other["from"] for other in others)
    outside = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert outside == ({53, 443, 5432} if has_replicas(combination) else set())


def test_replicas_share_nothing_on_a_node(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    deployment = find(rendered, "Deployment")["spec"]
    if not has_replicas(combination):
        # Two servers must never use one volume.
        assert deployment["replicas"] == 1
        assert deployment["strategy"] == {"type": "Recreate"}
        assert "PodDisruptionBudget" not in kinds(rendered)
        return
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert find(rendered, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert "PersistentVolumeClaim" not in kinds(rendered)
    keys = [each["topologyKey"] for each in pod(rendered)["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    # Sessions end with their connection.
    assert settings(rendered).max_connection_age_grace_s >= 7 * 24 * 3600
    sizes = {
        volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in pod(rendered)["volumes"] if "emptyDir" in volume
    }
    assert sizes.keys() == {"data", "tmp"}
    assert settings(rendered).blob_cache_bytes * 1.25 < gibibytes(sizes["data"]) << 30
    # The kubelet evicts a pod that exceeds its ephemeral storage, so the caches must fit.
    limit = container(rendered)["resources"]["limits"]["ephemeral-storage"]
    assert sum(map(gibibytes, sizes.values())) < gibibytes(limit)


def has_replicas(combination: tuple[str, ...]) -> bool:
    return not set(manifests.REPLICAS).isdisjoint(combination)


def gibibytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))


def test_autoscalers_own_the_number_of_replicas(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    scalers = [each for each in rendered if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert [each["kind"] for each in scalers] == (
        ["HorizontalPodAutoscaler"] if "hpa" in combination else ["ScaledObject"] if "keda" in combination else []
    )
    replicas = find(rendered, "Deployment")["spec"].get("replicas")
    assert replicas == (None if scalers else 3 if has_replicas(combination) else 1)
    for scaler in scalers:
        spec = scaler["spec"]
        assert spec.get("minReplicas", spec.get("minReplicaCount")) >= 2


def test_the_http_service_is_called_by_allowed_names(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    if "http" not in combination:
        assert "gradrule-http" not in {each["metadata"]["name"] for each in rendered}
        return
    name = find(rendered, "Service", "gradrule-http")["metadata"]["name"]
    hosts = settings(rendered).http_allowed_hosts.split(",")
    assert hosts == [
        f"{name}{suffix}" for suffix in ("", ".gradients", ".gradients.svc", ".gradients.svc.cluster.local")
    ]


def test_the_service_is_headless(rendered: list[Manifest], combination: tuple[str, ...]) -> None:
    service = find(rendered, "Service")["spec"]
    assert service["clusterIP"] == "None"
    (grpc,) = (port for port in service["ports"] if port["name"] == "grpc")
    assert grpc.get("appProtocol") == (None if "tls" in combination else "kubernetes.io/h2c")
    # Variables that Kubernetes makes of it would be ignored, if service links were on.
    assert kubernetes_service_variables({"GRADRULE_SERVICE_HOST": "None", "GRADRULE_PORT": "tcp://10.0.0.1:8470"})


def test_the_readmes_kustomization_renders(tmp_path: Path) -> None:
    text = (DEPLOY / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n# kustomization\.yaml\n(.*?)```", text, re.DOTALL)
    path = Path(*[".."] * (len(tmp_path.resolve().parts) - 1)) / DEPLOY.relative_to("/")
    documents = manifests.render_text(block.replace("gradrule/deploy", str(path)), tmp_path)
    check_schemas(documents)
    given: Mapping[str, Any] = yaml.safe_load(block)
    (image,) = given["images"]
    assert container(documents)["image"] == f"{image['newName']}:{image['newTag']}"
    assert {each["metadata"]["namespace"] for each in documents} == {given["namespace"]}
    assert settings(documents, "Dockerfile.gpu")


def test_a_server_runs_with_the_environment_of_its_pod(tmp_path: Path) -> None:
    """The kubelet's probe, a client in the cluster, and one that uses a name which is not allowed."""
    documents = manifests.combined(("tls", "http"))
    authority = Authority(tmp_path, "authority")
    files = authority.server("server")
    token = token_command("new", "--tenant", "ada", "--file", str(tmp_path / "tokens")).strip()
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = str(free.getsockname()[1])
    own = {
        "/run/gradrule/tls/tls.crt": str(files.certificate),
        "/run/gradrule/tls/tls.key": str(files.key),
        "/run/gradrule/tokens/tokens": str(tmp_path / "tokens"),
        "9470": metrics_port,
        "8480": "0",
    }
    variables = {name: own.get(value, value) for name, value in environment(documents).items()}
    with running_server(tmp_path / "server", ("--host", "::"), variables) as server:
        probe = container(documents)["readinessProbe"]["httpGet"]
        for address in ("127.0.0.1", "[::1]") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            with urllib.request.urlopen(f"http://{address}:{metrics_port}{probe['path']}", timeout=10) as answer:
                assert answer.status == 200
        target = server.target.replace("[::]", "localhost")
        with gr.connect(target, credentials=gr.tls(authority.file), token=token) as client:
            graph = gr.Graph()
            graph.op("Neg", graph.placeholder("x", "float32", []), name="y")
            assert client.evaluate(graph, {"x": 2.0}, fetches=["y"]).outputs["y"] == -2
        text = next((tmp_path / "server").glob("*.stdout")).read_text()
        (port,) = re.findall(r"HTTP at https://\S+:(\d+)$", text, re.MULTILINE)
        context = ssl.create_default_context(cafile=str(authority.file))
        statuses = []
        for host in ("gradrule-http.gradients.svc", "elsewhere.example"):
            connection = HTTPSConnection("localhost", int(port), context=context)
            connection.request("GET", "/v1/health", headers={"Host": host})
            statuses.append(connection.getresponse().status)
            connection.close()
        assert statuses == [200, 403]


def test_servers_with_the_environment_of_their_pods_share_rules_and_blobs(
    tmp_path: Path, database_url: str, s3: S3Server, bucket: str
) -> None:
    own = {"GRADRULE_REGISTRY": database_url, "GRADRULE_BLOBS": f"s3://{bucket}/blobs", "GRADRULE_METRICS_PORT": "0"}
    variables = environment(manifests.combined(("ha",))) | own | s3.environment
    with (
        running_server(tmp_path / "1", (), variables) as first,
        running_server(tmp_path / "2", (), variables) as second,
        gr.connect(first.target) as one,
        gr.connect(second.target) as other,
    ):
        created = one.create_rule("Halved", "0.5 * dy")
        assert other.get_rule("Halved").digest == created.digest
        name = one.upload(b"weights")
        assert other.find_missing_blobs([name]) == []
