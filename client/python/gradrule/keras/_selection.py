"""Selects layers of a Keras model, finds their nodes, and makes overrides by layer, layer class and op type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradrule._builder.graph import Graph
from gradrule._builder.names import bare, did_you_mean, glob_pattern, split
from gradrule._builder.overrides import Override, Overrides, Region
from gradrule._builder.rules import OverrideValue, rule_and_params
from gradrule._builder.specs import LayerCall
from gradrule.common import op_definitions
from gradrule.errors import InvalidGraphError, InvalidOverrideError
from gradrule.v1.tensor_pb2 import Dt

_WITHOUT_GRADIENT = frozenset(
    {Dt.DT_BOOL, Dt.DT_STRING, Dt.DT_INT8, Dt.DT_INT16, Dt.DT_INT32, Dt.DT_INT64, Dt.DT_UINT8, Dt.DT_UINT16}
    | {Dt.DT_UINT32, Dt.DT_UINT64, Dt.DT_RESOURCE}
)
_VALUE_SOURCES = frozenset({"Placeholder", "PlaceholderWithDefault", "VarHandleOp", "VariableV2"})
Keyed: TypeAlias = "Mapping[Any, OverrideValue]"
"""Rules by layer or op type; `overrides` lists the keys."""
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Describes the subgraph of one call.

    Attributes:
        nodes: names of the nodes through which gradients flow, in the graph's order.
        inputs: the layer's input tensors, then its weights in the order of their use.
        outputs: tensors that the layer returns.
        is_op: whether the subgraph is a single node with exactly these inputs.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_op: bool


class SubgraphFinder:
    """Finds the subgraphs of calls in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs = {
            node.name: [bare(name) for name in node.inputs if not name.startswith("^")] for node in graph.find()
        }
        self._users: dict[str, list[str]] = {}
        for node, inputs in self._inputs.items():
            for tensor in dict.fromkeys(inputs):
                self._users.setdefault(tensor, []).append(node)

    def find(self, call: LayerCall) -> Subgraph | None:
        """Returns the subgraph of a call; None if the call returns its inputs."""
        border, ends = set(call.inputs), [name for name in call.outputs if name not in call.inputs]
        for only_gradients in (True, False):
            inside = self._between(border, ends, only_gradients)
            if inside:
                break
        else:
            return None
        nodes = [node for node in self._inputs if node in inside]
        entering = dict.fromkeys(name for node in nodes for name in self._inputs[node] if split(name)[0] not in inside)
        weights = [
            name for name in entering if name not in border and self._has_gradient(name) and self._is_weight(name)
        ]
        inputs = (*call.inputs, *weights)
        outputs = tuple(name for name in ends if split(name)[0] in inside)
        operands = {name for name in self._inputs[nodes[0]] if self._has_gradient(name)}
        return Subgraph(tuple(nodes), inputs, outputs, len(nodes) == 1 and operands <= set(inputs))

    def _between(self, border: set[str], ends: Iterable[str], only_gradients: bool) -> set[str]:
        """Returns the nodes on paths from the border to the ends, optionally only on differentiable paths."""
        reached: set[str] = set()
        pending = [user for tensor in border for user in self._users.get(tensor, ())]
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                for handle in self._graph.outputs_of(node):
                    if not only_gradients or self._has_gradient(bare(handle.name)):
                        pending += self._users.get(bare(handle.name), ())
        found: set[str] = set()
        pending = [split(name)[0] for name in ends if not only_gradients or self._has_gradient(name)]
        while pending:
            node = pending.pop()
            if node in reached and node not in found:
                found.add(node)
                pending += [
                    split(name)[0]
                    for name in self._inputs[node]
                    if name not in border and (not only_gradients or self._has_gradient(name))
                ]
        return found

    def _has_gradient(self, tensor: str) -> bool:
        """Returns whether gradients are defined for a tensor's element type."""
        node, index = split(tensor)
        handles = self._graph.outputs_of(node)
        return index < len(handles) and handles[index].number not in _WITHOUT_GRADIENT

    def _is_weight(self, tensor: str) -> bool:
        """Returns whether a tensor depends on a placeholder or variable."""
        pending, seen = [split(tensor)[0]], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if self._graph.node(node).op_type in _VALUE_SOURCES:
                return True
            pending += [split(name)[0] for name in self._inputs[node]]
        return False


def layers(model: Any, which: Any = None) -> list[LayerCall]:
    """Returns the calls of a model's layers, in the order in which they end; a nested model follows its layers.

    Args:
        model: a Keras model, or a graph that was traced from one.
        which: a layer's name or path, a glob (`block1_*`; `*` matches within a part between slashes, `**` across
            slashes), a class, a layer, or a list of these; None: all.

    Returns:
        The calls.

    Raises:
        InvalidOverrideError: the model has no such layer.
        InvalidGraphError: the graph was not traced from a Keras model.
    """
    calls = _graph_of(model).layers
    return list(calls) if which is None else _calls(which, calls)


