"""Tests that a build gives the same whatever was built before it: gradients that are reused fit where they are used.

Each program is built three times: after all programs of its sequence before it, alone, and with nothing reused at all,
not even between its own nodes. All three must give the same bits, statuses, types and errors.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._messages.call_arguments import ProgramArguments
from gradrule_server.engine.process import configure_optimizer
from tests.samples import WHOLE, size
from tests.service.graph_defs import build_graph, build_graph_def, load_graph
from tests.service.map_sequences import Map, sequence
from tests.unit.engine.map_builds import Outcome, outcome


def _templates() -> Any:
    """Returns the store of what builds reuse; None for a server that reuses nothing."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("gradrule_server.engine.gradient_templates").TEMPLATES


TEMPLATES = _templates()


@pytest.fixture(scope="module", autouse=True)
def optimizer_of_engines() -> Iterator[None]:
    """Configures TensorFlow's optimizer as in engines: others of its passes change numbers by the names of nodes."""
    before = tf.config.optimizer.get_experimental_options()
    configure_optimizer()
    changed = tf.config.optimizer.get_experimental_options()
    yield
    tf.config.optimizer.set_experimental_options({name: before.get(name, True) for name in changed})


@contextlib.contextmanager
def nothing_reused() -> Iterator[None]:
    """Makes each gradient anew within the context."""
    if TEMPLATES is None:
        yield
        return

    def make_anew(key: Any, node: str, outer: Sequence[Any], make: Callable[[], Any], is_pure: Any) -> Any:
        return make()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TEMPLATES, "gradients", make_anew)
        yield


def clear() -> None:
    """Forgets what earlier builds of this process left."""
    if TEMPLATES is not None:
        TEMPLATES.clear()


def check(graph: gr.Graph, feeds: dict[str, Any], maps: Sequence[Map], what: str) -> list[Outcome]:
    """Asserts that each map gives the same after the others, alone and with nothing reused; returns the outcomes."""
    with nothing_reused():
        wanted = [outcome(graph, feeds, item) for item in maps]
    after = [outcome(graph, feeds, item) for item in maps]
    faults = []
    for number, item in enumerate(maps):
        clear()
        alone = outcome(graph, feeds, item)
        for how, found in (("after the others", after[number]), ("alone", alone)):
            for fault in found.differences(wanted[number]):
                faults.append(f"{what}, map {number} {how}: {fault}\n  {item}")
    assert not faults, "\n".join(faults[:6])
    return wanted


@pytest.mark.parametrize("number", range(size(8, 400)))
def test_sequences_of_maps(number: int) -> None:
    """What earlier sequences of this process left is kept: graphs meet each other's gradients too."""
    item = sequence(number, 6)
    check(item.graph, item.feeds, item.maps, f"sequence {number}")


def x_of(shape: Any = (4, 4), dtype: Any = tf.float32) -> Any:
    """Adds the placeholder x."""
    return tf.compat.v1.placeholder(dtype, shape, name="x")


def vjp(*overrides: Any, **words: Any) -> Map:
    """Returns a map for the gradient of y by x."""
    params = words.pop("params", {})
    return Map("vjp", ProgramArguments(fetches=["y"], ys=["y"], xs=["x"], overrides=list(overrides), **words), params)


def hvp(*overrides: Any, **words: Any) -> Map:
    """Returns a map for the second derivative of y by x along ones."""
    arguments = ProgramArguments(ys=["y"], xs=["x"], overrides=list(overrides), **words)
    return Map("hvp", arguments, vectors={"x": np.ones_like(X)})


X: Any = np.float32([[0.3, -0.7, 1.1, 0.2], [0.9, 0.2, -0.4, -1.5], [-0.1, 0.6, 0.8, -0.9], [0.5, -0.3, 0.7, 1.3]])


def refused(outcomes: Sequence[Outcome]) -> list[int]:
    """Returns the numbers of the maps that were refused."""
    return [number for number, item in enumerate(outcomes) if item.errors]


def check_maps(build: Callable[[], None], *maps: Map, feed: Any = X) -> list[Outcome]:
    """Checks the maps in this order, and in whole samples in the reverse one before."""
    graph = build_graph(build)
    if WHOLE:
        check(graph, {"x": feed}, maps[::-1], build.__name__)
        clear()
    return check(graph, {"x": feed}, maps, build.__name__)


