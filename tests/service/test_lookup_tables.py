"""Models with lookup tables on a real server, compared with local TensorFlow: layers for text, SavedModels of both
versions, and tables in loops, branches and functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._tracing import lookup_tables
from tests.service.answers import dense

v1 = tf.compat.v1
layers = keras.layers

WORDS = np.array([["the", "cat"], ["", "unknown"], ["a", "the"]], object)
NUMBERS = np.array([[30, 10], [-1, 7], [20, 20]], np.int64)
TEXT = np.array(["The cat sat!", "a DOG, unknown", ""], object)
VOCABULARY = ["the", "a", "cat", "dog"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings():
        # TensorFlow and Keras emit warnings while saving and loading.
        warnings.simplefilter("ignore")
        yield


def static(keys: Any, values: Any, default: Any) -> Any:
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)


def adapted(**words: Any) -> Any:
    layer = layers.TextVectorization(**words)
    layer.adapt(["the cat sat on the mat", "a dog and a cat"])
    return layer


LAYERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "indices": (lambda: layers.StringLookup(vocabulary=VOCABULARY), WORDS),
    "oov buckets and mask": (
        lambda: layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=3, mask_token=""),
        WORDS,
    ),
    "multi hot": (lambda: layers.StringLookup(vocabulary=VOCABULARY, output_mode="multi_hot"), WORDS),
    "tf-idf": (
        lambda: layers.StringLookup(vocabulary=VOCABULARY, idf_weights=[0.5, 1, 2, 3], output_mode="tf_idf"),
        WORDS,
    ),
    "inverted": (lambda: layers.StringLookup(vocabulary=VOCABULARY, invert=True), np.array([[1, 4], [0, 9]])),
    "integers": (lambda: layers.IntegerLookup(vocabulary=[10, 20, 30]), NUMBERS),
    "integers, counted": (lambda: layers.IntegerLookup(vocabulary=[30, 10], output_mode="count"), NUMBERS),
    "text": (lambda: adapted(output_sequence_length=5), TEXT),
    "text, pairs": (lambda: adapted(ngrams=2, output_mode="tf_idf"), TEXT),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_keras(client: gr.Client, name: str) -> None:
    make, x = LAYERS[name]
    layer = make()
    spec = tf.TensorSpec([None, *x.shape[1:]], tf.string if x.dtype == object else tf.int64)
    graph = gr.trace(layer.call, spec)
    (feed,) = graph.inputs
    found = client.evaluate(graph, {feed: x}, "output").outputs["output"]
    np.testing.assert_array_equal(found, layer(tf.constant(x)).numpy())


def classifier() -> Any:
    text = keras.Input((), dtype="string", name="text")
    tokens = adapted(output_sequence_length=4)(text)
    hidden = layers.Embedding(16, 3, name="embedding")(tokens)
    return keras.Model(text, layers.Dense(2, activation="tanh", name="score")(layers.Flatten()(hidden)))


def loaded(model: Any, how: str, folder: Path) -> gr.Graph:
    if how == "from_keras":
        return gr.from_keras(model)
    if how == "keras file":
        model.save(folder / "m.keras")
        return gr.load(folder / "m.keras")
    model.export(folder / "m", verbose=False)
    return gr.load(folder / "m")


@pytest.mark.parametrize("how", ["from_keras", "keras file", "SavedModel"])
def test_a_model_of_text_has_keras_gradients_for_its_weights(client: gr.Client, how: str, tmp_path: Path) -> None:
    model = classifier()
    with tf.GradientTape() as tape:
        y = model(tf.constant(TEXT))
    wanted = tape.gradient(y, model.trainable_variables)
    graph = loaded(model, how, tmp_path)
    (feed,), (fetch,) = graph.inputs, graph.outputs
    names = [variable.path for variable in model.trainable_variables]
    r = client.evaluate(graph, {feed: TEXT}, [fetch], ys=[fetch], xs=names)
    np.testing.assert_allclose(r.outputs[fetch], y.numpy(), rtol=1e-5, atol=1e-6)
    for name, gradient in zip(names, wanted, strict=True):
        reference = tf.convert_to_tensor(gradient).numpy()
        np.testing.assert_allclose(dense(r.gradients[name]), reference, rtol=1e-4, atol=1e-6)


FIRST = static(["a", "b", "c"], tf.constant([1, 2, 3], tf.int64), -1)
SECOND = static(["a", "b", "d"], tf.constant([10, 20, 40], tf.int64), -10)
BUCKETS = tf.lookup.StaticVocabularyTable(
    tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64)), 3
)
KEYS = np.array(["a", "d", "b", "c", "zz"], object)


@tf.function(autograph=False)
def looked_up(keys: Any, table: Any, default: Any) -> Any:
    return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=keys, default_value=default)


def in_a_loop(keys: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return i + 1, total + FIRST.lookup(keys) * SECOND.lookup(keys[::-1])

    return tf.while_loop(
        lambda i, total: tf.cast(i, tf.int64) < FIRST.size(), body, [0, tf.zeros_like(keys, tf.int64)]
    )[1]


def in_branches(keys: Any) -> Any:
    return tf.cond(tf.size(keys) > 3, lambda: FIRST.lookup(keys), lambda: SECOND.lookup(keys))


def by_one_function(keys: Any) -> Any:
    default = tf.constant(0, tf.int64)
    return looked_up(keys, FIRST.resource_handle, default) + 100 * looked_up(keys, SECOND.resource_handle, default)


def element_by_element(keys: Any) -> Any:
    return tf.map_fn(FIRST.lookup, keys, fn_output_signature=tf.int64)


def into_buckets(keys: Any) -> Any:
    return BUCKETS.lookup(keys) + BUCKETS.size()


def entries(keys: Any) -> Any:
    known, values = tf.raw_ops.LookupTableExportV2(
        table_handle=FIRST.resource_handle, Tkeys=tf.string, Tvalues=tf.int64
    )
    return tf.reduce_sum(tf.where(known[None] == keys[:, None], values[None], 0), 1)


@pytest.mark.parametrize(
    "function", [in_a_loop, in_branches, by_one_function, element_by_element, into_buckets, entries]
)
def test_a_table_in_a_function_equals_tensorflow(client: gr.Client, function: Callable[[Any], Any]) -> None:
    graph = gr.trace(function, ("string", [None]))
    found = client.evaluate(graph, {"keys": KEYS}, "output").outputs["output"]
    np.testing.assert_array_equal(found, tf.function(function)(tf.constant(KEYS)).numpy())


def vectors() -> Any:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [-1.0, 0.5])
    table.insert(tf.constant([5, -3, 2**40], tf.int64), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return table


TABLES: dict[str, tuple[Callable[[], Any], Any]] = {
    "vectors by number": (vectors, np.array([[2**40, -3], [0, 5]])),
    "nothing in it": (
        lambda: tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.5),
        np.array([["a", ""], ["b", "c"]], object),
    ),
    "vectors, nothing in it": (
        lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [-1.0, 0.5]),
        np.array([[2**40, -3, 4], [0, 5, 6]]),
    ),
    "32-bit keys": (
        lambda: static(tf.constant([7, 3, -2]), tf.constant([1, 2, 3]), 9),
        np.array([[3, 7], [8, -2]], np.int32),
    ),
    "strings of any bytes": (
        lambda: static([b"\xff\x00", b"", "ä".encode(), b"x" * 300], [1.0, 2.0, 3.0, 4.0], 0.0),
        np.array([b"\xff\x00", b"", "ä".encode(), b"\xff", b"x" * 300], object),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_keys_and_values_of_every_kind_equal_tensorflow(client: gr.Client, name: str) -> None:
    make, keys = TABLES[name]
    table = make()
    graph = gr.trace(
        table.lookup, tf.TensorSpec(keys.shape, tf.as_dtype(keys.dtype) if keys.dtype != object else tf.string)
    )
    (feed,) = graph.inputs
    wanted = table.lookup(tf.constant(keys)).numpy()
    np.testing.assert_array_equal(client.evaluate(graph, {feed: keys}, "output").outputs["output"], wanted)


def test_strings_with_equal_hashes_are_told_apart(client: gr.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_tables, "_BUCKETS", 7)
    table = static(["a", "b", "c", "d", "e"], [1.0, 2.0, 3.0, 4.0, 5.0], -1.0)
    keys = np.array([chr(code) for code in range(97, 123)], object)
    graph = gr.trace(table.lookup, ("string", [None]))
    (feed,) = graph.inputs
    found = client.evaluate(graph, {feed: keys}, "output").outputs["output"]
    np.testing.assert_array_equal(found, table.lookup(tf.constant(keys)).numpy())


def test_a_model_of_tensorflow_1_with_a_vocabulary_file(client: gr.Client, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the\ncat\ndog\n")
    with tf.Graph().as_default(), v1.Session() as session:
        words = v1.placeholder(tf.string, [None], name="words")
        table = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(tmp_path / "words.txt"),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            3,
        )
        weights = v1.get_variable("weights", initializer=tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]))
        score = tf.tanh(0.1 * tf.nn.embedding_lookup(weights, table.lookup(words)))
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        feeds = {words: ["dog", "bird", "the"]}
        wanted = session.run([score, tf.convert_to_tensor(v1.gradients(score, weights)[0])], feeds)
        v1.saved_model.simple_save(
            session, str(tmp_path / "m"), {"words": words}, {"score": score}, v1.tables_initializer()
        )
    graph = gr.load(tmp_path / "m")
    r = client.evaluate(graph, {"words": ["dog", "bird", "the"]}, "score", ys="score", xs="weights")
    np.testing.assert_allclose(r.outputs["score"], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(dense(r.gradients["weights"]), wanted[1], rtol=1e-6)


def test_an_empty_table_gives_each_key_its_own_default_value(client: gr.Client) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.5)

    def with_defaults(keys: Any, defaults: Any) -> Any:
        return table.lookup(keys, dynamic_default_values=defaults)

    feeds = {"keys": KEYS, "defaults": np.arange(5, dtype=np.float32)}
    graph = gr.trace(with_defaults, ("string", [None]), ("float32", [None]))
    found = client.evaluate(graph, feeds, "output").outputs["output"]
    np.testing.assert_array_equal(found, with_defaults(tf.constant(KEYS), tf.constant(feeds["defaults"])).numpy())


def test_what_is_no_table_of_constants_is_refused() -> None:
    def inserting(keys: Any) -> Any:
        table.insert(keys, tf.zeros_like(keys, tf.int64))
        return table.lookup(keys)

    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    with pytest.raises(
        gr.errors.UnsupportedError, match=r"LookupTableInsertV2 node .* more with a lookup table than read"
    ):
        gr.trace(inserting, ("string", [None]))
    dense_table = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, "", "$")
    dense_table.insert(["a"], tf.constant([1], tf.int64))
    with pytest.raises(gr.errors.UnsupportedError, match=r"is a DenseHashTable.*use a tf\.lookup\.StaticHashTable"):
        gr.trace(dense_table.lookup, ("string", [None]))
    iterator = iter(tf.data.Dataset.range(3))
    with pytest.raises(gr.errors.UnsupportedError, match="it is no variable and no lookup table"):
        gr.trace(lambda x: x + next(iterator), ("int64", []))
