"""What tests say about answers and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.rpc import error_details_pb2, status_pb2

import gradrule as gr

RECORDED: list[str] = []
"""Every reason that `refused` or `refused_raw` has seen, in order."""


class Refusal:
    """The error that a `with refused(…)` block met; set when the block is left."""

    def __init__(self) -> None:
        self.error: Any = None
        self.message = ""
        self.fields: list[str] = []

    def says(self, *words: str) -> None:
        """The message holds all the words."""
        missing = [word for word in words if word not in self.message]
        assert not missing, f"{missing} not in {self.message!r}"


@contextlib.contextmanager
def refused(reason: str) -> Iterator[Refusal]:
    """The block must raise the client's error with this reason, as a class of its own."""
    refusal = Refusal()
    try:
        yield refusal
    except gr.errors.GradruleError as caught:
        assert caught.reason == reason, f"{caught.reason}: {caught}"
        assert type(caught) is not gr.errors.GradruleError
        refusal.error, refusal.message = caught, str(caught)
        RECORDED.append(reason)
    else:
        raise AssertionError(f"no {reason} was raised")


@contextlib.contextmanager
def refused_raw(reason: str) -> Iterator[Refusal]:
    """The block's bare gRPC call must fail with this reason, and details that say so."""
    refusal = Refusal()
    try:
        yield refusal
    except grpc.RpcError as caught:
        details = dict(caught.trailing_metadata()).get("grpc-status-details-bin")
        assert details is not None, f"no details with {caught}"
        status = status_pb2.Status.FromString(details)
        assert status.code == caught.code().value[0]
        info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(violations)
        assert (info.domain, info.reason) == ("gradrule", reason), status
        refusal.error, refusal.message = caught, status.message
        refusal.fields = [violation.field for violation in violations.field_violations]
        RECORDED.append(reason)
    else:
        raise AssertionError(f"no {reason} was raised")


def dense(gradient: Any) -> npt.NDArray[Any]:
    """A gradient as an array, slices added up."""
    if not isinstance(gradient, gr.Sparse):
        return np.asarray(gradient)
    full = np.zeros(tuple(np.asarray(gradient.dense_shape)), np.asarray(gradient.values).dtype)
    np.add.at(full, np.asarray(gradient.indices), np.asarray(gradient.values))
    return full


def statuses(answer: Any) -> dict[str, str]:
    """Node → what became of it."""
    return {resolution.node: resolution.status for resolution in answer.overrides}


def rules_by_node(answer: Any) -> dict[str, str]:
    """Node → rule that gives its gradient."""
    return {item.node: item.rule for item in answer.overrides if item.status == "active"}


def assert_close(got: Any, wanted: Any, *, rtol: float = 1e-5) -> None:
    """Same dtype where `wanted` is an array, same shape, near values."""
    if isinstance(wanted, np.ndarray):
        assert np.asarray(got).dtype == wanted.dtype
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=rtol, atol=1e-6, strict=False)
    assert np.shape(got) == np.shape(wanted)
