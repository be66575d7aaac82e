"""Uploads the blobs that a call names and the server lacks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeVar

from gradrule._builder.blob_values import Data, Upload
from gradrule._messages.rpc_calls import Call
from gradrule.errors import BlobNotFoundError
from gradrule.v1 import blob_pb2

R = TypeVar("R")

# A server that is short of space may evict a blob right after its upload.
_TRIES = 3


def find_missing(names: Iterable[str]) -> Call[list[str]]:
    """Returns the call of FindMissingBlobs."""
    return Call(
        "/gradrule.v1.BlobService/FindMissingBlobs",
        blob_pb2.FindMissingBlobsRequest(sha256=names),
        blob_pb2.FindMissingBlobsResponse.FromString,
        lambda response: list(response.missing),
    )


def steps(call: Call[R]) -> Generator[Call[Any] | Upload, Any, R]:
    """Yields the steps that run a call: the call, and uploads of blobs that the server lacks; returns the answer.

    The caller sends each step's outcome to the generator, or throws its error.
    """
    bare = call._replace(blobs={})
    for _ in range(_TRIES):
        try:
            answer: R = yield bare
        except BlobNotFoundError:
            if not call.blobs:
                raise
        else:
            return answer
        yield from uploads(call.blobs)
    last: R = yield bare
    return last


def uploads(blobs: Mapping[str, Data]) -> Generator[Call[Any] | Upload, Any, None]:
    """Yields the steps that upload those blobs that the server lacks."""
    missing = yield find_missing(blobs)
    for name in missing:
        yield Upload(name, blobs[name])
