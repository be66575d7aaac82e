"""Tests how the values of large constants are moved out of graphs, in every encoding."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gradrule.v1.graph_pb2 import AttrValue, Graph, NameAttrList, Node
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server import graphs
from gradrule_server.errors import GradruleError
from gradrule_server.graphs.ir import CONTENT_ATTR
from tests.unit.graphs.helpers import call, function, graph, node, placeholder

_COUNT = 5000
_RANDOM = np.random.default_rng(0)
_LIMITS = graphs.Limits()


def _bytes(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Returns TensorFlow's own encoding, values in tensor_content."""
    return Tensor.FromString(tf.make_tensor_proto(array).SerializeToString())


def _shape(*sizes: int) -> TensorShape:
    return TensorShape(dim=[TensorShape.Dim(size=size) for size in sizes])


def _constant(tensor: Tensor, name: str = "c") -> Node:
    return node(name, "Const", dtype=AttrValue(type=tensor.dtype), value=AttrValue(tensor=tensor))


def _move(of: Graph, limits: graphs.Limits = _LIMITS) -> tuple[Graph, graphs.Contents]:
    found = graphs.Contents()
    return graphs.move_constants(of, limits, found), found


def _listed(dtype: Dt.ValueType, field: str, values: Any) -> Tensor:
    return Tensor(dtype=dtype, tensor_shape=_shape(_COUNT), **{field: values})


_FLOATS = _RANDOM.normal(size=_COUNT)
_INTS = _RANDOM.integers(0, 120, size=_COUNT)
_HALVES = _FLOATS.astype(np.float16)
_BFLOATS = _FLOATS.astype(ml_dtypes.bfloat16)
_COMPLEX = (_FLOATS + 1j * _FLOATS[::-1]).astype(np.complex64)

_LISTED: dict[str, tuple[Tensor, npt.NDArray[Any]]] = {
    "float": (_listed(Dt.DT_FLOAT, "float_val", _FLOATS.astype(np.float32)), _FLOATS.astype(np.float32)),
    "double": (_listed(Dt.DT_DOUBLE, "double_val", _FLOATS), _FLOATS),
    "half": (_listed(Dt.DT_HALF, "half_val", _HALVES.view(np.uint16)), _HALVES),
    "bfloat16": (_listed(Dt.DT_BFLOAT16, "half_val", _BFLOATS.view(np.uint16)), _BFLOATS),
    "complex64": (_listed(Dt.DT_COMPLEX64, "scomplex_val", _COMPLEX.view(np.float32)), _COMPLEX),
    "complex128": (
        _listed(Dt.DT_COMPLEX128, "dcomplex_val", _COMPLEX.astype(np.complex128).view(np.float64)),
        _COMPLEX.astype(np.complex128),
    ),
    "uint8": (_listed(Dt.DT_UINT8, "int_val", 2 + _INTS), (2 + _INTS).astype(np.uint8)),
    "int16": (_listed(Dt.DT_INT16, "int_val", _INTS - 60), (_INTS - 60).astype(np.int16)),
    "uint64": (_listed(Dt.DT_UINT64, "uint64_val", _INTS), _INTS.astype(np.uint64)),
}


@pytest.mark.parametrize("case", _LISTED)
def test_listed_values_become_the_bytes_of_tensor_content(case: str) -> None:
    """The numbers of the list are NumPy's; so two encodings of equal values are one content."""
    listed, array = _LISTED[case]
    found, contents = _move(graph(_constant(listed), _constant(_tensor(array), "d")))
    digests = [item.attr[CONTENT_ATTR].s.decode() for item in found.node]
    assert digests == [hashlib.sha256(_bytes(array)).hexdigest()] * 2
    assert contents.values(digests[0]) == _bytes(array)
    assert contents.size == array.nbytes
    assert found.ByteSize() < 600


def test_the_last_listed_value_fills_the_rest() -> None:
    listed = Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(3000), float_val=_FLOATS[:2000])
    found, contents = _move(graph(_constant(listed)))
    expected = np.concatenate([_FLOATS[:2000], np.full(1000, _FLOATS[1999])]).astype(np.float32)
    assert contents.values(found.node[0].attr[CONTENT_ATTR].s.decode()) == _bytes(expected)


