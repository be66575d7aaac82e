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
    from gradrule import aio, errors, keras, optimizers, schedules, viz
    from gradrule._builder.blob_values import Blob
    from gradrule._builder.graph import Graph
    from gradrule._builder.handles import Node, TensorHandle
    from gradrule._builder.overrides import Override, Preset, Region
    from gradrule._builder.rules import Rule
    from gradrule._builder.specs import TensorSpec
    from gradrule._comparison.compare import ComparedRow, Comparison, FirstDifference
    from gradrule._comparison.numeric_gradients import FiniteDifferences
    from gradrule._comparison.sweep import SweepResult
    from gradrule._messages.call_arguments import Batching
    from gradrule._messages.session_calls import StepResult
    from gradrule._messages.transfer_options import Transfer
    from gradrule._models import from_onnx, from_torch
    from gradrule._progress import ProgressReport
    from gradrule._results.call_results import Digests, Explanation, Resolution, Result, Sparse, Timings
    from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo, SampleResult
    from gradrule._results.status_report import ServerStatus
    from gradrule._rpc.async_client.forward import AsyncForwardHandle
    from gradrule._rpc.async_client.sessions import AsyncSession
    from gradrule._rpc.channels import tls
    from gradrule._rpc.sync_client.client import Client, connect, local
    from gradrule._rpc.sync_client.forward import ForwardHandle
    from gradrule._rpc.sync_client.programs import Program
    from gradrule._rpc.sync_client.sessions import Session
    from gradrule._tracing import from_keras, trace
    from gradrule._tracing.loading import load
    from gradrule.errors import GradruleError

__version__ = "0.1.0"

__all__ = [
    "connect", "tls", "local", "aio", "Client", "Program", "ForwardHandle", "AsyncForwardHandle",
    "Session", "AsyncSession", "StepResult", "optimizers", "schedules",
    "Graph", "TensorHandle", "Node", "load", "trace", "from_keras", "from_torch", "from_onnx", "Blob",
    "Rule", "Override", "Region", "Preset",
    "Result", "Explanation", "SampleResult", "RuleInfo", "PresetInfo", "ParamInfo",
    "Comparison", "ComparedRow", "FirstDifference", "FiniteDifferences", "SweepResult",
    "Resolution", "Timings", "Digests", "Sparse", "TensorSpec", "ServerStatus",
    "Transfer", "Batching", "ProgressReport", "errors", "GradruleError", "keras", "viz",
    "__version__",
]  # fmt: skip

_MODULES = {
    "Blob": "_builder.blob_values",
    "connect": "_rpc.sync_client.client",
    "Client": "_rpc.sync_client.client",
    "Program": "_rpc.sync_client.programs",
    "local": "_rpc.sync_client.client",
    "ServerStatus": "_results.status_report",
    "Session": "_rpc.sync_client.sessions",
    "AsyncSession": "_rpc.async_client.sessions",
    "StepResult": "_messages.session_calls",
    "ForwardHandle": "_rpc.sync_client.forward",
    "AsyncForwardHandle": "_rpc.async_client.forward",
    "Graph": "_builder.graph",
    "TensorHandle": "_builder.handles",
    "Node": "_builder.handles",
    "load": "_tracing.loading",
    "trace": "_tracing",
    "from_keras": "_tracing",
    "from_torch": "_models",
    "from_onnx": "_models",
    "Rule": "_builder.rules",
    "Override": "_builder.overrides",
    "Preset": "_builder.overrides",
    "Region": "_builder.overrides",
    "Comparison": "_comparison.compare",
    "ComparedRow": "_comparison.compare",
    "FirstDifference": "_comparison.compare",
    "FiniteDifferences": "_comparison.numeric_gradients",
    "SweepResult": "_comparison.sweep",
    "Result": "_results.call_results",
    "Explanation": "_results.call_results",
    "SampleResult": "_results.rule_infos",
    "RuleInfo": "_results.rule_infos",
    "PresetInfo": "_results.rule_infos",
    "ParamInfo": "_results.rule_infos",
    "Resolution": "_results.call_results",
    "Timings": "_results.call_results",
    "Digests": "_results.call_results",
    "Sparse": "_results.call_results",
    "TensorSpec": "_builder.specs",
    "tls": "_rpc.channels",
    "Transfer": "_messages.transfer_options",
    "Batching": "_messages.call_arguments",
    "ProgressReport": "_progress",
    "GradruleError": "errors",
}


def __getattr__(name: str) -> Any:
    if name in ("aio", "errors", "keras", "optimizers", "schedules", "viz"):
        return importlib.import_module(f"gradrule.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'gradrule' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gradrule.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
