"""Graphs of a given number of nodes, and one stage of their way, measured in a process of its own.

Run as a module: `python -m tests.benchmarks.scaling_work STAGE KIND NODES FOLDER`; prints one JSON object. Stages:
`front` (parse, check, expand; leaves requests for the engine in the folder), `engine` (build, run, build another map),
`tensorflow` (the same graph with tf.gradients, without gradrule), `resnet50` (the same of a ResNet50; kind, nodes and
folder do not matter).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradrule as gr

KINDS = ("mlp", "functions")
RULE, OTHER_RULE = "where(abs(x) <= 1, dy, 0)", "where(abs(x) <= 2, 2 * dy, 0)"
WIDTH = 4
# A layer: weights, product, bias, sum, activation.
_LAYER = 5
_LAYERS_PER_FUNCTION = 4


def graph_bytes(kind: str, nodes: int) -> bytes:
    """x, layers of five nodes (one activation in ten is a Sign, the others Tanh), y. functions: four layers a call."""
    layers = max(1, (nodes - 2) // _LAYER)
    if kind == "mlp":
        return _mlp(layers)
    return _functions(max(1, layers // _LAYERS_PER_FUNCTION))


def _constants() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2, rng.normal(size=WIDTH).astype(np.float32) / 4


def _mlp(layers: int) -> bytes:
    weights, bias = _constants()
    g = gr.Graph()
    last = g.placeholder("x", "float32", [None, WIDTH])
    for number in range(layers):
        total = g.op_output("AddV2", g.matmul(last, g.constant(weights)), g.constant(bias))
        last = g.op_output("Sign" if number % 10 == 5 else "Tanh", total)
    g.op_output("Identity", last, name="y")
    return g.to_bytes()


def _functions(calls: int) -> bytes:
    """Its nodes are counted once they are where they run."""
    import tensorflow as tf

    weights, bias = _constants()

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])], autograph=False)
    def block(value: Any) -> Any:
        for number in range(_LAYERS_PER_FUNCTION):
            total = tf.matmul(value, tf.constant(weights)) + tf.constant(bias)
            value = tf.sign(total) if number == 1 else tf.tanh(total)
        return value

    with tf.Graph().as_default() as graph:
        last = tf.compat.v1.placeholder(tf.float32, [None, WIDTH], name="x")
        last = block(last)
        tf.identity(last, name="y")
    graph_def = graph.as_graph_def()
    (call,) = [node for node in graph_def.node if "PartitionedCall" in node.op]
    (end,) = [node for node in graph_def.node if node.name == "y"]
    for number in range(1, calls):
        more = graph_def.node.add()
        more.CopyFrom(call)
        more.name, more.input[0] = f"call{number}", call.name if number == 1 else f"call{number - 1}"
        end.input[0] = more.name
    serialized: bytes = graph_def.SerializeToString()
    return serialized


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of processor time of the work, on all threads, seconds by the clock, and MiB by which the peak grew."""
    gc.collect()
    before, started, clock = _peak(), time.process_time(), time.perf_counter()
    work()
    return {
        "seconds": time.process_time() - started,
        "wall": time.perf_counter() - clock,
        "mib": _peak() - before,
    }


