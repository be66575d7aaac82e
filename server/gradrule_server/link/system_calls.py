"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.restype = ctypes.c_int

# linux/sched.h; by machine
_SCHED_BATCH = 3
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# linux/prctl.h
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36


def syscall(number: int, *arguments: ctypes.c_void_p | int | None) -> int:
    """Makes a system call by its number, with integers and addresses. Raises `OSError`."""
    return _checked(_libc.syscall(ctypes.c_long(number), *(_word(argument) for argument in arguments)))


def prctl(option: int, *arguments: ctypes.c_void_p | int | None) -> None:
    """Calls `prctl`; missing arguments are 0. Raises `OSError`."""
    words = [_word(argument) for argument in arguments] + [ctypes.c_ulong(0)] * (4 - len(arguments))
    _checked(_libc.prctl(ctypes.c_int(option), *words))


def set_process_name(name: str) -> None:
    """Sets the name that `ps` and `top` show; the kernel keeps 15 bytes of it."""
    text = ctypes.create_string_buffer(name.encode())
    prctl(_PR_SET_NAME, ctypes.c_void_p(ctypes.addressof(text)))


def lower_priority(nice: int) -> None:
    """Lowers the priority of the calling thread, and of threads that it starts, permanently.

    The sandbox refuses `setpriority`, because that can name other processes. Raises `OSError`.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        # struct sched_attr: its size, the policy, flags, nice, and the fields of other policies.
        packed = struct.pack("<IIQiIQQQ", 48, _SCHED_BATCH, 0, nice, 0, 0, 0, 0)
        attributes = ctypes.create_string_buffer(packed, len(packed))
        syscall(number, 0, ctypes.c_void_p(ctypes.addressof(attributes)), 0)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parent ends: it can wait for their exit codes."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def capget(header: ctypes.Structure, capabilities: ctypes.Structure) -> None:
    """Reads the capabilities of this process into `capabilities`. Raises `OSError`."""
    _checked(_libc.capget(address(header), address(capabilities)))


def capset(header: ctypes.Structure, capabilities: ctypes.Structure) -> None:
    """Sets the capabilities of this process. Raises `OSError`."""
    _checked(_libc.capset(address(header), address(capabilities)))


def address(value: ctypes.Structure | ctypes.Array[ctypes.c_uint32]) -> ctypes.c_void_p:
    """Returns the address of an object, which must be kept alive during the call."""
    return ctypes.cast(ctypes.byref(value), ctypes.c_void_p)


def _word(argument: ctypes.c_void_p | int | None) -> ctypes.c_void_p | ctypes.c_ulong:
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument or ctypes.c_void_p()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
