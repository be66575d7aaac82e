"""`gradrule registry`: copies of what a server keeps, and whether all of it is in order."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradrule_server.registry.backup import BackupError, Report, backup, begin_anew, check, restore
from gradrule_server.registry.blobs import DAMAGED
from gradrule_server.registry.files import BLOBS
from gradrule_server.settings import default_data_dir
from gradrule_server.settings_reading import SettingsError, environment_name

_VARIABLE = environment_name("data_dir")


def run(arguments: Sequence[str]) -> int:
    """Runs one of the commands; its exit code."""
    try:
        options = _parser().parse_args(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    try:
        return int(options.run(options))
    except BackupError as refusal:
        print(f"gradrule registry: {refusal}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrule registry", description="Rules, programs and blobs of a server, in its data folder."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    copying = commands.add_parser("backup", help="copy the registry to a new folder; the server may run meanwhile")
    copying.add_argument("folder", metavar="DIR", type=Path, help="folder to make")
    copying.set_defaults(run=_backup)
    bringing = commands.add_parser("restore", help="bring a copy back, into a data folder that has no registry")
    bringing.add_argument("folder", metavar="DIR", type=Path, help="folder that `backup` made")
    bringing.set_defaults(run=_restore)
    checking = commands.add_parser("check", help="read all that the registry holds; the server may run meanwhile")
    checking.set_defaults(run=_check)
    beginning = commands.add_parser("new", help="begin with an empty registry; what was there is renamed and kept")
    beginning.set_defaults(run=_new)
    given = os.environ.get(_VARIABLE)
    fallback = Path(given) if given else None
    # Where there is no default, --data-dir is required.
    with contextlib.suppress(SettingsError):
        fallback = fallback or default_data_dir(os.environ)
    for command in (copying, bringing, checking, beginning):
        command.add_argument(
            "--data-dir",
            metavar="DIR",
            type=Path,
            default=fallback,
            required=fallback is None,
            help=f"data folder{f' [default: {fallback}]' if fallback else ''} [{_VARIABLE}]",
        )
    return parser


def _backup(options: argparse.Namespace) -> int:
    report = backup(options.data_dir, options.folder)
    print(f"copied to {options.folder}: {report}")
    _tell_odd(report)
    return 0


def _restore(options: argparse.Namespace) -> int:
    report = restore(options.folder, options.data_dir)
    print(f"brought back to {options.data_dir}: {report}")
    _tell_odd(report)
    return 0


def _check(options: argparse.Namespace) -> int:
    report = check(options.data_dir)
    for problem in report.problems:
        print(problem)
    _tell_odd(report)
    is_sound = not (report.problems or report.unreadable)
    if is_sound:
        print(f"in order: {report}")
    return 0 if is_sound else 1


def _new(options: argparse.Namespace) -> int:
    kept = begin_anew(options.data_dir)
    print(f"{options.data_dir} has an empty registry now")
    for path in kept:
        print(f"kept: {path}")
    return 0


def _tell_odd(report: Report) -> None:
    for sentence in report.unreadable:
        print(sentence)
    if report.set_aside:
        print(
            f"{report.set_aside} blobs were damaged, and are kept aside in {BLOBS}/ as {DAMAGED}…; they may be deleted"
        )
    if report.missing:
        print(f"{len(report.missing)} of the blobs are gone; programs ask for them when they are run")
