"""GPU tests and the bench on a machine with an NVIDIA GPU that need not have a network.

    python tools/gpu_check.py fetch FOLDER             where there is a network: wheels for this Python, into FOLDER
    python tools/gpu_check.py check FOLDER [WORD ...]  where there is a GPU: installs and runs; WORDs go to the bench

`check` needs Python alone: packages come from FOLDER and go to .venv-gpu. Its last line is one JSON object; it exits 1
where a test failed, no test ran, or the bench did not finish.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "gpu-check.txt"
HOME = ROOT / ".venv-gpu"
OUT = ROOT / "out" / "gpu-check"
PYTHON = str(HOME / "bin" / "python")
PIP = ["-m", "pip", "--disable-pip-version-check"]


def fetch(wheels: Path) -> None:
    """Put every locked wheel into a folder."""
    download = ["download", "--require-hashes", "--only-binary=:all:", "--dest", str(wheels), "-r", str(LOCK)]
    subprocess.run([sys.executable, *PIP, *download], check=True)


def install(wheels: Path) -> None:
    """Make .venv-gpu from the folder alone."""
    if not Path(PYTHON).exists():
        venv.create(HOME, with_pip=True)
    pip = [PYTHON, *PIP, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--require-hashes", "--find-links", str(wheels), "-r", str(LOCK)], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)


def run_tests() -> dict[str, int]:
    """Run the tests marked `gpu`; how many ran, failed and were skipped."""
    report = OUT / "tests.xml"
    report.unlink(missing_ok=True)
    subprocess.run([PYTHON, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"], cwd=ROOT, check=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        return {"tests": 0, "failed": 0, "skipped": 0}
    counted = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counted["failures"] + counted["errors"]
    return {"tests": counted["tests"], "failed": failed, "skipped": counted["skipped"]}


def run_bench(words: list[str]) -> object:
    """Run the bench with its server on the first GPU; the JSON of its last line, or None where it did not finish."""
    command = [PYTHON, "tests/benchmarks/bench.py", "--device", "gpu:0", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> int:
    """Fetch, or check."""
    match sys.argv[1:]:
        case ["fetch", wheels]:
            fetch(Path(wheels))
            return 0
        case ["check", wheels, *words]:
            OUT.mkdir(parents=True, exist_ok=True)
            install(Path(wheels))
            tests, bench = run_tests(), run_bench(words)
            ok = tests["failed"] == 0 and tests["tests"] > tests["skipped"] and bench is not None
            print(json.dumps({"ok": ok, "tests": tests, "bench": bench}))
            return 0 if ok else 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
