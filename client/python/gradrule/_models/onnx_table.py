"""Gathers the conversions of all ONNX operations."""

from __future__ import annotations

from collections.abc import Mapping

# Each of these modules adds its rows.
from gradrule._models import (  # noqa: F401
    onnx_control_flow,
    onnx_elementwise,
    onnx_images,
    onnx_matrices,
    onnx_normalisation,
    onnx_quantised,
    onnx_recurrent,
    onnx_reductions,
    onnx_refused,
    onnx_sampling,
    onnx_shapes,
)
from gradrule._models.onnx_calls import ONNX_OPS, OnnxOp


def all_rows() -> Mapping[str, OnnxOp]:
    """Returns the rows by the names of the operations."""
    return ONNX_OPS