def test_upstream_gradients_that_tensorflow_knows_through_a_split() -> None:
    """The upstream gradients of the second outputs are parts of constants, zeros or ones."""

    def build() -> None:
        x = x_of()
        labels = tf.nn.softmax(tf.constant(X))
        with tf.name_scope("pair"):
            first = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=labels).backprop
            second = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=labels).backprop
        stacked = tf.reduce_sum(tf.stack([first, second]), name="stacked")
        tf.add(stacked, tf.reduce_sum(tf.concat([second, first], 0), name="joined"), name="y")

    def joined(rule: str, op_type: str) -> gr.Override:
        return gr.Override(gr.Rule(rule), op_type=op_type)

    maps = [vjp(joined(f"each({factor} * default)", op)) for op in ("Pack", "ConcatV2") for factor in (0, 1, 2)]
    zeros = [vjp(gr.Override("gradient_zero", node=name)) for name in ("stacked", "joined")]
    assert not refused(check_maps(build, vjp(), *maps, *zeros))


@pytest.mark.parametrize("policies", [("pass", "zero"), ("zero", "pass"), ("zero", "error")])
@pytest.mark.parametrize("order", ["first", "all"])
def test_the_policy_for_nodes_without_gradient(policies: tuple[str, str], order: Any) -> None:
    """A rule that asks for the gradient of such a node gets what the policy of its own program gives."""

    def build() -> None:
        x = x_of()
        with tf.name_scope("several"):
            for _ in range(2):
                x = tf.raw_ops.SoftsignGrad(gradients=x * x, features=x)
        tf.reduce_sum(tf.tanh(x) * x, name="y")

    def override() -> gr.Override:
        return gr.Override(gr.Rule("each(2 * default)"), op_type="SoftsignGrad", order=order)

    maps: list[Map] = []
    for policy in policies:
        words: dict[str, Any] = {"no_gradient": policy}
        maps += [hvp(override(), **words), vjp(override(), **words), vjp(**words)]
    check_maps(build, *maps)


def test_failed_checks_name_their_own_node() -> None:
    """The shape of the rule's result is checked when the program runs; the message names node and rule."""

    def build() -> None:
        x = x_of([None, None])
        tf.reduce_sum(tf.tanh(tf.tanh(x, name="one"), name="two"), name="y")

    rule = gr.Graph()
    x, dy = (rule.placeholder(name, "float32", [None, None]) for name in ("x", "dy"))
    rule.op("Mul", x[1:], dy[1:], name="dx")
    nodes = [vjp(gr.Override(gr.Rule(graph=rule), node=node)) for node in ("one", "two")]
    outcomes = check_maps(build, *nodes)
    assert ["'one'" in outcomes[0].errors[0][1], "'two'" in outcomes[1].errors[0][1]] == [True, True]


def test_random_numbers_depend_on_the_node() -> None:
    def build() -> None:
        x = x_of()
        tf.reduce_sum(tf.tanh(tf.tanh(x, name="one"), name="two") + tf.tanh(x, name="three"), name="y")

    nodes = ["one", "two", "three"]
    maps = [
        vjp(
            gr.Override("gradient_noise", node=node, label="noise", params={"eta": 0.5}),
            params={"noise": {"seed": seed, "step": 1}},
        )
        for node in nodes
        for seed in (1, 2)
    ]
    both = vjp(
        gr.Override("gradient_noise", op_type="Tanh", label="noise", params={"eta": 0.5}),
        params={"noise": {"seed": 1, "step": 1}},
    )
    assert not refused(check_maps(build, *maps, both))


def test_params_of_equal_formulas() -> None:
    def build() -> None:
        x = x_of()
        tf.reduce_sum(tf.tanh(tf.tanh(x, name="one"), name="two"), name="y")

    def override(node: str, **params: float) -> gr.Override:
        rule = gr.Rule("a * dy + b * x", params={"a": None, "b": None})
        return gr.Override(rule, node=node, label=node, params=params)

    maps = [
        vjp(override("one", a=2.0, b=3.0), override("two", a=3.0, b=2.0)),
        vjp(override("two", a=2.0, b=3.0), override("one", a=3.0, b=2.0)),
        vjp(override("two", b=3.0, a=2.0)),
        vjp(override("one", a=1.0, b=0.5), params={"one": {"b": 7.0}}),
    ]
    assert not refused(check_maps(build, *maps))


