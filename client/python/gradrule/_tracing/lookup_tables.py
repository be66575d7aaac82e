"""Replaces lookup tables by functions of constants.

A graph cannot hold a table, but it can hold a table's keys and values. The lookup is a function of ordinary ops: a
binary search in the sorted keys; strings are searched by their hash, and the string that is found is compared. An edge
with a table's handle becomes an edge with the number of the table's entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from gradrule._builder.frozen_variables import TopLevel, Value, ValueCopies
from gradrule._tracing import tf_private
from gradrule.common.tensor_codec import Array
from gradrule.errors import UnsupportedError

TABLE_OPS = frozenset(
    f"{kind}{version}"
    for kind in ("HashTable", "MutableHashTable", "MutableHashTableOfTensors", "MutableDenseHashTable")
    for version in ("", "V2")
)
"""Ops of graphs of TensorFlow 1 whose output is a table's handle."""

Content: TypeAlias = tuple[Array, Array]

_FIND = {"LookupTableFind", "LookupTableFindV2"}
_SIZE = {"LookupTableSize", "LookupTableSizeV2"}
_EXPORT = {"LookupTableExport", "LookupTableExportV2"}

_NO_CONTENT = "it is a lookup table without content; initialize it, or adapt the layer that contains it"
_BUCKETS = 2**63 - 1


class NotTableError(Exception):
    """Describes a resource that is no lookup table with entries."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Describes a lookup table.

    Attributes:
        name: Its name in errors.
        size: Number of its entries.
        export: Returns keys and values, given their types.
    """

    name: str
    size: int
    export: Callable[[tf.DType, tf.DType], Content]

    def content(self, key_type: tf.DType, value_type: tf.DType) -> Content:
        """Returns keys `[entries]` and values `[entries, …]`.

        Raises:
            UnsupportedError: The table has other types, or its keys cannot be told from free places.
        """
        try:
            keys, values = self.export(key_type, value_type)
        except tf.errors.OpError as cause:
            raise UnsupportedError(f"the lookup table {self.name!r} cannot be read: {cause.message}") from cause
        if len(keys) != self.size or keys.ndim != 1:
            raise UnsupportedError(
                f"the lookup table {self.name!r} is a DenseHashTable, whose entries cannot be read; use a "
                "tf.lookup.StaticHashTable or tf.lookup.experimental.MutableHashTable"
            )
        return keys, values


def eager_table(handle: Any, name: str) -> Table:
    """Returns the table of an eager handle. Raises `NotTableError`."""

    def export(key_type: tf.DType, value_type: tf.DType) -> Content:
        with tf.init_scope():
            found = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=key_type, Tvalues=value_type)
            return found.keys.numpy(), found.values.numpy()

    try:
        with tf.init_scope():
            return Table(name, int(tf.raw_ops.LookupTableSizeV2(table_handle=handle)), export)
    except tf.errors.FailedPreconditionError:
        raise NotTableError(_NO_CONTENT) from None
    except tf.errors.OpError:
        raise NotTableError("it is no variable and no lookup table") from None


def session_table(session: Any, handle: Any, name: str) -> Table:
    """Returns the table of a handle in a graph of TensorFlow 1. Raises `UnsupportedError`."""
    is_reference = handle.dtype != tf.resource
    size = tf.raw_ops.LookupTableSize if is_reference else tf.raw_ops.LookupTableSizeV2
    exported = tf.raw_ops.LookupTableExport if is_reference else tf.raw_ops.LookupTableExportV2

    def export(key_type: tf.DType, value_type: tf.DType) -> Content:
        with handle.graph.as_default():
            keys, values = session.run(exported(table_handle=handle, Tkeys=key_type, Tvalues=value_type))
            return keys, values

    try:
        with handle.graph.as_default():
            return Table(name, int(session.run(size(table_handle=handle))), export)
    except tf.errors.FailedPreconditionError:
        raise UnsupportedError(f"the lookup table {name!r} cannot be sent: {_NO_CONTENT}") from None


def replace_tables(
    nodes: Any,
    definitions: dict[str, function_pb2.FunctionDef],
    gradients: dict[str, str],
    tables: Mapping[str, Table],
) -> None:
    """Replaces all uses of tables in a graph.

    Args:
        nodes: The nodes of the graph's top level, which are changed.
        definitions: The graph's functions by name; gets new functions.
        gradients: Gradient functions by registered name.
        tables: Tables by the name of the top-level node that is their handle; the node becomes a constant.

    Raises:
        UnsupportedError: The graph changes a table, or uses it in another way.
    """
    reading = _Reading(definitions)
    readers = {
        **dict.fromkeys(_FIND, reading.find),
        **dict.fromkeys(_SIZE, reading.size),
        **dict.fromkeys(_EXPORT, reading.export),
    }
    values = {}
    for node in nodes:
        table = tables.get(node.name)
        if table is not None:
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = tf.int64.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(table.size, tf.int64))
            values[node.name] = Value(tf.int64.as_datatype_enum, table, "lookup table")
    ValueCopies(definitions, gradients, reading.unique, readers).take_values_in(TopLevel(nodes), values)
    used = {text.removeprefix("^").partition(":")[0] for node in nodes for text in node.input}
    for node in [node for node in nodes if node.name in tables and node.name not in used]:
        nodes.remove(node)


