"""Names inside a built program, and their way back to the names of the uploaded graph."""

from __future__ import annotations

import re

import tensorflow as tf

IMPORT_SCOPE = "g/"
"""Prefix of the uploaded graph's nodes in the built one, so that nothing collides with what building adds."""

_STACK = re.compile(
    r"^Graph execution error:\s*|Detected at node .*?\(most recent call last\):\n|<stack traces unavailable>\n"
    r"|^  File .*?\n|\n\nStack trace.*\Z",
    re.MULTILINE | re.DOTALL,
)
_LOCATION = re.compile(r"\s*\[\[.*?\]\]", re.DOTALL)
_CALL = re.compile(r"\s*\[Op:\w+\]\s*(name:\s*\S*)?")
_NODE_REFERENCE = re.compile(r"\{\{(?:\w+ )?([^}]*)\}\}")
_SCOPE_IN_TEXT = re.compile(r"(?<![\w/])g/(?=[\w.])")


def message_of(cause: Exception) -> str:
    """What an error of TensorFlow's says; where that holds bytes that are no UTF-8, Python has only those bytes."""
    if isinstance(cause, UnicodeDecodeError):
        return cause.object.decode(errors="backslashreplace")
    return cause.message if isinstance(cause, tf.errors.OpError) else str(cause)


def readable(message: str) -> str:
    """TensorFlow's message without its decorations and without ours: one line, names as in the uploaded graph."""
    text = message
    for decoration in (_STACK, _LOCATION, _CALL):
        text = decoration.sub("", text)
    text = _NODE_REFERENCE.sub(r"\1", text)
    return " ".join(_SCOPE_IN_TEXT.sub("", text).split())
