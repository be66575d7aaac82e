"""Graphs that TensorFlow makes, and the way they take to the client: as a file, like a user's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

import gradrule as gr


def drawn(build: Callable[[], None]) -> Any:
    """The GraphDef of what `build` draws, control flow of version 2 included."""
    with tf.Graph().as_default() as graph:
        build()
    return graph.as_graph_def()


def loaded(graph_def: Any) -> gr.Graph:
    """The graph as `gr.load` gives it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.pb"
        path.write_bytes(graph_def.SerializeToString())
        return gr.load(path)


def nodes(graph_def: Any) -> Iterator[Any]:
    """All nodes, those of functions too."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def placeholder(name: str, dtype: Any = tf.float32, shape: Any = (None,)) -> Any:
    """A placeholder in the graph that is being drawn."""
    return tf.compat.v1.placeholder(dtype, shape, name=name)
