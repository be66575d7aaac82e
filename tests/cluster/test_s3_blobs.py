"""Runs the tests of the store of blobs with an S3 server, and tests what only a network can do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.object_store import ObjectNotFoundError, ObjectStoreError, open_object_store
from gradrule_server.registry.s3_objects import _FileSystem
from gradrule_server.registry.store import Store
from tests.cluster.s3 import SECRET, S3Server
from tests.stores import OpenStore, open_blobs, shared_of, shared_stores
from tests.unit.registry.test_blobs import (  # noqa: F401
    PAGE,
    name_of,
    put,
    refusal,
    test_names_of_blobs_must_be_hashes,
    test_unfinished_upload_leaves_nothing,
    test_uploaded_blob_is_present,
)
from tests.waiting import wait_until


@pytest.fixture
def open_store(tmp_path: Path, bucket: str, s3_environment: None) -> Iterator[OpenStore]:
    """Returns a function that opens a store in an S3 bucket; each call is one start of a server."""
    with shared_stores(tmp_path, f"s3://{bucket}/some/prefix") as opened:
        yield opened


ANSWERS = [("404 Not Found", b"<h1>no backend</h1>"), ("404 Not Found", b""), ("200 OK", b"<h1>Sign in</h1>")]


@pytest.mark.parametrize(("status", "body"), ANSWERS)
async def test_answers_of_a_proxy_are_not_taken_for_missing_or_damaged_objects(
    tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None, status: str, body: bytes
) -> None:
    url, store = f"s3://{bucket}/x", Store(tmp_path / "registry")
    name = put(open_blobs(store, tmp_path / "ada", url), b"weights")
    blobs = open_blobs(store, tmp_path / "grace", url)
    with s3.proxy.answering(status, body):
        with pytest.raises(GradruleError) as caught:
            await blobs.acquire([name])
        assert reason_name(caught.value.reason) == "UNAVAILABLE"
        if not status.startswith("200"):
            assert reason_name(refusal(put, blobs, b"more").reason) == "UNAVAILABLE"
            with pytest.raises(ObjectStoreError):
                shared_of(blobs).objects.delete("default/x")
            with pytest.raises(ObjectStoreError):
                list(shared_of(blobs).objects.iterate())
        shared_of(blobs).maintain()
        with pytest.raises(StoreError):
            open_blobs(store, tmp_path / "third", url)
    assert blobs.missing([name, name_of(b"more")]) == [name_of(b"more")]
    async with blobs.acquired([name]):
        assert blobs.read(name) == b"weights"
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("400 Bad Request", "ExpiredToken", r"credentials are refused \(ExpiredToken\)"),
        ("403 Forbidden", "AccessDenied", r"credentials are refused \(AccessDenied\)"),
        ("404 Not Found", "NoSuchBucket", "it answers NoSuchBucket"),
        ("503 Slow Down", "SlowDown", "it answers SlowDown"),
        ("507 Insufficient Storage", "XMinioStorageFull", "it answers .*XMinioStorageFull"),
    ],
)
def test_errors_of_the_service_are_named(
    tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None, status: str, code: str, says: str
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    objects = open_object_store(f"s3://{bucket}")
    body = f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode()
    with s3.proxy.answering(status, body):
        for request in (lambda: objects.put("x", tmp_path / "file"), lambda: objects.read("x", 0, 7)):
            with pytest.raises(ObjectStoreError, match=says):
                request()


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "value", ["minio:9000", "127.0.0.1", "http://", "ftp://host", "http://host:99999", "http://[::1", "http://a b"]
)
def test_wrong_endpoints_are_refused(
    s3_environment: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError) as caught:
        open_object_store("s3://bucket")
    assert str(caught.value).startswith(f"{variable} must be the URL of an S3 service, such as https://")
    assert str(caught.value).endswith(f"not {value!r}")
    monkeypatch.setenv(variable, f"key:{SECRET}@{value}")
    with pytest.raises(StoreError) as caught:
        open_object_store("s3://bucket")
    assert SECRET not in str(caught.value)


def test_parts_of_killed_uploads_are_deleted_with_unneeded_objects(
    tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None
) -> None:
    store = Store(tmp_path / "registry")
    blobs = open_blobs(store, tmp_path / "ada", f"s3://{bucket}", PAGE)
    name = put(blobs, b"1")
    s3.client.create_multipart_upload(Bucket=bucket, Key=f"default/{'f' * 64}")
    shared_of(blobs).objects.delete_unfinished(time.time() + 3600)
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=bucket)
    assert blobs.missing([name]) == []
    store.close()


def test_objects_are_found_and_renewed(tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    objects = open_object_store(f"s3://{bucket}/some/prefix")
    for number in range(3):
        objects.put(f"default/{number}", tmp_path / "file")
    keys = [f"default/{number}" for number in range(40)]
    before = objects.find(keys)
    assert [(item.key, item.size) for item in before.values()] == [(key, 7) for key in keys[:3]]
    wait_until(lambda: time.time() > before[keys[0]].modified_s + 1.1 or None, "another second")
    objects.renew(keys[0])
    after = objects.find(keys)
    assert sorted(after) == keys[:3]
    assert after[keys[0]].modified_s > before[keys[0]].modified_s
    assert objects.read(keys[0], 0, 100) == b"weights"
    with pytest.raises(ObjectNotFoundError):
        objects.renew(keys[5])


def test_requests_are_repeated_after_errors_of_the_service(s3: S3Server, bucket: str, s3_environment: None) -> None:
    objects = open_object_store(f"s3://{bucket}")
    s3.proxy.answers = iter([b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"] * 2)
    assert list(objects.iterate()) == []
    assert next(s3.proxy.answers, None) is None


@pytest.mark.parametrize("length", [0, 7, 20 << 20])
def test_upload_that_a_proxy_accepts_without_storing_it_is_refused(
    tmp_path: Path, s3: S3Server, bucket: str, s3_environment: None, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    (tmp_path / "file").write_bytes(b"x" * length)
    objects = open_object_store(f"s3://{bucket}")
    call = _FileSystem._call_s3

    async def answered(self: _FileSystem, method: str, *arguments: Any, **options: Any) -> Any:
        # The answer to the request that makes the object visible.
        if method in ("put_object", "complete_multipart_upload"):
            return {"ResponseMetadata": {"HTTPStatusCode": 200}}
        return await call(self, method, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_FileSystem, "_call_s3", answered)
        with pytest.raises(ObjectStoreError, match=f"accepted an upload of {length} bytes, but has not stored it"):
            objects.put("default/x", tmp_path / "file")
    # A proxy that answers all requests with a page of its own.
    with s3.proxy.answering("200 OK", b""), pytest.raises(ObjectStoreError):
        objects.put("default/x", tmp_path / "file")
    objects.put("default/x", tmp_path / "file")
    assert [(item.key, item.size) for item in objects.iterate()] == [("default/x", length)]
