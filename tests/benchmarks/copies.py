"""Each copy of a large call: what the C library's memcpy, memmove and memset move in client, front end and engine.

Preloads copies.c, which a C compiler makes. Not seen: what the kernel copies (each send and each receive of a socket
copies once) and loops that a library writes itself. Memory that is touched for the first time shows as page faults in
the profile.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

from tests.benchmarks import peers
from tests.benchmarks.context import MIB, Bench, Contender
from tests.benchmarks.measure import Line, Skipped, Table
from tests.benchmarks.usage import roles

_HEAD = 128
_RECORD = struct.Struct("i12sQ104s")
_SLOTS = 4096
_CALLS = 4
_START = """
import os, sys

if "LD_PRELOAD" not in os.environ:
    for name in ("LD_PRELOAD", "BENCH_COPIES"):
        os.environ[name] = os.environ["TF_BENCH_" + name]
    os.execv(sys.executable, sys.orig_argv)
"""
_SOURCE = Path(__file__).with_name("copies.c")


def copies(bench: Bench) -> list[Line]:
    """Counts for the Python client."""
    size = bench.counts.large_bytes
    title = f"{size / MIB:g} MiB in and out, Python client: copies of one call"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return [Skipped("copies", title, "", "no C compiler is installed")]
    library, notes = bench.folder / "copies.so", bench.folder / "copies"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    notes.write_bytes(bytes(_HEAD + _SLOTS * _RECORD.size))
    environment = {"LD_PRELOAD": str(library), "BENCH_COPIES": str(notes)}
    # Engines get none of this environment but PYTHONPATH and what is TensorFlow's: Python sets the rest when it starts.
    start = bench.folder / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text(_START)
    passed_on = {f"TF_BENCH_{name}": value for name, value in environment.items()}
    path = os.pathsep.join([str(start), *filter(None, [os.environ.get("PYTHONPATH")])])
    servers = environment | passed_on | {"PYTHONPATH": path}
    with bench.own_server("--spares", "0", environment=servers) as server:
        settings = {"kind": "client", "work": f"large:{size // 4}", "target": server.target}
        command = peers.driver_command(settings)
        with peers.driver("client", command, bench.folder / "copies.log", environment) as driver:
            contender = Contender(driver, lambda: roles(server.process.pid))
            contender.sample(2)
            with notes.open("r+b") as file:
                file.write(bytes(_HEAD))
            contender.sample(_CALLS)
            cells = _cells(notes.read_bytes(), contender.pids, size)
    columns = ("process", "function", "called by", "times", "MiB", "times the tensor")
    return [Table("copies", title, columns, cells)]


def _cells(data: bytes, parts: dict[int, str], size: int) -> list[list[str]]:
    (count,) = struct.unpack_from("I", data)
    times: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for number in range(min(count, _SLOTS)):
        pid, function, length, library = _RECORD.unpack_from(data, _HEAD + number * _RECORD.size)
        names = (item.split(b"\0")[0].decode(errors="replace") for item in (function, library))
        key = (parts.get(pid, f"process {pid}"), *names)
        times[key] += 1
        moved[key] += length
    return [
        [*key, f"{times[key] / _CALLS:g}", f"{total / MIB / _CALLS:,.1f}", f"{total / size / _CALLS:.2f}"]
        for key, total in moved.most_common()
    ]
