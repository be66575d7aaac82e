"""Stores objects in an S3 bucket, or in one of a compatible service. Needs the extra `s3`.

s3fs runs its requests on an event loop in a thread of its own; the methods wait for them with a time limit. Endpoint,
credentials and region are those of the AWS libraries: `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, a role, and so on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import s3fs
import s3fs.core
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from botocore.utils import is_valid_endpoint_url
from fsspec.asyn import sync

from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.object_store import MARKER, ObjectNotFoundError, ObjectStoreError, StoredObject

T = TypeVar("T")

_CONNECT_S = 5
_READ_S = 15
# Includes further attempts after an error of the connection or of the service.
_REQUEST_S = 30.0
# Longest time to learn whether an object exists: callers wait for it before they use what is in the cache.
_HEAD_S = 10.0
_ATTEMPTS = 3
# Slowest upload that is waited for, bytes a second.
_MIN_RATE = 1 << 20
_PART_BYTES = 8 << 20
# With eight uploads at a time, about 300 MiB of memory.
_PARTS_AT_ONCE = 2
_HEADS_AT_ONCE = 32
# A copy of up to 5 GB is one request, which the service works on.
_COPY_S = 300.0

# At the level debug they log headers of requests, which may hold session tokens.
_LOGGERS_OF_REQUESTS = ("aiobotocore", "botocore", "s3fs", "fsspec", "asyncio")


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_MISSING_BUCKET = ("NoSuchBucket", "404")


def _is_repeated(cause: Exception) -> bool:
    """Returns whether s3fs repeats a request after an error, besides those that it repeats by itself."""
    if not isinstance(cause, ClientError):
        return False
    return int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) >= 500


s3fs.core.set_custom_error_handler(_is_repeated)


class _FileSystem(s3fs.S3FileSystem):  # type: ignore[misc]
    retries = _ATTEMPTS


class S3Objects:
    """The objects of a bucket whose keys start with a prefix; see `ObjectStore`.

    Raises `StoreError` if the bucket does not exist, cannot be reached, or credentials are missing or refused.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        for name in _LOGGERS_OF_REQUESTS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._files = _FileSystem(
            config_kwargs={
                "connect_timeout": _CONNECT_S,
                "read_timeout": _READ_S,
                "max_pool_connections": 64,
                "retries": {"mode": "standard", "total_max_attempts": 1},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        _check_endpoint()
        try:
            self._run(self._files._call_s3, "head_bucket", Bucket=bucket)
        except ObjectStoreError as cause:
            if _code(cause) in _MISSING_BUCKET:
                raise StoreError(f"the bucket of --blobs {self.url} does not exist; create it first") from cause
            raise StoreError(f"--blobs {self.url} cannot be used: {cause}") from cause

    def put(self, key: str, content: Path | bytes) -> None:
        if isinstance(content, bytes):
            length = len(content)
            self._run(self._files._pipe_file, self._path(key), content)
        else:
            length = content.stat().st_size
            self._run(
                self._files._put_file,
                str(content),
                self._path(key),
                chunksize=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
                timeout=_REQUEST_S + length / _MIN_RATE,
            )
        # A proxy may answer 200 to an upload of which it passes nothing on.
        if (found := self.find([key]).get(key)) is None or found.size != length:
            raise ObjectStoreError(f"{self.url} has accepted an upload of {length} bytes, but has not stored it")

    def read(self, key: str, offset: int, count: int) -> bytes:
        try:
            found = bytes(self._run(self._files._cat_file, self._path(key), start=offset, end=offset + count))
        except ObjectStoreError as cause:
            # Not the status 404 alone: a proxy gives it while the service behind it is away.
            if _code(cause) == "NoSuchKey":
                raise ObjectNotFoundError(key) from cause
            # The bytes that were asked for begin after the end of the object.
            if _code(cause) == "InvalidRange":
                return b""
            raise
        if len(found) > count:
            raise ObjectStoreError(f"{self.url} answers with other bytes of an object than those that were asked for")
        return found

    def find(self, keys: Iterable[str]) -> dict[str, StoredObject]:
        wanted = list(keys)
        rounds = 1 + len(wanted) // _HEADS_AT_ONCE
        return {item.key: item for item in self._run(self._find, wanted, timeout=rounds * _HEAD_S) if item}

    async def _find(self, keys: list[str]) -> list[StoredObject | None]:
        slots = asyncio.Semaphore(_HEADS_AT_ONCE)

        async def find(key: str) -> StoredObject | None:
            try:
                async with slots:
                    found = await self._files._call_s3("head_object", Bucket=self._bucket, Key=self._prefix + key)
            except FileNotFoundError:
                return None
            # The page of a proxy has no ETag, which S3 gives each object.
            if "ETag" not in found:
                raise ObjectStoreError(f"{self.url} gives an object no ETag; another server answers in its place")
            return StoredObject(key, found["ContentLength"], found["LastModified"].timestamp())

        return await asyncio.gather(*map(find, keys))

    def renew(self, key: str) -> None:
        path = self._path(key)
        # S3 copies an object to its own key only if something is to change.
        try:
            self._run(self._files._cp_file, path, path, MetadataDirective="REPLACE", timeout=_COPY_S)
        except ObjectStoreError as cause:
            if isinstance(cause.__cause__, FileNotFoundError):
                raise ObjectNotFoundError(key) from cause
            raise

    def delete(self, key: str) -> None:
        try:
            self._run(self._files._call_s3, "delete_object", Bucket=self._bucket, Key=self._prefix + key)
        except ObjectStoreError as cause:
            if _code(cause) != "NoSuchKey":
                raise

    def iterate(self, start: str = "") -> Iterator[StoredObject]:
        more: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + start}
        while True:
            page = self._run(self._files._call_s3, "list_objects_v2", **more)
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if key != MARKER:
                    yield StoredObject(key, item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def delete_unfinished(self, before_s: float) -> None:
        # Parts of an upload that was killed only cost money, and not every service lists them.
        with contextlib.suppress(ObjectStoreError):
            found = self._run(self._files._call_s3, "list_multipart_uploads", Bucket=self._bucket, Prefix=self._prefix)
            for upload in found.get("Uploads", ()):
                if upload["Initiated"].timestamp() < before_s:
                    part = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._run(self._files._call_s3, "abort_multipart_upload", Bucket=self._bucket, **part)

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._prefix}{key}"

    def _run(self, request: Callable[..., Awaitable[T]], *args: Any, timeout: float = _REQUEST_S, **more: Any) -> T:
        """Runs a coroutine of s3fs on its loop, and translates its errors."""
        try:
            return sync(self._files.loop, request, *args, timeout=timeout, **more)  # type: ignore[no-any-return]
        except Exception as cause:
            raise _translated(cause, timeout) from cause


def _check_endpoint() -> None:
    """Raises `StoreError` if the environment names an endpoint that is no URL."""
    for name in _ENDPOINTS:
        value = os.environ.get(name, "")
        try:
            parts = urlsplit(value)
            is_valid = parts.scheme in ("http", "https") and is_valid_endpoint_url(value) and parts.port != 0
        except ValueError:
            # The port is no number up to 65535, or a bracket of an IPv6 address is missing.
            is_valid = False
        if value and not is_valid:
            # Before an @ there may be credentials.
            raise StoreError(
                f"{name} must be the URL of an S3 service, such as https://objects.example.org or "
                f"http://127.0.0.1:9000, not {value.rpartition('@')[2][:60]!r}"
            )


def _code(cause: BaseException | None) -> str:
    """Returns the code by which S3 names an error; empty: the error is none of S3."""
    while cause is not None and not isinstance(cause, ClientError):
        cause = cause.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if cause is not None else ""


def _translated(cause: Exception, timeout: float) -> ObjectStoreError:
    if isinstance(cause, ObjectStoreError):
        return cause
    code = _code(cause)
    if isinstance(cause, NoCredentialsError | PartialCredentialsError):
        return ObjectStoreError(
            "credentials are missing; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
        )
    if isinstance(cause, PermissionError):
        return ObjectStoreError(f"the credentials are refused ({code or cause}); check them and their policy")
    if isinstance(cause, TimeoutError):
        return ObjectStoreError(f"it did not answer within {timeout:.0f} s")
    if code:
        # s3fs leaves the code out of the messages of some errors.
        return ObjectStoreError(f"it answers {code}: {getattr(cause, 'strerror', None) or cause}")
    if isinstance(cause, BotoCoreError | OSError):
        return ObjectStoreError(str(cause) or type(cause).__name__)
    return ObjectStoreError(f"{type(cause).__name__}: {cause}")
