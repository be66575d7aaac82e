"""Generates sequences of override maps over a random graph, to compare what a map gives first and what it gives later.

A program that reuses what an earlier program built, such as the gradients of similar nodes, must tell apart all that
gradients depend on. So the graphs consist of nodes that are nearly equal (`twin_graphs`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from gradrule._messages.call_arguments import ProgramArguments, flat_list
from tests.service.graph_defs import load_graph
from tests.service.twin_graphs import SIZE, GraphGenerator, Tensor

KINDS = ("vjp", "stacked", "jacobian", "hvp", "jvp")


@dataclass(frozen=True)
class Map:
    """One override map with what is differentiated; an argument of every call that `ask` or a build makes."""

    kind: str
    arguments: ProgramArguments
    params: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    grad_ys: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ys(self) -> list[str]:
        """Names of the ys."""
        return flat_list(self.arguments.ys)

    @property
    def xs(self) -> list[str]:
        """Names of the xs."""
        return flat_list(self.arguments.xs)

    def __repr__(self) -> str:
        shown = {name: getattr(self.arguments, name) for name in ("ys", "xs", "stop_gradients", "no_gradient")}
        return f"Map({self.kind}, {shown}, overrides={self.arguments.overrides}, params={dict(self.params)})"


@dataclass(frozen=True)
class MapSequence:
    """A graph, its feeds, and the maps in the order in which they are evaluated; some occur twice."""

    graph: gr.Graph
    feeds: dict[str, Any]
    maps: list[Map]
    graph_def: Any


def sequence(number: int, maps: int) -> MapSequence:
    """Returns the sequence of a number; the same whenever and wherever it is made."""
    rng = random.Random(number)
    generator = GraphGenerator(rng)
    graph_def = generator.graph_def()
    chosen: list[Map] = []
    makers = _MapMaker(rng, graph_def, generator)
    while len(chosen) < maps:
        if chosen and rng.random() < 0.2:
            chosen.append(rng.choice(chosen))
        elif chosen and rng.random() < 0.35:
            chosen.append(makers.varied(rng.choice(chosen)))
        else:
            chosen.append(makers.new())
    return MapSequence(load_graph(graph_def), generator.feeds, chosen, graph_def)


ELEMENTWISE = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Square",
    "Sign",
    "Floor",
    "Abs",
    "Sin",
    "Exp",
    "Elu",
    "Selu",
    "Relu6",
    "Softplus",
)
_UNARY = (
    "5 * dy",
    "{0} * dy",
    "where(abs(x) <= {0}, dy, 0)",
    "where(x > 0, maximum(dy, 0), 0)",
    "dy * y",
    "dy / ({0} + abs(x))",
    "{0} * default",
    "dy * sum(dy)",
    "dy * mean(x)",
    "dy + x",
)
_UNARY_NAMES = (
    "ste",
    "ste_sign",
    "guided_relu",
    "deconvnet",
    "gradient_reversal",
    "gradient_normalize",
    "elrp_activation",
    "magnitude_aware_sign",
    "deeplift_rescale",
    "gradient_sign",
    "Tanh",
    "Relu",
    "Identity",
    "default",
)
_LINEAR_NAMES = ("lrp_epsilon", "lrp_zplus", "lrp_gamma", "lrp_flat", "lrp_wsquare", "default", "feedback_alignment")
_PRESETS = (
    "guided_backprop",
    "deconvnet",
    "beta_smooth",
    "epsilon_plus",
    "epsilon_alpha2_beta1",
    "excitation_backprop",
)
_ANY = ("each({0} * default)", "each(default + {0} * default)", "default")


class _MapMaker:
    """Makes maps for one graph."""

    def __init__(self, rng: random.Random, graph_def: Any, generator: GraphGenerator) -> None:
        self._rng, self._dtype, self._graph_def = rng, generator.dtype, graph_def
        top = [node for node in graph_def.node if node.op not in ("Const", "Placeholder", "NoOp")]
        inner = [node for function in graph_def.library.function for node in function.node_def]
        self._top = top
        self._types = sorted({node.op for node in [*top, *inner] if node.op != "Const"})
        self._elementwise = [kind for kind in self._types if kind in ELEMENTWISE]
        self._linear = [kind for kind in self._types if kind in ("MatMul", "Conv2D", "BiasAdd", "Einsum", "AvgPool")]
        self._scopes = sorted({node.name.split("/")[0] for node in top if "/" in node.name})

    def new(self) -> Map:
        """Returns a new map."""
        rng = self._rng
        kind = rng.choices(KINDS, [58, 8, 8, 16, 10])[0]
        xs = rng.choice([["x"], ["x", "w"], ["w"], ["x"]])
        y = rng.choice(["y", "y", "v"])
        overrides, params = self._overrides(kind)
        inner = [node.name for node in self._top if node.name not in ("y", "v")]
        arguments = ProgramArguments(
            fetches=rng.choice([["y"], [y], []]),
            ys=[y],
            xs=xs,
            overrides=overrides,
            stop_gradients=rng.sample(inner, 1) if rng.random() < 0.12 else (),
            unconnected_gradients=rng.choice(["none", "none", "zero"]),
            no_gradient=rng.choices(["zero", "default", "pass", "error"], [40, 30, 20, 10])[0],
            dense_gradients=rng.random() < 0.3,
        )
        shape = (SIZE,) if y == "v" else ()
        return self._with_values(Map(kind, arguments, params), shape)

    def _with_values(self, made: Map, shape: tuple[int, ...]) -> Map:
        rng = self._rng
        (y,) = made.ys
        if made.kind == "stacked":
            made = replace(made, grad_ys={y: self._array((2, *shape))})
        elif made.kind == "vjp" and rng.random() < 0.5:
            made = replace(made, grad_ys={y: self._array(shape)})
        elif made.kind in ("hvp", "jvp"):
            made = replace(made, vectors={x: self._array((SIZE, SIZE)) for x in made.xs})
        return made

    def varied(self, other: Map) -> Map:
        """Returns a map of the same nodes with other rules, or of the same rules with another derivative."""
        rng = self._rng
        if rng.random() < 0.3:
            kind = rng.choice(KINDS)
            shape = (SIZE,) if other.ys == ["v"] else ()
            return self._with_values(Map(kind, other.arguments, other.params), shape)
        overrides = [
            gr.Override(gr.Rule(self._formula(_ANY[:2])), label=f"part{index}", optional=True, **self._selector())
            if isinstance(item, gr.Preset)
            else self._with_rule(item)
            for index, item in enumerate(other.arguments.overrides or [])
        ]
        return replace(other, arguments=replace(other.arguments, overrides=overrides), params={})

    def _with_rule(self, item: gr.Override) -> gr.Override:
        found = object.__new__(gr.Override)
        for name in gr.Override.__slots__:
            object.__setattr__(found, name, getattr(item, name))
        rules = _UNARY[:7] if item.selector.op_type in ELEMENTWISE else _ANY[:2]
        object.__setattr__(found, "rule", gr.Rule(self._formula(rules)))
        object.__setattr__(found, "params", None)
        return found

    def _formula(self, formulas: Sequence[str]) -> str:
        return self._rng.choice(formulas).format(self._rng.choice([0.5, 0.75, 2.0, 3.0]))

    def _overrides(self, kind: str) -> tuple[list[Any], dict[str, dict[str, float]]]:
        rng = self._rng
        if rng.random() < 0.1:
            return [gr.Preset(rng.choice(_PRESETS), optional=True)], {}
        overrides: list[Any] = []
        params: dict[str, dict[str, float]] = {}
        for index in range(rng.choice([0, 1, 1, 2, 2, 3])):
            words: dict[str, Any] = {"label": f"part{index}", "optional": True}
            if kind == "hvp" and rng.random() < 0.5:
                words["order"] = "all"
            draw = rng.random()
            if draw < 0.45 and self._elementwise:
                words |= self._narrowed({"op_type": rng.choice(self._elementwise)})
                rule: Any = self._unary(words, params)
            elif draw < 0.6 and self._linear:
                words |= self._narrowed({"op_type": rng.choice(self._linear)})
                rule = rng.choice(_LINEAR_NAMES)
            elif draw < 0.7 and len(self._top) > 2:
                words["region"] = self._region()
                rule = gr.Rule(self._formula(("first({0} * default)", "each({0} * default)")))
            else:
                words |= self._selector()
                rule = gr.Rule(self._formula(_ANY[:2])) if rng.random() < 0.75 else "default"
            overrides.append(gr.Override(rule, **words))
        return overrides, params

    def _unary(self, words: dict[str, Any], params: dict[str, dict[str, float]]) -> Any:
        rng = self._rng
        draw = rng.random()
        if draw < 0.12:
            words["params"] = {"gain": rng.choice([0.5, 2.0]), "beta": 1.25}
            if rng.random() < 0.5:
                params[words["label"]] = {"gain": rng.choice([0.75, 3.0])}
            return gr.Rule("gain * dy / (beta + abs(x))", params={"gain": None, "beta": None})
        if draw < 0.2:
            # The nodes' names decide which numbers are drawn.
            params[words["label"]] = {"seed": rng.choice([7, 8]), "step": 1}
            return "gradient_noise"
        if draw < 0.5:
            return rng.choice(_UNARY_NAMES)
        return gr.Rule(self._formula(_UNARY))

    def _narrowed(self, selector: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.2 and self._scopes:
            return selector | {"scope": rng.choice(self._scopes)}
        if draw < 0.35:
            return selector | {"position": rng.choice(["nearest_xs", "nearest_ys", 0, -1])}
        if draw < 0.45:
            return selector | {"depends_on": (rng.choice(["x", "w"]),)}
        if draw < 0.5:
            return selector | {"rank": rng.choice([0, 1, 2])}
        if draw < 0.65:
            names = [node.name for node in self._top if node.op == selector["op_type"]]
            return {"node": tuple(rng.sample(names, min(len(names), 2)))} if names else selector
        return selector

    def _selector(self) -> dict[str, Any]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.3:
            return {"op_type": rng.choice(self._types)}
        if draw < 0.6:
            return {"node": tuple(node.name for node in rng.sample(self._top, min(len(self._top), rng.randint(1, 3))))}
        if draw < 0.7 and self._scopes:
            return {"scope": rng.choice(self._scopes)}
        if draw < 0.8:
            return {"op_type": rng.choice(["@activation", "@linear", "@step", "@sum", "@bias"])}
        if draw < 0.9:
            return {"layer": rng.choice(["@linear", "@dense", "@convolution", "@activation"])}
        return self._chain()

    def _chain(self) -> dict[str, Any]:
        by_name = {node.name: node for node in self._top}
        node = self._rng.choice(self._top)
        before = [by_name[name] for name in (text.split(":")[0] for text in node.input) if name in by_name]
        return {"pattern": (self._rng.choice(before).op, node.op)} if before else {"op_type": node.op}

    def _region(self) -> gr.Region:
        """Returns a region of one node: from its inputs that are no constants."""
        rng = self._rng
        constants = {node.name for node in self._graph_def.node if node.op == "Const"}
        node = rng.choice(self._top)
        inputs = [text for text in node.input if not text.startswith("^") and text not in constants]
        return gr.Region(inputs=dict.fromkeys(inputs) or ["x"], outputs=[node.name])

    def _array(self, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape))
        values = np.array([self._rng.choice(range(-9, 10)) / 4 for _ in range(count)]).reshape(shape)
        return values.astype(tf.as_dtype(self._dtype).as_numpy_dtype)


# Rules that local TensorFlow can use under gradient_override_map.


def _five_times(op: Any, dy: Tensor) -> Tensor:
    return tf.constant(5, dy.dtype) * dy


def _by_output(op: Any, dy: Tensor) -> Tensor:
    return dy * op.outputs[0]


def _window(op: Any, dy: Tensor) -> Tensor:
    return tf.where(tf.abs(op.inputs[0]) <= tf.constant(0.5, dy.dtype), dy, tf.zeros_like(dy))


def _added(op: Any, dy: Tensor) -> Tensor:
    return dy + op.inputs[0]


_PLAIN: Mapping[str, Callable[..., Any]] = {
    "5 * dy": _five_times,
    "dy * y": _by_output,
    "where(abs(x) <= 0.5, dy, 0)": _window,
    "dy + x": _added,
}
_OWN_GRADIENTS = ("Cumprod", "Pow", "Xlogy", "Xdivy", "DivNoNan", "FusedBatchNormV3", "Max", "Min", "MatrixSetDiagV3")
"""Ops for which gradrule has gradients of its own, or whose gradient by ties is a choice."""


def plain_maps(number: int, maps: int) -> tuple[MapSequence, list[dict[str, Any]]]:
    """Returns a sequence of maps that local TensorFlow can express, and for each map its rules by name of node."""
    for attempt in range(100):
        rng = random.Random(f"{number} {attempt}")
        generator = GraphGenerator(rng)
        graph_def = generator.graph_def()
        dtype = tf.as_dtype(generator.dtype).as_datatype_enum
        nodes = [node for node in graph_def.node if node.op in ELEMENTWISE and node.attr["T"].type == dtype]
        is_plain = not graph_def.library.function and not any(node.op in _OWN_GRADIENTS for node in graph_def.node)
        if len(nodes) > 2 and is_plain and generator.dtype in ("float32", "float64"):
            break
    chosen: list[Map] = []
    rules: list[dict[str, Any]] = []
    for _ in range(maps):
        made: dict[str, Any] = {}
        overrides = []
        for place in range(rng.randint(0, 3)):
            text = rng.choice(sorted(_PLAIN))
            named = [node.name for node in rng.sample(nodes, rng.randint(1, 2))]
            overrides.append(gr.Override(gr.Rule(text), node=named, label=f"part{place}", optional=True))
            # The first override wins.
            made = dict.fromkeys(named, _PLAIN[text]) | made
        arguments = ProgramArguments(["y"], ["y"], rng.choice([["x"], ["w"], ["x", "w"]]), overrides=overrides)
        chosen.append(Map("vjp", replace(arguments, no_gradient="default")))
        rules.append(made)
    return MapSequence(load_graph(graph_def), generator.feeds, chosen, graph_def), rules


def same_bits(one: Any, two: Any) -> bool:
    """Returns whether two arrays have the same type, shape and bits; any NaN equals any other."""
    one, two = np.asarray(one), np.asarray(two)
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.tobytes() == two.tobytes():
        return True
    # Kernels may give NaNs of another sign or payload.
    both = np.logical_and(one != one, two != two)
    return np.where(both, 0, one).tobytes() == np.where(both, 0, two).tobytes()
