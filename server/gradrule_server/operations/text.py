"""Text of strangers' in lines of a log: on one line, of bounded length, without what a terminal would obey."""

from __future__ import annotations

import json

MAX_TEXT = 2048


def bounded(text: str, limit: int = MAX_TEXT) -> str:
    """At most so many characters, and how many there are besides."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters more)"


def plain(text: str, limit: int = MAX_TEXT) -> str:
    """Bounded, and with escapes (`\\n`, `\\x1b`, `\\u202e`) in the place of what cannot be printed."""
    text = bounded(text, limit)
    return text if text.isprintable() else "".join(map(_printable, text))


def one_line_json(value: object) -> str:
    """JSON on one line, readable, and escaped where a terminal would obey it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    # What cannot be printed stands within strings only, where JSON has its own escapes for it.
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
