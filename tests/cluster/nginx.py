"""Runs nginx in front of proxies of Ray Serve."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.ray_cluster import free_ports
from tests.e2e.pages import GUIDE, read_example
from tests.service.certificates import CertificateFiles
from tests.waiting import wait_until


@contextlib.contextmanager
def running_nginx(files: CertificateFiles, proxies: Sequence[str], folder: Path) -> Iterator[str]:
    """Runs nginx with the configuration of the guide and yields its address."""
    (port,) = free_ports(1)
    text = read_example(GUIDE / "ray.md", "nginx")
    for example, real in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "server node-1.example.org:8470": f"server {proxies[0]}",
        "server node-2.example.org:8470": f"server {proxies[1]}",
        "/etc/ssl/gradrule.crt": str(files.certificate),
        "/etc/ssl/gradrule.key": str(files.key),
    }.items():
        assert example in text
        text = text.replace(example, real)
    configuration = folder / "nginx.conf"
    head = f"daemon off; pid {folder}/nginx.pid; error_log stderr; events {{}} http {{ access_log off;"
    configuration.write_text(f"{head}\n{text}\n}}\n")
    # Debian installs it where only root looks for programs.
    program = shutil.which("nginx", path=os.pathsep.join((os.environ["PATH"], "/usr/sbin")))
    assert program, "make nginx installs nginx"
    with subprocess.Popen([program, "-c", str(configuration), "-p", str(folder)]) as process:
        try:
            wait_until(lambda: can_connect(port) or None, "nginx")
            yield f"localhost:{port}"
        finally:
            process.terminate()


def can_connect(port: int) -> bool:
    """Returns whether something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
