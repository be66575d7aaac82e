"""Tests which programs share the tensor of a variable."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.engine.program import as_array
from gradrule_server.engine.tensor_sources import BlobReader, VariableCache
from gradrule_server.errors import GradruleError
from gradrule_server.link.v1 import link_pb2
from gradrule_server.registry.blobs import folder_name

FIRST, ADA, GRACE = "", folder_name("ada"), folder_name("grace")
VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with empty blob folders of two tenants, in the blob folder of the first tenant."""
    for name in (ADA, GRACE):
        (tmp_path / name).mkdir()
    return tmp_path


def inline() -> link_pb2.BoundVariable:
    return _variable(tensor_pb2.TensorSource(inline_tensor=tensor_codec.to_message(VALUE)))


def blob() -> link_pb2.BoundVariable:
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in VALUE.shape])
    digest = hashlib.sha256(VALUE.tobytes()).hexdigest()
    return _variable(
        tensor_pb2.TensorSource(blob=tensor_pb2.BlobTensor(sha256=digest, dtype=tensor_pb2.DT_FLOAT, shape=shape))
    )


def _variable(value: tensor_pb2.TensorSource) -> link_pb2.BoundVariable:
    return link_pb2.BoundVariable(spec=tensor_pb2.TensorSpec(name="w", dtype=tensor_pb2.DT_FLOAT), value=value)


def write(folder: Path, variable: link_pb2.BoundVariable) -> None:
    if variable.value.HasField("blob"):
        (folder / variable.value.blob.sha256).write_bytes(VALUE.tobytes())


@pytest.mark.parametrize("variable", [inline(), blob()], ids=["inline", "blob"])
def test_programs_of_one_tenant_share_tensors_and_those_of_two_do_not(
    folder: Path, variable: link_pb2.BoundVariable
) -> None:
    cache = VariableCache(BlobReader(folder))
    made = {}
    for name in (FIRST, ADA, GRACE):
        write(folder / name, variable)
        made[name] = cache.tensors([variable], name)[0]
        np.testing.assert_array_equal(made[name].numpy(), VALUE)
    assert len({id(tensor) for tensor in made.values()}) == 3
    assert all(cache.tensors([variable], name)[0] is tensor for name, tensor in made.items())


@pytest.mark.parametrize("name", [FIRST, GRACE])
def test_blob_of_another_tenant_is_not_found(folder: Path, name: str) -> None:
    variable = blob()
    write(folder / ADA, variable)
    cache = VariableCache(BlobReader(folder))
    held = cache.tensors([variable], ADA)
    with pytest.raises(GradruleError) as caught:
        cache.tensors([variable], name)
    assert caught.value.reason == errors_pb2.ERROR_REASON_BLOB_NOT_FOUND
    assert len(held) == 1


_VALUES = np.arange(1, 1001)
_KEPT_DTYPES = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
)


def _kept(dtype: tf.DType, offset: int, *sizes: int) -> link_pb2.BoundVariable:
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in sizes])
    spec = tensor_pb2.TensorSpec(name="c", dtype=dtype.as_datatype_enum, shape=shape)
    return link_pb2.BoundVariable(
        spec=spec, kept=link_pb2.KeptValue(file=".kept-7", offset=offset, sha256=f"{dtype.name} {offset}")
    )


@pytest.mark.parametrize("dtype", _KEPT_DTYPES, ids=lambda dtype: dtype.name)
def test_kept_values_are_those_of_the_file(folder: Path, dtype: tf.DType) -> None:
    values = _VALUES.astype(dtype.as_numpy_dtype)
    (folder / ".kept-7").write_bytes(bytes(64) + values.tobytes())
    cache = VariableCache(BlobReader(folder))
    [tensor] = cache.tensors([_kept(dtype, 64, 10, 100)])
    assert tensor.dtype == dtype
    # Programs go on after the file is removed.
    (folder / ".kept-7").unlink()
    np.testing.assert_array_equal(tensor.numpy(), values.reshape(10, 100))


@pytest.mark.parametrize("size", [(), (1,), (1000,)], ids=str)
def test_values_of_a_blob_have_any_rank(folder: Path, size: tuple[int, ...]) -> None:
    value = np.ones(size, np.float32)
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    (folder / digest).write_bytes(value.tobytes())
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=item) for item in size])
    source = tensor_pb2.BlobTensor(sha256=digest, dtype=tensor_pb2.DT_FLOAT, shape=shape)
    [tensor] = VariableCache(BlobReader(folder)).tensors([_variable(tensor_pb2.TensorSource(blob=source))])
    np.testing.assert_array_equal(tensor.numpy(), value)


@pytest.mark.parametrize("dtype", _KEPT_DTYPES, ids=lambda dtype: dtype.name)
def test_kept_values_are_mapped_once_and_not_copied(folder: Path, dtype: tf.DType) -> None:
    (folder / ".kept-7").write_bytes(_VALUES.astype(dtype.as_numpy_dtype).tobytes() * 128)
    cache = VariableCache(BlobReader(folder))
    first, second = cache.tensors([_kept(dtype, 0, 1000), _kept(dtype, 64000, 1000)])
    addresses = [as_array(tensor).ctypes.data for tensor in (first, second)]
    assert addresses[1] - addresses[0] == 64000
    assert Path("/proc/self/maps").read_text().count(str(folder / ".kept-7")) == 1
    del first, second
    assert str(folder / ".kept-7") not in Path("/proc/self/maps").read_text()


def test_kept_values_take_no_space_for_data(folder: Path) -> None:
    """`--memory-limit` limits that space."""

    def data_bytes() -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
        return int(line.split()[1]) * 1024

    with (folder / ".kept-7").open("wb") as file:
        file.truncate(256 << 20)
    before = data_bytes()
    [tensor] = VariableCache(BlobReader(folder)).tensors([_kept(tf.float32, 0, 64 << 20)])
    assert data_bytes() - before < 64 << 20
    assert tensor.shape == (64 << 20,)


@pytest.mark.parametrize("jit", [False, True])
def test_tensorflow_does_not_write_to_kept_values(folder: Path, jit: bool) -> None:
    """That memory is read-only: writing to it would end the process."""
    values = _VALUES.astype(np.float32).tobytes() * 32
    (folder / ".kept-7").write_bytes(values)

    def read() -> Any:
        """Returns a tensor that nothing else refers to."""
        [tensor] = VariableCache(BlobReader(folder)).tensors([_kept(tf.float32, 0, 32000)])
        return tensor

    double: Any = tf.function(lambda x: tf.reshape(x, [-1, 10]) * 2.0, jit_compile=jit)
    double(read())
    variable: Any = tf.Variable(read())
    add: Any = tf.function(variable.assign_add, jit_compile=jit)
    add(tf.ones(32000))
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=1.0, delta=tf.ones(32000))
    assert (folder / ".kept-7").read_bytes() == values


@pytest.mark.parametrize("name", ["../.kept-7", ".kept-", "kept", "a" * 64])
def test_other_files_are_no_kept_values(folder: Path, name: str) -> None:
    variable = _kept(tf.float32, 0, 1)
    variable.kept.file = name
    with pytest.raises(GradruleError, match="no file of kept values"):
        VariableCache(BlobReader(folder)).tensors([variable])
