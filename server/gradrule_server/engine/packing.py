"""How a call wants the tensors of its answer packed."""

from __future__ import annotations

# `gradrule.common.tensor_packing` imports it at first use, when the process may no longer open files.
import zstandard  # noqa: F401

from gradrule.common import tensor_packing
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.errors import error


def packing_of(message: tensor_pb2.Packing) -> tensor_packing.Packing | None:
    """Returns how an answer is packed; None: not at all. MALFORMED_REQUEST."""
    try:
        return tensor_packing.packing_of(message)
    except ValueError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"answer_packing: {cause}", field="answer_packing"
        ) from cause
