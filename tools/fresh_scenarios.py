"""The scenarios of `make fresh-test`, and what they share: clones, installed wheels, servers, README's lines."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tools.fresh_root import HOME, USER_ID, Machine

SAMPLE = "tests/unit/cli tests/unit/link/test_process.py tests/service/test_evaluate.py"
LISTENING = "gradrule: listening on "
START_S, STOP_S, TAIL_LINES = 120.0, 60.0, 25
_BLOCK = re.compile(r"<!-- quickstart: python -->\n```\w+\n(.*?)```", re.DOTALL)


class Failure(Exception):
    """A scenario does not do what it should."""


class Skipped(Exception):
    """This machine lacks what a scenario needs."""


def check(holds: bool, what: str, output: str = "") -> None:
    """Raises `Failure` with the end of the output where something that should hold does not."""
    if not holds:
        raise Failure("\n".join([what, *output.splitlines()[-TAIL_LINES:]]))


@dataclass(frozen=True)
class Stage:
    """What all scenarios share. pythons: interpreters inside a machine by version."""

    machine: Machine
    pythons: dict[str, str]
    source: Path
    readme: str

    def fresh(self, **conditions: object) -> Machine:
        """Returns a machine with an empty home of its own, under the given conditions."""
        folder = Path(tempfile.mkdtemp(dir=self.machine.folder))
        folder.chmod(0o755)
        return replace(self.machine, folder=folder).but(**conditions)

    def python(self, version: str) -> str:
        """Returns the interpreter of a version. Raises `Skipped` where there is none."""
        if version not in self.pythons:
            raise Skipped(f"no Python {version} with ssl, sqlite3 and venv on this machine")
        return self.pythons[version]

    def clone(self, machine: Machine, folder: str) -> None:
        """Puts the source into a folder of the machine."""
        done = machine.run("sh", "-ec", 'mkdir -p "$1"; tar -xf "$2" -C "$1"', "clone", folder, str(self.source))
        check(done.returncode == 0, "the source cannot be unpacked", done.stdout)

    def installed(self, version: str = "", extra: str = "[server]") -> Path:
        """Returns the folder of an environment with the built wheel, for the oldest Python by default; made once."""
        version = version or min(self.pythons)
        folder = self.machine.folder / f"gradrule-{version}{extra and '-server'}"
        if not folder.exists():
            python, builder = self.python(version), self.fresh()
            make_folder(folder, USER_ID)
            builder = replace(builder, binds=(*builder.binds, folder))
            self.clone(builder, f"{HOME}/source")
            steps = f"""
                {python} -m venv {folder}
                {folder}/bin/pip wheel --quiet --retries 10 --no-deps --wheel-dir {HOME}/dist {HOME}/source
                {folder}/bin/pip install --quiet --retries 10 "$(echo {HOME}/dist/gradrule-*.whl){extra}"
            """
            try:
                done = builder.run("sh", "-ec", steps)
                check(done.returncode == 0, "the wheel cannot be built and installed", done.stdout)
            except BaseException:
                # Also after a time-out: the next scenario would take half an environment for a whole one.
                shutil.rmtree(folder)
                raise
        return folder

    def quick_start(self, environment: Path, *flags: str, machine: Machine) -> str:
        """Serves and runs README's Python lines; the log."""
        machine = replace(machine, binds=(*machine.binds, environment))
        with serving(machine, environment, *flags) as (port, log):
            self.run_readme(machine, environment, port)
        return log.read_text()

    def run_readme(self, machine: Machine, environment: Path, port: int) -> None:
        """Runs README's Python lines, and compares what they print with the comments beside them."""
        code = "\n".join(_BLOCK.findall(self.readme))
        expected = re.findall(r"^print\(.*\) +# (.*)$", code, re.MULTILINE)
        code = code.replace("localhost:8470", f"localhost:{port}")
        done = machine.run(f"{environment}/bin/python", "-c", code, cwd="/")
        printed = done.stdout.splitlines()
        check(done.returncode == 0, "README's Python lines fail", done.stdout)
        check(len(printed) == len(expected) > 0, f"README's Python lines print {len(printed)} lines", done.stdout)
        for line, comment in zip(printed, expected, strict=True):
            check(line == comment or not comment.startswith("["), f"expected {comment!r}, got {line!r}")


