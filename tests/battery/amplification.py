"""Measures how much memory of the front end large inputs take, one at a time: peak against size.

Target: at most ten times the input plus 128 MiB; the error is typed. Each input has its own server, because a process
reuses freed memory, which would hide the growth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from gradrule.v1 import evaluate_pb2, graph_pb2, override_pb2, program_pb2, rule_pb2
from tests.battery import answer_checks
from tests.battery.answer_checks import Verdict
from tests.battery.figures import Figures, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.serving import served
from tests.processes import peak_bytes, reset_peak, resources
from tests.service import raw
from tests.service.servers import RunningServer

FACTOR = 10
CONSTANT_BYTES = 128 << 20
_DEADLINE_S = 60.0
_EVALUATE = "GradientService/Evaluate"
_CREATE = "RuleService/CreateRule"
_FLOAT = graph_pb2.AttrValue(type=raw.DT_FLOAT)


TARGET = "memory of the front end ≤ 10 × input + 128 MiB"


def run(scale: Scale) -> Figures:
    """Sends each input once, for any scale."""
    found = Amplified()
    for name in INPUTS:
        with served(scale, "amplification") as server:
            found.add(asyncio.run(measure(server, [name])))
    return Figures(
        target=TARGET,
        cases=len(found.figures),
        failures=len(found.faults),
        met=not found.faults and len(found.figures) == len(INPUTS),
        details={"worst": max(found.figures.values(), default=0.0), "by_input": found.figures},
        findings=found.faults,
    )


@dataclass
class Amplified:
    """Holds peak growth per byte sent (figures), and inputs beyond the limit or with untyped errors (faults)."""

    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Amplified) -> None:
        """Adds the figures of other inputs."""
        self.figures |= other.figures
        self.faults += other.faults


async def measure(
    server: RunningServer, names: Iterable[str], factor: float = FACTOR, constant_bytes: int = CONSTANT_BYTES
) -> Amplified:
    """Sends inputs one by one. The front end may grow by `factor` times the input's size plus a constant."""
    found = Amplified()
    async with channel(server.target) as own:
        for name in names:
            method, build = INPUTS[name]
            data = build()
            await asyncio.sleep(0.2)
            pid = server.process.pid
            before = resources(pid).resident_bytes
            reset_peak(pid)
            judged = answer_checks.GOOD
            try:
                await own.unary_unary(f"/gradrule.v1.{method}")(data, timeout=_DEADLINE_S)
            except grpc.RpcError as failure:
                judged = answer_checks.check_failure(failure)
            grown = peak_bytes(pid) - before
            found.figures[name] = round(grown / len(data), 1)
            if grown > factor * len(data) + constant_bytes:
                found.faults.append(
                    f"{name}: {len(data) / 2**20:.1f} MiB sent, the front end's memory grew by {grown / 2**20:.0f} MiB"
                )
            if judged.verdict is Verdict.FAULT:
                found.faults.append(f"{name}: {judged.what}")
    return found


def many_nodes() -> bytes:
    """Makes a chain of 150,000 nodes."""
    nodes = [raw.placeholder()]
    nodes += [graph_pb2.Node(name=f"n{i}", op="Neg", input=[f"n{i - 1}" if i else "x"]) for i in range(150_000)]
    return raw.request(raw.graph(*nodes), fetches=["n9"]).SerializeToString()


def empty_nodes() -> bytes:
    """Makes nodes of two bytes each: the smallest on the wire and the largest when parsed."""
    message = evaluate_pb2.EvaluateRequest()
    message.spec.graph.serialized = b"\x0a\x00" * 2_000_000
    return message.SerializeToString()


def empty_nodes_inline() -> bytes:
    """Makes the same nodes in an inline graph, which is parsed with the request."""
    graph = b"\x0a\x00" * 2_000_000
    source = b"\x0a" + _varint(len(graph)) + graph
    spec = b"\x0a" + _varint(len(source)) + source
    return b"\x12" + _varint(len(spec)) + spec


def empty_overrides() -> bytes:
    """Makes overrides without content."""
    message = raw.request(raw.sign_graph())
    return message.SerializeToString() + b"\x12" + _length_delimited(b"\x12\x00" * 1_000_000)


def empty_feeds() -> bytes:
    """Makes feeds without content."""
    return raw.request(raw.sign_graph()).SerializeToString() + b"\x1a\x00" * 1_000_000


def many_dimensions() -> bytes:
    """Makes a feed whose shape has a million dimensions."""
    shape = b"\x12\x00" * 1_000_000
    tensor = b"\x08\x01\x12" + _length_delimited(shape)
    source = b"\x0a" + _length_delimited(tensor)
    feed = b"\x0a\x01x\x12" + _length_delimited(source)
    return raw.request(raw.sign_graph(), {}).SerializeToString() + b"\x1a" + _length_delimited(feed)


def many_values() -> bytes:
    """Makes a feed of small numbers, one field each, with a larger declared shape."""
    message = raw.request(raw.sign_graph(), {})
    feed = message.feeds.add(name="x").value.inline_tensor
    feed.dtype = raw.DT_FLOAT
    feed.tensor_shape.dim.add(size=2**33)
    feed.float_val.extend([1.0] * 500_000)
    return message.SerializeToString()


def long_name() -> bytes:
    """Makes a name of 8 MiB in a request whose error quotes it."""
    return raw.request(raw.sign_graph(), fetches=["y" * (8 << 20)]).SerializeToString()


