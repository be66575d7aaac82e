"""Sweeps over 18 variants of layer-wise relevance propagation (LRP), and over values of one param of it.

Trains a small Keras network for a moment on generated images: a bright shape at a random place, with noise. LRP
(Bach et al. 2015, doi:10.1371/journal.pone.0130140) has many rules, and which one to use in which layers is decided by
trying (Montavon et al. 2019, doi:10.1007/978-3-030-28954-6_10). `client.sweep` takes them all at once: rules for the
first layer, for the other convolutions, and for the dense layers. Each variant is a program that the server compiles.
Values of a param are inputs of one program, so a sweep of them compiles nothing after the first.

Prints the accuracy, the share of the positive relevance that is near the shape by the best and the worst variant (0.99
and 0.95) and by the gradient (0.8), and the milliseconds for each variant and for each value of a param.
Picture: out/examples/lrp_variants.png, one image: its gradient, and its relevance by the worst and the best variant.
"""

# %%
import itertools
import time
from pathlib import Path

import keras
import numpy as np
from keras import layers

import gradrule as gr

SIDE, IMAGES, EPOCHS = 32, 1200, 4
NAMES = ("disk", "cross")
WANTED_ACCURACY, WANTED_SHARE = 0.95, 0.95
OUT = Path("out/examples")

client = gr.local()
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)


# %% Images with a shape at a random place
def make_images(count):
    """Returns images (n, SIDE, SIDE, 1), classes (n,), and masks (n, SIDE, SIDE): true near the shape."""
    classes = rng.integers(len(NAMES), size=count)
    row, column = np.mgrid[:SIDE, :SIDE]
    y, x = (grid - rng.uniform(8, SIDE - 8, (count, 1, 1)) for grid in (row, column))
    disk = np.hypot(x, y) < 5
    cross = (np.minimum(abs(x), abs(y)) < 2) & (np.maximum(abs(x), abs(y)) < 6)
    shape = np.where(classes[:, None, None], cross, disk)
    noisy = (shape + rng.normal(0, 0.3, shape.shape))[..., None].astype(np.float32)
    return noisy, classes, np.maximum(abs(x), abs(y)) < 8


# %% A small network
image = keras.Input((SIDE, SIDE, 1), name="image")
h = layers.MaxPooling2D()(layers.Conv2D(16, 5, padding="same", activation="relu")(image))
h = layers.MaxPooling2D()(layers.Conv2D(32, 3, padding="same", activation="relu")(h))
h = layers.GlobalMaxPooling2D()(layers.Conv2D(32, 3, padding="same", activation="relu")(h))
h = layers.Dense(32, activation="relu")(h)
model = keras.Model(image, layers.Dense(len(NAMES), name="logits")(h))
model.compile(
    keras.optimizers.Adam(0.003), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
images, classes, _ = make_images(IMAGES)
model.fit(images, classes, 32, EPOCHS, verbose=0)
test_images, test_classes, near = make_images(64)
accuracy = model.evaluate(test_images, test_classes, verbose=0)[1]


# %% 18 variants, and TensorFlow's own gradient
def variant(first, convolution, dense):
    """Returns the override map of three rules; the first entry that matches a layer is used."""
    return [
        gr.Override(first, layer="@convolution", position="nearest_xs"),
        gr.Override(convolution, layer="@convolution"),
        gr.Override(dense, layer="@dense", label="dense"),
        gr.Override("lrp_pass", op_type="@activation"),
        gr.Override("lrp_norm", op_type="@sum", optional=True),
    ]


first_rules = ("lrp_zplus", "lrp_flat", "lrp_epsilon")
convolution_rules, dense_rules = ("lrp_zplus", "lrp_alpha_beta", "lrp_gamma"), ("lrp_epsilon", "lrp_zplus")
names = itertools.product(first_rules, convolution_rules, dense_rules)
maps = {"gradient": None} | {" ".join(rule[4:] for rule in rules): variant(*rules) for rules in names}

graph = gr.from_keras(model)
one_hot = np.eye(len(NAMES), dtype=np.float32)[test_classes]
upstream = one_hot * model.predict(test_images, verbose=0)
words = {"ys": "logits", "xs": "image", "grad_ys": {"logits": upstream}}


def share_near_shape(values):
    """Returns the share of the positive part that is near the shape."""
    positive = np.maximum(values[..., 0], 0)
    return (positive * near).sum() / positive.sum()


began = time.perf_counter()
relevance = {}
for done in client.sweep(graph, {"image": test_images}, maps, **words):
    relevance[done.label] = done.result.gradients["image"]
each_map = (time.perf_counter() - began) / len(maps)
shares = {label: share_near_shape(values) for label, values in relevance.items()}
worst, *_, best = sorted(maps.keys() - {"gradient"}, key=shares.__getitem__)

# %% Values of a param: the same program for all
values = {eps: {"dense": {"eps": eps}} for eps in np.logspace(-6, 1, 25).tolist()}
by_eps = client.sweep(
    graph, {"image": test_images}, overrides=variant("lrp_flat", "lrp_zplus", "lrp_epsilon"), params=values, **words
)
next(by_eps)  # compiles
began = time.perf_counter()
kept = {done.label: done.result.gradients["image"].sum() / upstream.sum() for done in by_eps}
each_value = (time.perf_counter() - began) / len(kept)

# %% The result
shown = ["gradient", worst, best]
pictures = np.concatenate([relevance[label][:1] for label in shown])
figure = gr.viz.saliency(np.concatenate([test_images[:1]] * 3), pictures, titles=shown, label="relevance")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "lrp_variants.png", dpi=120)

print(f"accuracy: {accuracy:.3f}; the shape and what is near it are {near.mean():.2f} of an image")
for label in (best, worst, "gradient"):
    print(f"{shares[label]:.2f} of the positive part is near the shape: {label}")
print(f"{1e3 * each_map:.0f} ms for each of {len(maps)} maps, {1e3 * each_value:.1f} ms for each value of eps")
assert accuracy >= WANTED_ACCURACY, accuracy
assert shares[best] >= WANTED_SHARE > shares["gradient"], shares
assert kept[max(kept)] < 0.5 < 0.9 < kept[min(kept)], kept
