"""How tensors travel between a client and its server, as users choose it."""

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
    """How tensors travel: for all calls of a client (`connect`), or for one call. The default sends them as they are.

    compression: `"zstd"`: the contents of tensors of 1 KiB or more, in both directions, where that makes them smaller;
    the engine unpacks and packs. It needs the extra `gradrule[zstd]`. `"gzip"`: all requests, and answers of up to
    256 KiB, by gRPC; it belongs to a connection, so it is given to `connect`. It takes ten times the processor time.
    wire_dtype: `"bfloat16"`: float32 tensors travel as bfloat16, in both directions, rounded to nearest, ties to even.
    That keeps 8 bits of precision of 24 (a relative error of at most 2**-8; values beyond 3.39e38 become infinite) and
    halves the bytes. The program computes in float32. Other element types travel as they are.
    keep_wire_dtype: float32 results that travelled as bfloat16 are given as bfloat16 arrays, not widened to float32.

    Raises `InvalidParamError`, and `UnsupportedError` where the package for zstd is missing.
    """

    compression: Literal["gzip", "zstd"] | None = None
    wire_dtype: Literal["bfloat16"] | None = None
    keep_wire_dtype: bool = False
    packing: Packing | None = field(init=False, repr=False, compare=False)
    """How single tensors are packed; None: they are not."""

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
        """What the metadata of every call says of it."""
        return (ANSWER_COMPRESSION,) if self.compression == "gzip" else ()

    @property
    def grpc_compression(self) -> grpc.Compression | None:
        """The compression of the whole connection."""
        import grpc

        return grpc.Compression.Gzip if self.compression == "gzip" else None

    def of_call(self) -> Transfer:
        """Returns the same, for one call. Raises `InvalidParamError` for what only a connection can have."""
        if self.compression == "gzip":
            raise InvalidParamError(
                "gzip compresses a whole connection: give it to connect; one call can have compression='zstd'"
            )
        return self

    def applied(self, call: Call[R]) -> Call[R]:
        """Returns the call with its tensors packed, and asking for an answer that is.

        The call's request is an `EvaluateRequest` or a `PullBackRequest` that holds all of its tensors.
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
        """Packs the tensors in an `EvaluateRequest` or a `PullBackRequest`, and asks for an answer that is packed."""
        if self.packing is not None:
            self.pack(request)
            request.answer_packing.CopyFrom(self.packing.message())

    def pack(self, request: Message) -> None:
        """Packs the values of a call, where they lie."""
        if self.packing is not None:
            from gradrule.common.tensor_packing import pack_feeds

            pack_feeds(request, self.packing)

    def unpack(self, answer: Message) -> None:
        """Unpacks the tensors in an answer, where they lie. Raises `InvalidTensorError`."""
        if self.packing is not None:
            from gradrule.common.tensor_packing import unpack_all

            try:
                unpack_all(answer, keep_bfloat16=self.keep_wire_dtype)
            except ValueError as cause:
                raise InvalidTensorError(f"the server's answer: {cause}") from None


PLAIN = Transfer()
"""Tensors as they are."""
