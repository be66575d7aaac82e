"""Builds the container image without a Docker engine, and shows that a user rule outlives a `kill -9` of its server.

`make image-test` runs it. Needs Linux and root; buildah and debootstrap are installed with apt-get where missing. The
base is a Debian made by debootstrap, or the image that --base names. The server runs in a chroot of the image, as the
image's user, with a folder of this machine as its volume; the client runs outside. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import gradrule as gr

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "localhost/gradrule:image-test"
BASE = "localhost/debian:bookworm-slim"
TOOLS = ("buildah", "debootstrap")
START_S = 120.0
STOP_S = 60.0


class Failure(Exception):
    """The image does not do what it should."""


def check(holds: bool, what: str) -> None:
    """Raise `Failure` where something that should hold does not."""
    if not holds:
        raise Failure(what)


def need_tools() -> None:
    """Install what is missing, or say what to install."""
    check(sys.platform == "linux" and os.geteuid() == 0, "image-test needs Linux and root (chroots and file owners)")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        check(shutil.which("apt-get") is not None, f"install {' and '.join(missing)} first")
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=sys.stderr)
        install = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing]
        subprocess.run(install, check=True, stdout=sys.stderr, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


class Buildah:
    """buildah with a store of its own, which goes with the folder it lies in."""

    def __init__(self, folder: Path) -> None:
        store = ["--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
        self._command = ["buildah", *store]
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}

    def arguments(self, *arguments: str) -> list[str]:
        """The whole command line."""
        return [*self._command, *arguments]

    def __call__(self, *arguments: str) -> str:
        """Run one command; its stdout. What it says on the way goes to stderr."""
        done = subprocess.run(
            self.arguments(*arguments), env=self.environment, stdout=subprocess.PIPE, text=True, check=False
        )
        check(done.returncode == 0, f"buildah {arguments[0]} failed")
        return done.stdout.strip()


def make_base(buildah: Buildah, folder: Path) -> None:
    """Commit a minimal Debian as `BASE`."""
    system = folder / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(system)], check=True, stdout=sys.stderr)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(system), "/")
    buildah("config", "--cmd", "bash", container)
    buildah("commit", "--quiet", container, BASE)
    buildah("rm", container)
    shutil.rmtree(system)


def build_secrets(folder: Path) -> list[str]:
    """How this machine's pip reaches its index, for the build alone: an index and certificates of its own."""
    flags = []
    configured = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured_url = subprocess.run(configured, capture_output=True, text=True, check=False).stdout.strip()
    url = os.environ.get("PIP_INDEX_URL") or configured_url
    if url:
        (folder / "pip.conf").write_text(f"[global]\nindex-url = {url}\n")
        flags += ["--secret", f"id=pip,src={folder}/pip.conf"]
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if certificates:
        flags += ["--secret", f"id=ca,src={certificates}"]
    return flags


def descendants(pid: int) -> list[int]:
    """The processes below PID, parents before children. Any of a process's threads may have forked."""
    try:
        forks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except FileNotFoundError:
        return []
    return [found for child in map(int, " ".join(forks).split()) for found in (child, *descendants(child))]


