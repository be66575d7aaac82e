"""Runs the server and counts the calls of its functions in the main thread, between two signals SIGUSR2.

Writes them to the file that TRACED_CALLS names, as a JSON list of file, function and number; empty at the first signal.
"""

from __future__ import annotations

import dis
import functools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gradrule
import gradrule_server
from gradrule_server.__main__ import main

_PACKAGES = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (gradrule, gradrule_server))
_RESUME = dis.opmap["RESUME"]
_found: Counter[tuple[str, str]] = Counter()


def _record(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(_PACKAGES) and _starts(code, frame.f_lasti):
        _found[code.co_filename, code.co_qualname] += 1


@functools.cache
def _starts(code: CodeType, position: int) -> bool:
    """Returns whether a function starts here. A coroutine or generator also goes on from where it waited."""
    return code.co_code[position] != _RESUME or code.co_code[position + 1] == 0


def _toggle(number: int, frame: FrameType | None) -> None:
    is_running = sys.getprofile() is not None
    sys.setprofile(None if is_running else _record)
    file = Path(os.environ["TRACED_CALLS"])
    file.with_suffix(".new").write_text(json.dumps([[*key, count] for key, count in _found.items()]))
    file.with_suffix(".new").rename(file)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _toggle)
    sys.exit(main())
