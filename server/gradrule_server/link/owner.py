"""Whose work it is: what waits for an engine is taken up in turn, one owner's after another's."""

from __future__ import annotations

from contextvars import ContextVar

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The tenant for whom the running task works; set where a request is let in."""