def _peak() -> float:
    """MiB of this process at its largest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def front(serialized: bytes, folder: Path) -> dict[str, dict[str, float]]:
    """What the front end does with a program that it has not seen."""
    from gradrule.v1 import program_pb2
    from gradrule_server import graphs
    from gradrule_server.link.messages import CallShape
    from gradrule_server.preparation.prepare import prepare
    from gradrule_server.preparation.references import SnapshotRuleLookup
    from gradrule_server.registry.blobs import BlobStore

    spec = program_pb2.ProgramSpec(fetches=["y"])
    spec.graph.serialized = serialized
    spec.vjp.ys.append("y")
    spec.vjp.xs.append("x")
    spec.overrides.add(definition={"expression": RULE}).selector.op_type = "Sign"
    lookup, found = SnapshotRuleLookup(b""), []
    store = BlobStore(folder / "blobs", 0)
    result = {
        "check and expand": measured(lambda: found.append(prepare(spec, CallShape(), lookup, graphs.Limits(), store))),
        "check and expand, again": measured(
            lambda: found.append(prepare(spec, CallShape(), lookup, graphs.Limits(), store))
        ),
    }
    # Another map on the same graph: a rule for other nodes, and another formula for the same ones.
    spec.overrides[0].definition.expression = OTHER_RULE
    spec.overrides.add(definition={"expression": RULE}).selector.op_type = "Tanh"
    found.append(prepare(spec, CallShape(), lookup, graphs.Limits(), store, "other"))
    for name, made in (("request", found[0]), ("other request", found[-1])):
        (folder / name).write_bytes(made.request.SerializeToString())
    return result


def _runs(call: Callable[[], object]) -> dict[str, dict[str, float]]:
    return {"first run": measured(call), "second run": measured(call)}


def engine(folder: Path) -> dict[str, dict[str, float]]:
    """What the engine does with what the front end sends."""
    from gradrule_server.engine.build import build
    from gradrule_server.engine.process import configure_optimizer
    from gradrule_server.link.v1 import link_pb2

    configure_optimizer()
    request, other = (
        link_pb2.CompileRequest.FromString((folder / name).read_bytes()) for name in ("request", "other request")
    )
    x = np.ones([1, WIDTH], np.float32)
    built: list[Any] = []
    result = {"build": measured(lambda: built.append(build(request)))}
    result |= _runs(lambda: built[0].call([x]))
    return result | {"build of another map": measured(lambda: built.append(build(other)))}


def tensorflow(serialized: bytes) -> dict[str, dict[str, float]]:
    """The same graph and its gradient, all by TensorFlow itself."""
    import tensorflow as tf

    definition = tf.compat.v1.GraphDef.FromString(serialized)
    made: list[Any] = []

    def traced(x: Any) -> list[Any]:
        (y,) = tf.import_graph_def(definition, {"x": x}, ["y:0"], name="")
        return [y, *tf.gradients(y, x)]

    def trace() -> None:
        spec = tf.TensorSpec([None, WIDTH])
        made.append(tf.function(traced, input_signature=[spec], autograph=False).get_concrete_function())

    x = tf.ones([1, WIDTH])
    return {"import and tf.gradients": measured(trace)} | _runs(lambda: made[0](x))


def resnet50() -> dict[str, dict[str, float]]:
    """The gradient of a ResNet50 that Keras has traced, by TensorFlow itself."""
    import keras
    import tensorflow as tf

    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    spec = tf.TensorSpec([None, 224, 224, 3])
    forward = tf.function(model, input_signature=[spec]).get_concrete_function()
    made: list[Any] = []

    def gradient(x: Any) -> list[Any]:
        y = forward(x)
        return [y, *tf.gradients(y, x)]

    def trace() -> None:
        made.append(tf.function(gradient, input_signature=[spec], autograph=False).get_concrete_function())

    x = tf.random.stateless_normal([1, 224, 224, 3], [0, 0])
    return {"import and tf.gradients": measured(trace)} | _runs(lambda: made[0](x))


def main(stage: str, kind: str, nodes: str, folder: str) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    serialized = b"" if stage in ("engine", "resnet50") else graph_bytes(kind, int(nodes))
    if stage != "front":
        import tensorflow as tf

        # What the first function and the first gradient set up is no part of any graph.
        tf.function(lambda x: tf.gradients(tf.tanh(x), x), autograph=False)(tf.ones([]))
    found = {
        "front": lambda: front(serialized, Path(folder)),
        "engine": lambda: engine(Path(folder)),
        "tensorflow": lambda: tensorflow(serialized),
        "resnet50": resnet50,
    }[stage]()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
