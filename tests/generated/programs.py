"""Random graphs: calls in one another with several results, loops, branches, layers, steps, casts, two-output nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradrule.common import op_definitions
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue, NameAttrList
from gradrule.v1.tensor_pb2 import Dt, TensorShape

EXAMPLES, SIZE = 2, 2
SHAPE = (EXAMPLES, SIZE)
UNARY = ("Tanh", "Sigmoid", "Relu", "Sin", "Square", "Neg", "Abs", "Sign", "Floor", "Identity")
WEIGHTS = (5, 3, 4, 4, 2, 2, 2, 2, 1, 1)
BINARY = ("AddV2", "Sub", "Mul", "Maximum")
EXACT = ("Neg", "Abs", "Relu", "Sign", "Identity")
"""Ops that give the same in float32 wherever they run."""
MAX_DEPTH = 2


@dataclass
class Block:
    """A function or the top level, while it grows. vectors: float64 tensors of `SHAPE`, as nodes refer to them."""

    nodes: Any
    is_function: bool
    vectors: list[str] = field(default_factory=list)

    def add(self, op: str, name: str, inputs: Sequence[str], **attrs: AttrValue) -> list[str]:
        """Adds a node; returns how others refer to its outputs."""
        node = self.nodes.add(name=name, op=op)
        node.input.extend(inputs)
        for key, value in attrs.items():
            node.attr[key].CopyFrom(value)
        count = len(attrs["T"].list.type) if op == "IdentityN" else 1
        if op in ("StatelessWhile", "StatelessIf", "StatelessCase", "PartitionedCall"):
            count = len(attrs["T" if op == "StatelessWhile" else "Tout"].list.type)
        if not self.is_function:
            return [name, *(f"{name}:{index}" for index in range(1, count))]
        definition = op_definitions.find(op)
        assert definition is not None
        return [f"{name}:{definition.outputs[0].name}:{index}" for index in range(count)]


def types(*dtypes: int) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(type=dtypes))


def type_of(dtype: int) -> AttrValue:
    return AttrValue(type=dtype)


def generate(rng: random.Random, constructs: int) -> graph_pb2.Graph:
    """A graph with the placeholders x, w (vectors) and k (int32); its top level holds some constructs."""
    return _Generator(rng).graph(constructs)


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._graph = graph_pb2.Graph()
        self._graph.versions.producer = op_definitions.graph_version()
        self._count = 0
        # Functions of two vectors that calls may share: name, number of results, depth of what is in them.
        self._shared: list[tuple[str, int, int]] = []

    def graph(self, constructs: int) -> graph_pb2.Graph:
        top = Block(self._graph.node, False)
        shape = AttrValue(shape=TensorShape(dim=[TensorShape.Dim(size=size) for size in SHAPE]))
        for name in ("x", "w"):
            top.vectors += top.add("Placeholder", name, [], dtype=type_of(Dt.DT_DOUBLE), shape=shape)
        scalar = AttrValue(shape=TensorShape())
        top.add("Placeholder", "k", [], dtype=type_of(Dt.DT_INT32), shape=scalar)
        self._fill(top, 0, constructs, "k")
        return self._graph

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _pick(self, block: Block) -> str:
        """A vector; the latest ones are picked most often."""
        latest = block.vectors[-4:]
        return self._rng.choice(latest + latest + block.vectors)

    def _fill(self, block: Block, depth: int, constructs: int, k: str) -> None:
        kinds = ["construct"] * constructs + ["op"] * self._rng.randint(1, 3 if depth else 4)
        self._rng.shuffle(kinds)
        for kind in kinds:
            if kind == "construct":
                made = self._rng.choices([self._call, self._branch, self._loop], [5, 3, 2])[0](block, depth, k)
            else:
                made = self._op(block)
            block.vectors += made
        if depth == 0:
            block.vectors += block.add("Tanh", "y", [self._join(block)], T=type_of(Dt.DT_DOUBLE))

    def _join(self, block: Block) -> str:
        """A vector that depends on most of what nothing has used so far."""
        used = {text for node in block.nodes for text in node.input}
        unused = [vector for vector in block.vectors if vector not in used]
        joined, *others = self._rng.sample(unused, min(len(unused), 4))
        for other in others:
            op = self._rng.choice(["AddV2", "AddV2", "Sub", "Mul"])
            joined = block.add(op, self._name("op"), [joined, other], T=type_of(Dt.DT_DOUBLE))[0]
        return joined

    def _op(self, block: Block) -> list[str]:
        rng = self._rng
        makers = [
            self._unary,
            self._binary,
            self._dense,
            self._step,
            self._narrow,
            self._integer,
            self._stop,
            self._pair,
        ]
        return rng.choices(makers, [40, 20, 9, 12, 5, 3, 3, 5])[0](block)

    def _unary(self, block: Block) -> list[str]:
        op = self._rng.choices(UNARY, WEIGHTS)[0]
        return block.add(op, self._name("op"), [self._pick(block)], T=type_of(Dt.DT_DOUBLE))

    def _binary(self, block: Block) -> list[str]:
        second = self._constant(block, SHAPE) if self._rng.random() < 0.2 else self._pick(block)
        op = self._rng.choice(BINARY)
        return block.add(op, self._name("op"), [self._pick(block), second], T=type_of(Dt.DT_DOUBLE))

    def _constant(self, block: Block, shape: tuple[int, ...], value: Any = None, dtype: Any = Dt.DT_DOUBLE) -> str:
        if value is None:
            value = np.array([self._rng.gauss(0, 1) for _ in range(int(np.prod(shape)))]).reshape(shape)
        tensor = AttrValue()
        tensor.tensor.dtype = dtype
        tensor.tensor.tensor_shape.SetInParent()
        for size in shape:
            tensor.tensor.tensor_shape.dim.add(size=size)
        tensor.tensor.tensor_content = value.tobytes()
        return block.add("Const", self._name("const"), [], value=tensor, dtype=type_of(dtype))[0]

    def _dense(self, block: Block) -> list[str]:
        """MatMul and BiasAdd."""
        weights, bias = self._constant(block, (SIZE, SIZE)), self._constant(block, (SIZE,))
        double = type_of(Dt.DT_DOUBLE)
        product = block.add("MatMul", self._name("op"), [self._pick(block), weights], T=double)
        return block.add("BiasAdd", self._name("op"), [*product, bias], T=double)

    def _step(self, block: Block) -> list[str]:
        """Greater and Cast."""
        threshold = self._constant(block, SHAPE) if self._rng.random() < 0.5 else self._pick(block)
        double = type_of(Dt.DT_DOUBLE)
        fired = block.add("Greater", self._name("op"), [self._pick(block), threshold], T=double)
        return block.add("Cast", self._name("op"), fired, SrcT=type_of(Dt.DT_BOOL), DstT=double)

    def _through(self, block: Block, dtype: int, op: str) -> list[str]:
        double, other = type_of(Dt.DT_DOUBLE), type_of(dtype)
        narrow = block.add("Cast", self._name("op"), [self._pick(block)], SrcT=double, DstT=other)
        inner = block.add(op, self._name("op"), narrow, T=other)
        return block.add("Cast", self._name("op"), inner, SrcT=other, DstT=double)

    def _narrow(self, block: Block) -> list[str]:
        return self._through(block, Dt.DT_FLOAT, self._rng.choice(EXACT))

    def _integer(self, block: Block) -> list[str]:
        return self._through(block, Dt.DT_INT32, "Neg")

    def _stop(self, block: Block) -> list[str]:
        return block.add("StopGradient", self._name("op"), [self._pick(block)], T=type_of(Dt.DT_DOUBLE))

    def _pair(self, block: Block) -> list[str]:
        """A node with two outputs."""
        inputs = [self._pick(block), self._pick(block)]
        return block.add("IdentityN", self._name("op"), inputs, T=types(Dt.DT_DOUBLE, Dt.DT_DOUBLE))

    def _function(
        self, kind: str, args: Sequence[tuple[str, int]], depth: int, results: int
    ) -> tuple[str, Any, list[str]]:
        """A function; returns its name, its definition and its results, which are vectors."""
        function = self._graph.library.function.add()
        name = f"{kind}_{len(self._graph.library.function)}"
        function.signature.name = name
        for arg, dtype in args:
            function.signature.input_arg.add(name=arg, type=dtype)
        block = Block(function.node_def, True, [arg for arg, dtype in args if dtype == Dt.DT_DOUBLE])
        before = len(block.vectors)
        k = [arg for arg, dtype in args if dtype == Dt.DT_INT32][-1]
        self._fill(block, depth, 0 if depth >= MAX_DEPTH else self._rng.choice([0, 0, 1]), k)
        made = block.vectors[before:]
        found = []
        for index in range(results):
            first = made[-1 - index] if index < len(made) else self._pick(block)
            op = self._rng.choice(["Tanh", "Sin"])
            found += block.add(op, self._name("op"), [first], T=type_of(Dt.DT_DOUBLE))
        return name, function, found

    def _vectors(self, block: Block, count: int) -> list[str]:
        """Different vectors."""
        while len(set(block.vectors)) < count:
            block.vectors += self._unary(block)
        return self._rng.sample(list(dict.fromkeys(block.vectors)), count)

    def _call(self, block: Block, depth: int, k: str) -> list[str]:
        rng = self._rng
        fitting = [item for item in self._shared if depth + item[2] <= MAX_DEPTH]
        if fitting and rng.random() < 0.4:
            name, results, _ = rng.choice(fitting)
        else:
            results = rng.choice([1, 1, 2])
            args = [
                (self._name("arg"), Dt.DT_DOUBLE),
                (self._name("arg"), Dt.DT_DOUBLE),
                (self._name("arg"), Dt.DT_INT32),
            ]
            name, function, found = self._function("fun", args, depth + 1, results)
            self._return(function, [(ref, Dt.DT_DOUBLE) for ref in found])
            self._shared.append((name, results, MAX_DEPTH - depth))
        inputs = self._vectors(block, 2)
        attrs = {"Tin": types(Dt.DT_DOUBLE, Dt.DT_DOUBLE, Dt.DT_INT32), "Tout": types(*[Dt.DT_DOUBLE] * results)}
        return block.add("PartitionedCall", self._name("call"), [*inputs, k], f=_named(name), **attrs)

    def _return(self, function: Any, results: Sequence[tuple[str, int]]) -> None:
        for index, (ref, dtype) in enumerate(results):
            function.signature.output_arg.add(name=f"out{index}", type=dtype)
            function.ret[f"out{index}"] = ref

    def _branch(self, block: Block, depth: int, k: str) -> list[str]:
        rng = self._rng
        inputs, results = self._vectors(block, rng.randint(1, 2)), rng.choice([1, 1, 2])
        is_case = rng.random() < 0.4
        count = rng.randint(2, 3) if is_case else 2
        names = []
        # Branches of one name for the same op are what makes names ambiguous.
        first = last = self._count
        for _ in range(count):
            self._count = first if rng.random() < 0.5 else last
            args = [(self._name("arg"), Dt.DT_DOUBLE) for _ in inputs]
            name, function, found = self._function(
                "branch", [*args, (self._name("arg"), Dt.DT_INT32)], depth + 1, results
            )
            self._return(function, [(ref, Dt.DT_DOUBLE) for ref in found])
            names.append(name)
            last = max(last, self._count)
        self._count = last
        attrs = {
            "Tin": types(*[Dt.DT_DOUBLE] * len(inputs), Dt.DT_INT32),
            "Tout": types(*[Dt.DT_DOUBLE] * results),
            "output_shapes": AttrValue(list=AttrValue.ListValue(shape=[_vector_shape()] * results)),
        }
        if is_case:
            branches = AttrValue(list=AttrValue.ListValue(func=[NameAttrList(name=name) for name in names]))
            return block.add("StatelessCase", self._name("fork"), [k, *inputs, k], branches=branches, **attrs)
        one = self._constant(block, (), np.array(1, np.int32), Dt.DT_INT32)
        chosen = block.add("Greater", self._name("test"), [k, one], T=type_of(Dt.DT_INT32))
        attrs |= {"Tcond": type_of(Dt.DT_BOOL), "then_branch": _named(names[0]), "else_branch": _named(names[1])}
        return block.add("StatelessIf", self._name("fork"), [*chosen, *inputs, k], **attrs)

    def _loop(self, block: Block, depth: int, k: str) -> list[str]:
        """Makes k turns. TensorFlow's gradient wants a counter and the largest number of turns as the first inputs."""
        rng = self._rng
        states = self._vectors(block, rng.randint(1, 2))
        start, most = (self._constant(block, (), np.array(value, np.int32), Dt.DT_INT32) for value in (0, -1))
        dtypes = [Dt.DT_INT32, Dt.DT_INT32, *[Dt.DT_DOUBLE] * len(states), Dt.DT_INT32]
        cond = self._graph.library.function.add()
        cond.signature.name = f"cond_{len(self._graph.library.function)}"
        names = [self._name("arg") for _ in dtypes]
        for arg, dtype in zip(names, dtypes, strict=True):
            cond.signature.input_arg.add(name=arg, type=dtype)
        test = Block(cond.node_def, True).add("Less", self._name("test"), [names[0], names[-1]], T=type_of(Dt.DT_INT32))
        self._return(cond, [(test[0], Dt.DT_BOOL)])
        args = [(self._name("arg"), dtype) for dtype in dtypes]
        name, function, found = self._function("body", args, depth + 1, len(states))
        inner = Block(function.node_def, True)
        one = self._constant(inner, (), np.array(1, np.int32), Dt.DT_INT32)
        after = inner.add("AddV2", self._name("count"), [args[0][0], one], T=type_of(Dt.DT_INT32))
        results = [(after[0], Dt.DT_INT32), (args[1][0], Dt.DT_INT32)]
        results += [*((ref, Dt.DT_DOUBLE) for ref in found), (args[-1][0], Dt.DT_INT32)]
        self._return(function, results)
        shapes = [TensorShape(), TensorShape(), *[_vector_shape()] * len(states), TensorShape()]
        made = block.add(
            "StatelessWhile",
            self._name("loop"),
            [start, most, *states, k],
            T=types(*dtypes),
            cond=_named(cond.signature.name),
            body=_named(name),
            output_shapes=AttrValue(list=AttrValue.ListValue(shape=shapes)),
            parallel_iterations=AttrValue(i=10),
            _num_original_outputs=AttrValue(i=len(dtypes)),
        )
        return made[2:-1]


def _named(name: str) -> AttrValue:
    return AttrValue(func=NameAttrList(name=name))


def _vector_shape() -> TensorShape:
    return TensorShape(dim=[TensorShape.Dim(size=size) for size in SHAPE])
