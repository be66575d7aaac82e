"""Overrides of an already built model: by layer, layer class, and op type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gradrule import _opdefs
from gradrule._graph import Graph
from gradrule._layers import LayerCall
from gradrule._names import glob, near
from gradrule._overrides import Override, Overrides, Region
from gradrule._rules import OverrideValue, rule_and_params
from gradrule.errors import InvalidGraphError, InvalidOverrideError
from gradrule.keras._paths import Paths

Keyed: TypeAlias = "Mapping[Any, OverrideValue]"
"""By layer or op type: keys are what `overrides` says."""

_LISTED = 20


def layers(model: Any, which: Any = None) -> list[LayerCall]:
    """The calls of a model's layers, in the order in which they end; a nested model comes after its layers.

    model: a Keras model, or a graph that was traced from one. which: a layer's name or path, a glob (`block1_*`; `*`
    stays between slashes, `**` crosses them), a class, a layer, or several of these; None: all.
    Raises `InvalidOverrideError` for what the model does not have, `InvalidGraphError` for a graph without layers.
    """
    calls = _graph_of(model).layers
    return list(calls) if which is None else _calls(which, calls)


def overrides(model: Any, rules: Keyed, *, optional: bool = False) -> list[Override]:
    """Overrides for `client.evaluate` and its like, by layer and op type; the first entry that fits a layer holds.

    model: a Keras model, or better the graph that `gr.from_keras` made of it: names may differ between inference and
    training. What is returned holds for that graph saved or frozen, too. rules: as values what `client.evaluate` takes,
    a rule or `(rule, params)`; as keys

    - what `layers` takes as `which`, or calls that it returned: each call of the layer as a whole;
    - a pair of such a layer and an op type (`("conv1", "Relu")`), a group (`(keras.layers.Dense, "@linear")`), or a
      pattern (`(keras.layers.Dense, ("@linear", "@bias"))`): nodes in the scope of the layer, nested ones too;
    - an op type or group: nodes anywhere.

    A layer as a whole is what `tf.custom_gradient` around its call would be: its rule sees as `x, x1, …` the tensors
    that go in and then the weights, in the order of their use, as `y, y1, …` those that come out. So a `ReLU` takes
    `guided_relu`, an `Activation("relu")` too, a `Dense` without activation `lrp_epsilon`, and `first(…)` makes of a
    gradient of `x` a rule for any layer. A layer of a single op is that op, and takes OP rules too. The rule `default`
    makes an exception of a layer, its ops included.

    optional: whether it is no error if nothing on the path from xs to ys matches. Labels are the names, the classes'
    names, and `layer/op type` for pairs. Raises `InvalidOverrideError` for layers that the model does not have, names
    that two layers have, layers that compute nothing, or whose calls in a loop's body are no subgraph of the graph.
    """
    graph = _graph_of(model)
    if not isinstance(rules, Mapping):
        raise InvalidOverrideError(f"the rules are a dict by layer or op type, not {type(rules).__name__}")
    paths = Paths(graph)
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
            made += _of_calls(key, calls, paths, rule, common)
    return made


def overrides_of(graph: Graph, given: Overrides | Keyed | None) -> Overrides | None:
    """What `client.compile` takes; a dict may have layers among its keys."""
    return overrides(graph, given) if isinstance(given, Mapping) else given


def _of_calls(
    key: Any, calls: Sequence[LayerCall], paths: Paths, rule: Any, common: Mapping[str, Any]
) -> list[Override]:
    """One override for all calls that are single ops, and one for each other."""
    if not calls:
        raise InvalidOverrideError(f"rules[{_label(key)!r}]: earlier entries have taken all layers that it means")
    nested = [call for call in calls if not call.outputs]
    if nested:
        raise InvalidOverrideError(
            f"rules[{_label(key)!r}]: the layer {nested[0].path!r} is called in a nested function, such as the body of "
            f"a loop, and cannot be meant as a whole there; name op types in it: ({nested[0].path!r}, 'Sigmoid')"
        )
    sites = [site for call in calls if (site := paths.site(call)) is not None]
    if not sites:
        raise InvalidOverrideError(
            f"rules[{_label(key)!r}]: in this graph {', '.join(sorted({repr(call.path) for call in calls}))} only "
            "passes on what goes in, as Dropout does in inference; there is no gradient to override"
        )
    if rule == "default":
        return [Override(rule, node_regex=_either(node for site in sites for node in site.nodes), **common)]
    single = [site.nodes[0] for site in sites if site.is_op]
    made = [Override(rule, node_regex=_either(single), **common)] if single else []
    regions = {(site.inputs, site.outputs): None for site in sites if not site.is_op}
    return made + [Override(rule, region=Region(inputs, outputs), **common) for inputs, outputs in regions]


def _calls(which: Any, calls: Sequence[LayerCall]) -> list[LayerCall]:
    """The calls that a key means."""
    if isinstance(which, tuple | list):
        found = [call for each in which for call in _calls(each, calls)]
        return list({id(call): call for call in found}.values())
    if isinstance(which, LayerCall):
        same = [call for call in calls if call == which]
        # A graph of the same model, traced at another time, has layers of the same paths.
        found = same or [call for call in calls if (call.path, call.outputs) == (which.path, which.outputs)]
        if not found:
            raise InvalidOverrideError(f"the graph has no call of the layer {which.path!r} as this one")
        return found
    if isinstance(which, type):
        found = [call for call in calls if issubclass(call.kind, which)]
        if not found:
            kinds = dict.fromkeys(call.kind.__name__ for call in calls)
            raise InvalidOverrideError(
                f"the model has no layer of class {which.__name__}.{near(which.__name__, kinds)} "
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
        pattern = glob(name)
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
            f"the model has no layer {name!r}, and TensorFlow no op type of that name.{near(name, known)} Layers: "
            f"{_some(dict.fromkeys(call.path for call in calls))}"
        )
    return found


def _is_op_type(key: Any, graph: Graph) -> bool:
    """Whether a key means nodes anywhere. Raises `InvalidOverrideError` where it could be a layer as well."""
    if not isinstance(key, str):
        return False
    known = key.startswith("@") or _opdefs.find(key) is not None or bool(graph.find(op_type=key))
    if known and any(key in (call.path, call.name) for call in graph.layers):
        raise InvalidOverrideError(
            f"{key!r} is a layer and an op type; say gr.Override(…, op_type={key!r}), or give the layer itself"
        )
    return known


def _is_pair(key: Any) -> bool:
    """Whether a key is a layer with op types in it."""
    if not (isinstance(key, tuple) and len(key) == 2):
        return False
    words = [key[1]] if isinstance(key[1], str) else key[1]
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return False
    return all(word.startswith("@") or _opdefs.find(word) is not None for word in words)


def _scopes(calls: Iterable[LayerCall]) -> str:
    """An expression for nodes in the scopes of layers. In a function's body a scope comes behind the call's name."""
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
        raise InvalidGraphError("the graph knows no layers; gr.from_keras makes one that does")
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
