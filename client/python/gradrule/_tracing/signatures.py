"""Converts argument specs to TensorFlow's, and names the inputs and outputs of a traced graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule._builder.graph import Graph
from gradrule._builder.names import bare
from gradrule._builder.specs import TensorSpec
from gradrule._tracing import tf_private
from gradrule.common import tensor_codec
from gradrule.common.dtypes import NUMBERS
from gradrule.errors import InvalidTensorError

_SPARSE_PARTS = ("indices", "values", "dense_shape")


def as_specs(given: Any, where: str) -> Any:
    """Converts each `(dtype, shape)`, `gr.TensorSpec` and example array in a structure to a `tf.TypeSpec`.

    Args:
        given: The structure.
        where: Name of the structure in errors.

    Raises:
        InvalidTensorError: A value is not a spec.
    """
    if isinstance(given, TensorSpec):
        return tf.TensorSpec(given.shape, _dtype(given.dtype, where))
    if isinstance(given, tf.TypeSpec):
        return given
    if isinstance(given, tf.Tensor | tf.Variable):
        return tf.TensorSpec(given.shape, given.dtype)
    if isinstance(given, tf.SparseTensor | tf.RaggedTensor):
        return tf.type_spec_from_value(given)
    if isinstance(given, np.ndarray | np.generic):
        return tf.TensorSpec(given.shape, tf.as_dtype(given.dtype))
    if _is_pair(given):
        return tf.TensorSpec(given[1], _dtype(given[0], where))
    if isinstance(given, Mapping):
        return {key: as_specs(value, f"{where}[{key!r}]") for key, value in given.items()}
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        parts = zip(given._fields, given, strict=True)
        return type(given)(*(as_specs(value, f"{where}.{name}") for name, value in parts))
    if isinstance(given, list | tuple):
        return type(given)(as_specs(value, f"{where}[{index}]") for index, value in enumerate(given))
    if _is_dtype(given):
        name = _dtype(given, where).name
        raise InvalidTensorError(
            f"{where} is the dtype {name!r} without a shape; write ({name!r}, shape), where None is an unknown size or "
            "shape. A function that takes the dtype itself needs functools.partial"
        )
    if isinstance(given, bool | int | float | complex | str | bytes | None) or callable(given):
        return given
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return tf.TensorSpec(tuple(given.shape), _dtype(given.dtype, where))
    raise InvalidTensorError(
        f"{where} is {type(given).__name__}; expected a tf.TensorSpec, gr.TensorSpec, (dtype, shape) or an array"
    )


def leaf_names(name: str, structure: Any) -> list[tuple[str, Any]]:
    """Returns (name, tensor) for the tensors in a structure: `name`, `name_0`, `name_key`, …; skips other values."""
    found = []
    for path, leaf in tf_private.flat_with_paths(structure):
        if isinstance(leaf, tf.Tensor | tf.TensorSpec):
            found.append(("_".join([name, *_words(path)]) if name else "_".join(_words(path)), leaf))
    return found


def node_name(requested: str) -> str:
    """Returns the name without characters that a node's name must not contain."""
    name = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", requested)
    return name if re.match(r"[A-Za-z0-9.]", name) else f"n{name}"


def _words(path: tuple[Any, ...]) -> list[str]:
    """Returns the words of a path; replaces a composite type and the index of its part by the part's name."""
    words = []
    composite = ""
    for step in path:
        if step in ("SparseTensor", "SparseTensorSpec", "RaggedTensor", "RaggedTensorSpec"):
            composite = str(step)
        elif composite.startswith("Sparse"):
            words.append(_SPARSE_PARTS[step])
        elif composite:
            words.append("values" if step == 0 else "row_splits")
        else:
            words.append(str(step))
    return words


def _is_dtype(given: Any) -> bool:
    """Returns whether the value names or is an element type; other strings and functions are passed to the function."""
    if isinstance(given, str):
        return given in NUMBERS
    is_scalar = isinstance(given, type) and issubclass(given, np.generic | float | int)
    return is_scalar or isinstance(given, np.dtype | tf.DType)


def _is_pair(given: Any) -> bool:
    """Returns whether the value is `(dtype, shape)` and not a tuple of two specs."""
    if not isinstance(given, tuple) or len(given) != 2 or hasattr(given, "_fields"):
        return False
    dtype, shape = given
    if not isinstance(shape, list | tuple | tf.TensorShape | None):
        return False
    if isinstance(shape, list | tuple) and not all(
        size is None or isinstance(size, int | np.integer) for size in shape
    ):
        return False
    return isinstance(dtype, str | type | np.dtype | tf.DType)


def _dtype(dtype: Any, where: str) -> tf.DType:
    try:
        return tf.as_dtype(tensor_codec.dtype_number(dtype))
    except (ValueError, TypeError) as cause:
        raise InvalidTensorError(f"{where}: {cause}") from None


def add_aliases(graph: Graph, inputs: Mapping[str, str], outputs: Iterable[tuple[str, str]]) -> None:
    """Adds aliases for a graph's inputs and outputs.

    A name must refer to the same tensor in feeds and in fetches. An output whose name belongs to another tensor that is
    an input or variable therefore gets the alias `output_NAME`.

    Args:
        graph: The graph to change.
        inputs: Names of tensors by alias.
        outputs: Pairs of alias and name of the tensor.
    """
    taken = {spec.name: bare(spec.name) for spec in graph.inputs.values()}
    taken |= {name: bare(name) for name in graph.variables}
    for alias, tensor in inputs.items():
        taken[alias] = bare(tensor)
        if alias != bare(tensor):
            graph.aliases[alias] = bare(tensor)
    requested = list(outputs)
    reserved = {alias for alias, _ in requested}
    for alias, tensor in requested:
        if taken.get(alias, bare(tensor)) != bare(tensor):
            alias = f"output_{alias}"
            while alias in taken or alias in reserved:
                alias += "_"
        if alias != bare(tensor):
            graph.aliases[alias] = bare(tensor)
        taken[alias] = bare(tensor)
