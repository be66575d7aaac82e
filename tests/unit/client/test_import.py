"""Tests which packages importing the client loads."""

from __future__ import annotations

import inspect
import subprocess
import sys

import gradrule as gr
from gradrule import aio


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return {name.partition(".")[0] for name in output.stdout.split()}


def test_importing_loads_no_heavy_package() -> None:
    assert not loaded_by("import gradrule") & {"grpc", "numpy", "tensorflow", "google"}


def test_nothing_imports_tensorflow_or_the_server() -> None:
    everything = (
        "import gradrule as gr\nfor name in gr.__all__: getattr(gr, name)\nimport gradrule._messages.error_status"
    )
    build = "g = gr.Graph()\ny = g.sign(g.placeholder('x', 'float32'))\ng.to_bytes()"
    assert not loaded_by(f"{everything}\n{build}") & {"tensorflow", "keras", "gradrule_server"}


def test_all_public_names_exist() -> None:
    assert all(getattr(gr, name) is not None for name in gr.__all__)
    assert set(gr.__all__) <= set(dir(gr))


def test_both_clients_are_made_with_the_same_parameters() -> None:
    assert inspect.signature(gr.connect).parameters == inspect.signature(aio.connect).parameters
    assert inspect.signature(gr.local).parameters == inspect.signature(aio.local).parameters


def test_tensorflow_is_imported_at_the_first_trace_only() -> None:
    assert "tensorflow" not in loaded_by("import gradrule as gr\ngr.trace, gr.from_keras, gr.load")
    assert "tensorflow" in loaded_by("import gradrule as gr\ngr.trace(lambda x: x, ('float32', [2]))")
