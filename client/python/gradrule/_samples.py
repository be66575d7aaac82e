"""A rule and values for its variables, as a request of SampleRule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradrule import _opdefs
from gradrule._attrs import attr_of_op, natural
from gradrule._opdefs import ArgDef, OpDef
from gradrule._requests import is_array, tensor_message
from gradrule._rules import Rule, param_value
from gradrule.errors import InvalidRuleError, InvalidTensorError
from gradrule.v1 import rule_pb2, tensor_pb2
from gradrule.v1.tensor_pb2 import Dt

_INPUT_OR_OUTPUT = re.compile(r"([xy])(\d*)")


def sample_request(
    rule: Any,
    values: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    op_type: str | None,
    attrs: Mapping[str, Any] | None = None,
) -> rule_pb2.SampleRuleRequest:
    """The request. `values` by the language's variable names; None entries drop out."""
    request = rule_pb2.SampleRuleRequest(op_type=op_type or "")
    if isinstance(rule, str):
        request.name = rule
    elif isinstance(rule, Rule):
        request.definition.CopyFrom(rule.definition(params or ()))
    else:
        raise InvalidRuleError(f"a rule to sample is its name or a gr.Rule, not {type(rule).__name__}")
    # A rule that is an op's own gradient is named as the op is.
    op = _opdefs.find(op_type or (rule if isinstance(rule, str) else ""))
    for name, value in values.items():
        if value is not None:
            message = tensor_message(value, _wanted_type(name, value, op), name)
            request.values.append(tensor_pb2.NamedTensor(name=name, value=tensor_pb2.TensorSource(inline=message)))
    for name, value in (params or {}).items():
        request.params[name].CopyFrom(param_value(name, value))
    for name, value in (attrs or {}).items():
        request.attrs[name].CopyFrom(attr_of_op(op_type or "", name, value, f"attrs[{name!r}]"))
    return request


def _wanted_type(name: str, value: Any, op: OpDef | None) -> int:
    """float32 for Python's numbers, which rules compute with, save where the op takes no floats; 0: the value's own."""
    if is_array(value):
        return 0
    try:
        if natural(value).dtype.kind not in "iu":
            return 0
    except ValueError as cause:
        raise InvalidTensorError(f"{name}: {cause}") from None
    match = _INPUT_OR_OUTPUT.fullmatch(name)
    if op is not None and match is not None:
        args = op.inputs if match[1] == "x" else op.outputs
        if not _takes_floats(op, args, int(match[2] or 0)):
            return 0
    return Dt.DT_FLOAT


def _takes_floats(op: OpDef, args: Sequence[ArgDef], index: int) -> bool:
    # Past an argument of many tensors the positions follow from the values; lists mostly hold what is computed with.
    if index >= len(args) or any(arg.number_attr or arg.type_list_attr for arg in args[: index + 1]):
        return True
    arg = args[index]
    if not arg.type_attr:
        return arg.type == Dt.DT_FLOAT
    allowed = next(attr.allowed for attr in op.attrs if attr.name == arg.type_attr)
    return allowed is None or Dt.DT_FLOAT in allowed.list.type
