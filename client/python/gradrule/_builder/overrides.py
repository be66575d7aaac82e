"""Defines overrides, presets and regions, and converts them to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.names import did_you_mean
from gradrule._builder.node_arguments import attr_of_op
from gradrule._builder.notebook_text import short_repr
from gradrule._builder.rules import (
    OverrideValue,
    Params,
    Rule,
    RuleLike,
    named_or_rule,
    param_value,
    rule_and_params,
)
from gradrule.common.dtypes import as_dt
from gradrule.common.tensor_codec import DtypeLike, dtype_number
from gradrule.errors import InvalidOverrideError
from gradrule.v1 import override_pb2

Order: TypeAlias = Literal["first", "all"]
Position: TypeAlias = Literal["nearest_xs", "nearest_ys"]
TensorName: TypeAlias = "str | TensorHandle | Node"

_ORDERS: Mapping[Order, override_pb2.OverrideOrder.ValueType] = {
    # The default of the protocol.
    "first": override_pb2.OVERRIDE_ORDER_UNSPECIFIED,
    "all": override_pb2.OVERRIDE_ORDER_ALL,
}
_NEAREST = {
    "nearest_xs": override_pb2.POSITION_NEAREST_XS,
    "nearest_ys": override_pb2.POSITION_NEAREST_YS,
}


class Region:
    """Selects a subgraph by its input and output tensors.

    The region's rule gets the inputs as `x, x1, …` and the outputs as `y, y1, …`, like a function under
    `tf.custom_gradient`.

    Args:
        inputs: at least one tensor, by name or handle.
        outputs: at least one tensor, by name or handle.

    Raises:
        InvalidOverrideError: no input, no output, or an entry that is neither a name nor a handle.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: TensorName | Iterable[TensorName], outputs: TensorName | Iterable[TensorName]) -> None:
        self.inputs = _tensor_names(inputs, "inputs of a region")
        self.outputs = _tensor_names(outputs, "outputs of a region")
        if not (self.inputs and self.outputs):
            raise InvalidOverrideError("a region has at least one input and one output")

    def __repr__(self) -> str:
        return short_repr(f"Region(inputs={list(self.inputs)!r}, outputs={list(self.outputs)!r})")