@pytest.mark.parametrize(
    "tensor",
    [
        # One value for many is a small message.
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(1 << 20), float_val=[1.0]),
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(1 << 20)),
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(1 << 20), float_val=_FLOATS[:2000]),
        # Small.
        _tensor(np.zeros(1000, np.float32) + _FLOATS[:1000].astype(np.float32)),
        # Sizes and axes are read while a program is built.
        _tensor(np.arange(8000, dtype=np.int32)),
        _tensor(np.array(["x" * 5000, "y"])),
        _tensor(_FLOATS > 0),
        # Not valid.
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(3000), tensor_content=bytes(11_999)),
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(3000), float_val=_FLOATS),
        Tensor(dtype=Dt.DT_FLOAT, tensor_shape=_shape(-1, -3000), tensor_content=bytes(12_000)),
    ],
)
def test_other_constants_stay(tensor: Tensor) -> None:
    before = graph(_constant(tensor))
    kept = before.SerializeToString(deterministic=True)
    found, contents = _move(before)
    assert found.SerializeToString(deterministic=True) == kept
    assert contents.size == 0


def test_large_indices_are_moved() -> None:
    array = np.arange(20_000, dtype=np.int64)
    found, contents = _move(graph(_constant(_tensor(array))))
    assert contents.values(found.node[0].attr[CONTENT_ATTR].s.decode()) == _bytes(array)


def test_values_beyond_the_limit_stay() -> None:
    tensors = [_tensor(_RANDOM.normal(size=4096)) for _ in range(3)]
    of = graph(*(_constant(tensor, f"c{number}") for number, tensor in enumerate(tensors)))
    found, contents = _move(of, graphs.Limits(graph_bytes=80_000))
    assert [CONTENT_ATTR in item.attr for item in found.node] == [True, True, False]
    assert contents.size <= 80_000


def test_parts_join_to_the_content_and_a_moved_content_reads_the_same() -> None:
    arrays = [_RANDOM.normal(size=size) for size in (1001, 2000, 1333)]
    contents = graphs.Contents()
    digests = [contents.add(array.tobytes()) for array in arrays]
    whole = b"".join(contents.parts(1000))
    assert len(whole) == contents.size
    name = contents.name
    contents.move_to(memoryview(whole))
    for digest, array in zip(digests, arrays, strict=True):
        start = contents.offset(digest)
        assert start % 64 == 0
        assert whole[start : start + array.nbytes] == contents.values(digest) == array.tobytes()
    assert b"".join(contents.parts(1000)) == whole
    assert contents.name == name


def test_a_client_cannot_name_values() -> None:
    sent = _constant(_tensor(np.float32([1.0, 2.0])))
    sent.attr[CONTENT_ATTR].s = b"ab" * 32
    found, contents = _move(graph(sent))
    assert CONTENT_ATTR not in found.node[0].attr
    assert contents.size == 0


_WEIGHTS = _RANDOM.normal(size=2000).astype(np.float32)


def _expand(of: Graph, *fetches: str, limits: graphs.Limits = _LIMITS, **request: Any) -> graphs.Expanded:
    found, contents = _move(of, limits)
    made = graphs.ExpandRequest(fetches=list(fetches), **request)
    return graphs.expand(graphs.ReadGraph(found, contents), made, limits)


def _float(name: str, op: str, *inputs: str) -> Node:
    return node(name, op, *inputs, T=AttrValue(type=Dt.DT_FLOAT))


def test_a_moved_constant_becomes_an_input_of_its_shape() -> None:
    expanded = _expand(graph(placeholder(), _constant(_tensor(_WEIGHTS)), _float("y", "Mul", "x", "c")), "y")
    written = {item.name: item for item in graphs.parse(expanded.graph_bytes).node}
    assert written["c"].op == "Placeholder"
    assert [dim.size for dim in written["c"].attr["shape"].shape.dim] == [2000]
    assert CONTENT_ATTR not in written["c"].attr
    [constant] = expanded.constants
    assert (constant.spec.name, constant.spec.dtype) == ("c", Dt.DT_FLOAT)
    assert constant.kept.sha256 == hashlib.sha256(_WEIGHTS.tobytes()).hexdigest()
    # Calls neither see nor feed it.
    assert [item.name for item in expanded.inputs] == expanded.placeholders == ["x"]


