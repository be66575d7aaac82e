"""Names inside a built program, and their way back to the names of the uploaded graph."""

from __future__ import annotations

import re

IMPORT_SCOPE = "g/"
"""Prefix of the uploaded graph's nodes in the built one, so that nothing collides with what building adds."""

_NODE_REFERENCE = re.compile(r"\{\{(?:\w+ )?([^}]*)\}\}")
_SCOPE_IN_TEXT = re.compile(r"(?<![\w/])g/(?=[\w.])")
_LOCATION = re.compile(r"\s*\[\[.*?\]\]", re.DOTALL)


def readable(message: str) -> str:
    """TensorFlow's message without decorations of ours and of its own: one line, names as in the uploaded graph."""
    first = (
        message.split("\n\nStack trace", maxsplit=1)[0]
        .split("\n\nDetected at", maxsplit=1)[0]
        .split("\nDetected at", maxsplit=1)[0]
    )
    first = re.sub(r"^Graph execution error:\s*", "", first.strip())
    first = _LOCATION.sub("", first)
    first = _NODE_REFERENCE.sub(r"\1", first)
    first = _SCOPE_IN_TEXT.sub("", first)
    first = re.sub(r"\s*\[Op:\w+\]\s*(name:\s*\S*)?", "", first)
    return " ".join(first.split())
