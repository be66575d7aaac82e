"""Reads JSON text strictly (RFC 8259), and writes it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson

from gradrule_gateway.problems import malformed

_SHOWN = 40


class _Refused(ValueError):
    """A text that Python's parser would accept and that is refused."""


def parse(text: bytes) -> Any:
    """Returns the value of a JSON text.

    Duplicate keys, NaN and Infinity as literals, text that is not UTF-8 and lone surrogates are refused.

    Raises:
        Problem: The text is not JSON; the message has line and column.
    """
    try:
        # Python's parser reports duplicate keys, which orjson does not.
        return json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as wrong:
        raise malformed(f"the body is not UTF-8: byte {wrong.start}") from None
    except json.JSONDecodeError as wrong:
        raise malformed(f"the body is not JSON: {wrong.msg}, line {wrong.lineno}, column {wrong.colno}") from None
    except _Refused as wrong:
        raise malformed(str(wrong)) from None
    except RecursionError:
        raise malformed("the body is nested too deeply") from None
    except ValueError:
        # Python limits the digits of integers.
        raise malformed("the body has an integer with too many digits") from None


def dump(value: Any) -> bytes:
    """Returns JSON text in UTF-8; NumPy arrays become nested lists, with the shortest digits that keep their values."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key[:_SHOWN]!r} occurs twice in one object")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f'{name} is not JSON; write the string "{name}"')
