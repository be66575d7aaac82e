"""What the fork server imports before it forks: no library for drawing, no Keras, no thread, no written file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import json, os, sys
from gradrule_server.engine.__main__ import without_unused_libraries
with without_unused_libraries():
    import gradrule_server.engine.process
def imported():
    # A refused module has an entry that is None.
    names = {name for name, module in sys.modules.items() if module is not None}
    return sorted({name.partition(".")[0] for name in names} | {"keras.src"} & names)
before = {"modules": imported(), "threads": len(os.listdir("/proc/self/task"))}
import gradrule_server.engine.session_optimizer
print(json.dumps(before | {"later": imported()}))
"""
_NEVER = {"matplotlib", "pandas", "sklearn", "PIL", "h5py", "scipy"}


def test_only_what_engines_use_is_imported_and_nothing_is_written(tmp_path: Path) -> None:
    from gradrule_server.link.fork_server import engine_environment

    home = tmp_path / "home"
    home.mkdir()
    environment = engine_environment() | {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    reported = json.loads(done.stdout)
    assert "tensorflow" in reported["modules"]
    assert not (_NEVER | {"keras.src"}) & set(reported["modules"])
    assert reported["threads"] == 1
    # A session's optimizer imports Keras, and that imports nothing that draws.
    assert "keras" in reported["later"]
    assert not _NEVER & set(reported["later"])
    assert list(home.iterdir()) == []
