"""Node names by glob and by regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable

import re2

NameTest = Callable[[str], bool]

MAX_PATTERN = 1000
"""Characters of a glob or regular expression."""

_MAGIC = re.compile(r"[*?]")


def name_test(glob: str) -> NameTest:
    """Tests a whole name: exact, or a glob in which `?` and `*` stay within a part between slashes and `**` crosses."""
    if not _MAGIC.search(glob):
        return glob.__eq__
    pattern = compile_glob(glob)
    return lambda name: pattern.fullmatch(name) is not None


def regex_test(regex: str) -> NameTest:
    """Tests a whole name by an RE2 expression, in time that grows with the name alone. `ValueError` if it is faulty."""
    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(regex, options)
    except re2.error as cause:
        text = cause.args[0] if cause.args else cause
        raise ValueError(text.decode(errors="replace") if isinstance(text, bytes) else str(text)) from None
    return lambda name: pattern.fullmatch(name) is not None


def compile_glob(glob: str) -> re.Pattern[str]:
    """The pattern as a regular expression.

    What lies between stars is matched as early as it can be and never again (`(?>…)`): later choices cannot help, and
    trying them would take exponential time.
    """
    blocks = re.split(r"\*{2,}", glob)
    head = _block(blocks[0])
    if len(blocks) == 1:
        return re.compile(head, re.DOTALL)
    middle = "".join(f"(?>.*?{_early(block)})" for block in blocks[1:-1] if block)
    return re.compile(f"{_early(blocks[0])}{middle}.*{_block(blocks[-1])}", re.DOTALL)


def _early(block: str) -> str:
    """Matches a block with `*` as early as possible."""
    first, *rest = block.split("*")
    return _literal(first) + "".join(f"(?>[^/]*?{_literal(part)})" for part in rest)


def _block(block: str) -> str:
    """Matches a block up to the end of the name."""
    first, *rest = block.split("*")
    if not rest:
        return _literal(first)
    early = "".join(f"(?>[^/]*?{_literal(part)})" for part in rest[:-1])
    return f"{_literal(first)}{early}[^/]*{_literal(rest[-1])}"


def _literal(text: str) -> str:
    return re.escape(text).replace(r"\?", "[^/]")
