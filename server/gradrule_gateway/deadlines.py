"""Reads the deadline of a request: the header `Grpc-Timeout`, in gRPC's notation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradrule_gateway.problems import malformed
from gradrule_gateway.routes import Route

DEFAULT_S = 30.0
"""Deadline of a call without the header; the gRPC clients have the same."""
COMPILE_S = 300.0
"""What a call gets besides if the server may compile a program for it."""
_NOTATION = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def deadline_s(headers: Mapping[str, str], route: Route) -> tuple[float, bool]:
    """Returns the seconds that a call may take, and whether they are the default. Raises `Problem`."""
    given = headers.get("grpc-timeout")
    if given is None:
        return DEFAULT_S + (COMPILE_S if route.may_compile else 0.0), True
    found = _NOTATION.fullmatch(given)
    if found is None or not int(found[1]):
        raise malformed("expected at most 8 digits and a unit (H, M, S, m, u or n), such as 5S", "Grpc-Timeout")
    return int(found[1]) * _UNITS[found[2]], False
