"""Builds requests of SampleRule from a rule and values of its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradrule._builder.array_values import is_array
from gradrule._builder.node_arguments import attr_of_op, tensorflow_array
from gradrule._builder.rules import Rule, named_or_rule, param_value
from gradrule._messages.feed_values import tensor_message
from gradrule.common import op_definitions
from gradrule.common.op_definitions import ArgDef, OpDef
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
    """Returns the request.

    Args:
        rule: a rule's name, a formula, or a `gr.Rule`.
        values: numbers or arrays by variable (`x`, `y1`, `dy`, …); None entries are left out.
        params: values of the rule's params.
        op_type: op type whose gradient the rule replaces.
        attrs: attributes of a node of that op type.

    Raises:
        InvalidRuleError, InvalidTensorError, InvalidParamError, InvalidAttrError: an argument has a wrong type.
    """
    request = rule_pb2.SampleRuleRequest(op_type=op_type or "")
    rule = named_or_rule(rule)
    if isinstance(rule, str):
        request.name = rule
    elif isinstance(rule, Rule):
        request.definition.CopyFrom(rule.definition(params or ()))
    else:
        raise InvalidRuleError(f"a rule to sample is its name, a formula or a gr.Rule, not {type(rule).__name__}")
    # An OP rule, TensorFlow's gradient of an op, has the name of the op.
    op = op_definitions.find(op_type or (rule if isinstance(rule, str) else ""))
    for name, value in values.items():
        if value is not None:
            message = tensor_message(value, _default_type(name, value, op), name)
            request.values.append(
                tensor_pb2.NamedTensor(name=name, value=tensor_pb2.TensorSource(inline_tensor=message))
            )
    for name, value in (params or {}).items():
        request.params[name].CopyFrom(param_value(name, value))
    for name, value in (attrs or {}).items():
        request.attrs[name].CopyFrom(attr_of_op(op_type or "", name, value, f"attrs[{name!r}]"))
    return request


def _default_type(name: str, value: Any, op: OpDef | None) -> int:
    """Returns float32 for Python's integers if the op accepts floats at this position, else 0: the value's own type."""
    if is_array(value):
        return 0
    try:
        if tensorflow_array(value).dtype.kind not in "iu":
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
    # After a list argument, positions depend on the values; lists are assumed to accept floats.
    if index >= len(args) or any(arg.number_attr or arg.type_list_attr for arg in args[: index + 1]):
        return True
    arg = args[index]
    if not arg.type_attr:
        return arg.type == Dt.DT_FLOAT
    allowed = next(attr.allowed for attr in op.attrs if attr.name == arg.type_attr)
    return allowed is None or Dt.DT_FLOAT in allowed.list.type
