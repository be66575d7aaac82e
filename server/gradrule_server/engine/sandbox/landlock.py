"""Restricts files, connections and signals of this thread and the threads it starts, by the kernel's Landlock.

Structures and flags: linux/landlock.h. What the running kernel does not know yet is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradrule_server.link.system_calls import address, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

READ_FILE, READ_DIR = 1 << 2, 1 << 3
WRITE_FILE, TRUNCATE, IOCTL_DEVICE = 1 << 1, 1 << 14, 1 << 15
_EXECUTE = 1 << 0
_OF_FILES = _EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE

# Number of rights on files, by version of Landlock, from version 1 on.
_FILE_RIGHTS = (13, 14, 15, 15, 16)
_NETWORK_SINCE, _TCP_BIND_AND_CONNECT = 4, 0b11
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights on a path and everything below it. A path that does not exist grants nothing."""

    path: Path
    rights: int


def version() -> int:
    """Returns the kernel's version of Landlock; 0 if it has none or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict(grants: Iterable[Grant]) -> None:
    """Forbids, for good, all files but the granted ones, TCP, and access to other processes.

    Needs `no_new_privs`, and a version above 0. `OSError` where the kernel refuses.
    """
    known = version()
    handled = (1 << _FILE_RIGHTS[min(known, len(_FILE_RIGHTS)) - 1]) - 1
    attributes = _Ruleset(
        handled,
        _TCP_BIND_AND_CONNECT if known >= _NETWORK_SINCE else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if known >= _SCOPES_SINCE else 0,
    )
    # A kernel accepts a longer structure than its own if the unknown part is 0.
    ruleset = syscall(_CREATE_RULESET, address(attributes), ctypes.sizeof(attributes), 0)
    try:
        for grant in grants:
            _add(ruleset, grant, handled)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, grant: Grant, handled: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = grant.rights & handled
            if not stat.S_ISDIR(os.fstat(path).st_mode):
                rights &= _OF_FILES
            if rights:
                rule = _PathBeneath(rights, path)
                syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, address(rule), 0)
        finally:
            os.close(path)