AXES: dict[str, Callable[[Any], Any]] = {
    "constants": lambda zero: [tf.constant([0]), tf.constant([1])],
    "sums of constants": lambda zero: [tf.constant([0]) + tf.constant([0]), tf.constant([0]) + tf.constant([1])],
    "packs": lambda zero: [tf.stack([tf.constant(0)]), tf.stack([tf.constant(1)])],
    "ranges": lambda zero: [tf.range(0, 1), tf.range(1, 2)],
    "copies": lambda zero: [tf.identity(tf.constant([0])), tf.identity(tf.constant([1]))],
    "casts": lambda zero: [tf.cast(tf.constant([axis], tf.int64), tf.int32) for axis in (0, 1)],
    "values of a run": lambda zero: [tf.constant([0]) + zero, tf.constant([1]) + zero],
}
"""Pairs of axes that are known at different times; `zero` is 0 in each run."""

BY_AXIS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "sum": ("Sum", lambda x, axis: tf.reduce_sum(x * x, axis, keepdims=True)),
    "max": ("Max", lambda x, axis: tf.reduce_max(x, axis, keepdims=True)),
    "mean": ("Mean", lambda x, axis: tf.reduce_mean(x * x, axis)),
    "cumsum": ("Cumsum", lambda x, axis: tf.cumsum(x, axis[0])),
    "gather": ("GatherV2", lambda x, axis: tf.gather(x, [3, 2, 1, 0], axis=axis[0])),
    "reverse": ("ReverseV2", tf.reverse),
    "expand": ("ExpandDims", lambda x, axis: tf.expand_dims(x, axis[0])),
    "concat": ("ConcatV2", lambda x, axis: tf.raw_ops.ConcatV2(values=[x, x * x], axis=axis[0])),
    "split": ("Split", lambda x, axis: tf.split(x, 2, axis=axis[0])[1]),
    "transpose": ("Transpose", lambda x, axis: tf.transpose(x, tf.concat([axis, 1 - axis], 0))),
    "tile": ("Tile", lambda x, axis: tf.tile(x, tf.concat([axis + 1, 2 - axis], 0))),
    "reshape": ("Reshape", lambda x, axis: tf.reshape(x, tf.concat([2 ** (axis + 1), 2 ** (3 - axis)], 0))),
    "slice": ("Slice", lambda x, axis: tf.slice(x, tf.concat([axis, 1 - axis], 0), [2, 2])),
    "pad": ("Pad", lambda x, axis: tf.pad(x, tf.stack([tf.concat([axis, axis], 0), tf.concat([1 - axis, axis], 0)]))),
}
"""Op types with an op that an axis, or integers computed from one, decides."""


@pytest.mark.parametrize("name", BY_AXIS)
def test_integers_that_decide_gradients(name: str) -> None:
    """Axes, sizes and permutations come from constants, from ops that TensorFlow follows, and from the run."""
    op_type, make = BY_AXIS[name]

    def build() -> None:
        x = x_of()
        zero = tf.cast(tf.reduce_sum(x * 0), tf.int32)
        y = tf.constant(0.0)
        for number, axes in enumerate(AXES.values()):
            for axis in axes(zero):
                y += tf.reduce_sum(tf.tanh(make(x, axis)) * (1 + number / 64))
        tf.identity(y, name="y")

    each = gr.Override(gr.Rule("each(2 * default)"), op_type=op_type)
    assert not refused(check_maps(build, vjp(), vjp(each)))


def test_indices_and_sizes_of_many_elements() -> None:
    """Long vectors of integers: more than a key may want to hold."""

    def build() -> None:
        x = x_of()
        long = tf.reshape(tf.tile(x, [8, 8]), [-1])
        y = tf.constant(0.0)
        for shift in (0, 1, 100):
            places = (np.arange(200) * 3 + shift) % 1024
            y += tf.reduce_sum(tf.tanh(tf.gather(long, places)) * np.float32(np.arange(200)))
            y += tf.reduce_sum(tf.tanh(tf.math.unsorted_segment_sum(long, (np.arange(1024) + shift) % 7, 7)))
            y += tf.reduce_sum(tf.dynamic_stitch([places[:100]], [tf.tanh(long[:100])]))
            y += tf.reduce_sum(tf.math.unsorted_segment_max(long, np.arange(1024) % (shift + 3), shift + 3))
        tf.identity(y, name="y")

    assert not refused(check_maps(build, vjp(), vjp(gr.Override(gr.Rule("first(2 * default0)"), op_type="GatherV2"))))


