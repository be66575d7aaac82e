"""Shares one fork server between the tests of a module: each one imports TensorFlow."""

from __future__ import annotations

from gradrule_server.link.fork_server import ForkServer


class SharedForkServer(ForkServer):
    """Survives the pools that use it; belongs to the event loop of a module."""

    async def stop(self) -> None:
        """Does nothing."""

    async def end(self) -> None:
        """Ends the process."""
        await super().stop()
