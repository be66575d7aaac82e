"""Params of rules: their declaration, and their values to and from messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradrule import _tensors
from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import error

ParamNumber = float | NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A param of a rule. `default` None: every use must give a value. An array broadcasts against x as NumPy does."""

    name: str
    default: ParamNumber | None = None
    description: str = ""


def read_param_value(value: rule_pb2.ParamValue, name: str, field: str) -> ParamNumber:
    """The number, or the tensor as float64. INVALID_PARAM where there is none, or no tensor of real numbers."""
    kind = value.WhichOneof("value")
    if kind == "number":
        return value.number
    if kind is None:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r} holds neither a number nor a tensor", field=field
        )
    try:
        array = _tensors.to_numpy(value.tensor)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r}: {cause}", field=field) from cause
    if array.dtype == object or array.dtype.kind in "cSU":
        raise error(
            errors_pb2.ERROR_REASON_INVALID_PARAM,
            f"param {name!r} is a tensor of {array.dtype.name}, and a param is of a float, int or bool type",
            field=field,
        )
    return array.astype(np.float64)


def write_param_value(value: ParamNumber) -> rule_pb2.ParamValue:
    """The message that `read_param_value` reads."""
    if isinstance(value, np.ndarray):
        return rule_pb2.ParamValue(tensor=_tensors.to_message(value))
    return rule_pb2.ParamValue(number=value)
