"""Runs a command as on a machine where nothing ever ran, for tools/fresh_test.py.

A `Machine` has a system folder (a Debian, or `/` of this machine), an empty home and an empty folder for temporary
files. `Machine.command` gives a command line that enters it: this file, run as a program, makes a mount namespace and a
process namespace, composes a root from the system's `usr` and `etc` and from empty folders, becomes an ordinary user,
and executes the command. Needs the standard library alone, and root or user namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

USER, USER_ID = "user", 1000
HOME = "/home/user"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc")
_EMPTY = ("home", "root", "run", "mnt", "opt", "srv", "var", "proc", "sys", "dev", "tmp")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWUSER = 0x20000, 0x20000000, 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 1, 38, 22, 2

# System calls that `refuse` names: numbers on x86-64 and aarch64, the value of the first argument that is refused
# (None: all), and the error that a kernel without the feature gives.
_REFUSED: dict[str, list[tuple[tuple[int, int], int | None, int]]] = {
    "landlock": [((444, 444), None, errno.ENOSYS)],
    "seccomp": [((317, 277), None, errno.ENOSYS), ((157, 167), _PR_SET_SECCOMP, errno.EINVAL)],
    "ipv6": [((41, 198), 10, errno.EAFNOSUPPORT)],
}


@dataclass(frozen=True)
class Conditions:
    """What differs from an ordinary machine. home: writable, read-only (so are temporary files) or unset."""

    home: str = "writable"
    shm: bool = True
    refuse: tuple[str, ...] = ()
    umask: int = 0o022
    user_id: int = USER_ID


@dataclass(frozen=True)
class Machine:
    """A system, folders of this machine at their own paths, and the folder that holds home and temporary files."""

    system: Path
    folder: Path
    binds: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    conditions: Conditions = Conditions()

    def but(self, **conditions: Any) -> Machine:
        """Returns the same machine under other conditions."""
        return replace(self, conditions=replace(self.conditions, **conditions))

    def command(self, arguments: Sequence[str], cwd: str = HOME) -> list[str]:
        """Returns the command line that runs ARGUMENTS in the machine."""
        spec = {
            "system": str(self.system),
            "folder": str(self.folder),
            "binds": [str(path) for path in self.binds],
            "environment": dict(self.environment),
            "conditions": asdict(self.conditions),
            "arguments": list(arguments),
            "cwd": cwd,
        }
        return [sys.executable, "-I", str(Path(__file__).resolve()), json.dumps(spec)]

    def run(self, *arguments: str, cwd: str = HOME, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; stdout and stderr together."""
        return subprocess.run(
            self.command(arguments, cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )


def fault() -> str | None:
    """Returns why this machine cannot enter a namespace; None where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "needs Linux on x86-64 or aarch64"
    with tempfile.TemporaryDirectory() as folder:
        done = Machine(Path("/"), Path(folder)).run("true", cwd="/", timeout_s=60)
    return None if done.returncode == 0 else f"needs root, or user namespaces: {done.stdout.strip()[-300:]}"


# What follows runs in a process of its own, which becomes the machine.


def enter(spec: Mapping[str, Any]) -> int:
    """Runs the command of SPEC in a new machine; its exit code."""
    conditions = Conditions(**spec["conditions"])
    is_root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWNS | (0 if is_root else _CLONE_NEWUSER))
    if not is_root:
        _map_user(0, user, 0, group)
    _mount("--make-rprivate", "/")
    root = Path(spec["folder"]) / "root"
    root.mkdir(exist_ok=True)
    _compose(root, spec, conditions, owner=USER_ID if is_root else 0)
    _unshare(_CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            _mount("-t", "proc", "proc", f"{root}/proc")
            _change_root(root)
            os.chdir(spec["cwd"])
            _become_user(conditions.user_id, is_root)
            # After the user, whose change ends it: the command must not outlive the process that waits for it.
            _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.umask(conditions.umask)
            _refuse_calls(conditions.refuse)
            environment = _environment(spec["environment"], conditions)
            os.execvpe(spec["arguments"][0], spec["arguments"], environment)
        except OSError as failure:
            print(f"fresh_root: {failure}", file=sys.stderr)
        os._exit(126)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _compose(root: Path, spec: Mapping[str, Any], conditions: Conditions, owner: int) -> None:
    """Mounts system, home, temporary files, devices and the given folders below ROOT."""
    folder, system = Path(spec["folder"]), Path(spec["system"])
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    for name in _EMPTY:
        (root / name).mkdir()
    for name in _SYSTEM:
        if (system / name).is_symlink():
            (root / name).symlink_to(os.readlink(system / name))
        elif (system / name).is_dir():
            _bind(system / name, root / name)
    for name, text in {
        "passwd": f"root:x:0:0::/root:/bin/sh\n{USER}:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\n",
        "group": f"root:x:0:\n{USER}:x:{USER_ID}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "resolv.conf": Path("/etc/resolv.conf").read_text(),
    }.items():
        (folder / name).write_text(text)
        target = (root / "etc" / name).resolve() if (root / "etc" / name).is_symlink() else root / "etc" / name
        if target.is_file():
            _bind(folder / name, target)
    folders = []
    for name, inside in {"home": HOME, "tmp": "/tmp", "var-tmp": "/var/tmp"}.items():
        outside = folder / name
        outside.mkdir(exist_ok=True)
        outside.chmod(0o755 if name == "home" else 0o1777)
        os.chown(outside, owner, owner)
        _bind(outside, root / inside[1:])
        folders.append(root / inside[1:])
    for name in _DEVICES:
        if Path("/dev", name).exists():
            _bind(Path("/dev", name), root / "dev" / name)
    for name, target_text in {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}.items():
        (root / "dev" / name).symlink_to(target_text)
    if conditions.shm:
        (root / "dev" / "shm").mkdir()
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / "dev" / "shm"))
    for path in map(Path, spec["binds"]):
        # What the system has there already may be another version.
        if path.exists():
            _bind(path, root / str(path)[1:])
    if conditions.home == "read-only":
        # Last, for the folders above may lie in these.
        for folder in folders:
            _mount("--options", "remount,bind,ro", str(folder))


def _change_root(root: Path) -> None:
    """Makes ROOT the root. A process that chroot was called in may not make user namespaces."""
    os.chdir(root)
    libc, pivot_root, detach = _libc(), 155 if platform.machine() == "x86_64" else 41, 2
    if libc.syscall(pivot_root, b".", b".") or libc.umount2(b".", detach):
        number = ctypes.get_errno()
        raise OSError(number, f"pivot_root: {os.strerror(number)}")


def _bind(outside: Path, inside: Path) -> None:
    if outside.is_dir():
        inside.mkdir(parents=True, exist_ok=True)
    elif not inside.exists():
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.touch()
    _mount("--rbind", str(outside), str(inside))


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def _environment(given: Mapping[str, str], conditions: Conditions) -> dict[str, str]:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **given}
    if conditions.home != "unset":
        environment["HOME"] = HOME
    return environment


def _become_user(user_id: int, is_root: bool) -> None:
    if is_root:
        os.setgroups([])
        os.setgid(user_id)
        os.setuid(user_id)
    else:
        _unshare(_CLONE_NEWUSER)
        _map_user(user_id, 0, user_id, 0)


def _map_user(inside: int, outside: int, group_inside: int, group_outside: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside} {outside} 1")
    Path("/proc/self/gid_map").write_text(f"{group_inside} {group_outside} 1")


def _refuse_calls(features: Sequence[str]) -> None:
    """Has the kernel answer as one that lacks the FEATURES. The filter stays over the command's own programs."""
    if not features:
        return
    column = 0 if platform.machine() == "x86_64" else 1

    def step(operation: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
        return struct.pack("<HBBI", operation, on_true, on_false, value)

    load, answer, equal, allow = 0x20, 0x06, 0x15, 0x7FFF0000
    code = b""
    for numbers, argument, error in (row for feature in features for row in _REFUSED[feature]):
        refuse = step(answer, 0x50000 | error)
        code += step(load, 0) + step(equal, numbers[column], on_false=1 if argument is None else 3)
        code += refuse if argument is None else step(load, 16) + step(equal, argument, on_false=1) + refuse
    code += step(answer, allow)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    program = Program(len(code) // 8, code)
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _unshare(flags: int) -> None:
    if _libc().unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    try:
        sys.exit(enter(json.loads(sys.argv[1])))
    except OSError as failure:
        sys.exit(f"fresh_root: {failure}")
