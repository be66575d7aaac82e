"""How a call wants the tensors of its answer packed."""

from __future__ import annotations

# `gradrule._packing` imports it at its first use, which would be too late: the process has given up its rights then.
import zstandard  # noqa: F401

from gradrule import _packing
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.errors import error


def packing_of(message: tensor_pb2.Packing) -> _packing.Packing | None:
    """Returns how an answer is packed; None: not at all. MALFORMED_REQUEST."""
    try:
        return _packing.packing_of(message)
    except ValueError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"answer_packing: {cause}", field="answer_packing"
        ) from cause
