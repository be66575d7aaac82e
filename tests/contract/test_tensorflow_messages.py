"""The graph messages have TensorFlow's wire format: field by field, and on graphs that TensorFlow makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tensorflow.core.framework import (
    attr_value_pb2,
    full_type_pb2,
    function_pb2,
    graph_debug_info_pb2,
    node_def_pb2,
    op_def_pb2,
    resource_handle_pb2,
    tensor_shape_pb2,
    types_pb2,
    versions_pb2,
)
from tensorflow.core.framework import (
    graph_pb2 as tf_graph_pb2,
)
from tensorflow.core.framework import (
    tensor_pb2 as tf_tensor_pb2,
)

from gradrule.v1 import graph_pb2, tensor_pb2

MIRRORED: dict[Any, Any] = {
    graph_pb2.Graph: tf_graph_pb2.GraphDef,
    graph_pb2.Versions: versions_pb2.VersionDef,
    graph_pb2.Node: node_def_pb2.NodeDef,
    graph_pb2.AttrValue: attr_value_pb2.AttrValue,
    graph_pb2.NameAttrList: attr_value_pb2.NameAttrList,
    graph_pb2.FunctionLibrary: function_pb2.FunctionDefLibrary,
    graph_pb2.Function: function_pb2.FunctionDef,
    graph_pb2.FunctionGradient: function_pb2.GradientDef,
    graph_pb2.RegisteredGradient: function_pb2.RegisteredGradient,
    graph_pb2.OpSignature: op_def_pb2.OpDef,
    graph_pb2.OpDeprecation: op_def_pb2.OpDeprecation,
    graph_pb2.GraphDebugInfo: graph_debug_info_pb2.GraphDebugInfo,
    graph_pb2.FullType: full_type_pb2.FullTypeDef,
    tensor_pb2.Tensor: tf_tensor_pb2.TensorProto,
    tensor_pb2.TensorShape: tensor_shape_pb2.TensorShapeProto,
    tensor_pb2.VariantTensorData: tf_tensor_pb2.VariantTensorDataProto,
    tensor_pb2.ResourceHandle: resource_handle_pb2.ResourceHandleProto,
}

OWN = {
    "TensorSpec",
    "TensorSource",
    "BlobTensor",
    "SharedMemoryTensor",
    "NamedTensor",
    "SparseTensor",
    "PackedTensor",
    "Packing",
}
"""Messages of tensor.proto that are gradrule's alone."""

OWN_FIELDS = 1000
"""Fields that are gradrule's alone have numbers from here on, far from those that TensorFlow may still give."""


def descriptors(message: Descriptor, mirror: Descriptor) -> list[tuple[Descriptor, Descriptor]]:
    """Iterates over a pair of messages and their nested pairs."""
    pairs = [(message, mirror)]
    assert {nested.name for nested in message.nested_types} == {nested.name for nested in mirror.nested_types}
    for nested in message.nested_types:
        pairs += descriptors(nested, mirror.nested_types_by_name[nested.name])
    return pairs


PAIRS = [pair for ours, theirs in MIRRORED.items() for pair in descriptors(ours.DESCRIPTOR, theirs.DESCRIPTOR)]
NAME_OF = {theirs.full_name: ours.full_name for ours, theirs in PAIRS}


def wire_form(field: FieldDescriptor) -> tuple[Any, ...]:
    """Returns what of a field affects the binary, text or JSON format, with our message names."""
    message = field.message_type
    kind = "enum" if field.enum_type is not None else None
    if message is not None:
        kind = NAME_OF.get(message.full_name, message.full_name)
    oneof = field.containing_oneof.name if field.containing_oneof is not None else None
    packed = bool(field.is_packed)
    return field.number, field.name, field.json_name, field.type, field.is_repeated, packed, kind, oneof


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[ours.full_name for ours, _ in PAIRS])
def test_fields_are_equal(ours: Descriptor, theirs: Descriptor) -> None:
    shared = [field for field in ours.fields if field.number < OWN_FIELDS]
    assert {wire_form(field) for field in shared} == {wire_form(field) for field in theirs.fields}


