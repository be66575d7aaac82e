"""Runs the protoc commands of docs/guide/other-languages.md, without the gRPC plugins.

With a protoc of the system (Debian: protobuf-compiler) they generate code. `make lint` installs the protoc of
grpcio-tools, which has no generators for these languages; with it the commands only read the protos.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.pages import GUIDE, ROOT, read_example

PAGE = GUIDE / "other-languages.md"
OWN = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos/gradrule/v1").glob("*.proto"))
TOOLS = ROOT / ".venv-tools/bin/python"
# The generator for Go is a plugin, so protoc only reads the protos.
SUFFIXES = {"java": ".java", "cpp": ".pb.cc", "csharp": ".cs", "ruby": "_pb.rb", "go": ""}


def builtin_arguments(command: str, folder: Path) -> list[str]:
    """Returns the arguments of a protoc command without plugins, with outputs in a folder and globs expanded."""
    program, *words = shlex.split(command.replace("\\\n", " "))
    assert program == "protoc"
    arguments = []
    for word in words:
        if word.startswith(("--go", "--grpc", "--plugin=")):
            continue
        if word.startswith("--") and "_out=" in word:
            word = f"{word.partition('=')[0]}={folder}"
        arguments += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(word)) if "*" in word else [word]
    return arguments


@pytest.mark.parametrize("language", SUFFIXES)
def test_protoc_commands_work(language: str, tmp_path: Path) -> None:
    arguments = builtin_arguments(read_example(PAGE, language), tmp_path)
    assert set(OWN) <= set(arguments)
    suffix, protoc = SUFFIXES[language], ["protoc"]
    if shutil.which("protoc") is None:
        if not TOOLS.exists():
            pytest.skip("protoc is not installed; `make lint` installs one")
        suffix, protoc = "", [str(TOOLS), "-m", "grpc_tools.protoc"]
    if not suffix:
        arguments = [argument for argument in arguments if "_out=" not in argument]
        arguments.append(f"--descriptor_set_out={tmp_path / 'all.descriptors'}")
    done = subprocess.run([*protoc, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    generated = [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(suffix)]
    assert len(generated) >= (len(OWN) if suffix else 1)
