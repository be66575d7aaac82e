"""Imports a graph into the TensorFlow graph that is being built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule_server.engine import tf_private
from gradrule_server.policy.op_tables import ops_with

IMPORT_SCOPE = "g/"
"""Prefix of the names of imported nodes: names that building adds cannot collide with them."""

_KERNEL_ATTR = "_kernel"
_LABEL = b"varies"
# Known from the shape of their input alone, even where the input's values vary.
_KNOWN_BY_SHAPE = ops_with("tells_shape")


def label_varying(graph_def: tf_graph_pb2.GraphDef, varying: Iterable[str] = ()) -> list[str]:
    """Labels the nodes whose values cannot be constants; returns their names.

    To infer the shape of a Reshape, a Sum or a Fill, TensorFlow searches backwards for a constant that gives the sizes.
    Behind the Shape of a tensor of unknown size lies the whole network, and the search is repeated for each node of a
    gradient, so building takes time that grows with the square of the graph. The search also ends at a node without a
    kernel, and no op has a kernel for this label. So the search ends earlier, with the same answer.

    A node varies if it has no inputs and is not a Const, or if one of its inputs varies. A node that precedes one of
    its inputs may lack the label: the search then only takes longer.

    Args:
        graph_def: The graph. It cannot run while it has the labels.
        varying: Names of varying nodes that are not in the graph.
    """
    known = set(varying)
    labelled = []
    for node in graph_def.node:
        sources = [source for source in node.input if not source.startswith("^")]
        if sources:
            varies = node.op not in _KNOWN_BY_SHAPE and any(source.partition(":")[0] in known for source in sources)
        else:
            varies = node.op != "Const"
        if varies:
            known.add(node.name)
            node.attr[_KERNEL_ATTR].s = _LABEL
            labelled.append(node.name)
    return labelled


def remove_labels(graph: tf.Graph, names: Iterable[str]) -> None:
    """Removes the labels from the ops of these names, so that the graph can run."""
    for name in names:
        tf_private.clear_attribute(graph.get_operation_by_name(name), _KERNEL_ATTR)


def import_graph(
    graph_def: tf_graph_pb2.GraphDef,
    bound: Mapping[str, tf.Tensor],
    wanted: Sequence[str],
    scope: str,
    labelled: list[str] | None = None,
) -> list[tf.Tensor]:
    """Imports `graph_def` under `scope`, the tensors in `bound` (`node:0`) replaced; returns the tensors `wanted`.

    The nodes of `bound` are left out: with an unused placeholder XLA would not compile the program.

    Args:
        graph_def: The graph.
        bound: Tensors of the current graph; arguments if `labelled` is given.
        wanted: Names of tensors.
        scope: Prefix of the names in the current graph.
        labelled: Receives the names of ops whose labels must be removed before the graph runs.
    """
    replaced = {name.rpartition(":")[0] for name in bound}
    kept = tf_graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    used: set[str] = set()
    for node in graph_def.node:
        if node.name in replaced:
            continue
        copy = kept.node.add()
        copy.CopyFrom(node)
        copy.attr.pop(tf_private.WAITED_FOR_ATTR, None)
        for index, source in reversed(list(enumerate(node.input))):
            if source.startswith("^"):
                if source[1:] in replaced:
                    del copy.input[index]
            elif tensor_name(source) in bound:
                used.add(tensor_name(source))
    if labelled is not None:
        labelled += [f"{scope.rstrip('/')}/{name}" for name in label_varying(kept, replaced)]
    imported = [name for name in wanted if tensor_name(name) not in bound]
    tensors = tf.import_graph_def(
        kept,
        input_map={name: bound[name] for name in used},
        return_elements=[tensor_name(name) for name in imported],
        name=scope,
    )
    by_name = dict(zip(imported, tensors, strict=True))
    return [by_name[name] if name in by_name else bound[tensor_name(name)] for name in wanted]


class NodeRefused(Exception):
    """TensorFlow refuses a node for the types and shapes of its inputs."""

    def __init__(self, name: str, inputs: Sequence[tf.Tensor], cause: Exception) -> None:
        # TensorFlow's message ends with the node, which no user wrote.
        why = str(cause).partition(" for '{{node")[0].rstrip(". ")
        shapes = ", ".join(str(value.shape) for value in inputs)
        super().__init__(f"{why} (shapes of its operands: {shapes})")
        self.name = name


def replay(
    graph_def: tf_graph_pb2.GraphDef, bound: Mapping[str, tf.Tensor], wanted: Sequence[str], scope: str
) -> list[tf.Tensor]:
    """Adds a few nodes, in order, to the current graph; returns the tensors `wanted`. Raises `NodeRefused`.

    The functions that they run must be known to the process. The cost does not depend on the size of the current
    graph; the cost of `import_graph` does.
    """
    graph = tf.compat.v1.get_default_graph()
    made: dict[str, tf.Tensor] = dict(bound)
    ops: dict[str, tf.Operation] = {}
    replaced = {name.rpartition(":")[0] for name in bound}
    with graph.name_scope(scope):
        for node in graph_def.node:
            if node.name in replaced:
                continue
            waits = [ops[source[1:]] for source in node.input if source.startswith("^") and source[1:] in ops]
            with graph.control_dependencies(waits):
                inputs = [made[tensor_name(source)] for source in node.input if not source.startswith("^")]
                try:
                    op = graph.create_op(node.op, inputs, attrs=dict(node.attr), name=node.name.rpartition("/")[2])
                except (ValueError, TypeError) as cause:
                    raise NodeRefused(node.name, inputs, cause) from cause
            ops[node.name] = op
            made.update({f"{node.name}:{index}": value for index, value in enumerate(op.outputs)})
    return [made[tensor_name(name)] for name in wanted]


def tensor_name(name: str) -> str:
    """Returns the full name of a tensor: `y` is `y:0`."""
    return name if ":" in name else f"{name}:0"