@contextlib.contextmanager
def serving(machine: Machine, environment: Path, *flags: str) -> Iterator[tuple[int, Path]]:
    """Runs `gradrule serve` in the machine; gives port and log. SIGTERM must end it with exit code 0."""
    log = machine.folder / "serve.log"
    command = machine.command([f"{environment}/bin/gradrule", "serve", "--port", "0", *flags], cwd="/")
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield await_port(process, log), log
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"the server did not end within {STOP_S:.0f} s of SIGTERM") from None
        check(code == 0, f"SIGTERM ends the server with exit code {code}", log.read_text())
    finally:
        # The machine ends with its first process.
        process.kill()
        process.wait()


def await_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Waits for the line that names the port."""
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + START_S
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.2)[0]:
            part = os.read(process.stdout.fileno(), 4096)
            said += part
            if not part:
                check(False, f"the server ended with exit code {process.wait()}", log.read_text())
        for line in said.decode().splitlines(keepends=True):
            if line.startswith(LISTENING) and line.endswith("\n"):
                return int(line.rpartition(":")[2])
    raise Failure(f"the server did not listen within {START_S:.0f} s\n{log.read_text()[-2000:]}")


def make_folder(folder: Path, owner: int) -> Path:
    """Makes a folder that a user of the machine owns."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(folder, owner, owner)
    return folder


def refusal(machine: Machine, environment: Path, *flags: str, code: int = 1) -> str:
    """Returns the one line with which `gradrule serve` refuses to start."""
    machine = replace(machine, binds=(*machine.binds, environment))
    done = machine.run(f"{environment}/bin/gradrule", "serve", "--port", "0", *flags, cwd="/", timeout_s=START_S)
    check(done.returncode == code, f"expected exit code {code}, got {done.returncode}", done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("gradrule serve: ")]
    check(len(lines) == 1 and "Traceback" not in done.stdout, "expected one plain line", done.stdout)
    return lines[0]


# The scenarios. Each raises `Failure` or `Skipped`.


def demo(stage: Stage) -> None:
    """README's first command, in a fresh clone."""
    machine = stage.fresh()
    stage.clone(machine, f"{HOME}/gradrule")
    done = machine.run("make", "demo", cwd=f"{HOME}/gradrule")
    check(done.returncode == 0, "make demo fails", done.stdout)
    check("Sign → ste_sign" in done.stdout and '"accuracy_rule"' in done.stdout, "make demo has no table", done.stdout)


def test_sample(stage: Stage) -> None:
    """README's second command, with some of the tests, in a clone whose path has a space."""
    machine, folder = stage.fresh(), f"{HOME}/a path with spaces/gradrule"
    stage.clone(machine, folder)
    done = machine.run("make", "test", f"ARGS=-q {SAMPLE}", cwd=folder)
    check(done.returncode == 0 and " passed" in done.stdout, "make test fails", done.stdout)


def wheel_311(stage: Stage) -> None:
    """README's quick start with the built wheel, Python 3.11."""
    stage.quick_start(stage.installed("3.11"), machine=stage.fresh())


def wheel_312(stage: Stage) -> None:
    """The same with Python 3.12."""
    stage.quick_start(stage.installed("3.12"), machine=stage.fresh())


def wheel_313(stage: Stage) -> None:
    """The same with Python 3.13."""
    stage.quick_start(stage.installed("3.13"), machine=stage.fresh())


