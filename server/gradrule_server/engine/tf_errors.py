"""Translates TensorFlow's errors into gradrule's, with node names as in the uploaded graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.memory import memory_error
from gradrule_server.engine.runtime_checks import failed_check
from gradrule_server.errors import error

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
    """What an error of TensorFlow's says; where that holds bytes that are no UTF-8, Python has only those bytes."""
    if isinstance(cause, UnicodeDecodeError):
        return cause.object.decode(errors="backslashreplace")
    return cause.message if isinstance(cause, tf.errors.OpError) else str(cause)


def clean_message(message: str) -> str:
    """TensorFlow's message without its decorations and without ours: one line, names as in the uploaded graph."""
    text = message
    for decoration in (_STACK, _LOCATION, _CALL):
        text = decoration.sub("", text)
    text = _NODE_REFERENCE.sub(r"\1", text)
    return " ".join(_SCOPE_IN_TEXT.sub("", text).split())


# TensorFlow runs out of other things too, of rows in a table for example.
_NO_MEMORY = re.compile(r"OOM|[Oo]ut of memory|allocat")


def out_of_memory(cause: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow's says that there is no memory left."""
    return isinstance(cause, tf.errors.ResourceExhaustedError) and _NO_MEMORY.search(cause.message) is not None


T = TypeVar("T")


def translate_errors(function: Callable[[], T]) -> T:
    """Returns what TensorFlow returns; raises a failed check as the error that it stands for, or EXECUTION_FAILED."""
    try:
        return function()
    except (tf.errors.OpError, UnicodeDecodeError) as cause:
        message = error_message(cause)
        found = failed_check(message)
        if found is not None:
            raise found from cause
        if isinstance(cause, tf.errors.OpError) and out_of_memory(cause):
            raise memory_error(clean_message(message)) from cause
        raise error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, clean_message(message)) from cause
