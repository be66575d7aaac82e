"""Entry of an engine process: `python -m gradrule_server.engine --fd N --device cpu --threads 8`.

`fd` is a connected stream socket; the engine greets on it, then serves frames until the other end closes it. Large
payloads come and go through `arenas`. It gives up what it does not need before anything is imported that might start a
thread.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from gradrule_server.engine.sandbox.enter import SandboxRefused, enter
from gradrule_server.link.framing import LINK_VERSION, Arenas, FrameSocket, Kind, serve_frames
from gradrule_server.link.v1 import link_pb2


def main() -> int:
    """Serves until the front end closes the socket, whatever runs then; exit code 3 where it cannot run as asked."""
    parser = argparse.ArgumentParser(prog="gradrule-engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--arenas", type=int, nargs=2, metavar=("INCOMING", "OUTGOING"))
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--blobs", type=Path)
    parser.add_argument("--sandbox", choices=("on", "auto", "off"), default="auto")
    parser.add_argument("--memory-limit", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="engine: %(levelname)s %(name)s: %(message)s")
    # The front end decides when an engine ends; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arenas = None
    if options.arenas is not None:
        incoming, outgoing = options.arenas
        arenas = Arenas.of(outgoing, incoming)
    frames = FrameSocket(socket.socket(fileno=options.fd), arenas)
    try:
        sandbox = enter(options.sandbox, options.blobs)
    except SandboxRefused as refusal:
        return _refuse(frames, refusal)

    # TensorFlow is imported here and not above: its import reads the environment set just now.
    from gradrule import _opdefs
    from gradrule_server.engine import tf_private
    from gradrule_server.engine.blobs import BlobReader
    from gradrule_server.engine.device import DeviceRefused, choose_device
    from gradrule_server.engine.memory import limit_memory
    from gradrule_server.engine.optimizer import configure_optimizer
    from gradrule_server.engine.service import EngineService, tensorflow_version

    try:
        device = choose_device(options.device)
    except DeviceRefused as refusal:
        return _refuse(frames, refusal)
    greeting = link_pb2.Greeting(
        link_version=LINK_VERSION,
        tensorflow_version=tensorflow_version(),
        op_table_digest=_opdefs.digest_of(tf_private.all_op_definitions()),
        gradients=sorted(name for name, function in tf_private.registered_gradients().items() if function is not None),
        device=device,
        sandbox=sandbox.held,
        sandbox_missing=sandbox.missing,
    )
    configure_optimizer()
    # What was imported is never garbage, and takes long to look at.
    gc.freeze()
    limit_memory(options.memory_limit)
    service = EngineService(frames, device, BlobReader(options.blobs))
    frames.send(Kind.GREETING, 0, greeting.SerializeToString())
    try:
        serve_frames(frames, service.handle, service.refuse, options.threads)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # An interpreter that ends beside threads that are in TensorFlow waits for them, or crashes.
    os._exit(0)


def _refuse(frames: FrameSocket, refusal: Exception) -> int:
    greeting = link_pb2.Greeting(link_version=LINK_VERSION, refusal=str(refusal))
    frames.send(Kind.GREETING, 0, greeting.SerializeToString())
    return 3


if __name__ == "__main__":
    sys.exit(main())
