"""Converts the arguments of a call, which are those of `tf.gradients` and `Session.run`, to messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import Message

from gradrule._builder import blob_values
from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike, graph_bytes, put_graph
from gradrule._builder.handles import Node, TensorHandle
from gradrule._builder.names import bare, did_you_mean
from gradrule._builder.overrides import label_of, override_messages
from gradrule._builder.rules import param_value
from gradrule._messages.call_arguments import (
    Batching,
    CallParams,
    GradYs,
    ProgramArguments,
    name_of_tensor,
    names_of,
    sent_aliases,
)
from gradrule._messages.feed_values import TypeOf, checked_value
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name, without_ref
from gradrule.errors import (
    FeedDtypeError,
    InvalidDerivativeError,
    InvalidGraphError,
    InvalidParamError,
    InvalidTensorError,
    UnknownFeedError,
    UnknownParamError,
    UnknownTensorError,
)
from gradrule.v1 import evaluate_pb2, override_pb2, program_pb2, tensor_pb2

# A program, and the upstream gradients that each call sends as values, by y.
Spec: TypeAlias = tuple[program_pb2.ProgramSpec, dict[str, Any]]

_C = TypeVar("_C")

_UNCONNECTED = {
    "none": program_pb2.UNCONNECTED_GRADIENTS_NONE,
    "zero": program_pb2.UNCONNECTED_GRADIENTS_ZERO,
}
_NO_GRADIENT = {
    "error": program_pb2.NO_GRADIENT_ERROR,
    "default": program_pb2.NO_GRADIENT_DEFAULT,
    "pass": program_pb2.NO_GRADIENT_PASS,
    "zero": program_pb2.NO_GRADIENT_ZERO,
}
# Omit the default, so that equal programs have equal bytes.
_JIT = {"off": program_pb2.JIT_UNSPECIFIED, "on": program_pb2.JIT_ON}


class Source(NamedTuple):
    """Holds what calls with equal arguments differ in: whether they send a graph, or a session has it.

    Attributes:
        graph: The graph, which resolves names.
        type_of: Returns the element type of a tensor.
        spec: Returns what `program_spec` returns, from arguments with flat xs and a dict that receives large data.
    """

    graph: GraphLike
    type_of: TypeOf
    spec: Callable[[ProgramArguments, blob_values.Blobs], Spec]


def sent_graph(graph: GraphLike) -> Source:
    """Returns the source of calls that send their graph."""
    return Source(graph, types_of_graph(graph), functools.partial(program_spec, graph))


def program_spec(graph: GraphLike, arguments: ProgramArguments, blobs: blob_values.Blobs | None = None) -> Spec:
    """Returns the message of a program, and the upstream gradients that each call sends as values, by y.

    Args:
        graph: The graph, as for `graph_bytes`.
        arguments: The arguments of the call; `xs` must be flat (see `x_groups`).
        blobs: Receives large data by SHA-256, which the message then contains only as a hash; None: the message
            contains all data.

    Raises:
        GradruleError: An argument is not valid.
    """
    spec, values = requested_spec(graph, arguments)
    spec.no_gradient = _chosen(arguments.no_gradient, _NO_GRADIENT, "no_gradient")
    spec.overrides.extend(override_messages(arguments.overrides))
    spec.rewrites.extend([arguments.rewrites] if isinstance(arguments.rewrites, str) else arguments.rewrites)
    spec.aliases.update(sent_aliases(graph, arguments))
    if arguments.batching is not None:
        if not isinstance(arguments.batching, Batching):
            raise InvalidParamError(f"batching is gradrule.Batching(axis=0) or None, not {arguments.batching!r}")
        spec.batching.axis = arguments.batching.axis
    spec.jit = _chosen(arguments.jit, _JIT, "jit")
    for override in spec.overrides:
        _resolve_aliases(override.selector, graph)
    put_graph(graph, spec.graph, blobs)
    if isinstance(graph, Graph):
        spec.variables.extend(graph.variables.messages(blobs))
        # Send recorded overrides only with ys: the server rejects overrides without ys.
        if spec.HasField("vjp"):
            spec.overrides.extend(overrides_of_graph(graph))
    return spec, values


def requested_spec(graph: GraphLike, arguments: ProgramArguments) -> Spec:
    """Returns the part of a program's message that says what to compute: the fetches and the derivative.

    The other arguments are as for `program_spec`.
    """
    unconnected = _chosen(arguments.unconnected_gradients, _UNCONNECTED, "unconnected_gradients")
    spec = program_pb2.ProgramSpec(fetches=names_of(arguments.fetches, graph))
    y_names, x_names = names_of(arguments.ys, graph), names_of(arguments.xs, graph)
    tensors, values = _split_grad_ys(arguments.grad_ys, y_names, graph)
    stops = names_of(arguments.stop_gradients, graph)
    if y_names or x_names or stops or tensors or values:
        spec.vjp.ys.extend(y_names)
        spec.vjp.xs.extend(x_names)
        spec.vjp.stop_gradients.extend(stops)
        spec.vjp.unconnected_gradients = unconnected
        spec.vjp.dense_gradients = arguments.dense_gradients
        for y, tensor in tensors.items():
            spec.vjp.grad_ys.add(y=y, tensor=tensor)
    return spec, values


def overrides_of_graph(graph: Graph) -> list[override_pb2.GradientOverride]:
    """Returns the messages of the overrides that `gradient_override_map` recorded."""
    messages = [override.message() for override in graph.node_overrides]
    for message in messages:
        message.part_of_graph = True
    return messages


def _resolve_aliases(selector: override_pb2.Selector, graph: GraphLike) -> None:
    """Replaces aliases and names of layers in a selector by names of tensors."""
    for names in (selector.region.inputs, selector.region.outputs, selector.depends_on):
        # Reading a missing region does not create it; writing would.
        for index, name in enumerate(names):
            names[index] = name_of_tensor(name, graph)


def add_params(request: Any, params: CallParams | None) -> None:
    """Adds the values of rules' params, by label, to a request. Raises `InvalidParamError`."""
    if not isinstance(params, Mapping | None):
        raise InvalidParamError(f"params is a dict of labels to dicts of values, not {type(params).__name__}")
    messages = request.params
    for label, values in (params or {}).items():
        if not isinstance(label, str):
            raise InvalidParamError(f"params are named by the override's label, a string, not by {label!r}")
        if not isinstance(values, Mapping):
            raise InvalidParamError(f"params[{label!r}] is a dict of values by the rule's param names, not {values!r}")
        for name, value in values.items():
            messages[label].values[name].CopyFrom(param_value(name, value))


