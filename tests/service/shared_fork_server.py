"""One fork server for the tests of a module: each one imports TensorFlow."""

from __future__ import annotations

from gradrule_server.link.fork_server import ForkServer


class SharedForkServer(ForkServer):
    """Stays when a pool that uses it stops. Belongs to the loop of a module."""

    async def stop(self) -> None:
        """Does nothing."""

    async def end(self) -> None:
        """Ends the process."""
        await super().stop()
