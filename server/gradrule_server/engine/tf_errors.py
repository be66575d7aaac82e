"""Translates TensorFlow's errors into gradrule's errors, with node names as in the uploaded graph."""

from __future__ import annotations

import re

import tensorflow as tf

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


# The same error type reports other resources too, such as rows of a table.
_NO_MEMORY = re.compile(r"OOM|[Oo]ut of memory|allocat")


def out_of_memory(cause: tf.errors.OpError) -> bool:
    """Returns whether an error of TensorFlow's reports that no memory is left."""
    return isinstance(cause, tf.errors.ResourceExhaustedError) and _NO_MEMORY.search(cause.message) is not None


TENSORFLOW_ERRORS = (tf.errors.OpError, UnicodeDecodeError)
"""Errors that TensorFlow raises when a graph runs."""


def translate_error(cause: Exception) -> GradruleError:
    """Returns the error for one of `TENSORFLOW_ERRORS`: of a failed check, MEMORY_EXCEEDED, or EXECUTION_FAILED."""
    message = error_message(cause)
    failed = failed_check(message)
    if failed is not None:
        return failed
    if isinstance(cause, tf.errors.OpError) and out_of_memory(cause):
        return memory_error(clean_message(message))
    return error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, clean_message(message))
