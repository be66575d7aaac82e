"""Explains a Keras ResNet by layer-wise relevance propagation (LRP): which pixels speak for the class.

Trains a small ResNet for a moment on generated images: a bright shape at a random place, with noise. Then LRP
distributes the logit of the class over the pixels, layer by layer (Bach et al. 2015, doi:10.1371/journal.pone.0130140).
The preset `epsilon_plus_flat` chooses a rule for each layer, as in zennit (arXiv:2106.13200), and `fold_batch_norm`
folds batch normalisations into the convolutions before them. Your own Keras model takes the same three lines.

Prints the accuracy, and the share of the positive relevance that is near the shape: more than 0.9, and 0.7 of the
gradient. LRP keeps the sum: the relevance of all pixels is the logit, except what biases and `eps` absorb.
Picture: out/examples/lrp_resnet.png, gradient and relevance for one image of each class.
"""

# %%
from pathlib import Path

import keras
import numpy as np
from keras import layers

import gradrule as gr

SIDE, IMAGES, EPOCHS = 32, 1600, 4
NAMES = ("square", "disk", "cross", "triangle")
WANTED_ACCURACY, WANTED_SHARE = 0.9, 0.8
OUT = Path("out/examples")

client = gr.local()
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)


# %% Images with a shape at a random place
def make_images(count):
    """Returns images (n, SIDE, SIDE, 1), classes (n,), and masks (n, SIDE, SIDE): true near the shape."""
    classes = rng.integers(len(NAMES), size=count)
    row, column = np.mgrid[:SIDE, :SIDE]
    y, x = (grid - rng.uniform(9, SIDE - 9, (count, 1, 1)) for grid in (row, column))
    r = rng.uniform(5, 7, (count, 1, 1))
    inside = [
        np.maximum(abs(x), abs(y)) < 0.9 * r,
        np.hypot(x, y) < r,
        (np.minimum(abs(x), abs(y)) < 0.3 * r) & (np.maximum(abs(x), abs(y)) < r),
        (y < 0.8 * r) & (2 * abs(x) < y + r),
    ]
    shape = np.choose(classes[:, None, None], inside)
    near = np.maximum(abs(x), abs(y)) < r + 2
    return (shape + rng.normal(0, 0.3, shape.shape))[..., None].astype(np.float32), classes, near


# %% A small ResNet
def block(x, channels, stride):
    """Adds a residual block."""
    y = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.BatchNormalization()(layers.Conv2D(channels, 3, padding="same", use_bias=False)(y))
    if stride > 1:
        x = layers.BatchNormalization()(layers.Conv2D(channels, 1, stride, use_bias=False)(x))
    return layers.ReLU()(layers.Add()([x, y]))


image = keras.Input((SIDE, SIDE, 1), name="image")
h = layers.Conv2D(16, 3, padding="same", use_bias=False)(image)
h = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(h))
h = block(block(block(h, 16, 1), 32, 2), 64, 2)
model = keras.Model(image, layers.Dense(len(NAMES), name="logits")(layers.GlobalAveragePooling2D()(h)))

model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
images, classes, _ = make_images(IMAGES)
model.fit(images, classes, 32, EPOCHS, verbose=0)

test_images, test_classes, near = make_images(64)
accuracy = model.evaluate(test_images, test_classes, verbose=0)[1]

# %% Relevance: start with the logit of the class at the output, and ask for the "gradient" of the image
graph = gr.from_keras(model)
call = {"feeds": {"image": test_images}, "fetches": "logits", "ys": "logits", "xs": "image"}
one_hot = np.eye(len(NAMES), dtype=np.float32)[test_classes]
gradient = client.evaluate(graph, **call, grad_ys={"logits": one_hot}).gradients["image"][..., 0]

logits = model.predict(test_images, verbose=0)
explained = client.evaluate(
    graph,
    **call,
    grad_ys={"logits": one_hot * logits},
    overrides=gr.Preset("epsilon_plus_flat"),
    rewrites="fold_batch_norm",
)
relevance = explained.gradients["image"][..., 0]


def share_near_shape(values):
    """Returns the mean share of the positive part that is near the shape."""
    positive = np.maximum(values, 0)
    return ((positive * near).sum((1, 2)) / positive.sum((1, 2))).mean()


shares = {"LRP": share_near_shape(relevance), "gradient": share_near_shape(gradient)}
kept = relevance.sum() / (one_hot * logits).sum()

# %% The result
first = [np.flatnonzero(test_classes == label)[0] for label in range(len(NAMES))]
figure = gr.viz.saliency(
    np.concatenate([test_images[first]] * 2),
    np.concatenate([gradient[first], relevance[first]])[..., None],
    titles=[f"{name}: {method}" for method in ("gradient", "LRP") for name in NAMES],
    label="gradient or relevance",
    beside=False,
)
figure.suptitle("Which pixels speak for (red) and against (blue) the class")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "lrp_resnet.png", dpi=120)

print(f"accuracy: {accuracy:.3f}; the shape and two pixels around it are {near.mean():.2f} of an image")
print(f"share near the shape: {shares['LRP']:.2f} of the relevance, {shares['gradient']:.2f} of the gradient")
print(f"sum of the relevance: {kept:.2f} of the logits")
assert accuracy >= WANTED_ACCURACY, accuracy
assert shares["LRP"] >= WANTED_SHARE, shares
assert 0.7 < kept < 1.1, kept
