"""Generates valid, nearly valid and invalid expressions of rules."""

from __future__ import annotations

from random import Random

from gradrule_server.rules.language.functions import CONSTANTS, FUNCTIONS

_NAMES = ("x", "x0", "x1", "x2", "x9", "y", "y1", "dy", "dy1", "default", "default1", "width", "alpha", "z", *CONSTANTS)
_FUNCTIONS = tuple(FUNCTIONS)
_BINARY = (
    "+",
    "-",
    "*",
    "/",
    "**",
    "%",
    "//",
    "<",
    "<=",
    "==",
    "!=",
    ">",
    "and",
    "or",
    "@",
    "<<",
    "&",
    "is",
    "in",
    ",",
    ":=",
)
_NUMBERS = (
    "0",
    "1",
    "-1",
    "0.5",
    "1e308",
    "1e-400",
    "9" * 400,
    "1e999999",
    "0x10",
    "1_0",
    "1j",
    "00",
    ".5",
    "5.",
    "1e",
    "nan",
)
_AXES = (
    "axis=0",
    "axis=-1",
    "axis=99",
    'axis="sample"',
    'axis="x"',
    "axis=(0, 1)",
    "axis=None",
    "axis=dy",
    "keepdims=1",
)
_FOREIGN = (
    "__import__('os')", "x.shape", "x[0]", "lambda: dy", "[x for x in y]", "f'{x}'", "'text'", "dy if x else y",
    "await dy", "{x: y}", "...", "*x", "not", "yield", "x.__class__", "(", ")", "dy dy", "\n", "\t", "#", "\\", "é",
    "𝔛", "\x00", "\ufeff", "x" * 5000, "(" * 300, "-" * 3000, "not " * 900,
)  # fmt: skip


def expression(chance: Random) -> str:
    """Returns one expression; about half of them are valid."""
    drawn = chance.random()
    if drawn < 0.04:
        return _deep(chance)
    text = _tuple(chance) if drawn < 0.15 else _term(chance, chance.randrange(1, 6))
    if chance.random() < 0.25:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice((*_FOREIGN, *_BINARY, *_NAMES, "")) + text[at + chance.randrange(3) :]
    return text


def _term(chance: Random, depth: int) -> str:
    if depth <= 0 or chance.random() < 0.15:
        drawn = chance.random()
        if drawn < 0.78:
            return chance.choice((*_NAMES[:3], "dy", "dy", "y"))
        return chance.choice(_NUMBERS if drawn < 0.9 else _NAMES)
    what = chance.randrange(10)
    if what < 4:
        return f"{_term(chance, depth - 1)} {_operator(chance)} {_term(chance, depth - 1)}"
    if what < 8:
        return _call(chance, depth)
    return f"({_term(chance, depth - 1)})" if what == 8 else f"-{_term(chance, depth - 1)}"


def _operator(chance: Random) -> str:
    return chance.choice(_BINARY[:13] if chance.random() < 0.95 else _BINARY)


def _call(chance: Random, depth: int) -> str:
    name = chance.choice(_FUNCTIONS)
    # Mostly the right number of arguments, so that much of it passes the parser.
    least = FUNCTIONS[name].least
    count = least if chance.random() < 0.9 else chance.randrange(5)
    arguments = [_term(chance, depth - 1) for _ in range(count)]
    if chance.random() < 0.15:
        arguments.append(chance.choice(_AXES))
    return f"{name}({', '.join(arguments)})"


def _tuple(chance: Random) -> str:
    parts = [chance.choice(("None", _term(chance, 2), _term(chance, 3))) for _ in range(chance.randrange(1, 5))]
    return f"({', '.join(parts)}{chance.choice(('', ','))})"


def _deep(chance: Random) -> str:
    """Makes a deep, long or doubling expression of up to 4,096 characters, for recursive parsers."""
    depth = chance.choice((50, 200, 1000, 2000))
    return chance.choice(
        (
            "(" * depth + "dy" + ")" * depth,
            "-" * depth + "dy",
            "not " * (depth // 4) + "dy",
            "dy" + " + dy" * depth,
            "dy" + " ** dy" * depth,
            "sin(" * (depth // 5) + "dy" + ")" * (depth // 5),
            "where(x > 0, " * (depth // 16) + "dy" + ", dy)" * (depth // 16),
            "x < " * (depth // 4) + "dy",
            "each(" * (depth // 6) + "dy" + ")" * (depth // 6),
            "dy, " * depth,
        )
    )
