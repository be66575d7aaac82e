"""Starts a PostgreSQL server for tests, on a free port of this machine and in a temporary folder.

PostgreSQL refuses to run as root, so root starts it as the user `postgres`, or as `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.waiting import wait_until

USER = "gradrule"
PASSWORD = "secret-of-tests"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0

# Safe where only processes are killed: the files of a killed server are still in the memory of the system.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "log_min_messages": "warning",
}


class PostgresServer:
    """A PostgreSQL server with the superuser `gradrule`, who has a password.

    Args:
        standby_of: The running server whose changes it receives and applies, and which it can replace.
        settings: More settings of PostgreSQL, by name.
    """

    def __init__(self, *, standby_of: PostgresServer | None = None, **settings: str) -> None:
        self._programs = find_programs()
        self._user = _other_user()
        self._folder = Path(tempfile.mkdtemp(prefix="gradrule-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = _SETTINGS | settings
        self.port = _free_port()
        self.log = self._folder / "log"
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        if standby_of is not None:
            source = (f"--dbname={standby_of.url()}", "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
            self._run("pg_basebackup", f"--pgdata={self._data}", *source)
            return
        password = self.add_file("password", PASSWORD.encode())
        files = (f"--pgdata={self._data}", f"--pwfile={password}")
        options = (f"--username={USER}", "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync")
        self._run("initdb", *files, *options)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user(), self._programs / program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, done.stderr

    def configure(self, **settings: str) -> None:
        """Adds settings of PostgreSQL, for the next start."""
        self._settings |= settings

    def add_file(self, name: str, content: bytes) -> Path:
        """Writes a file that only the server can read, and returns its path."""
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        return path

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server, always on the same port, and waits until it accepts connections."""
        assert not self.is_running
        settings = [f"-c{name}={value}" for name, value in self._settings.items()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_user(), self._programs / "postgres", "-D", self._data, f"-p{self.port}", *settings],
                stdout=log,
                stderr=log,
                cwd="/",
            )

        def is_ready() -> bool | None:
            assert self.is_running, self.log.read_text()[-4000:]
            command = [self._programs / "pg_isready", "-q", "-h127.0.0.1", f"-p{self.port}"]
            return subprocess.run(command, check=False).returncode == 0 or None

        wait_until(is_ready, f"PostgreSQL (log: {self.log})", _START_TIMEOUT_S)

    def stop(self) -> None:
        """Stops the server at once, and ends its connections; nothing that was committed is lost."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kills the server like a crash; `start` then recovers what was committed."""
        self._end(signal.SIGQUIT)

    def restart(self) -> None:
        """Stops and starts the server."""
        self.stop()
        self.start()

    def promote(self) -> None:
        """Makes a standby a server that accepts writes."""
        assert self.execute("SELECT pg_promote()") == ["t"]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stops all processes of the server from running, without ending connections: nothing is answered."""
        pids = [self.pid, *_children(self.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(_state(pid) in "TZ" for pid in pids) or None, "stopped process of PostgreSQL")
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def create_database(self, name: str = "", options: str = "") -> str:
        """Creates an empty database and returns its URL, which holds the password.

        Args:
            name: Its name; empty: a new one.
            options: Clauses of `CREATE DATABASE`, such as `ENCODING 'LATIN1' TEMPLATE template0`.
        """
        name = name or f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f'CREATE DATABASE "{name}" {options}')
        return self.url(name)

    def url(self, database: str = "postgres", *, user: str = USER, password: str = PASSWORD) -> str:
        """Returns the URL of a database."""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, *statements: str, database: str = "postgres") -> list[str]:
        """Runs statements, each in its own transaction, and returns the rows as text; columns are joined by `|`."""
        commands = [f"-c{statement}" for statement in statements]
        done = subprocess.run(
            [self._programs / "psql", "-XqtA", "-v", "ON_ERROR_STOP=1", *commands, self.url(database)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def close(self) -> None:
        """Stops the server and removes its folder."""
        if self.is_running:
            self.stop()
        shutil.rmtree(self._folder)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(_STOP_TIMEOUT_S)

    def _as_user(self) -> Sequence[str]:
        """Returns the start of a command that another user runs.

        Not the argument `user` of `subprocess`: with it Python forks in a way that calls gRPC's handlers, and the new
        process crashes if gRPC is in use.
        """
        if self._user is None:
            return ()
        return ("setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups")


@contextlib.contextmanager
def running_postgres(*, standby_of: PostgresServer | None = None, **settings: str) -> Iterator[PostgresServer]:
    """Starts a PostgreSQL server, see `PostgresServer`, and removes it at the end."""
    server = PostgresServer(standby_of=standby_of, **settings)
    try:
        server.start()
        yield server
    finally:
        server.close()


def find_programs() -> Path:
    """Returns the folder of PostgreSQL's programs; the newest version where Debian has installed several."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    assert found is not None, "PostgreSQL is not installed; `make postgres` installs it"
    return Path(found).resolve().parent


def _version(folder: Path) -> float:
    return float(folder.parent.name)


def _other_user() -> pwd.struct_passwd | None:
    """Returns the user that runs PostgreSQL; None: this user."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _children(pid: int) -> Sequence[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in path.read_text().split()]
    return found
