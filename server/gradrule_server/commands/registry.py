"""Implements `gradrule registry`: backs up, restores and checks the registry of a server."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradrule_server.registry.backup import BackupError, Report, backup, check, create_empty_registry, restore
from gradrule_server.registry.blobs import DAMAGED
from gradrule_server.registry.data_folder import BLOBS
from gradrule_server.settings import SettingsError, default_data_dir, environment_name

_VARIABLE = environment_name("data_dir")


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code."""
    try:
        options = _parser().parse_args(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    try:
        return int(options.run(options))
    except BackupError as failure:
        print(f"gradrule registry: {failure}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrule registry",
        description="Backs up, restores and checks the rules, programs and blobs in the data directory of a server.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    backup_parser = commands.add_parser(
        "backup", help="copy the registry to a new directory; the server may be running"
    )
    backup_parser.add_argument("folder", metavar="DIR", type=Path, help="directory to create")
    backup_parser.set_defaults(run=_backup)
    restore_parser = commands.add_parser("restore", help="restore a backup to a data directory without a registry")
    restore_parser.add_argument("folder", metavar="DIR", type=Path, help="directory that `backup` created")
    restore_parser.set_defaults(run=_restore)
    check_parser = commands.add_parser("check", help="read and check the whole registry; the server may be running")
    check_parser.set_defaults(run=_check)
    new_parser = commands.add_parser("new", help="create an empty registry; existing files are renamed and kept")
    new_parser.set_defaults(run=_new)
    given = os.environ.get(_VARIABLE)
    fallback = Path(given) if given else None
    # Without a default, --data-dir is required.
    with contextlib.suppress(SettingsError):
        fallback = fallback or default_data_dir(os.environ)
    for command in (backup_parser, restore_parser, check_parser, new_parser):
        command.add_argument(
            "--data-dir",
            metavar="DIR",
            type=Path,
            default=fallback,
            required=fallback is None,
            help=f"data directory{f' [default: {fallback}]' if fallback else ''} [env: {_VARIABLE}]",
        )
    return parser


def _backup(options: argparse.Namespace) -> int:
    report = backup(options.data_dir, options.folder)
    print(f"copied to {options.folder}: {report}")
    _print_warnings(report)
    return 0


def _restore(options: argparse.Namespace) -> int:
    report = restore(options.folder, options.data_dir)
    print(f"restored to {options.data_dir}: {report}")
    _print_warnings(report)
    return 0


def _check(options: argparse.Namespace) -> int:
    report = check(options.data_dir)
    for problem in report.problems:
        print(problem)
    _print_warnings(report)
    is_valid = not (report.problems or report.unreadable)
    if is_valid:
        print(f"no problems found: {report}")
    return 0 if is_valid else 1


def _new(options: argparse.Namespace) -> int:
    kept = create_empty_registry(options.data_dir)
    print(f"{options.data_dir} now has an empty registry")
    for path in kept:
        print(f"kept: {path}")
    return 0


def _print_warnings(report: Report) -> None:
    for sentence in report.unreadable:
        print(sentence)
    if report.damaged_blobs:
        print(
            f"{report.damaged_blobs} blobs were damaged and renamed to {BLOBS}/{DAMAGED}…; you may delete these files"
        )
    if report.missing:
        print(f"{len(report.missing)} blobs are missing; programs that need them fail until clients send them again")
