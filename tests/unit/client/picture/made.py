"""Makes graphs and explanations for tests of pictures."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gradrule as gr
from gradrule import _picture
from gradrule._picture.view import View
from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, NameAttrList, Node
from gradrule.v1.tensor_pb2 import Dt


def node(name: str, op: str, *inputs: str, **functions: str) -> Node:
    """A node; functions by attribute."""
    attrs = {attr: AttrValue(func=NameAttrList(name=function)) for attr, function in functions.items()}
    return Node(name=name, op=op, input=inputs, attr=attrs)


def function(name: str, args: Sequence[str], results: Mapping[str, str], *nodes: Node) -> Function:
    made = Function(node_def=nodes, ret=results)
    made.signature.name = name
    for arg in args:
        made.signature.input_arg.add(name=arg)
    for result in results:
        made.signature.output_arg.add(name=result)
    return made


def graph(*nodes: Node, functions: Sequence[Function] = ()) -> bytes:
    made = Graph(node=nodes)
    made.library.function.extend(functions)
    return made.SerializeToString()


def explained(
    of: bytes,
    xs: Sequence[str] = ("x",),
    ys: Sequence[str] = ("y",),
    overrides: Sequence[gr.Resolution] = (),
    default_gradient_nodes: Sequence[str] = (),
    **more: Any,
) -> gr.Explanation:
    """What the server says. Without overrides and default gradients, the path is the structure's."""
    specs = [{name: gr.TensorSpec(name, "float32", None) for name in names} for names in (ys, xs)]
    words: dict[str, Any] = {"findings": [], "rewritten": [], **more}
    return gr.Explanation(
        overrides=list(overrides), default_gradient_nodes=list(default_gradient_nodes), inputs={}, outputs={},
        ys=specs[0], xs=specs[1], graph=of, **words,
    )  # fmt: skip


def took(name: str, rule: str, status: str = "active", op: str = "Sign", **more: Any) -> gr.Resolution:
    return gr.Resolution(name, op, rule, more.pop("label", op), status, **more)


def view(explanation: gr.Explanation) -> View:
    return _picture.view(explanation, explanation.graph)


def nested() -> bytes:
    """x → block/in → a call of `outer`, which calls `inner` → a loop of two variables → a branch → y; an aside."""
    inner = function("inner", ["v"], {"r": "m:z:0"}, node("s", "Sign", "v"), node("m", "Mul", "s:y:0", "v"))
    outer = function("outer", ["v"], {"r": "i:output:0"}, node("call", "PartitionedCall", "v", f="inner"),
                     node("i", "Identity", "call:output:0"))  # fmt: skip
    body = function("body", ["n", "t"], {"n_": "more:z:0", "t_": "s:y:0"}, node("one", "Const"),
                    node("more", "AddV2", "n", "one:output:0"), node("s", "Sign", "t"))  # fmt: skip
    cond = function(
        "cond", ["n", "t"], {"c": "s:z:0"}, node("three", "Const"), node("s", "Less", "n", "three:output:0")
    )
    yes = function("yes", ["v"], {"r": "s:y:0"}, node("s", "Sign", "v"))
    no = function("no", ["v"], {"r": "z:y:0"}, node("z", "Neg", "v"))
    return graph(
        node("x", "Placeholder"),
        node("block/in", "Identity", "x"),
        node("block/call", "PartitionedCall", "block/in", f="outer"),
        node("start", "Const"),
        node("loop", "While", "start", "block/call", cond="cond", body="body"),
        node("pred", "Greater", "x", "start"),
        node("if", "If", "pred", "loop:1", then_branch="yes", else_branch="no"),
        node("aside", "Relu", "x"),
        node("stop", "StopGradient", "x"),
        node("y", "Sum", "if", "stop", "^aside"),
        functions=[inner, outer, body, cond, yes, no],
    )


def large(count: int, seed: int = 0) -> bytes:
    """A graph in three levels of scopes, each node with one to three inputs among those just before it."""
    draw = random.Random(seed)
    nodes = [node("x", "Placeholder")]
    for number in range(1, count - 1):
        inputs = {nodes[draw.randrange(max(0, number - 6), number)].name for _ in range(draw.randint(1, 3))}
        name = f"stage_{number * 6 // count}/block_{number // 40}/unit_{number // 8}/op_{number}"
        nodes.append(node(name, draw.choice(["Relu", "Sign", "AddN", "Tanh"]), *sorted(inputs)))
    nodes.append(node("y", "Identity", nodes[-1].name))
    return graph(*nodes)


def large_explained(count: int) -> gr.Explanation:
    """All `Sign` nodes of `large` with one rule, all `Tanh` nodes with another."""
    of = large(count)
    nodes = Graph.FromString(of).node
    overrides = [took(each.name, "ste_sign") for each in nodes if each.op == "Sign"]
    overrides += [took(each.name, "cosine", op="Tanh") for each in nodes if each.op == "Tanh"]
    return explained(
        of, overrides=overrides, default_gradient_nodes=[each.name for each in nodes if each.op in ("Relu", "AddN")]
    )


def layered(blocks: Sequence[int] = (3, 4)) -> bytes:
    """Returns a graph with layers named as in Keras: stages of blocks, each with weights, and a last layer."""
    nodes = [typed("keras_tensor", "Placeholder", shape=[None, 8])]
    last = "keras_tensor"
    for stage, count in enumerate(blocks, 1):
        for block in range(1, count + 1):
            for number in range(1, 5):
                layer = f"conv{stage}_block{block}_{number}_conv"
                nodes.append(typed(f"{layer}/kernel", "Const", value=[8, 8]))
                nodes.append(node(f"{layer}/MatMul", "MatMul", last, f"{layer}/kernel"))
                relu = f"conv{stage}_block{block}_{number}_relu/Relu"
                nodes.append(node(relu, "Relu", f"{layer}/MatMul"))
                last = relu
    nodes += [typed("head/kernel", "Const", value=[8, 3]), node("head/MatMul", "MatMul", last, "head/kernel")]
    nodes.append(node("Identity", "Identity", "head/MatMul"))
    return graph(*nodes)


def typed(name: str, op: str, shape: Sequence[int | None] | None = None, value: Sequence[int] | None = None) -> Node:
    """Returns a float32 node with the shape of a placeholder or the dimensions of a constant."""
    made = node(name, op)
    made.attr["dtype"].type = Dt.DT_FLOAT
    if shape is not None:
        for size in shape:
            made.attr["shape"].shape.dim.add(size=-1 if size is None else size)
    if value is not None:
        made.attr["value"].tensor.dtype = Dt.DT_FLOAT
        for size in value:
            made.attr["value"].tensor.tensor_shape.dim.add(size=size)
    return made


def layered_explained(blocks: Sequence[int] = (3, 4)) -> gr.Explanation:
    """Explains `layered` with a rule for all `Relu` nodes; the y is named `predictions`."""
    of = layered(blocks)
    nodes = Graph.FromString(of).node
    made = explained(
        of,
        xs=["keras_tensor"],
        ys=["Identity"],
        overrides=[took(each.name, "guided_relu", op="Relu") for each in nodes if each.op == "Relu"],
        default_gradient_nodes=[each.name for each in nodes if each.op in ("MatMul", "Identity")],
    )
    return dataclasses.replace(made, ys={"predictions": gr.TensorSpec("Identity", "float32", None)})
