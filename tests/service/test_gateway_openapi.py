"""Sends requests that schemathesis draws from the OpenAPI document, and checks the answers against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CheckFunction

from gradrule.common.dtypes import NAMES
from gradrule.v1 import admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2
from gradrule_gateway.routes import ROUTES, WITHOUT_ROUTE
from tests.service.gateways import RunningGateway, running_gateway
from tests.service.servers import running_server

DOCUMENT = json.loads((Path(__file__).parents[2] / "server" / "gradrule_gateway" / "openapi.json").read_text())
schema = schemathesis.openapi.from_dict(DOCUMENT)


def left_out_checks() -> list[CheckFunction]:
    """Returns checks that do not hold: most graphs and names that follow the schema are not valid."""
    return [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]


@pytest.fixture(scope="module")
def own_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """Returns a gateway before a server of its own: the drawn requests create and delete things."""
    with running_server(tmp_path_factory.mktemp("server")) as server, running_gateway(server.target) as running:
        yield running


@schema.parametrize()
@settings(
    # Without shrinking: a failure that is not shrunk is found within seconds.
    phases=[Phase.generate],
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_answers_follow_the_document(case: Any, own_gateway: RunningGateway) -> None:
    # Deadlines of nanoseconds pass, and 504 is an error of a server.
    case.headers.pop("Grpc-Timeout", None)
    case.call_and_validate(base_url=own_gateway.url, excluded_checks=left_out_checks(), timeout=60)


def test_every_rpc_has_a_route_or_a_reason() -> None:
    modules = (admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    rpcs = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert rpcs == {route.rpc for route in ROUTES} | set(WITHOUT_ROUTE)


def test_the_document_names_all_element_types() -> None:
    names = DOCUMENT["components"]["schemas"]["Dt"]["enum"]
    assert set(NAMES.values()) <= set(names)


def parts_of(schema: Any) -> Iterator[str]:
    """Yields the names that a schema refers to outside the properties of objects."""
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for part in [*schema.get("anyOf", ()), *schema.get("allOf", ()), *([schema["items"]] if "items" in schema else [])]:
        yield from parts_of(part)


def test_no_schema_is_a_part_of_itself() -> None:
    """Generators of clients drop operations with such schemas, and validators recurse without end."""
    schemas = DOCUMENT["components"]["schemas"]
    for name in schemas:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            found = set(parts_of(schemas[waiting.pop()])) - reached
            reached |= found
            waiting += found
        assert name not in reached
