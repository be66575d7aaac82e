"""Drops, for good, the rights that an engine process does not need, by all measures that the platform has.

Landlock, a part of the kernel, restricts files, connections and signals of this thread and the threads that it starts.
Structures and flags: linux/landlock.h. What the running kernel does not know yet is left out. The filter of system
calls is in `seccomp`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradrule_server.engine import seccomp
from gradrule_server.link.operating_system import address, capget, capset, prctl, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE, _IOCTL_DEVICE = 1 << 1, 1 << 14, 1 << 15
_EXECUTE = 1 << 0
_RIGHTS_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE

# Number of rights on files, by version of Landlock, from version 1 on.
_FILE_RIGHT_COUNTS = (13, 14, 15, 15, 16)
_NETWORK_SINCE, _TCP_BIND_AND_CONNECT = 4, 0b11
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11

_READ = _READ_FILE | _READ_DIR
_USE_DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEVICE

_OWN_PACKAGES = ("gradrule", "gradrule_server")
_SYSTEM_LIBRARIES = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/usr/local/nvidia", "/opt/cuda", "/nix/store"),
)
_MACHINE = (
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/devices", "/proc/modules"),
    *("/proc/driver", "/proc/sys/vm", "/proc/sys/kernel"),
    *("/sys/devices", "/sys/bus", "/sys/class", "/sys/module", "/sys/fs/cgroup", "/sys/kernel/mm"),
)
_READ_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
_USED_DEVICES = ("/dev/null", "/dev/nvidia-caps", "/dev/dxg")

_PR_SET_NO_NEW_PRIVS = 38
_MAX_OPEN_FILES = 4096

# linux/capability.h. A server that runs as root must read a data folder of another user.
_CAPABILITY_VERSION, _READ_ANY_FILE = 0x20080522, 1 << 2


class SandboxRefused(Exception):
    """The platform lacks a measure, and the mode is `on`; the message names it."""


@dataclass
class Sandbox:
    """Names of the measures in force, and of the missing ones, with reasons."""

    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def apply(self, measure: str, fault: str | None, function: Callable[[], None]) -> None:
        """Applies a measure by calling the function, unless `fault` is given. It is missing if the kernel refuses."""
        if fault is None:
            try:
                function()
            except OSError as refusal:
                fault = str(refusal)
        if fault is None:
            self.held.append(measure)
        else:
            self.missing.append(f"{measure} ({fault})")


def enter_sandbox(mode: str, blob_folder: Path | None) -> Sandbox:
    """Applies the measures of the sandbox. `mode`: `on`, `auto` or `off` (only `limits`). Raises `SandboxRefused`.

    - `limits`: no core files, few open files.
    - `writing`: no byte can be written to a file.
    - `privileges`: the process loses root's privileges and can gain no new ones.
    - `files`: only libraries and blobs can be read, and no file created or changed. Uses Landlock, which also forbids
      TCP and signals to other processes if the kernel supports that.
    - `calls`: sockets, processes and similar system calls are forbidden, by seccomp.

    Call it while the process has one thread: the measures apply to that thread and to those that it starts.
    """
    sandbox = Sandbox()
    sandbox.apply("limits", None, set_limits)
    if mode == "off":
        sandbox.missing.append("all else (--sandbox off)")
        return sandbox
    sandbox.apply("writing", None, forbid_writing)
    sandbox.apply("privileges", None, drop_privileges)
    granted = grants(blob_folder)
    no_landlock = None if landlock_version() else "no Landlock in this kernel"
    sandbox.apply("files", no_landlock, lambda: restrict_files(granted))
    if blob_folder is not None:
        # The registry is next to the blobs, and a readable folder cannot exclude a subfolder.
        around = next((folder for folder in readable_folders() if blob_folder.resolve().is_relative_to(folder)), None)
        if around is not None:
            sandbox.missing.append(f"a registry out of reach (the data folder lies in {around}, where libraries are)")
    sandbox.apply(
        "calls", None if seccomp.is_machine_known() else "system calls of this machine unknown", seccomp.restrict_calls
    )
    if mode == "on" and sandbox.missing:
        raise SandboxRefused(
            f"--sandbox on was asked for, but an engine here lacks {', '.join(sandbox.missing)}; "
            "use --sandbox auto to do without"
        )
    return sandbox


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights on a path and everything below it. A path that does not exist grants nothing."""

    path: Path
    rights: int


def grants(blob_folder: Path | None) -> list[Grant]:
    """Returns the readable paths and the few writable devices. Blobs can be read by name, but not listed."""
    found = [Grant(path, _READ) for path in readable_folders()]
    found += [Grant(Path(name), _READ) for name in (*_MACHINE, *_READ_DEVICES)]
    found += [
        Grant(path, _USE_DEVICE | _READ_DIR) for path in (*map(Path, _USED_DEVICES), *Path("/dev").glob("nvidia*"))
    ]
    if blob_folder is not None:
        found.append(Grant(blob_folder, _READ_FILE))
    return found


def readable_folders() -> list[Path]:
    """Returns the folders of libraries: of Python, its packages, this server, the system and CUDA."""
    return list(dict.fromkeys(path.resolve() for path in _library_folders()))


def _library_folders() -> Iterator[Path]:
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield Path(sysconfig.get_path(name))
    yield Path(sys.base_prefix) / "lib"
    yield from (Path(entry) for entry in sys.path if entry)
    for package in _OWN_PACKAGES:
        # An editable installation may be in no folder of `sys.path`.
        spec = importlib.util.find_spec(package)
        yield from map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())
    yield from map(Path, _SYSTEM_LIBRARIES)
    yield from Path("/usr/local").glob("cuda*")
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry)


class _CapabilityHeader(ctypes.Structure):
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
    """Forbids core files, and limits the number of open files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def forbid_writing() -> None:
    """Forbids writing to files. Sockets and pipes still work."""
    # Libraries look for a writable folder when they are imported, but none of them needs it.
    tempfile.tempdir = os.devnull
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def drop_privileges() -> None:
    """Drops root's privileges, and forbids to gain new ones. Raises `OSError` if the kernel refuses."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header, capabilities = _CapabilityHeader(_CAPABILITY_VERSION, 0), _Capabilities()
    capget(header, capabilities)
    kept = capabilities.permitted & _READ_ANY_FILE
    capset(header, _Capabilities(kept, kept))


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Returns the kernel's version of Landlock; 0 if it has none or it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict_files(grants: Iterable[Grant]) -> None:
    """Forbids, for good, all files but the granted ones, TCP, and access to other processes.

    Needs `no_new_privs` and Landlock. Raises `OSError` if the kernel refuses.
    """
    version = landlock_version()
    handled = (1 << _FILE_RIGHT_COUNTS[min(version, len(_FILE_RIGHT_COUNTS)) - 1]) - 1
    attributes = _Ruleset(
        handled,
        _TCP_BIND_AND_CONNECT if version >= _NETWORK_SINCE else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0,
    )
    # A kernel accepts a longer structure than its own if the part that it does not know is 0.
    ruleset = syscall(_CREATE_RULESET, address(attributes), ctypes.sizeof(attributes), 0)
    try:
        for grant in grants:
            _add_rule(ruleset, grant, handled)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, grant: Grant, handled: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = grant.rights & handled
            if not stat.S_ISDIR(os.fstat(path).st_mode):
                rights &= _RIGHTS_ON_FILES
            if rights:
                rule = _PathBeneath(rights, path)
                syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, address(rule), 0)
        finally:
            os.close(path)
