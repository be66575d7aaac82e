"""Each query of the dashboard, the alerts and the autoscaler names metrics and labels that a real server has."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import gradrule as gr
from gradrule.v1 import errors_pb2
from tests.cluster.manifests import DEPLOY
from tests.processes import workers
from tests.service.answers import refused
from tests.service.health import wait_for_another_engine
from tests.service.servers import running_server
from tests.waiting import wait_until

DASHBOARD = json.loads((DEPLOY / "grafana/gradrule.json").read_text())
GUIDE = DEPLOY.parent / "docs/guide/operating.md"

ADDED = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus adds to each sample, in Kubernetes."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Yields where a query stands, and the query."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"dashboard: {panel['title']} {target['refId']}", target["expr"]
    components = DEPLOY / "kubernetes/components"
    rules = yaml.safe_load((components / "monitoring/rules.yaml").read_text())
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            yield f"alert: {rule['alert']}", rule["expr"]
    scaled = yaml.safe_load((components / "keda/scaledobject.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield f"keda: {trigger['name']}", trigger["metadata"]["query"]
    text = GUIDE.read_text()
    for query in re.findall(r"`(sum\(.*?\))`", text):
        yield f"guide: {query}", query


QUERIES = dict(queries())


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Returns the labels of each metric of a server and their values, after calls, an error and a lost engine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("metrics")
    with running_server(folder, ("--metrics-port", str(port))) as server, gr.connect(server.target) as client:
        graph = gr.Graph()
        graph.op("Sign", graph.placeholder("x", "float32", [None]), name="y")
        client.evaluate(graph, {"x": [1.0]}, fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "ste"})
        with refused("UNKNOWN_RULE"):
            client.get_rule("nobody")
        engine = server.wait_for_engine()
        os.kill(engine, signal.SIGKILL)
        wait_for_another_engine(server, engine)
        for worker in workers(server.process.pid):
            os.kill(worker, signal.SIGKILL)
        text = wait_until(lambda: metrics_with("gradrule_helper_restarts_total{", port), "the end of a compile worker")
    found: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                names.setdefault(name, set()).add(value)
    return found


def metrics_with(beginning: str, port: int) -> str | None:
    """Returns the metrics of a server; None if no series begins like this."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text if f"\n{beginning}" in text else None


def selectors(query: str) -> Iterator[Any]:
    """Yields the selectors of metrics in a query, and its aggregations."""
    waiting = [promql_parser.parse(re.sub(r"\$__\w+", "1m", query))]
    while waiting:
        part = waiting.pop()
        if isinstance(part, promql_parser.VectorSelector | promql_parser.AggregateExpr):
            yield part
        for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
            if (child := getattr(part, name, None)) is not None:
                waiting.append(child)
        waiting += getattr(part, "args", ())


def faults(query: str, labels: dict[str, dict[str, set[str]]]) -> list[str]:
    """Returns what a query names that does not exist."""
    parts = list(selectors(query))
    metrics = [part for part in parts if isinstance(part, promql_parser.VectorSelector)]
    found = [f"no metric {metric.name}" for metric in metrics if metric.name not in labels]
    known = {label for metric in metrics for label in labels.get(metric.name, ())} | ADDED
    for metric in metrics:
        own = labels.get(metric.name, {})
        for matcher in metric.matchers.matchers:
            if matcher.name not in own.keys() | ADDED:
                found.append(f"no label {matcher.name} of {metric.name}")
            elif matcher.name == "reason" and metric.name.startswith("gradrule_requests"):
                errors_pb2.ErrorReason.Value(f"ERROR_REASON_{matcher.value}") if matcher.value != "OK" else None
            elif matcher.name == "rpc" and not any(re.fullmatch(matcher.value, value) for value in own["rpc"]):
                found.append(f"no rpc {matcher.value}")
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            found += [f"no label {label}" for label in part.modifier.labels if label not in known]
    return found


@pytest.mark.parametrize("where", QUERIES)
def test_queries_name_metrics_and_labels_of_a_server(where: str, labels: dict[str, dict[str, set[str]]]) -> None:
    assert faults(QUERIES[where], labels) == []


def test_wrong_queries_are_found(labels: dict[str, dict[str, set[str]]]) -> None:
    assert faults("sum(rate(gradrule_queue_second_sum[1m]))", labels) == ["no metric gradrule_queue_second_sum"]
    assert faults('gradrule_engine_up{tenant="a"}', labels) == ["no label tenant of gradrule_engine_up"]
    assert faults("sum by (rpc) (gradrule_engine_up)", labels) == ["no label rpc"]
    assert faults('gradrule_requests_total{rpc=~"Gradient/.*"}', labels) == ["no rpc Gradient/.*"]
    with pytest.raises(ValueError, match="NO_REASON"):
        faults('gradrule_requests_total{reason="NO_REASON"}', labels)
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum(gradrule_engine_up", labels)


def test_the_dashboard_shows_each_metric_that_needs_no_tenant() -> None:
    """What no panel shows is listed here, so that a new metric is not forgotten."""
    documented = re.findall(r"^\| `(gradrule_\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    text = json.dumps([target["expr"] for panel in panels() for target in panel["targets"]])
    hidden = {name for name in documented if not re.search(rf"\b{name}(_bucket|_sum)?\b", text)}
    assert hidden == {
        "gradrule_audit_left_out_total",
        "gradrule_blob_bytes",
        "gradrule_cache_evictions_total",
        "gradrule_engine_programs",
        "gradrule_engine_resident_bytes",
        "gradrule_engine_uptime_seconds",
        "gradrule_handles",
        "gradrule_programs",
        "gradrule_rules",
        "gradrule_sessions",
        "gradrule_tenant_requests_in_flight",
    }


def test_panels_have_variables_units_and_places() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
                assert x < 24
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert 'job=~"$job",instance=~"$instance"' in target["expr"]
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_scale_target_counts_calls_that_wait_or_run() -> None:
    """A quotient would be NaN without calls, which KEDA takes for a number."""
    scaled = yaml.safe_load((DEPLOY / "kubernetes/components/keda/scaledobject.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metricType"] == "AverageValue"
        assert "/" not in trigger["metadata"]["query"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"
