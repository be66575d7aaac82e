"""Forbids system calls that an engine does not need, for this thread and the threads it starts, by seccomp."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gradrule_server.link.operating_system import address, prctl

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

# Offsets in the data of a filter, in bytes: linux/seccomp.h. Both machines are little-endian.
_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
# Instructions of the kernel's packet filter: linux/bpf_common.h.
_LOAD, _RETURN, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
_INSTRUCTION = struct.Struct("<HBBI")

_CLONE_THREAD = 0x10000
# x86-64's second set of calls, for programs with 32-bit pointers.
_X32 = 0x40000000


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    column: int
    """Its column in the table of calls."""


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}

# Number of each refused call on x86-64 and aarch64; None: the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Network. The socket to the front end exists already. A socket of a pair can send datagrams to any path.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    # Programs and processes. Threads need clone, which is filtered by its flags.
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    # The meaning of the second argument depends on the first, so these cannot be filtered by process.
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    # Objects that outlive a process and have no name in the file system.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Changes of files that Landlock does not restrict, at least in its early versions.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Identity of the process.
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # The file system itself.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # Parts of the kernel with frequent vulnerabilities.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "modify_ldt": (154, None),
    # The machine.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# clone is filtered by its flags; those of clone3 are in memory, which a filter cannot read.
_CLONE, _CLONE3 = (56, 220), (435, 435)

# Calls whose first argument is a process, which must be this one.
_ON_PROCESS: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "move_pages": (279, 239),
}
# For these, 0 is a group of processes.
_SIGNALS = ("kill", "tgkill")

# Forbidden second arguments: linux/fcntl.h, asm-generic/fcntl.h, asm-generic/sockios.h, linux/fs.h. Most of them make
# changes of a file signal any process; the last two of ioctl change a file that is open for reading.
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR = 0x40086602, 0x401C5820
_NOT_SECOND: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "fcntl": ((72, 25), (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
    "ioctl": ((16, 29), (_FIOSETOWN, _SIOCSPGRP, _FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR)),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_machine_known() -> bool:
    """Returns whether the system calls of this machine are known."""
    return platform.machine() in _MACHINES and ctypes.sizeof(ctypes.c_void_p) == 8


def restrict_calls() -> None:
    """Makes the calls fail with EPERM, for good. Needs `no_new_privs`. Raises `OSError` if the kernel refuses."""
    code = _filter(_MACHINES[platform.machine()], os.getpid())
    program = _Program(len(code) // _INSTRUCTION.size, code)
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, address(program))


def _filter(machine: _Machine, pid: int) -> bytes:
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    allow = _step(_RETURN, _ALLOW)
    # A test is followed by the instruction for the case that it holds, and skips it otherwise.
    code = [
        _step(_LOAD, _MACHINE),
        *(_step(_IF_EQUAL, machine.audit, on_true=1), refuse),
        _step(_LOAD, _NUMBER),
        *(_step(_IF_AT_LEAST, _X32, on_false=1), refuse),
    ]
    for numbers in _REFUSED.values():
        number = numbers[machine.column]
        if number is not None:
            code += [_step(_IF_EQUAL, number, on_false=1), refuse]
    # The C library uses clone if clone3 does not exist.
    code += [_step(_IF_EQUAL, _CLONE3[machine.column], on_false=1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        *(_step(_IF_EQUAL, _CLONE[machine.column], on_false=4), _step(_LOAD, _FIRST_ARGUMENT)),
        *(_step(_IF_ANY_BIT, _CLONE_THREAD, on_false=1), allow, refuse),
    ]
    for name, numbers in _ON_PROCESS.items():
        own = (pid,) if name in _SIGNALS else (0, pid)
        code += _by_argument(numbers[machine.column], _FIRST_ARGUMENT, own, allow, refuse)
    for numbers, denied in _NOT_SECOND.values():
        code += _by_argument(numbers[machine.column], _SECOND_ARGUMENT, denied, refuse, allow)
    code.append(allow)
    return b"".join(code)


def _by_argument(number: int, argument: int, values: Sequence[int], match: bytes, other: bytes) -> list[bytes]:
    """Returns the filter of a call by the lower 32 bits of one argument; the kernel reads only these.

    `match`: the instruction for an argument in `values`. `other`: the one for all other arguments.
    """
    tests = [part for value in values for part in (_step(_IF_EQUAL, value, on_false=1), match)]
    return [_step(_IF_EQUAL, number, on_false=len(tests) + 2), _step(_LOAD, argument), *tests, other]


def _step(operation: int, value: int, *, on_true: int = 0, on_false: int = 0) -> bytes:
    """Returns an instruction. `on_true`, `on_false`: number of instructions that a test skips."""
    return _INSTRUCTION.pack(operation, on_true, on_false, value)