def check_call(spec: program_pb2.ProgramSpec, call: evaluate_pb2.EvaluateHeader, graph: GraphLike) -> None:
    """Checks that feeds match the graph's tensors and that params match the program's overrides.

    Raises:
        UnknownFeedError, FeedDtypeError, UnknownParamError: A feed or param does not match.
    """
    if not (call.feeds or call.params):
        return
    try:
        read = graph if isinstance(graph, Graph) else Graph.from_bytes(graph_bytes(graph))
    except InvalidGraphError:
        # The server reports the errors of the graph.
        return
    fed: set[str] = set()
    for feed in call.feeds:
        try:
            tensor = read.value_of(feed.name)
        except UnknownTensorError as cause:
            known = ", ".join(map(repr, read.inputs)) or "none"
            raise UnknownFeedError(f"feeds[{feed.name!r}]: {cause.message} Placeholders: {known}") from None
        if tensor.name in fed:
            raise UnknownFeedError(f"the tensor {feed.name!r} is fed twice")
        fed.add(tensor.name)
        # The dtype is not checked yet if the graph was given as bytes.
        if tensor.number and feed.dtype != without_ref(tensor.number):
            actual = dtype_name(feed.dtype)
            raise FeedDtypeError(f"feeds[{feed.name!r}] is an array of {actual}, the tensor is {tensor.dtype}")
    labels = {*map(label_of, spec.overrides), *read.op_types_with_rule_names()}
    for label in call.params:
        if label not in labels and "" not in labels:
            raise UnknownParamError(
                f"params name the label {label!r}, which no override has.{did_you_mean(label, labels)} "
                f"Labels: {', '.join(map(repr, sorted(labels))) or 'none'}"
            )


def types_of_graph(graph: GraphLike) -> TypeOf:
    """Returns a function for the element types of a graph's tensors; parses bytes only when a type is needed."""
    parsed: list[Graph] = [graph] if isinstance(graph, Graph) else []

    def type_of(name: str, needed: bool) -> int:
        if not parsed:
            if not needed:
                return 0
            try:
                parsed.append(Graph.from_bytes(graph_bytes(graph)))
            except InvalidGraphError:
                # The server reports the errors of the graph.
                return 0
        try:
            return without_ref(parsed[0].value_of(name).number)
        except UnknownTensorError:
            return 0

    return type_of