def overrides(model: Any, rules: Keyed, *, optional: bool = False) -> list[Override]:
    """Makes overrides by layer and op type; the first entry that matches a layer wins.

    A key of `rules` is one of:

    - a layer, as `layers` takes it for `which`, or calls that `layers` returned: each call of the layer as a whole;
    - a pair of a layer and an op type (`("conv1", "Relu")`), a group (`(keras.layers.Dense, "@linear")`), or a
      pattern (`(keras.layers.Dense, ("@linear", "@bias"))`): nodes in the scope of the layer and of nested layers;
    - an op type or group: nodes anywhere.

    The rule of a whole layer has the variables of a function under `tf.custom_gradient`: `x, x1, …` are the layer's
    inputs and then its weights in the order of their use, `y, y1, …` are its outputs. For example, `guided_relu` is
    valid for `ReLU` and `Activation("relu")`, `lrp_epsilon` for a `Dense` without activation, and `first(…)` turns a
    gradient of `x` into a rule for any layer. A layer with a single op is treated as that op, so OP rules are valid
    too. The rule `default` exempts a layer and its ops.

    Args:
        model: the graph that `gr.from_keras` made, or a Keras model. Prefer the graph: names of nodes may differ
            between inference and training. The overrides are also valid for the saved or frozen graph.
        rules: a rule or `(rule, params)` for each key.
        optional: raises no error if no node on the path from xs to ys matches.

    Returns:
        Overrides for `client.evaluate`, `explain` and `compile`. Labels are the names of layers or classes, and
        `layer/op type` for pairs.

    Raises:
        InvalidOverrideError: the model has no such layer, or several of that name; the layer computes nothing; or it is
            called in a loop's body and cannot be selected as a whole.
        InvalidGraphError: the graph was not traced from a Keras model.
    """
    graph = _graph_of(model)
    if not isinstance(rules, Mapping):
        raise InvalidOverrideError(f"the rules are a dict by layer or op type, not {type(rules).__name__}")
    finder = SubgraphFinder(graph)
    taken: set[int] = set()
    made: list[Override] = []
    for key, value in rules.items():
        rule, params = rule_and_params(value, f"rules[{_label(key)!r}]")
        common: dict[str, Any] = {"params": params, "label": _label(key), "optional": optional}
        if _is_op_type(key, graph):
            made.append(Override(rule, op_type=key, **common))
        elif _is_pair(key):
            where = _scopes(_calls(key[0], _layers_of(graph)))
            ops = {"op_type": key[1]} if isinstance(key[1], str) else {"pattern": key[1]}
            made.append(Override(rule, node_regex=where, **ops, **common))
        else:
            calls = [call for call in _calls(key, _layers_of(graph)) if id(call) not in taken]
            taken.update(map(id, calls))
            made += _of_calls(key, calls, finder, rule, common)
    return made


def overrides_of(graph: Graph, given: Overrides | Keyed | None) -> Overrides | None:
    """Returns overrides as `client.compile` takes them; keys of a dict may be layers."""
    return overrides(graph, given) if isinstance(given, Mapping) else given


def _of_calls(
    key: Any, calls: Sequence[LayerCall], finder: SubgraphFinder, rule: Any, common: Mapping[str, Any]
) -> list[Override]:
    """Returns one override for all calls that are single ops, and one for each other call."""
    if not calls:
        raise InvalidOverrideError(f"rules[{_label(key)!r}]: earlier entries match all of its layers")
    nested = [call for call in calls if not call.outputs]
    if nested:
        raise InvalidOverrideError(
            f"rules[{_label(key)!r}]: the layer {nested[0].path!r} is called in a nested function, such as the body of "
            f"a loop, and cannot be selected as a whole; select op types in it: ({nested[0].path!r}, 'Sigmoid')"
        )
    subgraphs = [subgraph for call in calls if (subgraph := finder.find(call)) is not None]
    if not subgraphs:
        raise InvalidOverrideError(
            f"rules[{_label(key)!r}]: in this graph {', '.join(sorted({repr(call.path) for call in calls}))} only "
            "returns its input, as Dropout does in inference; there is no gradient to override"
        )
    if rule == "default":
        return [Override(rule, node_regex=_either(node for subgraph in subgraphs for node in subgraph.nodes), **common)]
    single = [subgraph.nodes[0] for subgraph in subgraphs if subgraph.is_op]
    made = [Override(rule, node_regex=_either(single), **common)] if single else []
    regions = {(subgraph.inputs, subgraph.outputs): None for subgraph in subgraphs if not subgraph.is_op}
    return made + [Override(rule, region=Region(inputs, outputs), **common) for inputs, outputs in regions]


