"""Matches node names against many globs and regular expressions at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

MAX_PATTERN = 1000
"""Characters of a glob or regular expression."""

_MAGIC = re.compile(r"[*?]")
_GLOB_PARTS = re.compile(r"\*{2,}|\*|\?")
_GLOB_MEANS = {"?": "[^/]", "*": "[^/]*"}
_ANYTHING = "(?s:.*)"
_SET_SIZE = 128


def is_glob(text: str) -> bool:
    """Returns whether a name contains wildcards."""
    return _MAGIC.search(text) is not None


def compile_regex(regex: str) -> re2._Regexp:
    """Compiles an RE2 expression (linear matching time). Raises `ValueError` if it is invalid."""
    try:
        return re2.compile(regex, _options())
    except re2.error as cause:
        text = cause.args[0] if cause.args else cause
        raise ValueError(text.decode(errors="replace") if isinstance(text, bytes) else str(text)) from None


def glob_regex(glob: str) -> str:
    """Returns the RE2 expression of a glob: `?` and `*` do not match slashes, `**` does."""
    pieces, start = [], 0
    for part in _GLOB_PARTS.finditer(glob):
        pieces += [re2.escape(glob[start : part.start()]), _GLOB_MEANS.get(part[0], _ANYTHING)]
        start = part.end()
    return "".join([*pieces, re2.escape(glob[start:])])


class PatternSet:
    """Matches whole names against many RE2 expressions; one pass over the name serves up to `_SET_SIZE` of them."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._sets = [_Set(patterns[start : start + _SET_SIZE], start) for start in range(0, len(patterns), _SET_SIZE)]

    def matching(self, name: str) -> tuple[int, ...]:
        """Returns the indices of the matching expressions."""
        return tuple([number for item in self._sets for number in item.matching(name)])


class _Set:
    def __init__(self, patterns: Sequence[str], first: int) -> None:
        self._first = first
        self._patterns = patterns
        self._single: list[re2._Regexp] = []
        self._set: re2.Set | None = re2.Set.FullMatchSet(_options())
        for pattern in patterns:
            self._set.Add(pattern)
        # This pattern always matches: a result without it means that the set ran out of memory.
        self._anything = self._set.Add(_ANYTHING)
        try:
            self._set.Compile()
        except re2.error:
            self._set = None

    def matching(self, name: str) -> list[int]:
        found = None if self._set is None else self._set.Match(name)
        if found is None:
            self._single = self._single or [compile_regex(pattern) for pattern in self._patterns]
            return [self._first + number for number, one in enumerate(self._single) if one.fullmatch(name)]
        return [self._first + number for number in found if number != self._anything]


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options
