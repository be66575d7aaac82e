"""Implements `gradrule token`: creates, lists and revokes bearer tokens."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradrule_server.identity.token_file import (
    Token,
    TokenFileError,
    add_token,
    new_token,
    read_time,
    read_tokens,
    revoke_tokens,
    show_time,
)
from gradrule_server.settings import environment_name

_VARIABLE = environment_name("tokens")
_PERIOD = re.compile(r"(\d+)([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code."""
    parser = _parser()
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    if options.file is None:
        print(f"gradrule token: no token file: set --file or {_VARIABLE}", file=sys.stderr)
        return 2
    try:
        return int(options.run(options))
    except (TokenFileError, ValueError) as failure:
        print(f"gradrule token: {failure}", file=sys.stderr)
    except OSError as cause:
        print(f"gradrule token: {options.file} cannot be written: {cause.strerror or cause}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrule token",
        description="Creates, lists and revokes the bearer tokens in the file of `gradrule serve --tokens FILE`. A "
        "running server notices changes of the file within two seconds.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    new = commands.add_parser("new", help="create a token; it is shown once, and only its hash is stored")
    new.add_argument("--tenant", required=True, help="tenant of the token; its callers share rules and programs")
    new.add_argument("--admin", action="store_true", help="give the token administrator rights")
    new.add_argument(
        "--expires",
        metavar="WHEN",
        type=_when,
        help="expiry: 90d, 12h or 30m from now, or a time like 2030-01-31T00:00:00Z; default: never",
    )
    new.set_defaults(run=_new)
    listing = commands.add_parser("list", help="show id, tenant and expiry of all tokens")
    listing.add_argument("--json", action="store_true", help="print one line of JSON for each token")
    listing.set_defaults(run=_list)
    revoke = commands.add_parser("revoke", help="revoke tokens")
    revoke.add_argument("which", metavar="ID|TENANT", help="id of a token, or tenant whose tokens are all revoked")
    revoke.set_defaults(run=_revoke)
    for command in (new, listing, revoke):
        given = os.environ.get(_VARIABLE)
        command.add_argument(
            "--file", type=Path, default=Path(given) if given else None, help=f"token file [env: {_VARIABLE}]"
        )
    return parser


def _new(options: argparse.Namespace) -> int:
    text, token = new_token(options.tenant, is_admin=options.admin, expires=options.expires)
    add_token(options.file, token)
    until = "" if token.expires is None else f", until {show_time(token.expires)}"
    print(f"token {token.id} of tenant {token.tenant!r}{until}; it is shown only once:", file=sys.stderr)
    print(text)
    return 0


def _list(options: argparse.Namespace) -> int:
    for token in read_tokens(options.file):
        if options.json:
            print(json.dumps({"id": token.id} | json.loads(token.line())))
        else:
            print(_row(token))
    return 0


def _revoke(options: argparse.Namespace) -> int:
    revoked = revoke_tokens(options.file, options.which)
    if not revoked:
        print(
            f"gradrule token: {options.file} has no token with id {options.which!r} and no tenant of this name",
            file=sys.stderr,
        )
        return 1
    for token in revoked:
        print(f"revoked: {_row(token)}")
    return 0


def _row(token: Token) -> str:
    words = [token.id, token.tenant]
    if token.is_admin:
        words.append("admin")
    if token.expires is not None:
        words.append(f"{'expired' if token.expires <= time.time() else 'expires'} {show_time(token.expires)}")
    return "  ".join(words)


def _when(text: str) -> float:
    """Converts a period from now, or a time, to seconds since 1970."""
    period = _PERIOD.fullmatch(text)
    if period is not None:
        return float(int(time.time()) + int(period[1]) * _SECONDS[period[2]])
    try:
        return read_time(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a period like 90d, 12h or 30m, or a time like 2030-01-31T00:00:00Z, got {text!r}"
        ) from None
