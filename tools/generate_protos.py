"""Writes the Python stubs of the protos; with --check, says which committed ones differ from what it would write.

`make proto` and `make lint` run it in the tools' environment: grpcio-tools 1.72 emits code that protobuf 6 and 7 both
import.
"""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
API = sorted((PROTOS / "gradrule" / "v1").glob("*.proto"))
LINK = sorted((PROTOS / "gradrule_server" / "link" / "v1").glob("*.proto"))
HOMES = ("client/python/gradrule/v1", "server/gradrule_server/link/v1")


def run_protoc(files: list[Path], *outputs: str) -> None:
    """Run protoc with mypy-protobuf's plugins of this environment."""
    wellknown = Path(protoc.__file__).parent / "_proto"
    plugins = [f"--plugin={path.name}={path}" for path in Path(sys.executable).parent.glob("protoc-gen-mypy*")]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{wellknown}", *plugins, *outputs, *map(str, files)]) != 0:
        sys.exit("protoc failed")


def generate(root: Path) -> None:
    """Write all stubs below ROOT, laid out as in the repository."""
    client, server = root / "client" / "python", root / "server"
    for folder in (client, server):
        folder.mkdir(parents=True, exist_ok=True)
    api_kinds = (f"--{kind}_out={client}" for kind in ("python", "grpc_python"))
    run_protoc(API, *api_kinds, f"--mypy_out=quiet:{client}", f"--mypy_grpc_out=quiet:{client}")
    run_protoc(LINK, f"--python_out={server}", f"--mypy_out=quiet:{server}")
    for proto in API:
        if "\nservice " not in proto.read_text():
            for suffix in (".py", ".pyi"):
                (client / "gradrule" / "v1" / f"{proto.stem}_pb2_grpc{suffix}").unlink(missing_ok=True)


def stubs(root: Path) -> set[str]:
    """Paths of all stubs below ROOT, relative to it."""
    return {str(path.relative_to(root)) for home in HOMES for path in (root / home).glob("*_pb2*.py*")}


def differing(fresh: Path) -> list[str]:
    """Stubs that are missing, superfluous or different in the repository."""
    names = stubs(ROOT) | stubs(fresh)
    _, wrong, missing = filecmp.cmpfiles(ROOT, fresh, sorted(names), shallow=False)
    return sorted(wrong + missing)


def main() -> None:
    """Generate, or check with --check."""
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            wrong = differing(Path(folder))
        if wrong:
            sys.exit("stubs are out of date (run `make proto`): " + ", ".join(wrong))
    else:
        generate(ROOT)


if __name__ == "__main__":
    main()