def long_expression() -> bytes:
    """Makes an expression of 8 MiB."""
    definition = rule_pb2.RuleDefinition(expression="dy + " * (8 << 20 >> 3) + "dy")
    rule = rule_pb2.Rule(name="rules/long", definition=definition)
    return rule_pb2.CreateRuleRequest(rule=rule).SerializeToString()


def many_params() -> bytes:
    """Makes a rule with 200,000 params."""
    definition = rule_pb2.RuleDefinition(
        expression="dy", params=[rule_pb2.RuleParam(name=f"p{i}") for i in range(200_000)]
    )
    return rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(name="rules/many", definition=definition)).SerializeToString()


def many_selectors() -> bytes:
    """Makes overrides that each match every node."""
    nodes = [raw.placeholder()] + [raw.node(f"n{i}", "Sign", "x") for i in range(2_000)]
    override = override_pb2.GradientOverride(selector=override_pb2.Selector(node="**"), rule="Identity", optional=True)
    overrides = [override] * 2_000
    return raw.request(
        raw.graph(*nodes), fetches=["n0"], vjp=program_pb2.Vjp(ys=["n0"], xs=["x"]), overrides=overrides
    ).SerializeToString()


def long_call_name() -> bytes:
    """Makes a call with a name of 20 kB of a function with 2,000 nodes."""
    return _calling(["c" * 20_000], 2_000)


def long_call_names() -> bytes:
    """Makes calls with names of the maximum length of a function with 2,000 nodes."""
    return _calling([f"{i:x<1000}" for i in range(40)], 2_000)


def constant_in_function() -> bytes:
    """Makes a constant of 200 kB in a function that is called 300 times."""
    return _calling([f"c{i}" for i in range(300)], 1, 50_000)


def gradient_of_many() -> bytes:
    """Makes one gradient of 1,000 nodes that belongs to 800 regions."""
    chain = [raw.node(f"n{i}", "Neg", f"n{i - 1}:y:0" if i else "dy", T=_FLOAT) for i in range(1_000)]
    graph = raw.graph(raw.placeholder(), *(_region(i) for i in range(800)))
    graph.library.function.append(_function("g", "dy", "dx", chain))
    graph.library.registered_gradients.add(gradient_func="g", registered_op_type="G")
    graph.node.append(raw.node("y", "Identity", "k799"))
    return raw.request(graph, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).SerializeToString()


def _calling(names: list[str], nodes: int, elements: int = 1) -> bytes:
    value = graph_pb2.AttrValue()
    value.tensor.dtype = raw.DT_FLOAT
    value.tensor.tensor_shape.dim.add(size=elements)
    value.tensor.tensor_content = bytes(4 * elements)
    inside = [raw.node("c", "Const", dtype=_FLOAT, value=value), raw.node("n", "AddV2", "a", "c:output:0", T=_FLOAT)]
    inside += [raw.node(f"n{i}", "Neg", f"n{i - 1}:y:0" if i else "n:z:0", T=_FLOAT) for i in range(nodes)]
    graph = raw.graph(raw.placeholder())
    graph.library.function.append(_function("f", "a", "r", inside))
    for name in names:
        call = raw.node(name, "PartitionedCall", graph.node[-1].name)
        call.attr["f"].func.name = "f"
        call.attr["Tin"].list.type.append(raw.DT_FLOAT)
        call.attr["Tout"].list.type.append(raw.DT_FLOAT)
        graph.node.append(call)
    return raw.request(graph, fetches=[names[-1]]).SerializeToString()


def _function(name: str, arg: str, result: str, nodes: list[graph_pb2.Node]) -> graph_pb2.Function:
    made = graph_pb2.Function(node_def=nodes, ret={result: f"{nodes[-1].name}:y:0"})
    made.signature.name = name
    made.signature.input_arg.add(name=arg, type=raw.DT_FLOAT)
    made.signature.output_arg.add(name=result, type=raw.DT_FLOAT)
    return made


def _region(number: int) -> graph_pb2.Node:
    """Makes a region of its own, whose gradient is G."""
    taken = f"k{number - 1}" if number else "x"
    knot = raw.node(f"k{number}", "IdentityN", taken, taken)
    knot.attr["T"].list.type.extend([raw.DT_FLOAT] * 2)
    knot.attr["_gradient_op_type"].s = b"G"
    knot.attr["_gradrule_region"].s = f"region{number}".encode()
    knot.attr["_gradrule_outputs"].i = knot.attr["_gradrule_inputs"].i = 1
    return knot


def _length_delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


INPUTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "150,000 nodes": (_EVALUATE, many_nodes),
    "2,000,000 empty nodes, serialized": (_EVALUATE, empty_nodes),
    "2,000,000 empty nodes, inline": (_EVALUATE, empty_nodes_inline),
    "1,000,000 empty overrides": (_EVALUATE, empty_overrides),
    "1,000,000 empty feeds": (_EVALUATE, empty_feeds),
    "1,000,000 dimensions": (_EVALUATE, many_dimensions),
    "500,000 listed values": (_EVALUATE, many_values),
    "a name of 8 MiB": (_EVALUATE, long_name),
    "an expression of 5 MiB": (_CREATE, long_expression),
    "200,000 params": (_CREATE, many_params),
    "a call's name of 20 kB": (_EVALUATE, long_call_name),
    "40 calls' names of 1 kB": (_EVALUATE, long_call_names),
    "a constant in 300 calls": (_EVALUATE, constant_in_function),
    "a gradient of 800 regions": (_EVALUATE, gradient_of_many),
    "2,000 overrides of 2,000 nodes": (_EVALUATE, many_selectors),
}