def test_lists_of_tensors() -> None:
    """What TensorFlow knows of the elements of a list is part of the tensor that holds it."""

    def build() -> None:
        x = x_of()
        total = tf.constant(0.0)
        for shape in ([4], [2, 4]):
            for count in (2, 3):
                array = tf.TensorArray(tf.float32, count, element_shape=shape, infer_shape=True)
                for number in range(count):
                    array = array.write(number, tf.tanh(x[number]) if shape == [4] else x[:2] * (number + 1))
                total += tf.reduce_sum(tf.square(array.stack()))
                total += tf.reduce_sum(array.read(count - 1) if shape == [4] else array.concat())
        tf.identity(total, name="y")

    check_maps(build, vjp(), vjp(gr.Override(gr.Rule("3 * dy"), op_type="Tanh")), hvp())


@pytest.mark.parametrize("dense", [False, True])
def test_slices_and_dense_gradients(dense: bool) -> None:
    """The same op gets slices from one consumer and a dense gradient from another."""

    def build() -> None:
        x = x_of()
        picked = [tf.gather(x, [1, 1, 2]), tf.gather(tf.identity(x), [1, 1, 2]), tf.gather(tf.tanh(x), [1, 1, 2])]
        both = tf.identity(x)
        picked += [tf.gather(both, [0, 3, 3]), both[:3], tf.gather(tf.reshape(x, [4, 4]), [2, 2, 0])]
        tf.reduce_sum(tf.add_n([tf.square(one) for one in picked]), name="y")

    kinds = ("Identity", "Tanh", "Reshape", "GatherV2")
    maps = [
        vjp(gr.Override(gr.Rule("each(default + 0.5 * default)"), op_type=kind), dense_gradients=dense)
        for kind in kinds
    ]
    assert not refused(check_maps(build, vjp(dense_gradients=dense), *maps))


def test_the_same_names_in_other_graphs() -> None:
    """Names of nodes, and what lies behind them, differ between graphs that one process builds."""

    def gathers(prefix: str, second: Any) -> Callable[[], None]:
        def build() -> None:
            x = x_of()
            with tf.name_scope(prefix):
                y = tf.gather(tf.tanh(x), [0, 2]) + second(x)
            tf.reduce_sum(tf.tanh(y, name="end"), name="y")

        return build

    graphs = [
        build_graph(gathers(prefix, second))
        for prefix in ("a", "b", "a/b")
        for second in (lambda x: x[:2], lambda x: tf.gather(x, [1, 1]), lambda x: tf.gather(tf.sin(x), [1, 3]))
    ]
    each = gr.Rule("each(2 * default)")
    maps = [vjp(), vjp(gr.Override(each, op_type="GatherV2")), vjp(gr.Override(gr.Rule("dy * x"), node="end"))]
    with nothing_reused():
        wanted = [[outcome(graph, {"x": X}, item) for item in maps] for graph in graphs]
    for turn in range(2):
        for graph, expected in zip(graphs, wanted, strict=True):
            for item, one in zip(maps, expected, strict=True):
                assert not outcome(graph, {"x": X}, item).differences(one), f"turn {turn}, {item}"


def test_attributes_without_their_default_values() -> None:
    """A GraphDef may leave out attributes that have their default value."""

    def graph(*, stripped: bool, alpha: float) -> gr.Graph:
        def build() -> None:
            x = x_of()
            made = tf.nn.leaky_relu(tf.matmul(x, tf.transpose(x)), alpha)
            image = tf.reshape(made, [1, 4, 4, 1])
            tf.reduce_sum(tf.nn.conv2d(image, image[0, :3, :3, :, None], 1, "SAME"), name="y")

        definition = build_graph_def(build)
        for node in definition.node if stripped else ():
            for name, value in (("alpha", 0.2), ("transpose_a", False), ("dilations", None), ("data_format", None)):
                if name in node.attr and (value is None or node.attr[name].f == pytest.approx(value)):
                    del node.attr[name]
        return load_graph(definition)

    found = [
        check(graph(stripped=stripped, alpha=alpha), {"x": X}, [vjp(), hvp()], f"{stripped} {alpha}")
        for alpha in (0.2, 0.3)
        for stripped in (True, False)
    ]
    assert not [number for outcomes in found for number in refused(outcomes)]
    assert not found[0][0].differences(found[1][0])
    assert found[0][0].differences(found[2][0])


