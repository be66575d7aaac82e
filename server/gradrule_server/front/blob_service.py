"""`BlobService`: bytes in, by their hash."""

from __future__ import annotations

import asyncio

from gradrule.v1 import blob_pb2, errors_pb2
from gradrule_server.errors import error
from gradrule_server.front.calls import Call, Incoming, MethodTable, UploadTable

BLOB_SERVICE = "gradrule.v1.BlobService"

_MAX_NAMES = 10_000


class BlobServicer:
    """`BlobService`."""

    def methods(self) -> MethodTable:
        return {"FindMissingBlobs": (blob_pb2.FindMissingBlobsRequest, self.find_missing)}

    def uploads(self) -> UploadTable:
        return {"UploadBlob": (blob_pb2.UploadBlobRequest, self.upload)}

    async def find_missing(self, call: Call[blob_pb2.FindMissingBlobsRequest]) -> blob_pb2.FindMissingBlobsResponse:
        names = call.request.sha256
        if len(names) > _MAX_NAMES:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"{len(names)} hashes are more than the {_MAX_NAMES} that one request may hold",
                field="sha256",
            )
        return blob_pb2.FindMissingBlobsResponse(missing=await asyncio.to_thread(call.tenant.blobs.missing, names))

    async def upload(self, call: Incoming[blob_pb2.UploadBlobRequest]) -> blob_pb2.UploadBlobResponse:
        first = await anext(call.messages, None)
        if first is None:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the stream holds no message", field="sha256")
        name = first.sha256
        making = asyncio.ensure_future(asyncio.to_thread(call.tenant.blobs.upload, name))
        try:
            upload = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread makes it all the same.
            (await making).close()
            raise
        try:
            await asyncio.to_thread(upload.write, first.data)
            async for message in call.messages:
                if message.sha256 not in ("", name):
                    raise error(
                        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                        f"the stream is that of blob {name}, but a message names {message.sha256[:80]!r}",
                        field="sha256",
                    )
                await asyncio.to_thread(upload.write, message.data)
            size = await asyncio.to_thread(upload.finish)
        finally:
            # A caller that gives up may leave a thread that still writes: this waits for it.
            await asyncio.shield(asyncio.to_thread(upload.close))
        return blob_pb2.UploadBlobResponse(sha256=name, size_bytes=size)
