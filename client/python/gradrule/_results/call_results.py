"""Holds the results of calls: outputs, gradients, resolved overrides and timings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradrule._builder.by_name import ByName
from gradrule._builder.names import bare
from gradrule._builder.tensor_specs import TensorSpec
from gradrule._results.answers import Answer, AnswerReader, labeller, labels
from gradrule.common.tensor_codec import Array, to_numpy
from gradrule.errors import InvalidTensorError
from gradrule.v1 import evaluate_pb2, override_pb2, tensor_pb2

V = TypeVar("V")

Groups: TypeAlias = "Mapping[str, list[str]] | None"
"""Names of xs by group; None: no groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A gradient that is nonzero only in some slices along axis 0. Slices that share an index add up.

    values: (n, …). indices: (n). dense_shape: (rank).
    """

    values: Array
    indices: Array
    dense_shape: Array

    def to_dense(self) -> Array:
        """The whole gradient, of shape `dense_shape`."""
        dense: Array = np.zeros(tuple(int(size) for size in self.dense_shape), self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """`to_dense`, for NumPy's functions."""
        if copy is False:
            raise ValueError("a sparse gradient becomes an array only as a copy")
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which rule a node got.

    node: nested ones as `call/inner`. rule: its name, `default`, or `inline`. label: the override's.
    status: `active`, `off_path` or `not_differentiable`. function: the function that the node lies in, or empty.
    nodes: all nodes of a pattern or region; empty for a single node. With label `no_gradient` the rule is what the
    policy of that name did.
    """

    node: str
    op_type: str
    rule: str
    label: str
    status: str
    function: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds."""

    queue: float
    compile: float
    run: float


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 in hex, of the graph's bytes and of the program."""

    graph: str
    program: str


@dataclass(frozen=True, slots=True)
class ProgramDetails:
    """What is known of a program before its answers come.

    aliases: names of tensors in the result. The rest was in the answer to CompileProgram, so that later answers
    leave it out; None: it is in the answer.
    """

    aliases: Mapping[str, str] | None = None
    overrides: Sequence[Resolution] | None = None
    default_gradient_nodes: Sequence[str] | None = None
    rewritten: Sequence[str] | None = None


class Result:
    """What an evaluation gives. Each part is read from the answer when it is used first.

    outputs: arrays by fetch. gradients: by x (by group and x, where xs were given in groups) an array, a `Sparse`, or
    None where there is none; `gradient_kinds` tells why, by x: `dense`, `sparse`, `unconnected`, `not_differentiable`.
    overrides: which node got which rule. default_gradient_nodes: nodes on the path that no override took; they keep
    TensorFlow's gradient. rewritten: nodes that rewrites replaced. batch_size: examples of all calls that the server
    ran together, this one's included; 0: it ran alone. jit: whether XLA computed it.
    """

    def __init__(self, answer: Answer, details: ProgramDetails, groups: Groups = None) -> None:
        self._answer = answer
        self._details = details
        self._groups = groups

    @cached_property
    def outputs(self) -> Mapping[str, Array]:
        found = {name: place.array(self._answer) for name, place in self._answer.layout.outputs.items()}
        return ByName(found, self._details.aliases)

    @cached_property
    def gradients(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for x, place in self._answer.layout.gradients.items():
            tensors = [tensor.array(self._answer) for tensor in place.tensors]
            found[x] = Sparse(*tensors) if place.kind == "sparse" else tensors[0] if tensors else None
        return regrouped(ByName(found, self._details.aliases), self._groups)

    @cached_property
    def gradient_kinds(self) -> Mapping[str, str]:
        return ByName(self._answer.layout.kinds, self._details.aliases)

    @cached_property
    def overrides(self) -> list[Resolution]:
        overrides = self._details.overrides
        return resolutions(self._answer.rest.overrides) if overrides is None else list(overrides)

    @cached_property
    def default_gradient_nodes(self) -> list[str]:
        nodes = self._details.default_gradient_nodes
        return list(self._answer.rest.default_gradient_nodes if nodes is None else nodes)

    @cached_property
    def rewritten(self) -> list[str]:
        return list(self._answer.rest.rewritten if self._details.rewritten is None else self._details.rewritten)

    @cached_property
    def timings(self) -> Timings:
        return timings(self._answer.rest.timings)

    @cached_property
    def device(self) -> str:
        return self._answer.rest.device

    @cached_property
    def batch_size(self) -> int:
        return self._answer.rest.batch_size

    @cached_property
    def jit(self) -> bool:
        return self._answer.rest.jit

    @cached_property
    def digests(self) -> Digests:
        return Digests(self._answer.rest.digests.graph, self._answer.rest.digests.program)

    def __repr__(self) -> str:
        names = (
            "outputs",
            "gradients",
            "overrides",
            "default_gradient_nodes",
            "timings",
            "device",
            "digests",
            "rewritten",
        )
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def gradients_by_x(
    messages: Iterable[evaluate_pb2.Gradient], aliases: Mapping[str, str] | None = None
) -> ByName[Array | Sparse | None]:
    """Gradients; None where there is none. aliases: names of tensors in the result."""
    given = labels(aliases)
    found: ByName[Array | Sparse | None] = ByName(aliases=aliases)
    for gradient in messages:
        x = given.get(bare(gradient.x), gradient.x)
        match gradient.WhichOneof("value"):
            case "dense":
                found[x] = array(gradient.dense)
            case "sparse":
                found[x] = sparse(gradient.sparse)
            case _:
                found[x] = None
    return found


def regrouped(values: ByName[V], groups: Groups) -> ByName[Any]:
    """Values by x; with groups, by group and x."""
    if groups is None:
        return values
    return ByName({group: values.part(names) for group, names in groups.items()})


def timings(message: evaluate_pb2.Timings) -> Timings:
    """Times in seconds."""
    return Timings(*(part.ToNanoseconds() / 1e9 for part in (message.queue, message.compile, message.run)))


def result(data: bytes, groups: Groups = None, aliases: Mapping[str, str] | None = None) -> Result:
    """From the bytes of an answer of Evaluate. aliases: names of tensors in the result."""
    return Result(AnswerReader(labeller(aliases)).read(data), ProgramDetails(aliases), groups)


def resolutions(messages: Iterable[override_pb2.Resolution]) -> list[Resolution]:
    """From the messages, in their order."""
    return [
        Resolution(
            message.node,
            message.op_type,
            message.rule,
            message.label,
            override_pb2.ResolutionStatus.Name(message.status).removeprefix("RESOLUTION_STATUS_").lower(),
            message.function,
            tuple(message.nodes),
        )
        for message in messages
    ]


def specs(messages: Iterable[tensor_pb2.TensorSpec], aliases: Mapping[str, str] | None = None) -> ByName[TensorSpec]:
    """Specs by alias or name."""
    given = labels(aliases)
    return ByName({given.get(bare(item.name), item.name): TensorSpec.of(item) for item in messages}, aliases)


def array(message: tensor_pb2.Tensor) -> Array:
    """An array that its receiver may change."""
    try:
        return to_numpy(message, writable=True)
    except ValueError as cause:
        raise InvalidTensorError(f"the server's answer: {cause}") from None


def sparse(message: tensor_pb2.SparseTensor) -> Sparse:
    """A sparse gradient."""
    return Sparse(array(message.values), array(message.indices), array(message.dense_shape))
