"""Inference of attributes and types, held against graphs that TensorFlow made."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import tensorflow as tf

from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import NUMBERS
from gradrule.v1.graph_pb2 import AttrValue, OpSignature

F32, F64, I32, I64, STR, BOOL = (NUMBERS[name] for name in ("float32", "float64", "int32", "int64", "string", "bool"))


def definition(op_type: str) -> op_definitions.OpDef:
    op = op_definitions.find(op_type)
    assert op is not None
    return op


def tensorflow_graph() -> tf.Graph:
    """Fixed, listed, referenced and nested inputs; every way of giving types and lengths."""

    @tf.function
    def inner(v: tf.Tensor) -> tf.Tensor:
        return tf.sign(v) * v

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        d = tf.compat.v1.placeholder(tf.float64, name="d")
        i = tf.compat.v1.placeholder(tf.int64, [3], name="i")
        variable = tf.compat.v1.Variable([1.0, 2.0], use_resource=False)
        resource = tf.Variable([1.0, 2.0])
        tf.concat([x, x, x], 0)
        tf.stack([d, d])
        tf.split(x, 2, axis=1)
        tf.raw_ops.IdentityN(input=[x, i, d])
        tf.cast(x, tf.float64)
        tf.math.top_k(x, 2)
        tf.argmax(x, 0, output_type=tf.int32)
        tf.add_n([x, x])
        tf.unique(i)
        tf.strings.join(["a", "b"])
        tf.gather(x, [0, 1])
        tf.nn.conv2d(tf.zeros([1, 4, 4, 1]), tf.zeros([2, 2, 1, 1]), 1, "SAME")
        tf.compat.v1.assign_add(variable, [1.0, 1.0])
        resource.assign_add([1.0, 1.0])
        tf.raw_ops.Switch(data=x, pred=tf.constant(True))
        tf.raw_ops.Assert(condition=tf.constant(True), data=[x, i])
        tf.linalg.svd(x)
        inner(x)
        tf.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * 2.0), [0, x])
        tf.cond(tf.constant(True), lambda: x, lambda: x + 1.0)
        tf.map_fn(inner, x)
        tf.random.shuffle(x)
        tf.raw_ops.PyFunc(input=[x, i], token="t", Tout=[tf.float32])
        tf.io.parse_tensor(tf.constant(b""), tf.float32)
        tf.raw_ops.FusedBatchNormV3(x=tf.zeros([1, 1, 1, 2]), scale=[1.0, 1.0], offset=[1.0, 1.0], mean=[], variance=[])
    return graph


def test_omitted_attributes_are_inferred() -> None:
    graph = tensorflow_graph()
    seen = set()
    for op in graph.get_operations():
        own = definition(op.type) if op.type in op_definitions.names() else None
        if own is None:
            continue
        seen.add(op.type)
        full = {
            name: AttrValue.FromString(value.SerializeToString())
            for name, value in op.node_def.attr.items()
            if not name.startswith("_")
        }
        from_inputs = {name for arg in own.inputs for name in (arg.type_attr, arg.type_list_attr, arg.number_attr)}
        given = {name: value for name, value in full.items() if name not in from_inputs}
        inputs = [tensor.dtype.as_datatype_enum for tensor in op.inputs]
        completed = op_inference.complete(own, given, inputs)
        assert completed.attrs == full, op.type
        assert list(completed.outputs) == [tensor.dtype.as_datatype_enum for tensor in op.outputs], op.type
        assert set(completed.added) == set(full) - set(given)
        # Nothing to add to what is complete; and a default that is left out is found.
        assert op_inference.complete(own, full, inputs).added == {}
        defaults = {attr.name: attr.default for attr in own.attrs if attr.default is not None}
        rest = {name: value for name, value in full.items() if defaults.get(name) != value}
        assert op_inference.complete(own, rest, inputs).attrs == full, op.type
    assert len(seen) > 35


def test_slices_match_the_named_outputs_of_function_bodies() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def body(x: tf.Tensor) -> tf.Tensor:
        a, b = tf.split(x, 2, axis=1)
        values, indices = tf.math.top_k(a + b, 1)
        first, second = tf.raw_ops.IdentityN(input=[values, indices])
        return first + tf.cast(second, tf.float32)

    nodes = body.get_concrete_function().function_def.node_def
    split, top, both = (definition(name) for name in ("Split", "TopKV2", "IdentityN"))

    def own(op_type: str) -> Mapping[str, AttrValue]:
        node = next(node for node in nodes if node.op == op_type)
        return {name: AttrValue.FromString(value.SerializeToString()) for name, value in node.attr.items()}

    assert op_inference.output_slices(split, own("Split")) == {"output": (0, 2)}
    assert op_inference.output_slices(top, own("TopKV2")) == {"values": (0, 1), "indices": (1, 1)}
    assert op_inference.output_slices(both, own("IdentityN")) == {"output": (0, 2)}
    assert op_inference.input_slices(both, own("IdentityN")) == {"input": (0, 2)}


def test_a_function_of_a_graph_is_an_op() -> None:
    signature = OpSignature(name="f")
    signature.input_arg.add(name="a", type_attr="T")
    signature.input_arg.add(name="b", type_attr="T", number_attr="N")
    signature.output_arg.add(name="r", type_list_attr="Tout")
    for name, kind in (("T", "type"), ("N", "int"), ("Tout", "list(type)")):
        signature.attr.add(name=name, type=kind)
    op = op_definitions.from_signature(signature)
    tout = AttrValue(list=AttrValue.ListValue(type=[F64, I32]))
    completed = op_inference.complete(op, {"Tout": tout}, [F32, F32, F32])
    assert completed.outputs == (F64, I32)
    assert completed.added == {"T": AttrValue(type=F32), "N": AttrValue(i=2)}
    assert (op.name, op.gradient) == ("f", "absent")


@pytest.mark.parametrize(
    ("op_type", "attrs", "inputs", "kind", "says"),
    [
        ("MatMul", {}, [F32], "TYPE_MISMATCH", "a, b"),
        ("MatMul", {}, [F32, F64], "TYPE_MISMATCH", "input 1 (b) of MatMul is float64, not float32"),
        ("MatMul", {}, [STR, STR], "TYPE_MISMATCH", "cannot be string"),
        ("Sqrt", {"T": AttrValue(type=F64)}, [F32], "TYPE_MISMATCH", "is float32, not float64"),
        ("LogicalNot", {}, [F32], "TYPE_MISMATCH", "is float32, not bool"),
        ("Sqrt", {"T": AttrValue(type=I32)}, [I32], "INVALID_ATTR", "cannot be int32; allowed: "),
        ("Sqrt", {"T": AttrValue(i=1)}, [F32], "INVALID_ATTR", "'T' is a type, not an int"),
        ("Sqrt", {"T": AttrValue()}, [F32], "INVALID_ATTR", "not set"),
        ("Sqrt", {"T": AttrValue(type=0)}, [F32], "INVALID_ATTR", "not set"),
        ("Sqrt", {"U": AttrValue(type=F32)}, [F32], "INVALID_ATTR", "no attribute 'U'; it has: T"),
        ("Cast", {}, [F32], "INVALID_ATTR", "'DstT', which does not follow"),
        ("Conv2D", {"strides": AttrValue(i=1)}, [F32, F32], "INVALID_ATTR", "list(int)"),
        (
            "Conv2D",
            {"padding": AttrValue(s=b"FULL")},
            [F32, F32],
            "INVALID_ATTR",
            "cannot be 'FULL'; allowed: 'EXPLICIT'",
        ),
        ("Pack", {"N": AttrValue(i=3)}, [F32, F32], "TYPE_MISMATCH", "N says 3; 2 are given"),
        ("Pack", {}, [], "TYPE_MISMATCH", "at least 1"),
        ("Pack", {"N": AttrValue(i=0)}, [], "INVALID_ATTR", "minimum is 1"),
        ("Concat", {}, [F32, F32, F32], "TYPE_MISMATCH", "input 0 (concat_dim) of Concat is float32, not int32"),
        ("Assign", {}, [F32, F32], "TYPE_MISMATCH", "a reference"),
        (
            "IdentityN",
            {"T": AttrValue(list=AttrValue.ListValue(type=[F32, I32]))},
            [F32, F32],
            "TYPE_MISMATCH",
            "int32",
        ),
        ("Conv2D", {"strides": AttrValue(list=AttrValue.ListValue(s=[b"1"]))}, [F32] * 2, "INVALID_ATTR", "list of s"),
        ("ParseExample", {}, [STR] * 5, "INVALID_ATTR", "do not follow"),
    ],
)
def test_refusals(op_type: str, attrs: dict[str, AttrValue], inputs: list[int], kind: str, says: str) -> None:
    with pytest.raises(op_inference.InferenceError) as caught:
        op_inference.complete(definition(op_type), attrs, inputs)
    assert (caught.value.kind, says in caught.value.message) == (kind, True), caught.value.message


def test_references_fit_their_base_type() -> None:
    assert op_inference.complete(definition("Assign"), {}, [F32 + 100, F32]).outputs == (F32 + 100,)
    assert op_inference.complete(definition("Neg"), {}, [F32 + 100]).outputs == (F32,)


def test_unknown_types_raise_nothing_further() -> None:
    assert op_inference.complete(definition("Sqrt"), {}, [0]).outputs == (0,)
    assert op_inference.complete(definition("Add"), {}, [0, F32]).outputs == (F32,)
    assert op_inference.complete(definition("IdentityN"), {}, [0, F32]).outputs == (0,)
    assert op_inference.complete(definition("Sqrt"), {"T": AttrValue(placeholder="T")}, [0]).outputs == (0,)
