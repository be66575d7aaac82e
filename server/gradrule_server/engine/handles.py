"""Forward runs that wait to be pulled back."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine import run
from gradrule_server.engine.answers import write_gradients
from gradrule_server.engine.built import Built
from gradrule_server.engine.split import SplitProgram
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2

# Names that were let go before their forward run was done, so that it is not kept then.
_MAX_RELEASED = 4096


@dataclass(frozen=True, slots=True)
class _Kept:
    built: Built
    split: SplitProgram
    saved: Sequence[tf.Tensor]


class Handles:
    """What forward runs left, by the front end's names, until it lets go of them. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def forward(self, built: Built, request: link_pb2.ForwardRequest, device: str) -> link_pb2.ForwardReply:
        """Runs the forward part of a split program."""
        if built.split is None:
            raise AssertionError("the program was not built in two parts")
        started = time.monotonic_ns()
        call = evaluate_pb2.EvaluateRequest.FromString(request.run.request)
        outputs, saved = run.execute(built.split.forward, run.arguments(built, call, request.run.params), small=built.small)
        response = run.answer_of(built, outputs, device)
        run.set_timings(response, request.run.received_ns, started)
        reply = link_pb2.ForwardReply(
            response=response.SerializeToString(), kept_bytes=sum(map(tf_private.bytes_of, saved))
        )
        with self._lock:
            if request.handle in self._released:
                del self._released[request.handle]
            else:
                self._kept[request.handle] = _Kept(built, built.split, saved)
        return reply

    def pull_back(self, request: link_pb2.PullBackRequest) -> evaluate_pb2.PullBackResponse:
        """Gradients; HANDLE_EXPIRED where nothing is kept under the name."""
        ...

    def release(self, name: str) -> None:
        """Lets go of what is kept, or will be."""
        with self._lock:
            if self._kept.pop(name, None) is None:
                self._released[name] = None
                while len(self._released) > _MAX_RELEASED:
                    self._released.popitem(last=False)