def test_rules_that_look_beyond_their_node() -> None:
    """LRP looks at the bias behind a product and at which input depends on the xs; DeepLIFT at another forward run."""

    def build() -> None:
        x = x_of()
        weights, more = (tf.constant(X * factor) for factor in (1, 2))
        first = tf.nn.bias_add(tf.matmul(x, weights), [0.1, 0.2, 0.3, 0.4])
        second = tf.matmul(weights, tf.nn.relu(first))
        third = tf.matmul(tf.nn.relu(second), more)
        fourth = tf.nn.bias_add(tf.matmul(tf.sigmoid(third), tf.sigmoid(weights)), X[0])
        tf.reduce_sum(tf.tanh(fourth) + tf.matmul(x, x, transpose_b=True) * 0.1, name="y")

    maps = [
        vjp(gr.Override(rule, op_type=op, optional=True))
        for op in ("MatMul", "BiasAdd")
        for rule in ("lrp_epsilon", "lrp_zplus", "lrp_gamma", "default")
    ]
    maps += [vjp(gr.Override("lrp_gamma", layer="@dense")), vjp(gr.Preset("epsilon_plus"))]
    maps += [
        vjp(gr.Override("deeplift_rescale", op_type=op, params={"baseline": baseline}))
        for op in ("Relu", "Sigmoid", "Tanh")
        for baseline in (0.0, 0.25)
    ]
    check_maps(build, *maps)


def test_which_gradients_a_batch_norm_needs() -> None:
    def build() -> None:
        x = tf.reshape(x_of(), [1, 4, 4, 1])
        ones = tf.constant([0.5])
        y = tf.constant(0.0)
        for scale in (ones, tf.reduce_sum(x)[None], ones):
            for training in (False, True):
                made = tf.raw_ops.FusedBatchNormV3(
                    x=x, scale=scale, offset=ones, mean=ones, variance=ones, epsilon=0.01, is_training=training
                )
                y += tf.reduce_sum(tf.tanh(made.y))
        tf.identity(y, name="y")

    each = gr.Rule("each(2 * default)")
    check_maps(build, vjp(), vjp(gr.Override(each, op_type="FusedBatchNormV3")), hvp())


def test_every_order() -> None:
    """Gradients made for a first derivative lack what a second derivative needs, and the other way round."""

    def build() -> None:
        x = x_of()
        with tf.name_scope("a"):
            y = tf.tanh(tf.matmul(x, x)) * tf.math.cumprod(x, 0)
        tf.reduce_sum(tf.sigmoid(y) * tf.square(y), name="y")

    def of(rule: Any, order: Any, **selector: Any) -> gr.Override:
        return gr.Override(rule, order=order, optional=True, **selector)

    maps = [vjp(), hvp()]
    for kind in ("Tanh", "TanhGrad", "Mul", "MatMul", "Cumprod", "Sigmoid"):
        rule = gr.Rule("dy * (1 + abs(x))") if kind in ("Tanh", "Sigmoid") else gr.Rule("each(2 * default)")
        for order in ("first", "all"):
            maps += [hvp(of(rule, order, op_type=kind)), vjp(of(rule, order, op_type=kind))]
    check_maps(build, *maps)


def test_zeros_that_no_consumer_asked_for() -> None:
    """The second output's upstream gradient is missing, or zeros that a rule made."""

    def build() -> None:
        x = x_of([None, 4])
        labels = tf.nn.softmax(tf.constant(X))
        alone = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=labels)
        both = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=-x, labels=labels)
        sparse = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[0, 1, 2, 3])
        used = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[0, 1, 2, 3])
        total = tf.reduce_sum(alone.loss + both.loss + sparse.loss + used.loss)
        tf.add(total, tf.reduce_sum(tf.tanh(both.backprop, name="a") + tf.tanh(used.backprop, name="b")), name="y")

    rules: list[Any] = ["gradient_zero", gr.Rule("zeros_like(x)"), gr.Rule("0 * dy"), gr.Rule("dy")]
    maps = [vjp(gr.Override(rule, op_type="Tanh")) for rule in rules]
    assert not refused(check_maps(build, vjp(), *maps, hvp()))
