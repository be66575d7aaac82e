"""gradrule's half of a comparison: builds the graph of a case, evaluates it on a server, returns gradients by input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradrule as gr
from tests.peers.cases import Array, Case, Reference, moments

Tensor = Any
# Seconds; the first evaluation sends a model of 200 MB and builds its gradients.
_MODEL_TIMEOUT = 600.0


def run(client: gr.Client, reference: Reference, case: Case) -> dict[str, Array]:
    """What gradrule gives for a case, in the reference's layout, by the names of the reference."""
    values = reference.inputs(case)
    kind = case.run["kind"]
    if kind == "network":
        return _network(client, reference, case, values)
    if kind == "keras":
        return _keras(client, case, values)
    answer = _op(client, case, values) if kind == "op" else _GRAPHS[case.run["graph"]](client, case, values)
    after = case.run.get("post")
    if after == "moments":
        return {"x": moments(values["x"], answer["x"])}
    if after == "symmetric":
        return {"x": (answer["x"] + answer["x"].T) / 2}
    return answer


def _op(client: gr.Client, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    """One op with the rule on it; a rule named as the op is the op's own gradient."""
    g = gr.Graph()
    constants = case.run.get("constants", ())
    inputs = [
        g.constant(value, name=name) if name in constants else g.placeholder(name, case.dtype, list(value.shape))
        for name, value in values.items()
        if name != "dy"
    ]
    g.op(case.run["op"], *inputs, name="y")
    overrides = {} if case.rule == case.run["op"] else {case.run["op"]: (case.rule, dict(case.params))}
    feeds = {name: value for name, value in values.items() if name != "dy" and name not in constants}
    return _gradients(client, g, feeds, values["dy"], overrides)


def _gradients(
    client: gr.Client, g: gr.Graph, feeds: Mapping[str, Array], dy: Array, overrides: Any, **options: Any
) -> dict[str, Array]:
    answer = client.evaluate(
        g, dict(feeds), ys=["y"], xs=list(feeds), grad_ys={"y": dy}, overrides=overrides, **options
    )
    return {name: np.asarray(answer.gradients[name]) for name in feeds}


# Graphs of more than one op. Each is called with the case and its input values.


def _on_region(
    build: Callable[[gr.Graph, Tensor, Mapping[str, Array]], None], outputs: str = "y"
) -> Callable[[gr.Client, Case, Mapping[str, Array]], dict[str, Array]]:
    def evaluate(client: gr.Client, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
        g = gr.Graph()
        build(g, g.placeholder("x", case.dtype, list(values["x"].shape)), values)
        region = gr.Region(inputs=["x"], outputs=[outputs])
        overrides = [gr.Override(case.rule, region=region, params=dict(case.params))]
        return _gradients(client, g, {"x": values["x"]}, values["dy"], overrides)

    return evaluate


def _log1pexp(g: gr.Graph, x: Tensor, values: Mapping[str, Array]) -> None:
    del values
    g.op("Log", g.op("AddV2", np.array(1.0, x.dtype), g.op("Exp", x)), name="y")


def _safe_norm(g: gr.Graph, x: Tensor, values: Mapping[str, Array]) -> None:
    del values
    g.op("Sqrt", g.op("Sum", g.op("Square", x), np.array([0], np.int32)), name="y")


def _dorefa_weight(g: gr.Graph, x: Tensor, values: Mapping[str, Array]) -> None:
    """DoReFa's weights of two bits: 2·round(3·(tanh(x)/(2·max abs tanh) + 1/2))/3 - 1."""
    axes = np.arange(values["x"].ndim, dtype=np.int32)

    def number(value: float) -> Array:
        return np.array(value, values["x"].dtype)

    limited = g.op("Tanh", x)
    largest = g.op("Max", g.op("Abs", limited), axes)
    unit = g.op("AddV2", g.op("RealDiv", limited, g.op("Mul", largest, number(2))), number(0.5))
    rounded = g.op("RealDiv", g.op("Round", g.op("Mul", unit, number(3))), number(3))
    g.op("Sub", g.op("Mul", rounded, number(2)), number(1), name="y")


def _argmax_softmax(g: gr.Graph, x: Tensor, values: Mapping[str, Array]) -> None:
    one, zero = np.array(1, values["x"].dtype), np.array(0, values["x"].dtype)
    largest = g.op("ArgMax", x, np.array(-1, np.int32), output_type="int32")
    g.op("OneHot", largest, np.array(values["x"].shape[-1], np.int32), one, zero, axis=-1, name="y")


def _step(client: gr.Client, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    g = gr.Graph()
    feeds = {name: values[name] for name in ("x", "threshold")}
    sides = [g.placeholder(name, case.dtype, list(value.shape)) for name, value in feeds.items()]
    g.op("Cast", g.op("Greater", *sides), DstT=case.dtype, name="y")
    overrides = [gr.Override(case.rule, op_type="@step", params=dict(case.params))]
    return _gradients(client, g, feeds, values["dy"], overrides)


def _eigenvectors(client: gr.Client, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    g = gr.Graph()
    x = g.placeholder("x", case.dtype, list(values["x"].shape))
    e, v = g.op("SelfAdjointEigV2", x)
    axis = np.array([0], np.int32)
    seen = g.op("Square", g.op("Sum", g.op("Mul", values["weights"], v), axis))
    of_values = g.op("Sum", g.op("Mul", values["of_values"], e), axis)
    g.op("AddV2", of_values, g.op("Sum", g.op("Mul", values["of_vectors"], seen), axis), name="y")
    overrides = {"SelfAdjointEigV2": (case.rule, dict(case.params))}
    return _gradients(client, g, {"x": values["x"]}, values["dy"], overrides)


_GRAPHS: Mapping[str, Callable[[gr.Client, Case, Mapping[str, Array]], dict[str, Array]]] = {
    "log1pexp": _on_region(_log1pexp),
    "safe_norm": _on_region(_safe_norm),
    "dorefa_weight": _on_region(_dorefa_weight),
    "argmax_softmax": _on_region(_argmax_softmax),
    "step": _step,
    "eigenvectors": _eigenvectors,
}


# Networks: PyTorch's (n, channels, height, width) outside, TensorFlow's (n, height, width, channels) inside.


def to_channels_last(value: Array) -> Array:
    return np.ascontiguousarray(value.transpose(0, 2, 3, 1)) if value.ndim == 4 else value


def to_channels_first(value: Array) -> Array:
    return value.transpose(0, 3, 1, 2) if value.ndim == 4 else value


def _network(client: gr.Client, reference: Reference, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    name = case.run["network"]
    description, weights = reference.networks[name], reference.weights(name, case.dtype)
    x = to_channels_last(values["x"])
    g = gr.Graph()
    # TensorFlow's FusedBatchNormV3 has no float64; written as a product and a sum the norm has.
    batch_norm = case.run.get("batch_norm") or ("FusedBatchNormV3" if case.dtype == "float32" else "MulAdd")
    builder = _Layers(g, weights, description, case.run.get("bias_op", "BiasAdd"), batch_norm)
    y = builder.add(description["layers"], "", g.placeholder("x", case.dtype, list(x.shape)))
    g.op("Identity", y, name="y")
    if case.run.get("forward"):
        return {"y": np.asarray(client.evaluate(g, {"x": x}, fetches=["y"]).outputs["y"])}
    overrides = [_override(entry, values) for entry in case.run["overrides"]]
    options = {"rewrites": tuple(case.run["rewrites"])} if case.run["rewrites"] else {}
    gradient = to_channels_first(_gradients(client, g, {"x": x}, values["dy"], overrides, **options)["x"])
    return {"x": gradient * values["times"] if "times" in values else gradient}


@functools.lru_cache(maxsize=1)
def _keras_model(name: str) -> tuple[gr.Graph, Array]:
    from tests.peers.keras_models import model_and_input

    model, x = model_and_input(name)
    return gr.from_keras(model), x


def _keras(client: gr.Client, case: Case, values: Mapping[str, Array]) -> dict[str, Array]:
    """A preset on a whole Keras model."""
    from tests.peers import keras_layers

    graph, x = _keras_model(case.run["model"])
    (input_name,), (y_name,) = graph.inputs, graph.outputs
    # An index has no gradient, so that of its embedding is compared.
    x_name = input_name if np.issubdtype(x.dtype, np.floating) else keras_layers.EMBEDDING
    answer = client.evaluate(
        graph, {input_name: x}, ys=[y_name], xs=[x_name], grad_ys={y_name: values["dy"].astype(case.dtype)},
        overrides=[_override(entry, values) for entry in case.run["overrides"]],
        rewrites=tuple(case.run["rewrites"]), timeout=_MODEL_TIMEOUT,
    )  # fmt: skip
    gradient = np.asarray(answer.gradients[x_name])
    return {"x": gradient * values["times"] if "times" in values else gradient}


def _override(entry: Mapping[str, Any], values: Mapping[str, Array]) -> Any:
    """An override or a preset. A param `@name` is an array of the case, in the layout of the input."""
    words = dict(entry)
    words["params"] = {
        name: to_channels_last(values[value]) if isinstance(value, str) else value
        for name, value in entry.get("params", {}).items()
    }
    if "preset" in words:
        return gr.Preset(words["preset"], **words["params"])
    if "pattern" in words:
        words["pattern"] = tuple(words["pattern"])
    return gr.Override(words.pop("rule"), **words)


@dataclass(frozen=True)
class _Layers:
    """Adds the layers of a description to a graph. Node names follow the description: `2/MatMul`, `2/bias_add`."""

    graph: gr.Graph
    weights: Mapping[str, Array]
    description: Mapping[str, Any]
    bias_op: str
    batch_norm: str

    def add(self, layers: Sequence[Mapping[str, Any]], prefix: str, x: Tensor) -> Tensor:
        for index, layer in enumerate(layers):
            path = f"{prefix}{index}"
            if layer["kind"] == "residual":
                x = self.graph.op("AddV2", self.add(layer["layers"], f"{path}/", x), x, name=f"l{path}/sum")
            else:
                x = self._layer(layer, path, x)
        return x

    def _layer(self, layer: Mapping[str, Any], path: str, x: Tensor) -> Tensor:
        g, kind, name = self.graph, layer["kind"], f"l{path}/{layer['kind']}"
        if kind == "dense":
            return self._biased(g.op("MatMul", x, self._dense_weight(path), name=name), path)
        if kind == "conv":
            weight = np.ascontiguousarray(self.weights[f"{path}/weight"].transpose(2, 3, 1, 0))
            strides = [1, layer["stride"], layer["stride"], 1]
            return self._biased(g.op("Conv2D", x, weight, strides=strides, padding=layer["padding"], name=name), path)
        if kind == "batch_norm":
            return self._normalised(path, x, name)
        if kind == "flatten":
            return g.op("Reshape", x, np.array([-1, int(np.prod(self.description["flattened"]))], np.int32), name=name)
        if kind.endswith("pool"):
            window = [1, 2, 2, 1]
            op = "AvgPool" if kind == "avg_pool" else "MaxPool"
            return g.op(op, x, ksize=window, strides=window, padding="VALID", name=name)
        return g.op(kind.capitalize(), x, name=name)

    def _dense_weight(self, path: str) -> Array:
        weight = self.weights[f"{path}/weight"]
        shape = self.description.get("flattened")
        if shape is not None and weight.shape[1] == np.prod(shape):
            # Flattened channels come last here, first there.
            weight = weight.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(len(weight), -1)
        return np.ascontiguousarray(weight.T)

    def _biased(self, x: Tensor, path: str) -> Tensor:
        bias = self.weights.get(f"{path}/bias")
        return x if bias is None else self.graph.op(self.bias_op, x, bias, name=f"l{path}/bias_add")

    def _normalised(self, path: str, x: Tensor, name: str) -> Tensor:
        scale, shift, mean, variance = (
            self.weights[f"{path}/{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        epsilon = self.description["batch_norm_epsilon"]
        if self.batch_norm == "FusedBatchNormV3":
            outputs = self.graph.op(
                "FusedBatchNormV3", x, scale, shift, mean, variance, epsilon=epsilon, is_training=False, name=name
            )
            return outputs[0]
        factor = (scale / np.sqrt(variance + epsilon)).astype(scale.dtype)
        product = self.graph.op("Mul", x, factor, name=f"{name}/mul")
        return self.graph.op("AddV2", product, (shift - mean * factor).astype(scale.dtype), name=name)
