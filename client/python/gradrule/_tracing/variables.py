"""Collects the captures of a traced function: variables, constants, and resources that cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from gradrule._tracing import tf_private
from gradrule._tracing.bodies import Library
from gradrule.common.tensor_codec import Array
from gradrule.errors import Detail, UnsupportedError


@dataclass(eq=False, slots=True)
class Variable:
    """Holds a variable: requested or final name, value, and static shape."""

    name: str
    value: Array
    dtype: int
    shape: Any
    trainable: bool = True
    is_named: bool = False

    def take_name(self, name: str) -> str:
        """Sets the final name."""
        self.name, self.is_named = name, True
        return name

    def write(self, node: node_def_pb2.NodeDef) -> None:
        """Writes the attributes of the variable's node."""
        node.attr["dtype"].type = self.dtype
        node.attr["shape"].shape.CopyFrom(self.shape)
        node.attr["shared_name"].s = self.name.encode()
        node.attr["container"].s = b""


def split_captures(captured: Mapping[str, Any], library: Library) -> tuple[dict[str, Variable], dict[str, Any]]:
    """Returns variables and constants by top-level argument. Raises `UnsupportedError` for other captures."""
    known = _known_variables(library)
    made: dict[Any, Variable] = {}
    variables: dict[str, Variable] = {}
    constants: dict[str, Any] = {}
    refused: list[Detail] = []
    for argument, tensor in captured.items():
        if not tf_private.is_eager(tensor):
            message = f"it captures the tensor {tensor.name!r} of another graph; pass it as an argument"
            refused.append(Detail(UnsupportedError.REASON, message, node=tensor.name))
        elif tensor.dtype not in (tf.resource, tf.variant):
            constants[argument] = tensor
        else:
            key = tf_private.identity_of(tensor)
            try:
                if key not in made:
                    name, trainable = known.get(key, (argument, True))
                    made[key] = _variable(tensor, name, trainable)
                variables[argument] = made[key]
            except _NotVariableError as cause:
                refused.append(Detail(UnsupportedError.REASON, _refusal(library, argument, str(cause)), node=argument))
    if refused:
        raise UnsupportedError(refused[0].message, details=refused)
    return variables, constants


class _NotVariableError(Exception):
    """Describes a resource without a value."""


def _variable(handle: Any, name: str, trainable: bool) -> Variable:
    data = None if handle.dtype != tf.resource else tf_private.handle_data(handle)
    if data is None or len(data) != 1:
        raise _NotVariableError("it is no variable")
    try:
        value = tf_private.read_variable(handle, tf.as_dtype(data[0].dtype))
    except tf.errors.OpError:
        raise _NotVariableError("it is a variable without a value") from None
    return Variable(name, value, data[0].dtype, data[0].shape, trainable)


def _known_variables(library: Library) -> dict[Any, tuple[str, bool]]:
    """Returns the names of the function graphs' variables, and whether they are trainable, by handle.

    Keras names them by their paths.
    """
    found = {}
    for body in library.bodies.values():
        for variable in getattr(body.graph, "variables", ()):
            if tf_private.is_eager(variable.handle):
                name = variable.name.removesuffix(":0")
                found[tf_private.identity_of(variable.handle)] = name, bool(variable.trainable)
    return found


def _refusal(library: Library, argument: str, why: str) -> str:
    users = [f"{node.op} node {node.name!r}" for node in library.root.definition.node_def if argument in node.input]
    return (
        f"the function uses the resource {argument!r} ({', '.join(users) or 'unused'}), which cannot travel: {why}. "
        "Remove this part from the function and feed its result"
    )
