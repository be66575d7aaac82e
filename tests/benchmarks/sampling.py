"""What only tools tell: system calls and libraries (perf), Python functions (py-spy). A missing tool is left out."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.context import PEERS_PYTHON, Contender
from tests.benchmarks.measure import Line, Skipped, Table
from tests.benchmarks.usage import Usage

_PY_SPY = PEERS_PYTHON.with_name("py-spy")
_FREQUENCY = 1999
_PY_SPY_FREQUENCY = 500
_SHOWN = 12
_LIBRARIES = (
    (re.compile(r"kernel|\[vdso\]|\[guest"), "kernel"),
    (re.compile(r"tensorflow|libtf|_pywrap"), "TensorFlow"),
    (re.compile(r"cygrpc"), "gRPC"),
    (re.compile(r"_message\.|_upb|protobuf"), "protobuf"),
    (re.compile(r"numpy|multiarray|ml_dtypes"), "NumPy"),
    (re.compile(r"libpython|python3|_ctypes|_asyncio|_socket|select"), "Python"),
    (re.compile(r"libc[.-]|libpthread|ld-linux|libstdc|libm[.-]|libgcc"), "C library"),
)


def by_part(contender: Contender) -> dict[str, list[int]]:
    """Returns the process ids of each part."""
    found: dict[str, list[int]] = {}
    for pid, part in contender.pids.items():
        found.setdefault(part, []).append(pid)
    return found


def syscalls(contender: Contender, calls: int) -> dict[str, float]:
    """Returns the system calls of each part for one call; nothing where `perf` is missing or not allowed."""
    if shutil.which("perf") is None:
        return {}
    with contextlib.ExitStack() as stack:
        running = {}
        for part, pids in by_part(contender).items():
            command = ["perf", "stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", ",".join(map(str, pids))]
            running[part] = stack.enter_context(_tool(command))
        contender.sample(calls)
        counts = {}
        for part, process in running.items():
            text = _stopped(process)
            match = re.search(r"^(\d+),", text, re.MULTILINE)
            if match is not None:
                counts[part] = int(match[1]) / calls
    return counts


def tables(group: str, what: str, contender: Contender, used: Mapping[str, Usage], seconds: float) -> list[Line]:
    """Returns where the parts' processor time goes: by library, by C function, by Python function.

    used: what a call takes where no tool watches it; shares of samples are applied to it.
    """
    return [*_libraries(group, what, contender, used, seconds), *_functions(group, what, contender, seconds)]


def _libraries(group: str, what: str, contender: Contender, used: Mapping[str, Usage], seconds: float) -> list[Line]:
    title = f"{what}: by library"
    if shutil.which("perf") is None:
        return [Skipped(group, title, "", "perf is not installed")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = {part: Path(folder) / part.replace(" ", "-") for part in by_part(contender)}
        running = []
        for part, pids in by_part(contender).items():
            command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(_FREQUENCY), "-o", str(files[part])]
            running.append(stack.enter_context(_tool([*command, "-p", ",".join(map(str, pids))])))
        _calls_for(contender, seconds)
        for process in running:
            _stopped(process)
        counted = {part: _report(file) for part, file in files.items()}
    shares, functions = [], []
    for part, counts in counted.items():
        libraries: Counter[str] = Counter()
        for (library, _), count in counts.items():
            libraries[_library(library)] += count
        total = libraries.total()
        per_sample_us = used.get(part, Usage()).cpu_ns / 1e3 / max(1, total)
        for name, count in libraries.most_common():
            if count >= total / 200:
                shares.append([part, name, f"{count * per_sample_us:,.1f}", f"{count / total:.0%}"])
        for (library, symbol), count in counts.most_common(_SHOWN):
            functions.append(
                [part, _library(library), symbol[:70], f"{count * per_sample_us:,.1f}", f"{count / total:.1%}"]
            )
    return [
        Table(group, title, ("process", "library", "CPU µs", "share"), shares),
        Table(group, f"{what}: C functions", ("process", "library", "function", "CPU µs", "share"), functions),
    ]


def _library(path: str) -> str:
    name = path.rpartition("/")[2] if not path.startswith("[") else path
    return next((known for pattern, known in _LIBRARIES if pattern.search(name)), name)


def _report(file: Path) -> Counter[tuple[str, str]]:
    """Returns samples by library and function."""
    command = [
        "perf",
        "report",
        "--no-inline",
        "-i",
        str(file),
        "--stdio",
        "-q",
        "-n",
        "--sort",
        "dso,symbol",
        "-t",
        "\t",
        "-g",
        "none",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    found: Counter[tuple[str, str]] = Counter()
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) >= 4 and fields[1].isdigit():
            found[fields[2], re.sub(r"^\[.\] ", "", fields[3])] += int(fields[1])
    return found


def _functions(group: str, what: str, contender: Contender, seconds: float) -> list[Line]:
    title = f"{what}: Python functions"
    if not _PY_SPY.exists():
        return [Skipped(group, title, "", "py-spy is not installed; `make bench` installs it in .venv-bench")]
    cells = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = []
        for part, pids in by_part(contender).items():
            for pid in pids:
                file = Path(folder) / str(pid)
                command = [str(_PY_SPY), "record", "-p", str(pid), "-r", str(_PY_SPY_FREQUENCY), "-f", "raw", "-F"]
                command += ["--nonblocking", "--gil", "-d", "3600", "-o", str(file)]
                running.append((part, file, stack.enter_context(_tool(command))))
        _calls_for(contender, seconds)
        for _, _, process in running:
            _stopped(process)
        for part, file, _ in running:
            if file.exists():
                cells += _stacks(part, file.read_text())
    columns = ("process", "function", "own share", "with callees")
    return [Table(group, f"{title} (share of samples that hold the interpreter's lock)", columns, cells)]


def _stacks(part: str, text: str) -> list[list[str]]:
    """Returns the functions of a process in which its samples lie."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [re.sub(r":\d+\)", ")", frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            within[frame] += int(count)
    total = own.total()
    if total < 20:
        return []
    shown = [
        *dict.fromkeys([name for name, _ in own.most_common(_SHOWN)] + [n for n, _ in within.most_common(2 * _SHOWN)])
    ]
    return [[part, name, f"{own[name] / total:.1%}", f"{within[name] / total:.1%}"] for name in shown]


def _calls_for(contender: Contender, seconds: float) -> None:
    """Makes calls for about so many seconds."""
    sample = contender.sample(2)
    calls = max(4, int(seconds * 1e6 / sample.value))
    contender.sample(calls)


@contextlib.contextmanager
def _tool(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A tool that cannot attach ends at once; one that can has attached by then.
            process.wait(0.5)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _stopped(process: subprocess.Popen[str]) -> str:
    """Interrupts a tool and returns what it wrote."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[1]