def command_of(pid: int) -> list[str]:
    """The command line of PID; empty where it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Server:
    """The image's own entry point and command, with a free port, in a chroot of a container."""

    def __init__(self, buildah: Buildah, container: str, volume: Path, command: list[str], log: Path) -> None:
        self._buildah, self._container, self._volume = buildah, container, volume
        self._command = command
        self.pids: list[int] = []
        begun = time.monotonic()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                self._run(*command), env=buildah.environment, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            self.address = self._wait_for_address()
        except BaseException:
            self.reap()
            raise
        self.start_s = time.monotonic() - begun
        self.pids = [pid for pid in descendants(self._process.pid) if "gradrule" in " ".join(command_of(pid))]

    def _run(self, *command: str) -> list[str]:
        mount = f"{self._volume}:/var/lib/gradrule:rw"
        return self._buildah.arguments("run", "--volume", mount, self._container, "--", *command)

    def _wait_for_address(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        os.set_blocking(stdout.fileno(), False)
        deadline, said = time.monotonic() + START_S, b""
        while time.monotonic() < deadline:
            said += stdout.read() or b""
            for line in said.decode().splitlines():
                if line.startswith("gradrule: listening on "):
                    return "127.0.0.1:" + line.rpartition(":")[2]
            check(self._process.poll() is None, f"the server ended with {self._process.returncode} before it listened")
            time.sleep(0.05)
        raise Failure(f"the server did not listen within {START_S:.0f} s")

    @property
    def front(self) -> int:
        """The process that serves: the first one whose command is the image's."""
        words = self._command[1:]
        for pid in self.pids:
            command = command_of(pid)
            if command[-len(words) :] == words and "python" in command[0]:
                return pid
        raise Failure("no process runs the image's command")

    def health(self) -> int:
        """The exit code of the image's health check."""
        port = self.address.rpartition(":")[2]
        probe = self._run("gradrule", "health", f"localhost:{port}")
        return subprocess.run(probe, env=self._buildah.environment, stdout=sys.stderr, check=False).returncode

    def user(self) -> int:
        """The user id that the server runs as."""
        return os.stat(f"/proc/{self.front}").st_uid

    def end(self, number: signal.Signals) -> int:
        """Send a signal to the serving process; the exit code. No process may be left."""
        os.kill(self.front, number)
        code = self._process.wait(STOP_S)
        deadline = time.monotonic() + 10
        while left := [pid for pid in self.pids if command_of(pid)]:
            check(time.monotonic() < deadline, f"{len(left)} processes outlived {number.name}")
            time.sleep(0.05)
        return code

    def reap(self) -> None:
        """End what still runs, whatever happened."""
        for pid in {*self.pids, *descendants(self._process.pid), self._process.pid}:
            if command_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()


def gradient_of_sign(client: gr.Client) -> list[float]:
    """The gradient of Sign at (-2, 0.5, 3) under the rule `ImageTest`."""
    graph = gr.Graph()
    graph.op("Sign", graph.placeholder("x", "float32", [None]), name="y")
    x = np.array([-2.0, 0.5, 3.0], np.float32)
    result = client.evaluate(graph, feeds={"x": x}, ys=["y"], xs=["x"], overrides={"Sign": "ImageTest"})
    return [float(value) for value in np.asarray(result.gradients["x"])]


@contextmanager
def reaping(server: Server) -> Iterator[None]:
    """Nothing of the server is left afterwards."""
    try:
        yield
    finally:
        server.reap()


@contextmanager
def reporting(last_words: Callable[[], str]) -> Iterator[None]:
    """Show the server's log where something went wrong."""
    try:
        yield
    except BaseException:
        print(last_words(), file=sys.stderr)
        raise


@contextmanager
def workplace(keep: bool) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gradrule-image-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def build(buildah: Buildah, folder: Path, base: str | None) -> dict[str, float]:
    """Build the image; how long its parts took."""
    begun = time.monotonic()
    if base is None:
        make_base(buildah, folder)
    based = time.monotonic()
    dockerfile = str(ROOT / "deploy" / "Dockerfile")
    buildah(
        *("bud", "--format", "docker", "--layers=false", "--build-arg", f"BASE={base or BASE}"),
        *(*build_secrets(folder), "--file", dockerfile, "--tag", IMAGE, str(ROOT)),
    )
    return {"base_s": based - begun, "build_s": time.monotonic() - based}


def live_and_die(buildah: Buildah, folder: Path) -> dict[str, object]:
    """Start the image, make a rule, kill -9, start again, find the rule; stop it with SIGTERM."""
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    check(config["User"] == "10001:10001", f"the image runs as {config['User']!r}")
    check("/var/lib/gradrule" in config["Volumes"], "the image declares no volume for its data")
    probe = config["Healthcheck"]["Test"]
    check(probe == ["CMD", "gradrule", "health", "localhost:8470"], f"the health check is {probe}")
    command = [*config["Entrypoint"], *("0" if word == "8470" else word for word in config["Cmd"])]
    volume = folder / "volume"
    volume.mkdir()
    os.chown(volume, 10001, 10001)
    container, log = buildah("from", IMAGE), folder / "server.log"

    def start() -> Server:
        return Server(buildah, container, volume, command, log)

    def last_words() -> str:
        return log.read_text(errors="replace")[-4000:]

    with reporting(last_words):
        server = start()
        with reaping(server):
            user = server.user()
            check(user == 10001, f"the server runs as user {user}")
            check(server.health() == 0, "the health check fails while the server serves")
            with gr.connect(server.address) as client:
                client.create_rule("ImageTest", "3 * where(abs(x) <= 1, dy, 0)")
                check(gradient_of_sign(client) == [0.0, 3.0, 0.0], "a wrong gradient")
            check(server.end(signal.SIGKILL) != 0, "the server outlived kill -9")
        again = start()
        with reaping(again):
            with gr.connect(again.address) as client:
                found = [rule.name for rule in client.list_rules(kind="user")]
                check(any(name.endswith("ImageTest") for name in found), f"the user rules after kill -9 are {found}")
                check(gradient_of_sign(client) == [0.0, 3.0, 0.0], "a wrong gradient after kill -9")
            drained = again.end(signal.SIGTERM)
            check(drained == 0, f"SIGTERM ends the server with {drained}")
    return {"start_s": server.start_s, "restart_s": again.start_s, "rules_found": len(found), "user": user}


def main() -> None:
    """Build, run, report; exit 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="base image instead of one made by debootstrap")
    parser.add_argument("--keep", action="store_true", help="keep image and logs")
    options = parser.parse_args()
    report: dict[str, object] = {"ok": False}
    try:
        need_tools()
        with workplace(options.keep) as folder:
            buildah = Buildah(folder)
            report |= build(buildah, folder, options.base)
            report["image_size"] = json.loads(buildah("images", "--json", IMAGE))[0]["size"]
            report |= live_and_die(buildah, folder)
            report["ok"] = True
    except (Failure, subprocess.SubprocessError, gr.errors.GradruleError) as failure:
        report["failure"] = str(failure)
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in report.items()}))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
