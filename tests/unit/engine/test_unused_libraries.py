"""What the fork server imports before it forks: nothing that draws, no Keras, no thread, no file written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import json, os, sys
from gradrule_server.engine.unused_libraries import without_libraries
with without_libraries():
    import gradrule_server.engine.process
before = {"modules": sorted({name.partition(".")[0] for name in sys.modules} | {"keras.src"} & set(sys.modules)),
          "threads": len(os.listdir("/proc/self/task"))}
import gradrule_server.engine.session_optimizer
print(json.dumps(before | {"later": sorted({name.partition(".")[0] for name in sys.modules})}))
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
    told = json.loads(done.stdout)
    assert "tensorflow" in told["modules"]
    assert not (_NEVER | {"keras.src"}) & set(told["modules"])
    assert told["threads"] == 1
    # A session's optimizer imports Keras, and that imports nothing that draws.
    assert "keras" in told["later"]
    assert not _NEVER & set(told["later"])
    assert list(home.iterdir()) == []