class Preset:
    """Selects a named list of overrides: `gr.Preset("epsilon_plus", eps=1e-6)`.

    Overrides that are not presets win over presets, whatever the order of the list.

    Args:
        name: the preset's name.
        label: name of the override in `params` of calls and in results. Default: the preset's name.
        optional: allows that no node matches.
        order: as in `Override`.
        params: values for every rule of the preset that has a param of the name.

    Raises:
        InvalidOverrideError: the name is not a string, or `order` is unknown.
    """

    __slots__ = ("label", "name", "optional", "order", "params")

    def __init__(
        self, name: str, /, *, label: str | None = None, optional: bool = False, order: Order = "first", **params: Any
    ) -> None:
        if not isinstance(name, str):
            raise InvalidOverrideError(f"a preset is chosen by its name, not by {name!r}")
        self.name, self.label, self.optional, self.params = name, label, optional, params
        self.order = _order(order)

    def message(self) -> override_pb2.GradientOverride:
        """Returns the override as a message."""
        message = override_pb2.GradientOverride(
            preset=override_pb2.PresetChoice(name=self.name),
            label=self.label or "",
            optional=self.optional,
            order=_ORDERS[self.order],
        )
        for name, value in self.params.items():
            message.preset.params[name].CopyFrom(param_value(name, value))
        return message

    def __repr__(self) -> str:
        params = (f"{name}={value!r}" for name, value in self.params.items())
        return short_repr(f"Preset({', '.join([repr(self.name), *params])})")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Override:
    """Gives a rule to the nodes that match all given selectors; at least one selector is needed.

    Args:
        rule: a registered rule's name, a formula such as `"dy * x"`, a `Rule`, or `default`, which exempts the nodes
            from later overrides.
        op_type: selector: op type, or a group such as `@activation`, `@linear`, `@step`.
        node: selector: name, `Node`, or glob (`*` and `?` match within a part between slashes, `**` across slashes);
            or several of these, of which one must match. With the branch of a conditional in brackets,
            `cond[then]/inner`, it selects nodes of that branch alone; so do scopes and the tensors of `depends_on` and
            of a region.
        node_regex: selector: RE2 expression for the whole name.
        scope: selector: nodes whose names start with `scope/`.
        position: selector: `nearest_xs`, `nearest_ys`, or an index among the nodes on the path, counted from the xs;
            a negative index is counted from the ys.
        pattern: selector: a chain of op types or groups that gets one rule.
        layer: selector: a kind of layer, all of whose ops get one rule: `@linear`, `@convolution`, `@dense` (with their
            bias), `@activation`, `@batch_norm`, `@normalization`.
        dtype: selector: element type of the node's first output.
        rank: selector: number of axes of the node's first output.
        attrs: selector: attributes of the node, by name.
        depends_on: selector: tensors; the node depends on at least one of them.
        region: selector, only by itself: a `Region`, or the name of a `tf.custom_gradient` function, which selects
            each call of it in a traced graph.
        params: values of the rule's params.
        label: name of the override in `params` of calls and in results. Default: the first given of op type, node,
            scope, regex, the pattern joined by `+`, layer, the region's name or first output.
        optional: allows that no node matches.
        order: `first`: the rule holds in the first differentiation; higher derivatives (`hvp`) use the op's own
            gradient. `all`: the rule holds in every differentiation; if `op_type` is the only selector, also at nodes
            that gradients added.

    Raises:
        InvalidOverrideError: no selector is given, or an argument has a wrong type or value.
        InvalidAttrError: no op type has an attribute of this name, or its value does not fit.
    """

    rule: RuleLike
    selector: override_pb2.Selector
    params: Params | None
    label: str | None
    optional: bool
    order: Order

    def __init__(
        self,
        rule: RuleLike,
        *,
        op_type: str | None = None,
        node: str | Node | Iterable[str | Node] | None = None,
        node_regex: str | None = None,
        scope: str | None = None,
        position: Position | int | None = None,
        pattern: Sequence[str] | None = None,
        layer: str | None = None,
        dtype: DtypeLike | None = None,
        rank: int | None = None,
        attrs: Mapping[str, Any] | None = None,
        depends_on: TensorName | Iterable[TensorName] = (),
        region: Region | str | None = None,
        params: Params | None = None,
        label: str | None = None,
        optional: bool = False,
        order: Order = "first",
    ) -> None:
        if not isinstance(rule, str | Rule):
            raise InvalidOverrideError(
                f"an override takes a rule's name, a formula or a gr.Rule, not {type(rule).__name__}"
            )
        names: list[str] = []
        if isinstance(node, Node):
            node = node.name
        elif not isinstance(node, str | None):
            names, node = _node_names(node), None
        texts = {
            "op_type": op_type,
            "node": node,
            "node_regex": node_regex,
            "scope": scope,
            "layer": layer,
            "label": label,
        }
        for word, text in texts.items():
            if not isinstance(text, str | None):
                also = " or a node of a graph" if word == "node" else ""
                raise InvalidOverrideError(f"the {word} of an override is a string{also}, not {text!r}")
        if not isinstance(params, Mapping | None):
            raise InvalidOverrideError(f"the params of an override are a dict by name, not {params!r}")
        selector = override_pb2.Selector(
            op_type=op_type or "", node=node or "", node_regex=node_regex or "", scope=scope or "", layer=layer or ""
        )
        selector.nodes.extend(names)
        if position is not None:
            selector.position.CopyFrom(_position(position))
        if pattern is not None:
            selector.pattern.extend(_pattern(pattern))
        if dtype is not None:
            selector.dtype = as_dt(dtype_number(dtype))
        if rank is not None:
            if not isinstance(rank, int) or rank < 0:
                raise InvalidOverrideError(f"the rank of an override is a number from 0 on, not {rank!r}")
            selector.rank = rank
        for name, value in (attrs or {}).items():
            named = op_type or (pattern or [""])[-1]
            selector.attrs[name].CopyFrom(attr_of_op(named, name, value, f"attrs[{name!r}] of an override"))
        selector.depends_on.extend(_tensor_names(depends_on, "depends_on"))
        if region is not None:
            if isinstance(region, str) and region:
                selector.region_name = region
            elif isinstance(region, Region):
                selector.region.inputs.extend(region.inputs)
                selector.region.outputs.extend(region.outputs)
            else:
                raise InvalidOverrideError(f"the region of an override is a gr.Region or a name, not {region!r}")
        if not selector.ListFields():
            raise InvalidOverrideError(
                f"the override with rule {rule!r} selects nothing; give op_type, node, scope, pattern, region, …"
            )
        values = (named_or_rule(rule), selector, params, label, optional, _order(order))
        for field, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        selector = " ".join(f"{field.name}={value!r}" for field, value in self.selector.ListFields())
        return short_repr(f"Override({self.rule!r}, {selector})")

    def message(self) -> override_pb2.GradientOverride:
        """Returns the override as a message."""
        params = dict(self.params or {})
        message = override_pb2.GradientOverride(
            selector=self.selector,
            label=self.label or "",
            optional=self.optional,
            order=_ORDERS[self.order],
        )
        if isinstance(self.rule, str):
            message.rule = self.rule
        else:
            message.definition.CopyFrom(self.rule.definition(params))
        for name, value in params.items():
            message.params[name].CopyFrom(param_value(name, value))
        return message


