"""What code rules share: refusing a site, and the type that they calculate in."""

from __future__ import annotations

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.site import Gradient, Site
from gradrule_server.errors import GradruleError, error

_HALF_TYPES = (tf.float16, tf.bfloat16)


def not_applicable(site: Site, rule: str, meant_for: str) -> GradruleError:
    """The refusal of a site: `meant_for` says what the rule is for."""
    return error(
        errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
        f"rule {rule!r} cannot be used on node {site.node!r} ({site.what}): it is for {meant_for}",
        node=site.node,
    )


def require_elementwise(site: Site, rule: str) -> None:
    """Refuses a site that has not one input and one output of compatible shapes."""
    if (
        len(site.inputs) != 1
        or len(site.outputs) != 1
        or not site.inputs[0].shape.is_compatible_with(site.outputs[0].shape)
    ):
        raise not_applicable(site, rule, "elementwise ops with one input, such as Relu")


def wide(dtype: tf.DType) -> tf.DType:
    """float32 for the 16-bit types, whose quotients and squares overflow or round to nothing; else the type itself."""
    return tf.float32 if dtype in _HALF_TYPES else dtype


def dense(gradient: Gradient) -> tf.Tensor | None:
    """An op's own gradient without slices."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
