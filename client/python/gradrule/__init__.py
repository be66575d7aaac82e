"""gradrule: gradients with rules of your own, as a service.

    import gradrule as gr

    client = gr.connect("localhost:8470")
    client.create_rule("QuantizeGrad", "where(abs(x) <= 1, dy, 0)")

Importing it loads nothing heavy; each name below is loaded at its first use. TensorFlow is needed only for graphs
that come from it (`trace`, `from_keras`, `load` of SavedModels and Keras files) and for `gradrule.keras`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradrule import aio, errors, keras, optimizers
    from gradrule._blobs import Blob
    from gradrule._comparison import ComparedRow, Comparison, FirstDifference
    from gradrule._differences import FiniteDifferences
    from gradrule._graph import Graph
    from gradrule._handles import Node, TensorHandle
    from gradrule._load import load
    from gradrule._overrides import Override, Preset, Region
    from gradrule._results import (
        Digests,
        Explanation,
        ParamInfo,
        PresetInfo,
        Resolution,
        Result,
        RuleInfo,
        SampleResult,
        Sparse,
        Timings,
    )
    from gradrule._rpc.async_client.forward import AsyncForwardHandle
    from gradrule._rpc.async_client.sessions import AsyncSession
    from gradrule._rpc.sync_client.client import Client, connect, local
    from gradrule._rpc.sync_client.forward import ForwardHandle
    from gradrule._rpc.sync_client.programs import Program
    from gradrule._rpc.sync_client.sessions import Session
    from gradrule._rules import Rule
    from gradrule._security import tls
    from gradrule._server_status import ServerStatus
    from gradrule._sessions import StepResult
    from gradrule._specs import TensorSpec
    from gradrule._tracing import from_keras, trace
    from gradrule._transfer import Transfer
    from gradrule.errors import GradruleError

__version__ = "0.1.0"

__all__ = [
    "connect", "tls", "local", "aio", "Client", "Program", "ForwardHandle", "AsyncForwardHandle",
    "Session", "AsyncSession", "StepResult", "optimizers",
    "Graph", "TensorHandle", "Node", "load", "trace", "from_keras", "Blob",
    "Rule", "Override", "Region", "Preset",
    "Result", "Explanation", "SampleResult", "RuleInfo", "PresetInfo", "ParamInfo",
    "Comparison", "ComparedRow", "FirstDifference", "FiniteDifferences",
    "Resolution", "Timings", "Digests", "Sparse", "TensorSpec", "ServerStatus",
    "Transfer", "errors", "GradruleError", "keras",
    "__version__",
]  # fmt: skip

_HOMES = {
    "Blob": "_blobs",
    "connect": "_rpc.sync_client.client",
    "Client": "_rpc.sync_client.client",
    "Program": "_rpc.sync_client.programs",
    "local": "_rpc.sync_client.client",
    "ServerStatus": "_server_status",
    "Session": "_rpc.sync_client.sessions",
    "AsyncSession": "_rpc.async_client.sessions",
    "StepResult": "_sessions",
    "ForwardHandle": "_rpc.sync_client.forward",
    "AsyncForwardHandle": "_rpc.async_client.forward",
    "Graph": "_graph",
    "TensorHandle": "_handles",
    "Node": "_handles",
    "load": "_load",
    "trace": "_tracing",
    "from_keras": "_tracing",
    "Rule": "_rules",
    "Override": "_overrides",
    "Preset": "_overrides",
    "Region": "_overrides",
    "Comparison": "_comparison",
    "ComparedRow": "_comparison",
    "FirstDifference": "_comparison",
    "FiniteDifferences": "_differences",
    "Result": "_results",
    "Explanation": "_results",
    "SampleResult": "_results",
    "RuleInfo": "_results",
    "PresetInfo": "_results",
    "ParamInfo": "_results",
    "Resolution": "_results",
    "Timings": "_results",
    "Digests": "_results",
    "Sparse": "_results",
    "TensorSpec": "_specs",
    "tls": "_security",
    "Transfer": "_transfer",
    "GradruleError": "errors",
}


def __getattr__(name: str) -> Any:
    if name in ("aio", "errors", "keras", "optimizers"):
        return importlib.import_module(f"gradrule.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradrule' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gradrule.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
