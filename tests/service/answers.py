"""Checks results and refusals, and records which test provokes which error reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from google.rpc import error_details_pb2, status_pb2

import gradrule as gr

Test = TypeVar("Test", bound=Callable[..., None])

RECORDED: list[str] = []
"""Every reason that `refused` or `refused_raw` has seen, in order."""

PROVOKED: dict[str, Callable[..., None]] = {}
"""Reason → a test that provokes it at a real server."""

keeps_engine = pytest.mark.usefixtures("same_engine")
"""After the test the same engine still answers right."""


class Refusal:
    """Holds the error that a `with refused(…)` block raised; filled when the block ends."""

    def __init__(self) -> None:
        self.error: Any = None
        self.message = ""
        self.fields: list[str] = []

    def says(self, *words: str) -> None:
        """Asserts that the message contains all the words."""
        missing = [word for word in words if word not in self.message]
        assert not missing, f"{missing} not in {self.message!r}"


@contextlib.contextmanager
def refused(reason: str) -> Iterator[Refusal]:
    """Asserts that the block raises the client's error class for this reason."""
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
    """Asserts that the block's plain gRPC call fails with this reason in its status details."""
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


def provokes(*reasons: str) -> Callable[[Test], Test]:
    """Registers a test for error reasons and asserts that it met one of them."""

    def enter(test: Test) -> Test:
        @functools.wraps(test)
        def proven(*args: Any, **kwargs: Any) -> None:
            before = len(RECORDED)
            test(*args, **kwargs)
            assert set(reasons) & set(RECORDED[before:])

        for reason in reasons:
            PROVOKED[reason] = proven
        return proven  # type: ignore[return-value]  # wraps keeps the signature

    return enter


def dense(gradient: Any) -> npt.NDArray[Any]:
    """Returns a gradient as a dense array; adds up slices with the same index."""
    if not isinstance(gradient, gr.Sparse):
        return np.asarray(gradient)
    full = np.zeros(tuple(np.asarray(gradient.dense_shape)), np.asarray(gradient.values).dtype)
    np.add.at(full, np.asarray(gradient.indices), np.asarray(gradient.values))
    return full


def statuses(answer: Any) -> dict[str, str]:
    """Maps each overridden node to its status."""
    return {resolution.node: resolution.status for resolution in answer.overrides}


def rules_by_node(answer: Any) -> dict[str, str]:
    """Maps each node to the rule that computes its gradient."""
    return {item.node: item.rule for item in answer.overrides if item.status == "active"}


def assert_close(got: Any, wanted: Any, *, rtol: float = 1e-5) -> None:
    """Compares shapes and values, and dtypes where `wanted` is an array."""
    if isinstance(wanted, np.ndarray):
        assert np.asarray(got).dtype == wanted.dtype
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=rtol, atol=1e-6, strict=False)
    assert np.shape(got) == np.shape(wanted)
