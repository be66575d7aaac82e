"""CPU time that must grow no faster than its input. Limits are generous: other processes share the machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.override_pb2 import Position, Selector
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import graphs
from gradrule_server.errors import GradruleError, did_you_mean, error
from gradrule_server.front.calls import to_status
from gradrule_server.graphs import ExpandRequest
from gradrule_server.policy import NodeLimits, check_parsed_size
from tests.unit.graphs.helpers import call, expand, function, graph, node, placeholder
from tests.unit.graphs.test_embedded_rules import RuleIndices, brings, custom_gradient, doubling
from tests.unit.graphs.test_scale import chain
from tests.unit.graphs.test_variables import _read, _variable
from tests.unit.rules.test_language_fuzz import PATHOLOGICAL, try_everything

MIB = 1 << 20


def cpu_seconds(work: Callable[[], Any], times: int = 1) -> float:
    """Returns the CPU time of the fastest of some runs."""
    best = math.inf
    for _ in range(times):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def wide(count: int) -> Graph:
    nodes = [node(f"part/n{i}", "Sign" if i % 2 else "Tanh", "n0") for i in range(1, count - 1)]
    return graph(placeholder("n0"), *nodes, node("y", "AddN", *(item.name for item in nodes)))


def calls(count: int) -> Graph:
    inner = function("f", ["a"], {"r": "n1:y:0"}, [node("n0", "Sign", "a"), node("n1", "Tanh", "n0:y:0")])
    nodes = [placeholder("n0"), *(call(f"n{i}", "f", f"n{i - 1}") for i in range(1, count // 3))]
    return graph(*nodes, node("y", "Neg", nodes[-1].name), functions=[inner])


@pytest.mark.parametrize("make", [chain, wide, calls])
def test_expanding_takes_linear_time(make: Callable[[int], Graph]) -> None:
    overrides = [graphs.OverrideSpec(Selector(op_type="Sign"), label="s", optional=True)]
    overrides += [
        graphs.OverrideSpec(Selector(node=f"**/p*{i}/*q"), label=str(i), optional=True, index=i) for i in range(1, 20)
    ]
    paths = [Selector(op_type="Tanh", position=Position(index=-1)), Selector(pattern=["Tanh", "Sign"])]
    overrides += [graphs.OverrideSpec(item, label="path", optional=True, index=99) for item in paths]

    def seconds(made: Graph) -> float:
        return cpu_seconds(lambda: expand(made, ["y"], ys=["y"], xs=["n0"], overrides=overrides), times=3)

    small, large = seconds(make(2_000)), seconds(make(32_000))
    # 1.15 is the bar; sixteen times the nodes leave room for a noisy machine without letting a square through.
    assert math.log(large / small) / math.log(16) < 1.3


def chained(count: int) -> Graph:
    """Gradients each of which asks for the next."""
    functions = [
        function(
            f"grad{i}",
            ["dy"],
            {"dx": "again:output:0"},
            [custom_gradient("again", "dy", "dy", gradient=f"G{i + 1}", region=f"r{i + 1}")],
        )
        for i in range(count)
    ]
    functions.append(doubling(f"grad{count}"))
    made = graph(
        placeholder(), node("s", "Sign", "x"), custom_gradient("y", "s", "x", gradient="G0"), functions=functions
    )
    return brings(made, **{f"G{i}": f"grad{i}" for i in range(count + 1)})


def test_many_gradients_take_linear_time() -> None:
    def seconds(made: Graph) -> float:
        return cpu_seconds(
            lambda: graphs.expand(
                made, ExpandRequest(ys=["y"], xs=["x"], add_embedded_rule=RuleIndices().add_embedded_rule)
            ),
            times=3,
        )

    small, large = seconds(chained(250)), seconds(chained(2_000))
    assert math.log(large / small) / math.log(8) < 1.4


def test_reads_before_and_after_many_writes_stay_fast() -> None:
    nodes = [_variable(), placeholder(), _read("r0", "w")]
    for number in range(3000):
        nodes.append(
            node(
                f"a{number}", "AssignAddVariableOp", "w", f"r{number}", f"^r{number}", dtype=AttrValue(type=Dt.DT_FLOAT)
            )
        )
        read = _read(f"r{number + 1}", "w")
        read.input.append(f"^a{number}")
        nodes.append(read)
    made = graph(*nodes)
    assert cpu_seconds(lambda: expand(made, ["r3000"])) < 5


def test_what_a_message_takes_is_told_quickly() -> None:
    size = 60 * MIB
    tensor = (
        b"\x22"
        + bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21])
        + bytes(size)
    )
    assert cpu_seconds(lambda: check_parsed_size(tensor, tensor_pb2.Tensor, NodeLimits())) < 0.2
    many = b"\x20\x00" * (32 * MIB)

    def refuse() -> None:
        with pytest.raises(GradruleError, match="fields"):
            check_parsed_size(many, Graph, NodeLimits(), field="graph")

    assert cpu_seconds(refuse) < 10


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_pathological_text_is_answered_at_once(name: str) -> None:
    assert cpu_seconds(lambda: try_everything(PATHOLOGICAL[name])) < 2


def test_the_status_of_an_error_with_a_long_name_is_made_at_once() -> None:
    name = "ü" * 5_000_000
    cause = error(errors_pb2.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {name!r}.", node=name, field=name)
    assert cpu_seconds(lambda: to_status(cause), times=3) < 0.05


def test_looking_for_near_names_takes_no_time_whatever_the_names() -> None:
    hard = [f"{'a' * 60}{number}" for number in range(10_000)]
    assert cpu_seconds(lambda: did_you_mean("a" * 120, hard)) < 1.0
