"""Builds the smallest graph that needs an op at the top level, in a function, in a nested function and in a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gradrule.common import op_definitions
from gradrule.common.op_definitions import ArgDef, AttrDef, OpDef
from gradrule.v1.graph_pb2 import AttrValue, Function, Graph, NameAttrList, Node
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape

OP = "under_test"
"""Name of the node of the op."""
RESULT = "y"
"""Name of the tensor that needs it."""

_FLOAT = AttrValue(type=Dt.DT_FLOAT)
_IDENTITY, _CONDITION, _EMPTY = "minimal_identity", "minimal_condition", "minimal_empty"


def at_top(op: OpDef, number: int = 0) -> list[Node]:
    """Adds nodes at the top level. `number`: part of all names, so that several ops fit into one graph."""
    return [*_needing(op, number)]


def in_function(op: OpDef, number: int = 0) -> tuple[list[Node], list[Function]]:
    """Calls a function that needs the op."""
    body = _function(f"body_{number}", _needing(op, number), number)
    return [_call(f"{RESULT}{number}", body)], [body]


def in_nested_function(op: OpDef, number: int = 0) -> tuple[list[Node], list[Function]]:
    """Calls a function that calls one that needs the op."""
    inner = _function(f"inner_{number}", _needing(op, number), number)
    outer = _function(f"outer_{number}", [_call(f"{RESULT}{number}", inner)], number, result="output:0")
    return [_call(f"{RESULT}{number}", outer)], [inner, outer]


def in_branch(op: OpDef, number: int = 0) -> tuple[list[Node], list[Function]]:
    """Makes a branch that needs the op."""
    body = _function(f"body_{number}", _needing(op, number), number)
    other = _function(f"other_{number}", [_constant(f"{RESULT}{number}")], number, result="output:0")
    node = Node(name=f"{RESULT}{number}", op="StatelessIf", input=[f"predicate{number}"])
    node.attr["Tcond"].type = Dt.DT_BOOL
    node.attr["Tin"].list.SetInParent()
    node.attr["Tout"].list.type.append(Dt.DT_FLOAT)
    node.attr["then_branch"].func.name = body.signature.name
    node.attr["else_branch"].func.name = other.signature.name
    predicate = Node(name=f"predicate{number}", op="Placeholder", attr={"dtype": AttrValue(type=Dt.DT_BOOL)})
    return [predicate, node], [body, other]


PLACES: Mapping[str, Callable[[OpDef, int], tuple[list[Node], list[Function]]]] = {
    "top": lambda op, number: (at_top(op, number), []),
    "function": in_function,
    "nested_function": in_nested_function,
    "branch": in_branch,
}


def graph_of(ops: Iterable[OpDef], place: str) -> Graph:
    """Returns a graph that needs all the ops; results are `y0`, `y1`, …, nodes end with `under_test0`, …"""
    made = Graph()
    for number, op in enumerate(ops):
        nodes, functions = PLACES[place](op, number)
        made.node.extend(nodes)
        made.library.function.extend(functions)
    made.library.function.extend(_helpers())
    return made


def _needing(op: OpDef, number: int) -> list[Node]:
    """Returns the op's node, its inputs, and a result that depends on it."""
    attrs = {attr.name: _value(attr, op) for attr in op.attrs}
    node = Node(
        name=f"{OP}{number}", op=op.name, attr={name: value for name, value in attrs.items() if value is not None}
    )
    producers: list[Node] = []
    for arg in op.inputs:
        for dtype in _types(arg, attrs):
            name = f"in{number}_{len(producers)}"
            if dtype == Dt.DT_RESOURCE and op.name.startswith("TensorArray"):
                producers += [_constant(f"{name}_size", Dt.DT_INT32), _tensor_array(name)]
            else:
                # The state of a random generator is an integer; all other ops take variables of any type.
                content = Dt.DT_INT64 if op.name.startswith("Rng") else Dt.DT_FLOAT
                producers.append(_producer(name, dtype, content, is_ref=arg.is_ref))
            node.input.append(name)
    waiting = Node(name=f"{RESULT}{number}", op="Identity", input=[f"one{number}", f"^{node.name}"], attr={"T": _FLOAT})
    return [*producers, node, _constant(f"one{number}"), waiting]


def _types(arg: ArgDef, attrs: Mapping[str, AttrValue | None]) -> list[int]:
    def given(name: str) -> AttrValue:
        return attrs[name] or AttrValue()

    if arg.type_list_attr:
        return list(given(arg.type_list_attr).list.type)
    count = given(arg.number_attr).i if arg.number_attr else 1
    return [arg.type or given(arg.type_attr).type] * count


