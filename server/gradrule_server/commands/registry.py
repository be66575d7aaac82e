"""Implements `gradrule registry`: backs up, restores, checks, copies and cleans the registry of a server."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradrule_server.registry.backup import (
    BackupError,
    RegistryPlace,
    Report,
    backup,
    check,
    copy_registry,
    delete_unneeded_blobs,
    restore,
)
from gradrule_server.registry.blobs import DAMAGED
from gradrule_server.registry.data_folder import BLOBS
from gradrule_server.registry.database_url import check_url, is_postgres_url
from gradrule_server.rules.signature import count_noun
from gradrule_server.settings import SettingsError, default_data_dir, environment_name

_VARIABLE = environment_name("data_dir")
_REGISTRY_VARIABLE = environment_name("registry")
_BLOBS_VARIABLE = environment_name("blobs")


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
        description="Backs up, restores, checks and copies the rules, programs and blobs of a server.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    backup_parser = commands.add_parser("backup", help="write the registry to a new file; the server may be running")
    backup_parser.add_argument("file", metavar="FILE", type=Path, help="tar archive to create")
    backup_parser.set_defaults(run=_backup)
    restore_parser = commands.add_parser(
        "restore", help="restore a backup to a data directory or database without a registry"
    )
    restore_parser.add_argument(
        "file", metavar="FILE", type=Path, help="archive that `backup` created, or the directory of an older release"
    )
    restore_parser.set_defaults(run=_restore)
    check_parser = commands.add_parser("check", help="read and check the whole registry; the server may be running")
    check_parser.set_defaults(run=_check)
    copy_parser = commands.add_parser(
        "copy",
        help="copy a registry with its blobs to an empty one, between data directories, PostgreSQL and object stores",
    )
    for name, what in (("source", "FROM"), ("target", "TO")):
        copy_parser.add_argument(
            name, metavar=what, type=_registry_name, help="data directory, or postgresql://USER@HOST/DATABASE"
        )
    for side, what in (("from", "FROM"), ("to", "TO")):
        copy_parser.add_argument(
            f"--{side}-blobs",
            metavar="URL",
            default="",
            help=f"object store of the blobs of {what}: s3://bucket/prefix or file:///folder; without it: the data "
            "directory",
        )
    copy_parser.set_defaults(run=_copy)
    gc_parser = commands.add_parser("gc", help="delete blobs that no program needs from the object store of --blobs")
    gc_parser.add_argument(
        "--grace-h",
        metavar="HOURS",
        type=float,
        default=24.0,
        help="keep blobs that were uploaded, or that clients looked for, within this time [default: 24]",
    )
    gc_parser.set_defaults(run=_gc)
    given = os.environ.get(_VARIABLE)
    fallback = Path(given) if given else None
    # Without a default, --data-dir is required.
    with contextlib.suppress(SettingsError):
        fallback = fallback or default_data_dir(os.environ)
    for command in (backup_parser, restore_parser, check_parser, gc_parser):
        command.add_argument(
            "--registry",
            metavar="URL",
            type=_database_url,
            default=os.environ.get(_REGISTRY_VARIABLE, ""),
            help=f"PostgreSQL database; without it: SQLite in the data directory [env: {_REGISTRY_VARIABLE}]",
        )
    for command in (backup_parser, restore_parser, check_parser, gc_parser):
        command.add_argument(
            "--blobs",
            metavar="URL",
            default=os.environ.get(_BLOBS_VARIABLE, ""),
            help="object store of the blobs: s3://bucket/prefix or file:///folder; without it: the data directory "
            f"[env: {_BLOBS_VARIABLE}]",
        )
    for command in (backup_parser, restore_parser, check_parser, gc_parser, copy_parser):
        command.add_argument(
            "--data-dir",
            metavar="DIR",
            type=Path,
            default=fallback,
            required=fallback is None,
            help=f"data directory{' of the registry in PostgreSQL, for blobs' if command is copy_parser else ''}"
            f"{f' [default: {fallback}]' if fallback else ''} [env: {_VARIABLE}]",
        )
    return parser


def _database_url(text: str) -> str:
    try:
        return check_url(text) if text else ""
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _registry_name(text: str) -> str:
    # A URL with a wrong scheme must not become a directory, whose name would show its password.
    return _database_url(text) if ":/" in text else text


def _backup(options: argparse.Namespace) -> int:
    report = backup(_place(options), options.file)
    print(f"copied to {options.file}: {report}")
    _print_warnings(report, has_object_store=bool(options.blobs))
    return 0


def _restore(options: argparse.Namespace) -> int:
    report = restore(options.file, _place(options))
    print(f"restored to {_place(options)}: {report}")
    _print_warnings(report, has_object_store=True)
    return 0


def _check(options: argparse.Namespace) -> int:
    report = check(_place(options))
    for problem in report.problems:
        print(problem)
    _print_warnings(report, has_object_store=bool(options.blobs))
    is_valid = not (report.problems or report.unreadable)
    if is_valid:
        print(f"no problems found: {report}")
    return 0 if is_valid else 1


def _gc(options: argparse.Namespace) -> int:
    count, size = delete_unneeded_blobs(_place(options), options.grace_h * 3600)
    print(f"deleted from {options.blobs}: {count_noun(count, 'blob')}, {size / 1e6:.0f} MB")
    return 0


def _copy(options: argparse.Namespace) -> int:
    source, target = (
        RegistryPlace(options.data_dir, name, blobs) if is_postgres_url(name) else RegistryPlace(Path(name), "", blobs)
        for name, blobs in ((options.source, options.from_blobs), (options.target, options.to_blobs))
    )
    report = copy_registry(source, target)
    print(f"copied to {target}: {report}")
    _print_warnings(report, has_object_store=bool(options.from_blobs))
    return 0


def _place(options: argparse.Namespace) -> RegistryPlace:
    return RegistryPlace(options.data_dir, options.registry, options.blobs)


def _print_warnings(report: Report, *, has_object_store: bool) -> None:
    for sentence in report.unreadable:
        print(sentence)
    if report.damaged_blobs:
        print(f"damaged blobs, renamed to {BLOBS}/{DAMAGED}…: {report.damaged_blobs}; you may delete these files")
    if report.missing:
        hint = "" if has_object_store else "; if they are in an object store, name it"
        print(f"missing blobs: {len(report.missing)}; programs that need them fail until clients send them again{hint}")
