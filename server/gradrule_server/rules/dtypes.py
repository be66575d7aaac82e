"""Lists the element types (`Dt` numbers) that rules support: differentiable types, names and NumPy types."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from gradrule.common import dtypes
from gradrule.v1 import tensor_pb2

Dt = tensor_pb2.Dt

FLOATS = frozenset({Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE})
COMPLEX = frozenset({Dt.DT_COMPLEX64, Dt.DT_COMPLEX128})
DIFFERENTIABLE: frozenset[int] = frozenset(FLOATS | COMPLEX)

# Integer types with kernels for arithmetic. Other integers must be cast first.
INTEGERS = frozenset({Dt.DT_INT32, Dt.DT_INT64})

REAL_PART: Mapping[int, int] = {Dt.DT_COMPLEX64: Dt.DT_FLOAT, Dt.DT_COMPLEX128: Dt.DT_DOUBLE}

_NAMES: Mapping[int, str] = {
    Dt.DT_HALF: "float16",
    Dt.DT_BFLOAT16: "bfloat16",
    Dt.DT_FLOAT: "float32",
    Dt.DT_DOUBLE: "float64",
    Dt.DT_COMPLEX64: "complex64",
    Dt.DT_COMPLEX128: "complex128",
    Dt.DT_INT8: "int8",
    Dt.DT_INT16: "int16",
    Dt.DT_INT32: "int32",
    Dt.DT_INT64: "int64",
    Dt.DT_UINT8: "uint8",
    Dt.DT_UINT16: "uint16",
    Dt.DT_UINT32: "uint32",
    Dt.DT_UINT64: "uint64",
    Dt.DT_BOOL: "bool",
}

dtype_name = dtypes.dtype_name

# Types that expressions can name.
BY_NAME: Mapping[str, int] = {name: dtype for dtype, name in _NAMES.items()}

NUMPY: Mapping[int, np.dtype[np.generic]] = {
    dtype: np.dtype(ml_dtypes.bfloat16) if dtype == Dt.DT_BFLOAT16 else np.dtype(name) for dtype, name in _NAMES.items()
}
