"""Options for how tensors are transferred between a client and its server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from gradrule.errors import InvalidParamError, InvalidTensorError, UnsupportedError

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from gradrule.common.tensor_packing import Packing

M = TypeVar("M", bound="Message")

_COMPRESSIONS = (None, "gzip", "zstd")
_WIRE_DTYPES = (None, "bfloat16")

ANSWER_COMPRESSION = ("gradrule-answer-compression", "gzip")
"""Metadata that requests the compression of answers by gRPC."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Selects how tensors are transferred, for all calls of a client (`connect`) or for one call. Default: unchanged.

    Args:
        compression: `"zstd"` compresses tensors of 1 KiB or more, in both directions, if that makes them smaller. It
            needs the extra `gradrule[zstd]`. `"gzip"` lets gRPC compress all requests, and answers of up to 256 KiB,
            of a connection, so only `connect` takes it; it needs ten times the processor time.
        wire_dtype: `"bfloat16"` sends float32 tensors as bfloat16, in both directions, rounded to nearest, ties to
            even. That keeps 8 of 24 bits of precision (a relative error of at most 2**-8; values beyond 3.39e38 become
            infinite) and halves the bytes. The program computes in float32. Other dtypes are sent unchanged.
        keep_wire_dtype: Return float32 results that were sent as bfloat16 as bfloat16 arrays, not as float32.

    Raises:
        InvalidParamError: There is no such compression or dtype.
        UnsupportedError: The package for zstd is missing.
    """

    compression: Literal["gzip", "zstd"] | None = None
    wire_dtype: Literal["bfloat16"] | None = None
    keep_wire_dtype: bool = False
    packing: Packing | None = field(init=False, repr=False, compare=False)
    """Packing of each tensor; None: no packing."""

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
        """Metadata of every call."""
        return (ANSWER_COMPRESSION,) if self.compression == "gzip" else ()

    @property
    def grpc_compression(self) -> grpc.Compression | None:
        """The compression of the whole connection."""
        import grpc

        return grpc.Compression.Gzip if self.compression == "gzip" else None

    def checked_for_call(self) -> Transfer:
        """Returns the options if they are valid for one call. Raises `InvalidParamError` for gzip."""
        if self.compression == "gzip":
            raise InvalidParamError(
                "gzip compresses a whole connection: give it to connect; one call can have compression='zstd'"
            )
        return self

    def reader_of(self, kind: type[M]) -> Callable[[bytes], M]:
        """Returns a function that reads an answer and unpacks its tensors.

        Args:
            kind: The type of the answer's message.
        """

        def read(data: bytes) -> M:
            message = kind.FromString(data)
            self.unpack(message)
            return message

        return read

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
