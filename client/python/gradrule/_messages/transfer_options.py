"""Defines how tensors are compressed between a client and its server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gradrule.errors import InvalidParamError, InvalidTensorError, UnsupportedError

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from gradrule._messages.rpc_calls import Call
    from gradrule.common.tensor_packing import Packing

R = TypeVar("R")

_COMPRESSIONS = (None, "gzip", "zstd")
_WIRE_DTYPES = (None, "bfloat16")

ANSWER_COMPRESSION = ("gradrule-answer-compression", "gzip")
"""Metadata by which a client asks for answers compressed by gRPC."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chooses how tensors are sent, for all calls of a client (`connect`) or for one call. Default: unchanged.

    Attributes:
        compression: `"zstd"` compresses tensors of at least 1 KiB, in both directions, if that makes them smaller; it
            needs `gradrule[zstd]`. `"gzip"` compresses all requests, and answers of up to 256 KiB, by gRPC; it holds
            for a whole connection, so only `connect` takes it. It needs ten times the processor time of zstd.
        wire_dtype: `"bfloat16"` sends float32 tensors as bfloat16 in both directions, rounded to nearest, ties to even:
            half the bytes, a relative error of at most 2**-8, and values beyond 3.39e38 become infinite. The program
            computes in float32. Other element types do not change.
        keep_wire_dtype: Returns float32 results that were sent as bfloat16 as bfloat16 arrays.

    Raises:
        InvalidParamError: A value is unknown.
        UnsupportedError: The package for zstd is not installed.
    """

    compression: Literal["gzip", "zstd"] | None = None
    wire_dtype: Literal["bfloat16"] | None = None
    keep_wire_dtype: bool = False
    packing: Packing | None = field(init=False, repr=False, compare=False)
    """Packing of single tensors; None: they are not packed."""

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSIONS:
            raise InvalidParamError(f"compression is 'gzip', 'zstd' or None, not {self.compression!r}")
        if self.wire_dtype not in _WIRE_DTYPES:
            raise InvalidParamError(f"wire_dtype is 'bfloat16' or None, not {self.wire_dtype!r}")
        if self.compression == "zstd":
            from gradrule.common import tensor_packing

            if not tensor_packing.has_zstd():
                raise UnsupportedError(tensor_packing.NO_ZSTD)
        object.__setattr__(self, "packing", self._packing())

    def _packing(self) -> Packing | None:
        if self.compression != "zstd" and self.wire_dtype is None:
            return None
        from gradrule.common.tensor_packing import Packing

        return Packing(zstd=self.compression == "zstd", bfloat16=self.wire_dtype is not None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call of the connection."""
        return (ANSWER_COMPRESSION,) if self.compression == "gzip" else ()

    @property
    def grpc_compression(self) -> grpc.Compression | None:
        """The compression of the whole connection."""
        import grpc

        return grpc.Compression.Gzip if self.compression == "gzip" else None

    def of_call(self) -> Transfer:
        """Returns these options for one call. Raises `InvalidParamError` for gzip, which needs a connection."""
        if self.compression == "gzip":
            raise InvalidParamError(
                "gzip compresses a whole connection: give it to connect; one call can have compression='zstd'"
            )
        return self

    def applied(self, call: Call[R]) -> Call[R]:
        """Returns the call with packed tensors and a request for a packed answer.

        Args:
            call: A call whose request is an `EvaluateRequest` or `PullBackRequest` that holds all its tensors.
        """
        if self.packing is None:
            return call
        request = type(call.request)()
        request.CopyFrom(call.request)
        self.prepare(request)

        def answer(data: bytes) -> Any:
            message = call.answer(data)
            self.unpack(message)
            return message

        return call._replace(request=request, answer=answer)

    def prepare(self, request: Any) -> None:
        """Packs the tensors of a request and requests a packed answer.

        Args:
            request: An `EvaluateRequest` or `PullBackRequest`; changed in place.
        """
        if self.packing is not None:
            self.pack(request)
            request.answer_packing.CopyFrom(self.packing.message())

    def pack(self, request: Message) -> None:
        """Packs the tensors of a request.

        Args:
            request: A request; changed in place.
        """
        if self.packing is not None:
            from gradrule.common.tensor_packing import pack_feeds

            pack_feeds(request, self.packing)

    def unpack(self, answer: Message) -> None:
        """Unpacks the tensors of an answer.

        Args:
            answer: An answer; changed in place.

        Raises:
            InvalidTensorError: A packed tensor is malformed.
        """
        if self.packing is not None:
            from gradrule.common.tensor_packing import unpack_all

            try:
                unpack_all(answer, keep_bfloat16=self.keep_wire_dtype)
            except ValueError as cause:
                raise InvalidTensorError(f"the server's answer: {cause}") from None


PLAIN = Transfer()
"""Sends tensors unchanged."""
