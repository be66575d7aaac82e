"""Entering the sandbox: all measures that the platform has, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradrule_server.engine.sandbox import landlock, privileges, seccomp
from gradrule_server.engine.sandbox.files import grants, readable_folders


class SandboxRefused(Exception):
    """The platform lacks a measure, and the mode is `on`; the message says which."""


@dataclass
class Sandbox:
    """The measures that hold, by name, and those that do not, each with the reason."""

    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def take(self, measure: str, fault: str | None, hold: Callable[[], None]) -> None:
        """Holds a measure, unless something speaks against it or the kernel refuses."""
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
    """Gives up what an engine does not need, for good. `mode`: `on`, `auto` or `off`, which keeps to the limits.

    The measures: `limits` (no core files, few open files), `writing` (no byte into a file), `privileges` (none of
    root's, none to be gained), `files` (only libraries and the blobs are read, no file is made or changed; by Landlock,
    with TCP and signals where the kernel can), `calls` (no sockets, processes and the like; by seccomp). To be called
    while the process has one thread: they hold for that one and those it starts. Raises `SandboxRefused`.
    """
    sandbox = Sandbox()
    sandbox.take("limits", None, privileges.set_limits)
    if mode == "off":
        sandbox.missing.append("all else (--sandbox off)")
        return sandbox
    sandbox.take("writing", None, privileges.forbid_writing)
    sandbox.take("privileges", None, privileges.drop)
    granted = grants(blob_folder)
    no_landlock = None if landlock.version() else "no Landlock in this kernel"
    sandbox.take("files", no_landlock, lambda: landlock.restrict(granted))
    if blob_folder is not None:
        # The registry lies beside the blobs, and a folder within a readable one cannot be taken out of it.
        around = next((folder for folder in readable_folders() if blob_folder.resolve().is_relative_to(folder)), None)
        if around is not None:
            sandbox.missing.append(f"a registry out of reach (the data folder lies in {around}, where libraries are)")
    sandbox.take("calls", None if seccomp.is_known() else "system calls of this machine unknown", seccomp.restrict)
    if mode == "on" and sandbox.missing:
        raise SandboxRefused(
            f"--sandbox on was asked for, but an engine here lacks {', '.join(sandbox.missing)}; "
            "use --sandbox auto to do without"
        )
    return sandbox
