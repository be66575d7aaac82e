"""Builds graphs with TensorFlow and loads them into the client through a file, like a user's graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

import gradrule as gr

SIGN_FEEDS = {"x": [1.0, -2.0]}
"""Feeds of `sign_graph`."""


def sign_graph() -> gr.Graph:
    """Returns the small graph y = sign(x)."""
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    return g


def build_graph_def(build: Callable[[], None]) -> Any:
    """Returns the GraphDef that `build` makes, with control flow of version 2."""
    with tf.Graph().as_default() as graph:
        build()
    return graph.as_graph_def()


def load_graph(graph_def: Any) -> gr.Graph:
    """Returns the graph that `gr.load` reads from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.pb"
        path.write_bytes(graph_def.SerializeToString())
        return gr.load(path)


def build_graph(build: Callable[[], None]) -> gr.Graph:
    """Returns the graph that `build` makes, loaded from a file."""
    return load_graph(build_graph_def(build))


def all_nodes(graph_def: Any) -> Iterator[Any]:
    """Iterates over all nodes, those of functions included."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def placeholder(name: str, dtype: Any = tf.float32, shape: Any = (None,)) -> Any:
    """Adds a placeholder to the current graph."""
    return tf.compat.v1.placeholder(dtype, shape, name=name)
