"""Changes graphs: drops, doubles and rewires nodes, makes functions recursive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

from google.protobuf.message import DecodeError

from gradrule.common import op_definitions
from gradrule.v1 import graph_pb2, tensor_pb2
from tests.battery.fuzzing.mutations import Mutator, mutated_bytes

_TYPES = [value for value in tensor_pb2.Dt.values() if value < 100]
_ATTRS = ("T", "dtype", "shape", "N", "axis", "value", "body", "cond", "then_branch", "f", "output_shapes", "num_split")


@cache
def op_types() -> tuple[str, ...]:
    """Returns all op types of the table."""
    return tuple(sorted(op_definitions.names()))


def mutate(chance: Random, graph: graph_pb2.Graph, words: Sequence[str]) -> None:
    """Changes one to three things of a graph."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        lists = [graph.node, *(function.node_def for function in graph.library.function)]
        nodes = chance.choice([each for each in lists if each] or [graph.node])
        if not nodes:
            graph.node.add(name="x", op=chance.choice(op_types()))
            continue
        chance.choice(_CHANGES)(chance, graph, nodes, words)


def mutate_bytes(words: Sequence[str]) -> Callable[[Random, bytes], bytes]:
    """Changes a graph given as bytes; sometimes the bytes themselves."""

    def change(chance: Random, data: bytes) -> bytes:
        try:
            graph = graph_pb2.Graph.FromString(data)
        except DecodeError:
            return mutated_bytes(chance, data)
        if chance.random() < 0.15:
            return mutated_bytes(chance, data)
        mutate(chance, graph, words)
        return graph.SerializeToString()

    return change


def _drop(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    del nodes[chance.randrange(len(nodes))]


def _double(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    copy = nodes.add()
    copy.CopyFrom(nodes[chance.randrange(len(nodes) - 1)])
    if chance.random() < 0.6:
        copy.name += chance.choice(("_1", "/x", "é", "\x00", " "))


def _rename(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    nodes[chance.randrange(len(nodes))].name = chance.choice((*words, "", "x:0", "^x", "a" * 1000, "é/ü", "_x", "x/y"))


def _retarget(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    node = chance.choice(nodes)
    target = chance.choice(nodes).name + chance.choice(("", "", "", ":0", ":1", ":output:0", ":7"))
    if chance.random() < 0.15:
        target = "^" + target
    if node.input and chance.random() < 0.7:
        node.input[chance.randrange(len(node.input))] = target
    else:
        node.input.append(target)


def _unwire(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    node = chance.choice(nodes)
    if node.input:
        del node.input[chance.randrange(len(node.input))]


def _retype(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    typed = [(node, key) for node in nodes for key, attr in node.attr.items() if attr.WhichOneof("value") == "type"]
    if typed:
        node, key = chance.choice(typed)
        node.attr[key].type = chance.choice(_TYPES)


def _other_op(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    functions = [function.signature.name for function in graph.library.function]
    node = chance.choice(nodes)
    node.op = chance.choice(functions if functions and chance.random() < 0.3 else op_types())


def _add_op(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    """Adds a node of any op over tensors of the graph; half the time the last, fetched node depends on it."""
    names = [node.name for node in nodes]
    last = nodes[-1].name
    fresh = nodes.add(name=f"fuzz{len(nodes)}", op=chance.choice(op_types()))
    fresh.input.extend(chance.choice(names) for _ in range(chance.choice((0, 1, 1, 2, 3))))
    if chance.random() < 0.5:
        for node in nodes:
            if node.name == last:
                node.input.append(fresh.name if chance.random() < 0.5 else "^" + fresh.name)
                break


def _attr(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    node = chance.choice(nodes)
    keys = list(node.attr)
    if keys and chance.random() < 0.25:
        del node.attr[chance.choice(keys)]
        return
    key = chance.choice(keys) if keys and chance.random() < 0.8 else chance.choice(_ATTRS)
    Mutator(chance, words).message(node.attr[key])


def _function(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    """Removes, doubles, renames functions, or lets them call themselves or each other."""
    functions = graph.library.function
    if not functions:
        _add_op(chance, graph, nodes, words)
        return
    chosen = chance.choice(functions)
    what = chance.randrange(6)
    if what == 0:
        functions.remove(chosen)
    elif what == 1:
        functions.add().CopyFrom(chosen)
    elif what == 2:
        chosen.signature.name = chance.choice(words)
    elif what == 3:
        inner = chosen.node_def.add(name="again", op=chance.choice(functions).signature.name)
        inner.input.extend(arg.name for arg in chosen.signature.input_arg)
    elif what == 4:
        Mutator(chance, words).message(chosen.signature)
    else:
        for key in list(chosen.ret):
            chosen.ret[key] = chance.choice((*chosen.ret.values(), "x:0", "", "again:output:0"))


def _func_attr(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    named = [attr for node in nodes for attr in node.attr.values() if attr.WhichOneof("value") == "func"]
    if named:
        functions = [function.signature.name for function in graph.library.function]
        chance.choice(named).func.name = chance.choice((*functions, *words))


def _mark(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    """Sets attributes that TensorFlow and gradrule interpret."""
    key = chance.choice(
        ("_gradient_op_type", "_class", "container", "shared_name", "_gradrule", "_output_shapes", "_XlaMustCompile")
    )
    value = chance.choice((*words, "CustomGradient-17", "loc:@x", "gradrule", "builtin/ste", "default"))
    chance.choice(nodes).attr[key].s = value.encode()


def _cycle(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    first, last = chance.choice(nodes), chance.choice(nodes)
    first.input.append(last.name)
    last.input.append(first.name)


def _versions(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    Mutator(chance, words).message(graph.versions)


def _shuffle(chance: Random, graph: graph_pb2.Graph, nodes: Any, words: Sequence[str]) -> None:
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    chance.shuffle(copies)
    del nodes[:]
    nodes.extend(copies)


_CHANGES = (
    *(_drop, _double, _rename, _retarget, _retarget, _unwire, _retype, _other_op, _other_op, _add_op),
    *(_attr, _attr, _attr, _function, _func_attr, _mark, _cycle, _versions, _shuffle),
)  # fmt: skip
