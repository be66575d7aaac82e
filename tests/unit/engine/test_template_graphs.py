"""Tests that programs that are built from templates of gradients equal those that TensorFlow builds."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

import gradrule as gr
from gradrule._messages.call_arguments import ProgramArguments
from gradrule._messages.request_messages import program_spec
from gradrule.v1 import graph_pb2, program_pb2, rule_pb2
from gradrule_server.engine import gradient_templates
from gradrule_server.engine.build import build
from gradrule_server.engine.differentiation import Differentiation
from gradrule_server.engine.gradient_templates import TEMPLATES, GradientTemplates
from gradrule_server.engine.graph_import import label_varying
from gradrule_server.engine.program import BuiltProgram, as_array
from gradrule_server.errors import GradruleError
from gradrule_server.graphs import Limits
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.preparation.prepare import prepare
from gradrule_server.preparation.references import ResolvedRule
from gradrule_server.rules import RuleContent
from tests.samples import size
from tests.service.graph_defs import load_graph
from tests.service.nested_cases import REGISTERED, REGISTERED_EXPRESSION, case
from tests.service.nested_graphs import graph_def
from tests.stores import no_blobs
from tests.unit.engine.building import NAMESPACES, Builtins, prepared

_RULES = ("ste", "guided_relu", "deconvnet", "default", "elrp_activation", "magnitude_aware_sign")


class _Rules(Builtins):
    """Resolves rules of the catalogue, TensorFlow's own gradients, and the rule that the nested graphs name."""

    def resolve(self, name: str) -> ResolvedRule:
        if name == REGISTERED:
            definition = rule_pb2.RuleDefinition(expression=REGISTERED_EXPRESSION)
            return ResolvedRule(name, RuleContent.from_definition(definition, Limits()))
        return ResolvedRule(name, None) if name[0].isupper() else super().resolve(name)


def _request(graph: Any, words: ProgramArguments) -> link_pb2.CompileRequest:
    spec, _ = program_spec(graph, words)
    return prepare(spec, CallShape(), _Rules(), Limits(), no_blobs(), next(NAMESPACES)).request


def _contents(built: BuiltProgram) -> dict[str, Any]:
    """Returns everything about a program. TensorFlow adds nodes without use, which templates lack."""
    ends = [end.op.name for end in built.graph.outputs] + [op.name for op in built.graph.control_outputs]
    used = tf.compat.v1.graph_util.extract_sub_graph(built.graph.as_graph_def(add_shapes=True), ends)
    return {
        "statuses": built.statuses,
        "default_gradient_nodes": built.default_gradient_nodes,
        "without": [item.SerializeToString() for item in built.without_gradient],
        "made": built.made,
        "layout": built.layout,
        "specs": {name: [item.SerializeToString() for item in specs] for name, specs in built.specs.items()},
        "nodes": sorted(_comparable(node) for node in used.node),
        "outputs": [
            (tensor.name, tensor.shape.as_list() if tensor.shape.rank is not None else None)
            for tensor in built.graph.outputs
        ],
    }


def _comparable(node: node_def_pb2.NodeDef) -> str:
    """Returns a node as text; names of functions lack their numbers, which are new for each loop and branch."""
    return re.sub(r'(name: "\S*?)[_0-9]+"', r'\1"', str(node)) if "func {" in str(node) else str(node)


def _outcome(request: link_pb2.CompileRequest) -> Any:
    try:
        return _contents(build(request))
    except GradruleError as cause:
        return [(item.reason, item.message, item.node) for item in cause.findings]


def _assert_equal(graph: Any, words: ProgramArguments) -> Any:
    """Checks that a program has the same nodes, with the same shapes, with templates and without."""
    try:
        request = _request(graph, words)
    except GradruleError:
        # Random overrides may conflict; such programs are refused before they reach an engine.
        request = _request(graph, replace(words, overrides=None))
    # The first build may record templates that the second one reuses.
    found = [_outcome(request), _outcome(request)]
    with mock.patch.object(GradientTemplates, "gradients", lambda _, key, node, outer, make, is_pure: make()):
        wanted = _outcome(request)
    assert found == [wanted, wanted]
    return wanted