def _calls(which: Any, calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Returns the calls that a key selects."""
    if isinstance(which, tuple | list):
        found = [call for each in which for call in _calls(each, calls)]
        return list({id(call): call for call in found}.values())
    if isinstance(which, LayerCall):
        same = [call for call in calls if call == which]
        # Another graph of the same model has different identities but the same paths.
        found = same or [call for call in calls if (call.path, call.outputs) == (which.path, which.outputs)]
        if not found:
            raise InvalidOverrideError(f"the graph has no such call of the layer {which.path!r}")
        return found
    if isinstance(which, type):
        found = [call for call in calls if issubclass(call.kind, which)]
        if not found:
            kinds = dict.fromkeys(call.kind.__name__ for call in calls)
            raise InvalidOverrideError(
                f"the model has no layer of class {which.__name__}.{did_you_mean(which.__name__, kinds)} "
                f"Classes: {_some(kinds)}"
            )
        return found
    if isinstance(which, str):
        return _named(which, calls)
    found = [call for call in calls if call.layer == id(which)]
    if not found:
        what = getattr(which, "name", None)
        raise InvalidOverrideError(
            f"{what if isinstance(what, str) else which!r} is no layer of this model; expected a layer's name or path, "
            f"a class, or a layer. Layers: {_some(dict.fromkeys(call.path for call in calls))}"
        )
    return found


def _named(name: str, calls: Sequence[LayerCall]) -> list[LayerCall]:
    if found := [call for call in calls if call.path == name]:
        return found
    if any(sign in name for sign in "*?"):
        pattern = glob_pattern(name)
        found = [call for call in calls if pattern.fullmatch(call.path)]
    else:
        found = [call for call in calls if call.name == name]
        if len({call.layer for call in found}) > 1:
            raise InvalidOverrideError(
                f"{name!r} is the name of several layers: {_some(dict.fromkeys(call.path for call in found))}; "
                "give the path of one, or a glob such as '**/" + name + "'"
            )
    if not found:
        known = dict.fromkeys(word for call in calls for word in (call.path, call.name))
        raise InvalidOverrideError(
            f"the model has no layer {name!r}, and TensorFlow no op type of that name.{did_you_mean(name, known)} "
            f"Layers: {_some(dict.fromkeys(call.path for call in calls))}"
        )
    return found


def _is_op_type(key: Any, graph: Graph) -> bool:
    """Returns whether a key is an op type or group. Raises `InvalidOverrideError` if it is a layer's name too."""
    if not isinstance(key, str):
        return False
    known = key.startswith("@") or op_definitions.find(key) is not None or bool(graph.find(op_type=key))
    if known and any(key in (call.path, call.name) for call in graph.layers):
        raise InvalidOverrideError(
            f"{key!r} is a layer and an op type; use gr.Override(…, op_type={key!r}), or give the layer itself"
        )
    return known


def _is_pair(key: Any) -> bool:
    """Returns whether a key is a pair of a layer and op types."""
    if not (isinstance(key, tuple) and len(key) == 2):
        return False
    words = [key[1]] if isinstance(key[1], str) else key[1]
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return False
    return all(word.startswith("@") or op_definitions.find(word) is not None for word in words)


def _scopes(calls: Iterable[LayerCall]) -> str:
    """Returns a regex for nodes in the scopes of layers. Inside functions, the call's name precedes the scope."""
    words = {f"{'(?:.*/)?' if not call.outputs else ''}{re.escape(call.path)}/.*": None for call in calls}
    return "|".join(words)


def _either(nodes: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(map(re.escape, nodes)))


def _graph_of(model: Any) -> Graph:
    if isinstance(model, Graph):
        return model
    from gradrule._tracing import from_keras

    return from_keras(model)


def _layers_of(graph: Graph) -> list[LayerCall]:
    if not graph.layers:
        raise InvalidGraphError("the graph has no layers; make it with gr.from_keras")
    return graph.layers


def _label(key: Any) -> str:
    if isinstance(key, tuple | list):
        return "/".join("+".join(word) if isinstance(word, tuple | list) else _label(word) for word in key)
    if isinstance(key, LayerCall):
        return key.path
    return str(getattr(key, "__name__", None) or getattr(key, "name", None) or key)


def _some(words: Iterable[str]) -> str:
    listed = list(words)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(map(repr, listed[:_LISTED])) + more