def client_only(stage: Stage) -> None:
    """The wheel without extras, on the newest Python: README's lines, and tables in plain text."""
    server, client = stage.installed(), stage.installed(max(stage.pythons), extra="")
    machine = stage.fresh()
    machine = replace(machine, binds=(*machine.binds, server, client))
    with serving(machine, server) as (port, _):
        stage.run_readme(machine, client, port)
        target = ("--target", f"localhost:{port}")
        for arguments in (("create", "Fresh", "a * dy", "--param", "a=0.5"), ("list", "--kind", "user")):
            done = machine.run(f"{client}/bin/gradrule", "rules", *arguments, *target, cwd="/")
            check(done.returncode == 0 and "a * dy" in done.stdout, "the rule is not in a table", done.stdout)
    done = machine.run(f"{client}/bin/gradrule", "serve", cwd="/")
    named = done.returncode == 1 and "gradrule[server]" in done.stdout
    check(named, "serve does not say how to install the server", done.stdout)
    done = machine.run(f"{client}/bin/gradrule", "gateway", cwd="/")
    named = done.returncode == 1 and "gradrule[gateway]" in done.stdout
    check(named, "gateway does not say how to install it", done.stdout)


def home_unset(stage: Stage) -> None:
    """HOME is not set."""
    stage.quick_start(stage.installed(), machine=stage.fresh(home="unset"))


def user_unknown(stage: Stage) -> None:
    """HOME is not set and the user is not in /etc/passwd, as some container platforms have it."""
    machine = stage.fresh(home="unset", user_id=54321)
    data = make_folder(machine.folder / "data", 54321)
    machine = replace(machine, binds=(*machine.binds, data))
    environment = stage.installed()
    stage.quick_start(environment, "--data-dir", str(data), machine=machine)
    said = refusal(machine, environment, code=2)
    check("--data-dir" in said, "the refusal does not name --data-dir", said)


def read_only(stage: Stage) -> None:
    """Neither home nor the folders for temporary files can be written."""
    machine = stage.fresh(home="read-only")
    data = make_folder(machine.folder / "data", USER_ID)
    machine = replace(machine, binds=(*machine.binds, data))
    environment = stage.installed()
    stage.quick_start(environment, "--data-dir", str(data), machine=machine)
    said = refusal(machine, environment)
    check("Read-only file system" in said, "the refusal does not say that the folder is read-only", said)


def no_shm(stage: Stage) -> None:
    """There is no /dev/shm."""
    stage.quick_start(stage.installed(), machine=stage.fresh(shm=False))


def no_ipv6(stage: Stage) -> None:
    """The kernel has no IPv6."""
    stage.quick_start(stage.installed(), machine=stage.fresh(refuse=("ipv6",)))


def no_sandbox(stage: Stage) -> None:
    """The kernel has neither Landlock nor seccomp: `auto` says so and serves, `on` refuses."""
    machine, environment = stage.fresh(refuse=("landlock", "seccomp")), stage.installed()
    log = stage.quick_start(environment, "--sandbox", "auto", machine=machine)
    warning = next((line for line in log.splitlines() if "the sandbox of engines lacks" in line), "")
    check("files (" in warning and "calls (" in warning, "the log does not say what the sandbox lacks", log)
    said = refusal(machine, environment, "--sandbox", "on")
    check("files (" in said and "calls (" in said, "the refusal does not say what is missing", said)


def umask_077(stage: Stage) -> None:
    """New files are readable by their owner alone."""
    stage.quick_start(stage.installed(), machine=stage.fresh(umask=0o077))


def path_with_space(stage: Stage) -> None:
    """The data folder's path has a space."""
    machine = stage.fresh()
    stage.quick_start(stage.installed(), "--data-dir", f"{HOME}/my data/gradrule", machine=machine)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "demo": demo,
    "test-sample": test_sample,
    "wheel-3.11": wheel_311,
    "wheel-3.12": wheel_312,
    "wheel-3.13": wheel_313,
    "client-only": client_only,
    "home-unset": home_unset,
    "user-unknown": user_unknown,
    "read-only": read_only,
    "no-shm": no_shm,
    "no-ipv6": no_ipv6,
    "no-sandbox": no_sandbox,
    "umask-077": umask_077,
    "path-with-space": path_with_space,
}
QUICK = ("wheel-3.11", "home-unset", "user-unknown", "read-only", "no-shm", "no-sandbox")