@pytest.mark.parametrize("number", range(size(6, 12)))
def test_functions_loops_and_branches(number: int) -> None:
    item = case(number)
    arguments = {key: value for key, value in item.arguments().items() if key not in ("feeds", "params")}
    _assert_equal(load_graph(graph_def(item.program, static=item.static)), ProgramArguments(**arguments))


def _random_graph(rng: random.Random) -> gr.Graph:
    """Returns a graph with many nodes of few kinds: equal ones, and nearly equal ones."""
    g = gr.Graph()
    made: list[Any] = [g.placeholder("x", "float32", rng.choice([[None, 4], [2, 4], None]))]
    for _ in range(rng.randint(8, 40)):
        value = rng.choice(made[-4:])
        kind = rng.choice(
            ("Relu", "Sign", "Tanh", "Neg", "Square", "Floor", "sum", "mul", "bias", "reshape", "stop", "cut", "linear")
        )
        match kind:
            case "sum":
                made.append(g.op_output("AddV2", value, rng.choice(made)))
            case "mul":
                made.append(g.op_output("Mul", value, rng.choice([value, rng.choice(made)])))
            case "bias":
                made.append(g.op_output("AddV2", value, g.constant([0.5] * 4)))
            case "reshape":
                made.append(g.op_output("Reshape", value, g.op_output("Shape", value)))
            case "linear":
                made.append(g.op_output("MatMul", value, g.constant(np.eye(4, dtype=np.float32) * rng.choice([1, 2]))))
            case "stop":
                made.append(g.op_output("AddV2", value, g.op_output("StopGradient", value)))
            case "cut":
                axis = rng.choice([0, 1])
                total = g.op_output("Sum", value, g.constant([axis], dtype="int32"), keep_dims=True)
                made.append(g.op_output("Sub", value, total))
            case _:
                made.append(g.op_output(kind, value))
    g.op_output("Identity", made[-1], name="y")
    return g


def _random_overrides(rng: random.Random, g: gr.Graph) -> list[gr.Override]:
    parsed = graph_pb2.Graph.FromString(g.to_bytes())
    nodes = [node.name for node in parsed.node if node.op in ("Relu", "Sign", "Tanh", "Floor", "Square")]
    kinds = sorted({node.op for node in parsed.node if node.name in nodes})
    made = []
    for _ in range(rng.randint(0, 5) if kinds else 0):
        rule: Any = rng.choice([*_RULES, "Identity", gr.Rule("dy * where(x > 0, 1, 0.5)"), gr.Rule("dy + default")])
        selector: dict[str, Any] = {"op_type": rng.choice(kinds)}
        if nodes and rng.random() < 0.3:
            selector = {"node": rng.choice(nodes)}
        elif rng.random() < 0.2:
            selector["position"] = rng.choice(["nearest_xs", "nearest_ys"])
        made.append(gr.Override(rule, optional=rng.random() < 0.9, **selector))
    if any(node.op == "MatMul" for node in parsed.node):
        made.append(gr.Override(rng.choice(["lrp_epsilon", "lrp_zplus", "feedback_alignment"]), op_type="MatMul"))
    if nodes and rng.random() < 0.2:
        inside = next(node for node in parsed.node if node.name == nodes[0])
        region = gr.Region(inputs=[inside.input[0]], outputs=[inside.name])
        made.append(gr.Override(gr.Rule("2 * dy"), region=region, optional=True))
    return made


@pytest.mark.parametrize("number", range(40))
def test_random_graphs(number: int) -> None:
    rng = random.Random(number)
    g = _random_graph(rng)
    policy = rng.choice(["error", "default", "pass", "zero"])
    _assert_equal(
        g, ProgramArguments(fetches=["y"], ys=["y"], xs=["x"], overrides=_random_overrides(rng, g), no_gradient=policy)
    )


def _chain(layers: int) -> gr.Graph:
    g = gr.Graph()
    last: Any = g.placeholder("x", "float32", [None, 4])
    for _ in range(layers):
        last = g.op_output("AddV2", g.op_output("Relu", last), g.op_output("Tanh", last))
    g.op_output("Identity", last, name="y")
    return g


