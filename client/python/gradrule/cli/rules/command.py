"""`gradrule rules`: adds the parsers of all its commands."""

from __future__ import annotations

from typing import Any

from gradrule.cli.rules import checking, drawing, editing, listing


def add(commands: Any) -> None:
    """Adds the commands."""
    group = commands.add_parser(
        "rules", help="list, show, create, delete, try, draw and check rules; list presets"
    ).add_subparsers(dest="verb", metavar="VERB", required=True)
    for part in (listing, editing, drawing, checking):
        part.add(group)
