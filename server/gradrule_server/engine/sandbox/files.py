"""The files that an engine needs: libraries, what the kernel tells of the machine, devices, and the blobs."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gradrule_server.engine.sandbox.landlock import IOCTL_DEVICE, READ_DIR, READ_FILE, WRITE_FILE, Grant

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
    """What may be read, and the few devices that may be written. Blobs can be read by name, but not listed."""
    found = [Grant(path, _READ) for path in readable_folders()]
    found += [Grant(Path(name), _READ) for name in (*_MACHINE, *_READ_DEVICES)]
    found += [
        Grant(path, _USE_DEVICE | READ_DIR) for path in (*map(Path, _USED_DEVICES), *Path("/dev").glob("nvidia*"))
    ]
    if blob_folder is not None:
        found.append(Grant(blob_folder, READ_FILE))
    return found


def readable_folders() -> list[Path]:
    """Where libraries lie: Python's, its packages', this server's, the system's and CUDA's."""
    return list(dict.fromkeys(path.resolve() for path in _library_folders()))


def _library_folders() -> Iterator[Path]:
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield Path(sysconfig.get_path(name))
    yield Path(sys.base_prefix) / "lib"
    yield from (Path(entry) for entry in sys.path if entry)
    for package in _OWN_PACKAGES:
        # An installation for development may lie in no folder of the path.
        spec = importlib.util.find_spec(package)
        yield from map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())
    yield from map(Path, _SYSTEM_LIBRARIES)
    yield from Path("/usr/local").glob("cuda*")
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry)
