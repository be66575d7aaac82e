"""Privileges and limits of the process, as far as every Linux has them."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile

from gradrule_server.link.system_calls import capget, capset, prctl

_PR_SET_NO_NEW_PRIVS = 38
_MAX_OPEN_FILES = 4096

# linux/capability.h. A data folder may belong to another user than root, who serves.
_CAPABILITY_VERSION, _READ_ANY_FILE = 0x20080522, 1 << 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    """The first and the second 32 capabilities."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
        ("more", ctypes.c_uint32 * 3),
    )


def set_limits() -> None:
    """No core files, a sane number of files open at a time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def forbid_writing() -> None:
    """No byte into any file; sockets and pipes stay as they are."""
    # Libraries ask for a folder to write to as they are imported, and would try all they know; none of them needs it.
    tempfile.tempdir = os.devnull
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def drop() -> None:
    """No privilege is gained any more, and those of root's are gone. `OSError` where the kernel refuses."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header, capabilities = _Header(_CAPABILITY_VERSION, 0), _Capabilities()
    capget(header, capabilities)
    kept = capabilities.permitted & _READ_ANY_FILE
    capset(header, _Capabilities(kept, kept))