def test_all_messages_of_the_graph_protos_are_compared() -> None:
    compared = {ours.full_name for ours, _ in PAIRS}
    for file in (graph_pb2.DESCRIPTOR, tensor_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            assert message.full_name in compared or message.name in OWN, message.full_name


def values(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


@pytest.mark.parametrize(
    ("ours", "theirs", "zero"),
    [
        (tensor_pb2.Dt.DESCRIPTOR, types_pb2.DataType.DESCRIPTOR, ("DT_UNSPECIFIED", "DT_INVALID")),
        (graph_pb2.Tft.DESCRIPTOR, full_type_pb2.FullTypeId.DESCRIPTOR, ("TFT_UNSPECIFIED", "TFT_UNSET")),
    ],
)
def test_enum_values_are_equal(ours: EnumDescriptor, theirs: EnumDescriptor, zero: tuple[str, str]) -> None:
    renamed = {zero[1] if name == zero[0] else name: number for name, number in values(ours).items()}
    assert renamed == values(theirs)


def flat() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
    table = tf.constant([[1.0, -2.5], [0.0, float("inf")], [3.0, 1e-30]])
    tf.identity_n([tf.matmul(x, table), tf.constant([b"a\x00", b"b"]), tf.constant([1 + 2j, 3])], name="y")
    tf.constant([1, 2, 3], tf.bfloat16)
    tf.constant([True, False])


@tf.function
def squared(value: Any) -> Any:
    return tf.square(value) + tf.constant(1.0)


def functions() -> None:
    squared(squared(tf.compat.v1.placeholder(tf.float32, [None], name="x")))


def loop() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
    tf.while_loop(lambda i, _: i < 3, lambda i, value: (i + 1, tf.sign(value) * 2.0), [0, x])


def branch() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
    tf.cond(tf.reduce_sum(x) > 0, lambda: squared(x), lambda: -x)


def mapped() -> None:
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    tf.map_fn(lambda row: tf.reduce_sum(tf.sign(row)), x)


def ragged_and_datasets() -> None:
    tf.ragged.constant([[1, 2], [3]]).to_tensor()
    tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()


def silu() -> None:
    tf.nn.silu(tf.compat.v1.placeholder(tf.float32, [None], name="x"))


def keras_model() -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="image")])
    def model(image: Any) -> Any:
        hidden = tf.nn.conv1d(image[:, :, None], tf.ones([3, 1, 2]), 1, "SAME")
        return tf.nn.softmax(tf.nn.relu(hidden))

    return model.get_concrete_function().graph.as_graph_def()


def graph_def(build: Callable[[], Any]) -> Any:
    with tf.Graph().as_default() as graph:
        made = build()
    return graph.as_graph_def() if made is None else made


BUILDS = [flat, functions, loop, branch, mapped, ragged_and_datasets, silu, keras_model]


@pytest.mark.parametrize("build", BUILDS)
def test_binary_format_round_trip(build: Callable[[], Any]) -> None:
    original = graph_def(build)
    ours = graph_pb2.Graph.FromString(original.SerializeToString())
    assert not unknown_fields(ours)
    back = tf_graph_pb2.GraphDef.FromString(ours.SerializeToString())
    assert back == original
    assert len(ours.node) == len(original.node)


@pytest.mark.parametrize("build", BUILDS)
def test_graph_read_back_by_tensorflow_runs(build: Callable[[], Any]) -> None:
    ours = graph_pb2.Graph.FromString(graph_def(build).SerializeToString())
    with tf.Graph().as_default():
        tf.import_graph_def(tf_graph_pb2.GraphDef.FromString(ours.SerializeToString()), name="")


@pytest.mark.parametrize("build", BUILDS)
def test_text_format_round_trip(build: Callable[[], Any]) -> None:
    original = graph_def(build)
    text = text_format.MessageToString(original)
    assert "DT_INVALID" not in text
    ours = text_format.Parse(text, graph_pb2.Graph())
    assert ours == graph_pb2.Graph.FromString(original.SerializeToString())
    assert text_format.Parse(text_format.MessageToString(ours), tf_graph_pb2.GraphDef()) == original


@pytest.mark.parametrize("build", BUILDS)
def test_json_format_round_trip(build: Callable[[], Any]) -> None:
    original = graph_def(build)
    ours = json_format.Parse(json_format.MessageToJson(original), graph_pb2.Graph())
    assert ours == graph_pb2.Graph.FromString(original.SerializeToString())
    assert json_format.Parse(json_format.MessageToJson(ours), tf_graph_pb2.GraphDef()) == original


def unknown_fields(message: Any) -> list[int]:
    """Returns the numbers of unknown fields at any depth."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    fields: Any = UnknownFieldSet(message)
    found = [field.field_number for field in fields]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                found += [number for item in value.values() for number in unknown_fields(item)]
        else:
            found += [number for item in (value if field.is_repeated else [value]) for number in unknown_fields(item)]
    return found


# Field 1007, length-delimited.
UNKNOWN = b"\xfa\x3e\x05later"
NUMBER_OF_UNKNOWN = 1007


@pytest.mark.parametrize("build", [flat, functions, loop])
def test_unknown_fields_survive(build: Callable[[], Any]) -> None:
    original = graph_def(build)
    original.MergeFromString(UNKNOWN)
    original.node[0].MergeFromString(UNKNOWN)
    for function in original.library.function:
        function.signature.MergeFromString(UNKNOWN)
    data = original.SerializeToString()
    ours = graph_pb2.Graph.FromString(data)
    assert set(unknown_fields(ours)) == {NUMBER_OF_UNKNOWN}
    assert len(unknown_fields(ours)) == 2 + len(original.library.function)
    again = tf_graph_pb2.GraphDef.FromString(ours.SerializeToString())
    assert again.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.int8, tf.uint64, tf.complex128, tf.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_round_trip(dtype: Any, shape: tuple[int, ...]) -> None:
    import numpy as np

    from gradrule.common import tensor_codec

    wanted = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.as_numpy_dtype)
    proto = tf.make_tensor_proto(wanted, dtype=dtype, shape=shape)
    ours = tensor_codec.to_numpy(tensor_pb2.Tensor.FromString(proto.SerializeToString()))
    assert ours.dtype == wanted.dtype
    np.testing.assert_array_equal(ours, wanted)
    message = tensor_codec.to_message(wanted)
    theirs = tf_tensor_pb2.TensorProto.FromString(message.SerializeToString())
    np.testing.assert_array_equal(tf.make_ndarray(theirs), wanted)