class _Reading:
    """Replaces the ops that read tables; makes one function for each table."""

    def __init__(self, definitions: dict[str, function_pb2.FunctionDef]) -> None:
        self._definitions = definitions
        self._made: dict[tuple[str, Table], str] = {}

    def unique(self, requested: str) -> str:
        """Returns a name that no other function has."""
        names = itertools.chain([requested], (f"{requested}_{number}" for number in itertools.count(1)))
        return next(name for name in names if name not in self._definitions)

    def find(self, body: Any, node: node_def_pb2.NodeDef, value: Value) -> None:
        """Replaces a lookup by a call of a function that takes the keys and the default value."""
        key_type, value_type = tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type)
        function = self._function("find", value.resource, _find, key_type, value_type, takes_arguments=True)
        _call(node, function, [key_type, value_type], [value_type])
        del node.input[0]
        _take_results(body, node, ["values"])

    def size(self, body: Any, node: node_def_pb2.NodeDef, value: Value) -> None:
        """Replaces the number of entries by what the edge carries."""
        _reset(node, "Identity")
        node.attr["T"].type = value.dtype
        _take_results(body, node, ["size"])

    def export(self, body: Any, node: node_def_pb2.NodeDef, value: Value) -> None:
        """Replaces all keys and values by a call of a function that returns constants."""
        key_type, value_type = tf.as_dtype(node.attr["Tkeys"].type), tf.as_dtype(node.attr["Tvalues"].type)
        function = self._function("export", value.resource, _entries, key_type, value_type, takes_arguments=False)
        _call(node, function, [], [key_type, value_type])
        del node.input[0]
        _take_results(body, node, ["keys", "values"])

    def _function(
        self,
        what: str,
        table: Table,
        build: Callable[..., list[Any]],
        key_type: tf.DType,
        value_type: tf.DType,
        *,
        takes_arguments: bool,
    ) -> str:
        if (what, table) not in self._made:
            content = table.content(key_type, value_type)
            graph = tf_private.FuncGraph(f"lookup_table_{what}")
            with graph.as_default():
                if takes_arguments:
                    keys = tf.compat.v1.placeholder(key_type, name="keys")
                    graph.inputs = [keys, tf.compat.v1.placeholder(value_type, name="default_value")]
                graph.outputs = [tf.identity(output) for output in build(content, *graph.inputs)]
            name = self._made[what, table] = self.unique(f"lookup_table_{what}")
            self._definitions[name] = tf_private.definition_of(graph, name)
            self._definitions[name].signature.name = name
        return self._made[what, table]


def _find(content: Content, keys: Any, default_value: Any) -> list[Any]:
    """Returns the values of keys, or the default value for keys that the table does not have."""
    known, values = content
    # As in TensorFlow, a lookup has no gradient.
    default_value = tf.stop_gradient(default_value)
    if not len(known):
        return [tf.broadcast_to(default_value, tf.concat([tf.shape(keys), values.shape[1:]], 0))]
    codes, code = _codes(known)
    order = np.argsort(codes, kind="stable")
    wanted = tf.reshape(code(keys), [1, -1])
    places = tf.raw_ops.LowerBound(sorted_inputs=codes[order][None], values=wanted, out_type=tf.int32)
    rows = tf.minimum(tf.reshape(places, tf.shape(keys)), len(known) - 1)
    is_known = tf.equal(tf.gather(tf.constant(known[order], keys.dtype), rows), keys)
    for _ in values.shape[1:]:
        is_known = is_known[..., None]
    return [tf.where(is_known, tf.gather(tf.constant(values[order], default_value.dtype), rows), default_value)]


def _entries(content: Content) -> list[Any]:
    return [tf.constant(array) for array in content]


def _codes(known: Array) -> tuple[Array, Callable[[Any], Any]]:
    """Returns a number for each key, all different, and the function that computes it in a graph."""
    if known.dtype != object:
        return known, tf.identity
    for seed in itertools.count():
        key = [seed, seed]

        def code(keys: Any, key: list[int] = key) -> Any:
            return tf.strings.to_hash_bucket_strong(keys, _BUCKETS, key)

        # A session of its own runs inside of another graph too.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            codes = session.run(code(tf.constant(known)))
        # Two strings may have one hash; another key of the hash function separates them.
        if len(np.unique(codes)) == len(codes):
            return codes, code
    raise AssertionError("there is always another key")


def _call(node: node_def_pb2.NodeDef, function: str, given: list[tf.DType], returned: list[tf.DType]) -> None:
    _reset(node, "PartitionedCall")
    node.attr["f"].func.name = function
    node.attr["Tin"].list.type.extend(dtype.as_datatype_enum for dtype in given)
    node.attr["Tout"].list.type.extend(dtype.as_datatype_enum for dtype in returned)
    node.attr["Tin"].list.SetInParent()


def _reset(node: node_def_pb2.NodeDef, op_type: str) -> None:
    """Changes a node's op; keeps only the shapes of its outputs, which stay the same."""
    node.op = op_type
    for name in set(node.attr) - {"_output_shapes"}:
        del node.attr[name]


def _take_results(body: Any, node: node_def_pb2.NodeDef, slots: list[str]) -> None:
    """Changes references to a node's old outputs in a function; at the top level, outputs have no names."""
    if isinstance(body, TopLevel):
        return
    names = {f"{node.name}:{slot}:0": f"{node.name}:output:{index}" for index, slot in enumerate(slots)}
    for user in body.node_def:
        for index, text in enumerate(user.input):
            user.input[index] = names.get(text, text)
    for result in list(body.ret):
        body.ret[result] = names.get(body.ret[result], body.ret[result])
