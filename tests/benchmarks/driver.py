"""A process that holds one contender: `python -m tests.benchmarks.driver '{"kind": "wire", "work": "tiny", …}'`.

Each contender has a process of its own, so that what it uses can be counted apart from what the others use.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.benchmarks.driver_loop import Contender, serve


def contender(kind: str, work: str, target: str = "", echo: str = "", token: str | None = None) -> Contender:
    """Returns a contender, ready to be called.

    work: as `work.named` takes it, or a model of `training`. target: of the gradrule server, or of TensorFlow's. echo:
    of the echo server; it gets the bytes that the gradrule server at `target` would get. token: the credential of the
    Python client.
    """
    from tests.benchmarks import contenders, training
    from tests.benchmarks.work import named

    if kind in training.KINDS:
        return training.contender(kind, work, target)
    what = named(work)
    match kind:
        case "echo":
            return contenders.echo(echo, contenders.request_of(target, what))
        case "wire":
            return contenders.gradrule_wire(target, what)
        case "wire inline":
            return contenders.gradrule_wire(target, what, inline=True)
        case "stream":
            return contenders.RawStream(target, contenders.request_of(target, what))
        case "client":
            return contenders.Client(target, what, token=token)
        case "client shared":
            return contenders.Client(target, what, shared_memory=True)
        case "client inline":
            return contenders.Client(target, what, inline=True)
        case "session":
            return contenders.TensorFlowSession(target, what)
        case "function":
            return contenders.Function(what)
        case "hop":
            return contenders.Hop(len(contenders.request_of(target, what)))
        case _:
            raise ValueError(f"there is no contender {kind!r}")


def main(settings: dict[str, Any]) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    serve(contender(**settings))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