def _value(attr: AttrDef, op: OpDef) -> AttrValue | None:
    if attr.type == "func":
        return AttrValue(func=NameAttrList(name=_function_for(op, attr.name)))
    if attr.type == "list(func)":
        return AttrValue(list=AttrValue.ListValue(func=[NameAttrList(name=_function_for(op, attr.name))]))
    if attr.type == "int" and any(attr.name == arg.number_attr for arg in (*op.inputs, *op.outputs)):
        return AttrValue(i=max(attr.minimum or 0, 1))
    if attr.default is not None:
        return attr.default
    if attr.allowed is not None and attr.type in ("type", "string"):
        allowed = attr.allowed.list
        return AttrValue(type=_preferred(allowed.type)) if allowed.type else AttrValue(s=allowed.s[0])
    several = AttrValue.ListValue
    count = max(attr.minimum or 0, 1)
    types = attr.allowed.list.type if attr.allowed is not None else [Dt.DT_FLOAT]
    scalar = Tensor(dtype=Dt.DT_FLOAT, tensor_shape=TensorShape(), float_val=[1.0])
    makers: Mapping[str, Callable[[], AttrValue]] = {
        "type": lambda: AttrValue(type=Dt.DT_FLOAT),
        "int": lambda: AttrValue(i=attr.minimum or 0),
        "float": lambda: AttrValue(f=1.0),
        "bool": lambda: AttrValue(b=False),
        "string": lambda: AttrValue(s=b"a"),
        "shape": lambda: AttrValue(shape=TensorShape(unknown_rank=True)),
        "tensor": lambda: AttrValue(tensor=scalar),
        "list(type)": lambda: AttrValue(list=several(type=[_preferred(types)] * count)),
        "list(int)": lambda: AttrValue(list=several(i=[1] * max(count, 4))),
        "list(float)": lambda: AttrValue(list=several(f=[1.0] * count)),
        "list(bool)": lambda: AttrValue(list=several(b=[True] * count)),
        "list(string)": lambda: AttrValue(list=several(s=[attr.allowed.list.s[0] if attr.allowed else b"a"] * count)),
        "list(shape)": lambda: AttrValue(list=several(shape=[TensorShape(unknown_rank=True)] * count)),
        "list(tensor)": lambda: AttrValue(list=several(tensor=[scalar] * count)),
    }
    return makers[attr.type]()


def _preferred(types: Iterable[int]) -> int:
    known = list(types)
    return Dt.DT_FLOAT if Dt.DT_FLOAT in known else known[0]


def _producer(name: str, dtype: int, content: int, *, is_ref: bool) -> Node:
    shape = AttrValue(shape=TensorShape(unknown_rank=True))
    if is_ref:
        return Node(name=name, op="VariableV2", attr={"dtype": AttrValue(type=dtype), "shape": shape})
    if dtype == Dt.DT_RESOURCE:
        return Node(name=name, op="VarHandleOp", attr={"dtype": AttrValue(type=content), "shape": shape})
    if dtype == Dt.DT_VARIANT:
        return Node(name=name, op="OptionalNone")
    return _constant(name, dtype)


def _constant(name: str, dtype: int = Dt.DT_FLOAT) -> Node:
    tensor = AttrValue(tensor=Tensor(dtype=dtype, tensor_shape=TensorShape()))
    return Node(name=name, op="Const", attr={"dtype": AttrValue(type=dtype), "value": tensor})


def _tensor_array(name: str) -> Node:
    return Node(name=name, op="TensorArrayV3", input=[f"{name}_size"], attr={"dtype": _FLOAT})


def _call(name: str, function: Function) -> Node:
    node = Node(name=name, op="PartitionedCall")
    node.attr["Tin"].list.SetInParent()
    node.attr["Tout"].list.type.append(Dt.DT_FLOAT)
    node.attr["f"].func.name = function.signature.name
    return node


def _function(name: str, nodes: Iterable[Node], number: int, *, result: str = "") -> Function:
    made = Function(node_def=nodes)
    made.signature.name = name
    made.signature.output_arg.add(name="r", type=Dt.DT_FLOAT)
    made.ret["r"] = f"{RESULT}{number}:{result or 'output:0'}"
    for node in made.node_def:
        for index, source in enumerate(node.input):
            if not source.startswith("^"):
                producer = next(other for other in made.node_def if other.name == source)
                op = op_definitions.find(producer.op)
                assert op is not None
                node.input[index] = f"{source}:{op.outputs[0].name}:0"
    return made


def _function_for(op: OpDef, attr: str) -> str:
    return _CONDITION if attr == "cond" else _EMPTY if op.name.endswith(("If", "Case")) else _IDENTITY


def _helpers() -> list[Function]:
    """Makes the functions that loops, branches and calls under test run."""
    identity = Function(ret={"r": "a"})
    condition = Function(node_def=[_constant("true", Dt.DT_BOOL)])
    condition.ret["r"] = "true:output:0"
    for made, name, result in ((identity, _IDENTITY, Dt.DT_FLOAT), (condition, _CONDITION, Dt.DT_BOOL)):
        made.signature.name = name
        made.signature.input_arg.add(name="a", type=Dt.DT_FLOAT)
        made.signature.output_arg.add(name="r", type=result)
    empty = Function()
    empty.CopyFrom(identity)
    empty.signature.name = _EMPTY
    return [identity, condition, empty]