def types_of_specs(specs: Iterable[tensor_pb2.TensorSpec]) -> TypeOf:
    """Returns a function for the element types of the tensors in a program's signature."""
    known = {bare(spec.name): spec.dtype for spec in specs}

    def type_of(name: str, needed: bool) -> int:
        return known.get(bare(name), 0)

    return type_of


def program_grad_ys(grad_ys: GradYs | None, program: program_pb2.Program) -> dict[str, Any]:
    """Returns the upstream gradients of one call of a program, by y. Raises `InvalidDerivativeError`."""
    return {} if grad_ys is None else upstream_values(grad_ys, [spec.name for spec in program.ys], program)


def upstream_values(grad_ys: GradYs | None, ys: Sequence[str], graph: GraphLike) -> dict[str, Any]:
    """Returns upstream gradients, which are no names of tensors, by y. Raises `InvalidDerivativeError`."""
    tensors, values = _split_grad_ys(grad_ys, ys, graph)
    if tensors:
        y = next(iter(tensors))
        raise InvalidDerivativeError(
            f"grad_ys of {y!r} names the tensor {tensors[y]!r}; names are given to compile, calls give arrays"
        )
    return values


def add_named_tensors(
    request: Message, field: str, values: Mapping[Any, Any], type_of: TypeOf, graph: GraphLike | None, what: str = ""
) -> None:
    """Adds values to a repeated field of `NamedTensor`.

    Args:
        request: The request.
        field: Name of the field.
        values: Values by tensor, see `checked_value`.
        type_of: Returns the element type of a tensor.
        graph: The graph of the tensors; resolves aliases.
        what: Name of the values in errors; empty: the field's name.

    Raises:
        InvalidTensorError: A value is not a valid tensor.
        FeedDtypeError: An array or blob does not have the tensor's element type.
    """
    messages = getattr(request, field)
    for key, given in values.items():
        name = name_of_tensor(key, graph)
        where = f"{what or field}[{name!r}]"
        value = checked_value(given, name, type_of, where)
        if isinstance(value, blob_values.Blob):
            messages.add(name=name, value=value.source())
            continue
        try:
            # Written directly into the request, because a separate message would need a copy.
            tensor_codec.write_message(messages.add(name=name).value.inline_tensor, value)
        except ValueError as cause:
            raise InvalidTensorError(f"{where}: {cause}") from None


def _chosen(value: Any, choices: Mapping[str, _C], what: str) -> _C:
    if isinstance(value, str) and value in choices:
        return choices[value]
    *most, last = map(repr, choices)
    known = f"{', '.join(most)} or {last}" if most else last
    raise InvalidDerivativeError(f"{what} is {known}, not {value!r}.{did_you_mean(str(value), choices)}")


def pairs(values: Any, what: str) -> Iterable[tuple[Any, Any]]:
    """Returns the items of a dict of values by tensor. Raises `InvalidTensorError` for other types."""
    if not isinstance(values, Mapping):
        raise InvalidTensorError(f"{what} is a dict of values by tensor, not {type(values).__name__}")
    return values.items()


def _split_grad_ys(
    grad_ys: GradYs | None, ys: Sequence[str], graph: GraphLike | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Splits upstream gradients into names of tensors by y and values by y; omits None."""
    if grad_ys is None:
        return {}, {}
    given: dict[str, Any] = {}
    if isinstance(grad_ys, Mapping):
        known = {bare(y): y for y in ys}
        for key, value in grad_ys.items():
            name = name_of_tensor(key, graph)
            y = known.get(bare(name))
            if y is None:
                raise InvalidDerivativeError(
                    f"grad_ys has {name!r}, which is none of the ys {list(ys)}.{did_you_mean(name, ys)}"
                )
            given[y] = value
    elif isinstance(grad_ys, list | tuple):
        if len(grad_ys) != len(ys):
            raise InvalidDerivativeError(f"grad_ys has {len(grad_ys)} entries for {len(ys)} ys; None stands for ones")
        given = dict(zip(ys, grad_ys, strict=True))
    else:
        kind = type(grad_ys).__name__
        raise InvalidDerivativeError(f"grad_ys is a dict by y or a list in the order of ys, not {kind}")
    tensors: dict[str, str] = {}
    values: dict[str, Any] = {}
    for y, value in given.items():
        if isinstance(value, str | TensorHandle | Node):
            tensors[y] = name_of_tensor(value, graph)
        elif value is not None:
            values[y] = value
    return tensors, values
