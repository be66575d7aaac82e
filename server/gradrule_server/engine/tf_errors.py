"""Translates TensorFlow's errors into gradrule's errors, with node names as in the uploaded graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine.checks import failed_check
from gradrule_server.engine.memory import memory_error
from gradrule_server.errors import GradruleError, error

_STACK = re.compile(
    r"^Graph execution error:\s*|Detected at node .*?\(most recent call last\):\n|<stack traces unavailable>\n"
    r"|^  File .*?\n|\n\nStack trace.*\Z",
    re.MULTILINE | re.DOTALL,
)
_LOCATION = re.compile(r"\s*\[\[.*?\]\]", re.DOTALL)
_CALL = re.compile(r"\s*\[Op:\w+\]\s*(name:\s*\S*)?")
_NODE_REFERENCE = re.compile(r"\{\{(?:\w+ )?([^}]*)\}\}")
_SCOPE_IN_TEXT = re.compile(r"(?<![\w/])g/(?=[\w.])")


def error_message(cause: Exception) -> str:
    """Returns the message of an error of TensorFlow's. Python raises `UnicodeDecodeError` for one that is not UTF-8."""
    if isinstance(cause, UnicodeDecodeError):
        return cause.object.decode(errors="backslashreplace")
    return cause.message if isinstance(cause, tf.errors.OpError) else str(cause)


def clean_message(message: str) -> str:
    """Returns a message of TensorFlow's as one line, without locations, with names as in the uploaded graph."""
    text = message
    for decoration in (_STACK, _LOCATION, _CALL):
        text = decoration.sub("", text)
    text = _NODE_REFERENCE.sub(r"\1", text)
    return " ".join(_SCOPE_IN_TEXT.sub("", text).split())


# The node that failed, as TensorFlow writes it at the end: an imported node, or a node of a function.
_FAILED_NODE = re.compile(r"\[\[(?:\{\{node g/|\{\{function_node [^}]*\}\}\{\{node )([^}]+)\}\}")
# A node that the gradient of an imported node made; TensorFlow names it after that node.
_FAILED_GRADIENT = re.compile(r"\[\[(?:\{\{function_node [^}]*\}\})?\{\{node [^}]*\bg/([^}]+)_grad/[^}]*\}\}")
# TensorFlow puts the nodes of a loop or branch between the nodes of the graph, and adds such a part to their names.
_LOWERED = re.compile(r"/\w+/_\d+/")
# How TensorFlow shows the node that it cannot import: 'name = MatMul[attributes](inputs)'.
_REFUSED_NODE = re.compile(r" for '(?:\{\{node )?(?:g/)?([^ '}]+)(?:\}\})? = (\w+)(?:\[.*?\])?\([^()]*\)'", re.DOTALL)


def failed_node(message: str) -> str:
    """Returns the node of the uploaded graph at which a run failed; empty if TensorFlow's message names none.

    Nodes within a loop, branch or call are named `call/inner`. Of a gradient it returns the node that it belongs to.
    """
    found = _FAILED_GRADIENT.search(message) or _FAILED_NODE.search(message)
    return "" if found is None else _LOWERED.sub("/", found[1])


def refusal(cause: Exception, graph_def: graph_pb2.GraphDef) -> GradruleError:
    """Returns INVALID_GRAPH for a graph that TensorFlow does not import, with names as in the uploaded graph."""
    message = error_message(cause)
    shown = _REFUSED_NODE.search(message)
    node = None if shown is None else next((node for node in graph_def.node if node.name == shown[1]), None)
    if shown is None or node is None:
        return error(errors_pb2.ERROR_REASON_INVALID_GRAPH, f"TensorFlow refuses the graph: {clean_message(message)}")
    # Replace TensorFlow's inputs: fed tensors have other names there.
    inputs = ", ".join(repr(name) for name in node.input if not name.startswith("^"))
    text = clean_message(message.replace(shown[0], f" for inputs {inputs}"))
    return error(
        errors_pb2.ERROR_REASON_INVALID_GRAPH,
        f"TensorFlow refuses the {node.op} node {node.name!r}: {text}",
        node=node.name,
    )


# The same error type reports other resources too, such as rows of a table.
_NO_MEMORY = re.compile(r"OOM|[Oo]ut of memory|allocat")


def out_of_memory(cause: tf.errors.OpError) -> bool:
    """Returns whether an error of TensorFlow's reports that no memory is left."""
    return isinstance(cause, tf.errors.ResourceExhaustedError) and _NO_MEMORY.search(cause.message) is not None


# Longer lists, as of Concat, would hide the rest of the message.
_MAX_INPUTS = 8

TENSORFLOW_ERRORS = (tf.errors.OpError, UnicodeDecodeError)
"""Errors that TensorFlow raises when a graph runs."""


def translate_error(
    cause: Exception,
    run_again: Callable[[], object] | None = None,
    inputs_of: Callable[[str], Sequence[str]] | None = None,
) -> GradruleError:
    """Returns the error for one of `TENSORFLOW_ERRORS`: of a failed check, MEMORY_EXCEEDED, or EXECUTION_FAILED.

    Args:
        cause: The error.
        run_again: Runs the program with an executor that names the node that failed, if the first one does not.
        inputs_of: Returns the names of a node's inputs, for the message.
    """
    message = error_message(cause)
    failed = failed_check(message)
    if failed is not None:
        return failed
    node, text = failed_node(message), clean_message(message)
    if isinstance(cause, tf.errors.OpError) and out_of_memory(cause):
        # The rest is advice for programs that call TensorFlow.
        text = text.partition(" Hint: ")[0]
        return memory_error(f"node {node!r}: {text}" if node else text)
    if not node and run_again is not None:
        try:
            run_again()
        except TENSORFLOW_ERRORS as second:
            node = failed_node(error_message(second))
    if node and not text.startswith(f"node {node!r}"):
        text = f"node {node!r}: {text}"
    inputs = inputs_of(node) if node and inputs_of is not None else ()
    if 0 < len(inputs) <= _MAX_INPUTS:
        text = f"{text}; its inputs are {', '.join(repr(name.removesuffix(':0')) for name in inputs)}"
    return error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, text, node=node)
