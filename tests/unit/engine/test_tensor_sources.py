"""Tests which programs share the tensor of a variable."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, tensor_pb2
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