def test_gradients_of_similar_nodes_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    registered = Differentiation._registered

    def record(op: tf.Operation, *others: Any) -> Any:
        made.append(op.type)
        return registered(op, *others)

    monkeypatch.setattr(Differentiation, "_registered", staticmethod(record))
    words = ProgramArguments(ys=["y"], xs=["x"], overrides={"Relu": "guided_relu"})
    TEMPLATES.clear()
    reused = TEMPLATES.reused
    build(_request(_chain(100), words))
    # A gradient of a sum differs by its producer: another sum, or the end of the chain.
    assert len(made) < 10
    assert TEMPLATES.reused - reused > 290
    made.clear()
    build(_request(_chain(50), words))
    assert made == [], "templates are kept for other programs"


def test_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_templates, "_MAX_STEPS", 8)
    TEMPLATES.clear()
    words = ProgramArguments(ys=["y"], xs=["x"])
    rng = random.Random(3)
    for _ in range(5):
        build(_request(_random_graph(rng), replace(words, no_gradient="zero")))
        assert sum(len(template.steps) for template in TEMPLATES._templates.values()) == TEMPLATES._steps <= 8
    TEMPLATES.clear()


def test_no_second_copy_of_the_graph_is_made_and_values_are_shared() -> None:
    value = np.arange(4, dtype=np.float32)
    g = gr.Graph()
    g.op_output("AddV2", g.placeholder("x", "float32", [None, 4]), g.variable("v", value), name="y")
    request = _request(g, ProgramArguments(ys=["y"], xs=["x"], fetches=["y"]))
    variable = tf.constant(value)
    built = build(request, [variable])
    built.call([np.ones((2, 4), np.float32), as_array(variable)])
    assert built._function is None
    assert np.shares_memory(as_array(variable), as_array(variable))


def test_all_nodes_without_gradient_are_reported() -> None:
    g = gr.Graph()
    last: Any = g.placeholder("x", "float32", [None, 4])
    for _ in range(4):
        last = g.op_output("AddV2", g.op_output("Relu", last), g.op_output("RandomShuffle", last))
    g.op_output("Identity", last, name="y")
    overrides = {"RandomShuffle": gr.Rule("dy + default")}
    found = _assert_equal(g, ProgramArguments(ys=["y"], xs=["x"], overrides=overrides, no_gradient="pass"))
    assert len(found["without"]) == 4


def test_labels_change_no_shape_and_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    labelled: list[int] = []

    def none(definition: Any, varying: Any = ()) -> list[str]:
        return []

    def record(definition: Any, varying: Any = ()) -> list[str]:
        found = label_varying(definition, varying)
        labelled.append(len(found))
        return found

    rng = random.Random(1)
    for graph in [_random_graph(rng) for _ in range(6)]:
        program = prepared(graph, {}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"]), no_gradient=program_pb2.NO_GRADIENT_ZERO)
        shapes = []
        for function in (record, none):
            TEMPLATES.clear()
            monkeypatch.setattr("gradrule_server.engine.graph_import.label_varying", function)
            ops = build(program.request).graph.get_operations()
            assert not [op.name for op in ops if "_kernel" in op.node_def.attr]
            shapes.append(
                [
                    (
                        op.type,
                        [tensor.shape.as_list() if tensor.shape.rank is not None else None for tensor in op.outputs],
                    )
                    for op in ops
                ]
            )
        assert shapes[0] == shapes[1]
    assert min(labelled) > 5


def test_constants_and_known_sizes_get_no_label() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2, None], name="x")
        tf.reshape(tf.nn.relu(x, name="varies"), tf.shape(x, name="shape"), name="reshaped")
        tf.add(tf.constant(1.0), 2.0, name="sum")
        tf.random.uniform([2], name="random")
    found = label_varying(graph.as_graph_def())
    assert {"x", "varies", "reshaped"} <= set(found)
    assert not {"shape", "sum"} & set(found)
