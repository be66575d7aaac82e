"""Refuses calls in forked processes in which gRPC would never answer."""

from __future__ import annotations

import os

from gradrule.errors import UnsupportedError

# As gRPC reads it, when it is imported.
_SUPPORTED = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")


class _Process:
    """Knows whether gRPC works in this process.

    Attributes:
        has_connected: Whether a client was made here or before a fork.
        is_broken: Whether this process was forked after a client was made, without gRPC's support for forks.
    """

    has_connected = False
    is_broken = False

    def note_fork(self) -> None:
        self.is_broken = self.has_connected and not _SUPPORTED


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.note_fork)


def note_connection() -> None:
    """Notes that gRPC is in use. Raises `UnsupportedError` if it does not work in this process."""
    require_grpc()
    _process.has_connected = True


def require_grpc() -> None:
    """Raises `UnsupportedError` if gRPC does not work in this process, so that calls would wait for their deadline."""
    if _process.is_broken:
        raise UnsupportedError(
            "this process was forked after a client had connected, and gRPC does not work in forked processes: start "
            "processes with 'forkserver' or 'spawn' (PyMC: mp_ctx='forkserver'; PyTorch's DataLoader: "
            "multiprocessing_context='forkserver'), or set the environment variable GRPC_ENABLE_FORK_SUPPORT=1 before "
            "Python starts"
        )
