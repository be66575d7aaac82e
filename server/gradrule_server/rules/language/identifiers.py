"""Recognises names of variables and functions, and checks names of params."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence

from gradrule_server.rules.language.functions import CONSTANTS, FUNCTIONS
from gradrule_server.rules.language.source import quoted

FAMILIES = ("x", "y", "dy", "default")

_VARIABLE = re.compile(r"(x|y|dy|default)(0|[1-9][0-9]{0,5})?")
_RESERVED = re.compile(r"(x|y|dy|default)[0-9]*")
_MAX_LENGTH = 64
_MAX_LISTED = 12


def split_variable(name: str) -> tuple[str, int, bool] | None:
    """Returns family, index, and whether the index was omitted; None if the name is not a variable's."""
    match = _VARIABLE.fullmatch(name)
    if match is None:
        return None
    return match[1], int(match[2] or 0), match[2] is None


def param_name_problem(name: str) -> str | None:
    """Returns why a param cannot have this name; None if it can."""
    if len(name) > _MAX_LENGTH:
        return f"a param's name has at most {_MAX_LENGTH} characters, this one has {len(name)}: {quoted(name)}"
    if not (name.isidentifier() and name.isascii()):
        return f"{name!r} is no identifier: a param's name is made of letters, digits and _, and starts with no digit"
    if keyword.iskeyword(name):
        return f"{name!r} is a keyword of the language; {name + '_'!r} would do"
    if _RESERVED.fullmatch(name):
        return f"{name!r} is a variable of the language (x, y, dy and default, with or without an index)"
    if name in CONSTANTS:
        return f"{name!r} is a constant of the language"
    return None


def is_function(name: str) -> bool:
    """Returns whether this is the name of a function; only params of the catalogue may have such a name."""
    return name in FUNCTIONS


def declared_params_text(params: Sequence[str]) -> str:
    """Returns the declared params as text for an error: `the declared params (alpha, beta)`."""
    if not params:
        return "declared params (this rule has none)"
    return f"the declared params ({', '.join(params[:_MAX_LISTED])}{', …' if len(params) > _MAX_LISTED else ''})"