Overrides: TypeAlias = "Mapping[str, OverrideValue] | Sequence[Override | Preset] | Override | Preset"


def override_messages(overrides: Overrides | None) -> list[override_pb2.GradientOverride]:
    """Converts a dict by op type, or a list of `Override` and `Preset`, to messages in order.

    Raises:
        InvalidOverrideError: a key or an entry has a wrong type.
    """
    if overrides is None:
        return []
    if isinstance(overrides, Override | Preset):
        return [overrides.message()]
    if isinstance(overrides, Mapping):
        messages = []
        for op_type, value in overrides.items():
            if not isinstance(op_type, str):
                raise InvalidOverrideError(f"the keys of an override map are op types, not {type(op_type).__name__}")
            rule, params = rule_and_params(value, f"overrides[{op_type!r}]")
            messages.append(Override(rule, op_type=op_type, params=params).message())
        return messages
    messages = []
    for index, override in enumerate(overrides):
        if not isinstance(override, Override | Preset):
            raise InvalidOverrideError(
                f"overrides[{index}] is {type(override).__name__}; a list holds gr.Override and gr.Preset"
            )
        messages.append(override.message())
    return messages


def label_of(message: override_pb2.GradientOverride) -> str:
    """Returns the label that the server gives to an override; empty if none of its parts gives one."""
    selector = message.selector
    return (
        message.label
        or message.preset.name
        or selector.op_type
        or selector.node
        or selector.scope
        or selector.node_regex
        or "+".join(selector.pattern)
        or selector.layer
        or selector.region_name
        or next(iter((*selector.region.outputs, *selector.nodes)), "")
    )


def _node_names(nodes: Any) -> list[str]:
    several = isinstance(nodes, Iterable) and not isinstance(nodes, TensorHandle)
    names = [node.name if isinstance(node, Node) else node for node in nodes] if several else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidOverrideError(
            f"the node of an override is a string or a node of a graph, not {nodes!r}; or a list of these"
        )
    return names


def _order(order: Order) -> Order:
    if order not in _ORDERS:
        raise InvalidOverrideError(f"the order of an override is 'first' or 'all', not {order!r}")
    return order


def _position(position: Position | int) -> override_pb2.Position:
    if isinstance(position, int) and not isinstance(position, bool):
        return override_pb2.Position(index=position)
    if position in _NEAREST:
        return override_pb2.Position(nearest=_NEAREST[position])
    raise InvalidOverrideError(
        f"the position of an override is 'nearest_xs', 'nearest_ys' or a number, not {position!r}."
        f"{did_you_mean(position, _NEAREST) if isinstance(position, str) else ''}"
    )


def _pattern(pattern: Sequence[str]) -> list[str]:
    if isinstance(pattern, str) or not all(isinstance(word, str) and word for word in pattern) or not pattern:
        raise InvalidOverrideError(
            f'the pattern of an override is a sequence of op types such as ("MatMul", "BiasAdd"), not {pattern!r}'
        )
    return list(pattern)


def _tensor_names(tensors: TensorName | Iterable[TensorName], what: str) -> list[str]:
    found = []
    for tensor in [tensors] if isinstance(tensors, str | TensorHandle | Node) else tensors:
        name = as_tensor(tensor)
        if isinstance(name, TensorHandle):
            name = name.name
        if not isinstance(name, str):
            raise InvalidOverrideError(f"{what}: {tensor!r} is neither a tensor's name nor a handle")
        found.append(name)
    return found
