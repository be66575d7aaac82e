"""Enters the sandbox: applies all measures that the platform has."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradrule_server.engine.sandbox import landlock, seccomp
from gradrule_server.engine.sandbox.landlock import IOCTL_DEVICE, READ_DIR, READ_FILE, WRITE_FILE, Grant
from gradrule_server.link.system_calls import capget, capset, prctl

_READ = READ_FILE | READ_DIR
_USE_DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEVICE

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


def grants(blob_folder: Path | None) -> list[Grant]:
    """Returns the readable paths and the few writable devices. Blobs can be read by name, but not listed."""
    found = [Grant(path, _READ) for path in readable_folders()]
    found += [Grant(Path(name), _READ) for name in (*_MACHINE, *_READ_DEVICES)]
    found += [
        Grant(path, _USE_DEVICE | READ_DIR) for path in (*map(Path, _USED_DEVICES), *Path("/dev").glob("nvidia*"))
    ]
    if blob_folder is not None:
        found.append(Grant(blob_folder, READ_FILE))
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


_PR_SET_NO_NEW_PRIVS = 38
_MAX_OPEN_FILES = 4096

# linux/capability.h. A server that runs as root must read a data folder of another user.
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
    header, capabilities = _Header(_CAPABILITY_VERSION, 0), _Capabilities()
    capget(header, capabilities)
    kept = capabilities.permitted & _READ_ANY_FILE
    capset(header, _Capabilities(kept, kept))


class SandboxRefused(Exception):
    """The platform lacks a measure, and the mode is `on`; the message names it."""


@dataclass
class Sandbox:
    """Names of the measures in force, and of the missing ones, with reasons."""

    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def apply(self, measure: str, fault: str | None, hold: Callable[[], None]) -> None:
        """Applies a measure, unless `fault` is given or the kernel refuses."""
        if fault is None:
            try:
                hold()
            except OSError as refusal:
                fault = str(refusal)
        if fault is None:
            self.held.append(measure)
        else:
            self.missing.append(f"{measure} ({fault})")


def enter(mode: str, blob_folder: Path | None) -> Sandbox:
    """Gives up, for good, the rights that an engine does not need. `mode`: `on`, `auto` or `off` (only `limits`).

    The measures: `limits` (no core files, few open files), `writing` (no byte into a file), `privileges` (none of
    root's, none to be gained), `files` (only libraries and the blobs are read, no file is made or changed; by Landlock,
    with TCP and signals where the kernel can), `calls` (no sockets, processes and the like; by seccomp). To be called
    while the process has one thread: they hold for that one and those it starts. Raises `SandboxRefused`.
    """
    sandbox = Sandbox()
    sandbox.apply("limits", None, set_limits)
    if mode == "off":
        sandbox.missing.append("all else (--sandbox off)")
        return sandbox
    sandbox.apply("writing", None, forbid_writing)
    sandbox.apply("privileges", None, drop_privileges)
    granted = grants(blob_folder)
    no_landlock = None if landlock.version() else "no Landlock in this kernel"
    sandbox.apply("files", no_landlock, lambda: landlock.restrict(granted))
    if blob_folder is not None:
        # The registry is next to the blobs, and a readable folder cannot exclude a subfolder.
        around = next((folder for folder in readable_folders() if blob_folder.resolve().is_relative_to(folder)), None)
        if around is not None:
            sandbox.missing.append(f"a registry out of reach (the data folder lies in {around}, where libraries are)")
    sandbox.apply("calls", None if seccomp.is_known() else "system calls of this machine unknown", seccomp.restrict)
    if mode == "on" and sandbox.missing:
        raise SandboxRefused(
            f"--sandbox on was asked for, but an engine here lacks {', '.join(sandbox.missing)}; "
            "use --sandbox auto to do without"
        )
    return sandbox
