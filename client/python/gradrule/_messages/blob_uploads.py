"""Uploads the blobs that a call names and the server lacks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeVar

from gradrule._builder.blob_values import Data, Upload
from gradrule._messages.rpc_calls import Call
from gradrule.errors import BlobNotFoundError
from gradrule.v1 import blob_pb2

R = TypeVar("R")

# A server that is short of space may delete a blob again before the call runs.
_TRIES = 3


def find_missing(names: Iterable[str]) -> Call[list[str]]:
    """FindMissingBlobs."""
    return Call(
        "/gradrule.v1.BlobService/FindMissingBlobs",
        blob_pb2.FindMissingBlobsRequest(sha256=names),
        blob_pb2.FindMissingBlobsResponse.FromString,
        lambda response: list(response.missing),
    )


def steps(call: Call[R]) -> Generator[Call[Any] | Upload, Any, R]:
    """What a client does one after the other to get a call's answer: the call, and what the server turns out to lack.

    Each step is sent its outcome, or thrown its error.
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
    """The steps that bring blobs to a server that may have some of them."""
    missing = yield find_missing(blobs)
    for name in missing:
        yield Upload(name, blobs[name])
