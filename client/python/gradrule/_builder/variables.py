"""Stores the values of a graph's variables and writes them into requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from gradrule._builder import blob_values
from gradrule._builder.array_values import is_array
from gradrule._builder.node_arguments import tensorflow_array
from gradrule._builder.notebook_text import names_text, short_repr
from gradrule.common import tensor_codec
from gradrule.errors import InvalidTensorError
from gradrule.v1 import tensor_pb2


class Variables(MutableMapping[str, tensor_codec.Array]):
    """Maps variable names to read-only arrays; assign a new array to change a value.

    Writable arrays are copied; read-only arrays are stored without a copy. Lists and numbers are converted to the
    variable's element type.
    """

    def __init__(self, type_of: Callable[[str], int]) -> None:
        self._type_of = type_of
        self._arrays: dict[str, tensor_codec.Array] = {}
        # Cache of SHA-256 and bytes per array.
        self._blobs: dict[str, tuple[str, blob_values.Data]] = {}

    def __getitem__(self, name: str) -> tensor_codec.Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        number = self._type_of(name)
        try:
            if is_array(value) or not number:
                array = tensorflow_array(value)
                tensor_codec.number_of_array(array)
            else:
                array = tensor_codec.from_value(value, number)
        except ValueError as cause:
            raise InvalidTensorError(f"variable {name!r}: {cause}") from None
        if array.flags.writeable:
            array = array.copy()
            array.setflags(write=False)
        self._arrays[name] = array
        self._blobs.pop(name, None)

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]
        self._blobs.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return short_repr(f"<Variables {names_text(sorted(self._arrays))}>")

    def messages(self, blobs: blob_values.Blobs | None) -> Iterator[tensor_pb2.NamedTensor]:
        """Yields the values as messages of a request.

        Args:
            blobs: Receives the bytes of large values by SHA-256; their messages then hold only the hash. None: all
                messages hold the values themselves.
        """
        for name, array in self._arrays.items():
            number = tensor_codec.number_of_array(array)
            if blobs is None or array.nbytes <= blob_values.MAX_INLINE_VALUE or number == tensor_pb2.DT_STRING:
                value = tensor_pb2.TensorSource(inline_tensor=tensor_codec.to_message(array))
            else:
                if name not in self._blobs:
                    data = blob_values.data_of(array)
                    self._blobs[name] = blob_values.digest(data), data
                sha256, blobs[self._blobs[name][0]] = self._blobs[name]
                value = blob_values.source(sha256, number, array.shape)
            yield tensor_pb2.NamedTensor(name=name, value=value)