def test_a_constant_that_no_result_needs_is_no_input() -> None:
    expanded = _expand(graph(placeholder(), _constant(_tensor(_WEIGHTS)), _float("y", "Neg", "x")), "y")
    assert not expanded.constants


def test_nodes_for_which_a_constant_waits_still_run() -> None:
    constant = _constant(_tensor(_WEIGHTS))
    constant.input.append("^before")
    expanded = _expand(graph(placeholder(), _float("before", "Neg", "x"), constant, _float("y", "Neg", "c")), "y")
    written = {item.name: item for item in graphs.parse(expanded.graph_bytes).node}
    item = expanded.constants[0].spec
    assert written["c"].op == "Identity"
    assert list(written["c"].input) == [item.name, "^before"]
    assert written[item.name].op == "Placeholder"


def test_a_constant_of_a_called_function_is_an_input_for_each_call() -> None:
    body = function("f", ["a"], {"r": "m:z:0"}, [_constant(_tensor(_WEIGHTS)), _float("m", "Mul", "a", "c:output:0")])
    of = graph(placeholder(), call("one", "f", "x"), call("two", "f", "one"), functions=[body])
    expanded = _expand(of, "two", limits=graphs.Limits(inlined_bytes=1000))
    assert [item.spec.name for item in expanded.constants] == ["one/c", "two/c"]
    assert len({item.kept.sha256 for item in expanded.constants}) == 1


def _branches(count: int) -> Graph:
    body = function("f", ["a"], {"r": "m:z:0"}, [_constant(_tensor(_WEIGHTS)), _float("m", "Mul", "a", "c:output:0")])
    types = AttrValue(list=AttrValue.ListValue(type=[Dt.DT_FLOAT]))
    functions = dict.fromkeys(("then_branch", "else_branch"), AttrValue(func=NameAttrList(name="f")))
    attrs = {"Tcond": AttrValue(type=Dt.DT_BOOL), "Tin": types, "Tout": types, **functions}
    nodes = [node(f"y{number}", "StatelessIf", "p", "x", **attrs) for number in range(count)]
    return graph(placeholder(), placeholder("p", Dt.DT_BOOL), *nodes, functions=[body])


def test_a_constant_of_a_branch_has_its_values() -> None:
    expanded = _expand(_branches(1), "y0")
    assert not expanded.constants
    for body in graphs.parse(expanded.graph_bytes).library.function:
        [constant] = [item for item in body.node_def if item.op == "Const"]
        assert constant.attr["value"].tensor.tensor_content == _WEIGHTS.tobytes()


def test_copies_of_constants_in_branches_are_limited() -> None:
    with pytest.raises(GradruleError, match="--max-inlined-bytes"):
        _expand(_branches(4), *(f"y{number}" for number in range(4)), limits=graphs.Limits(inlined_bytes=50_000))


def test_expansions_of_one_graph_do_not_change_it() -> None:
    """Ten requests in random order give the bytes that a graph which is read for each of them gives."""
    body = function("f", ["a"], {"r": "m:z:0"}, [_constant(_tensor(_WEIGHTS)), _float("m", "Mul", "a", "c:output:0")])
    of = graph(
        placeholder(),
        _constant(_tensor(_WEIGHTS), "w"),
        call("one", "f", "x"),
        _float("scaled", "Mul", "one", "w"),
        call("two", "f", "scaled"),
        _float("y", "Neg", "two"),
        functions=[body],
    )
    data = of.SerializeToString()
    found, contents = _move(graphs.parse(data))
    shared = graphs.ReadGraph(found, contents)
    wanted = [
        {"fetches": ["y"]},
        {"fetches": ["scaled"], "fed": ["one"]},
        {"fetches": [], "ys": ["y"], "xs": ["x"]},
        {"fetches": ["two"], "ys": ["y"], "xs": ["w"]},
        {"fetches": [], "ys": ["two"], "xs": ["one"], "stop_gradients": ["scaled"]},
    ]
    for index in _RANDOM.permutation(10):
        request = graphs.ExpandRequest(**wanted[index % len(wanted)])
        assert graphs.expand(shared, request) == graphs.expand(graphs.ReadGraph(*_move(graphs.parse(data))), request)
