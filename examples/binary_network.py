"""Trains a Keras network with binary weights and activations, with TensorFlow's gradient of the sign and with a rule.

The sign of a number has the gradient 0 everywhere, so a network of signs does not learn. The straight-through estimator
of Courbariaux et al. 2016 (BinaryNet, arXiv:1602.02830) passes the gradient where |x| <= 1. Here the layers run on a
gradrule server, which replaces the gradient of `Sign` by the rule `ste_sign`; training is plain Keras.

Prints the accuracy on test digits: about 0.9 with the rule, close to guessing (0.1) without it.
Picture: out/examples/binary_network.png, the accuracy by epoch.
"""

# %%
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import tensorflow as tf

import gradrule as gr
from gradrule.cli.demo import data

EPOCHS = 8
WANTED_ACCURACY = 0.85
OUT = Path("out/examples")

client = gr.local()
digits = data.load(seed=0)  # 1,797 handwritten digits of 8 × 8 pixels between -1 and 1, shape (n, 64)


# %% A dense layer whose weights are signs
class BinaryDense(keras.layers.Dense):
    """Multiplies by the signs of its weights, which stay between -1 and 1."""

    def __init__(self, units: int) -> None:
        super().__init__(units, use_bias=False, kernel_initializer="glorot_uniform", kernel_constraint=clip)

    def call(self, x):
        return x @ tf.sign(self.kernel)


def clip(weights):
    """Keeps weights where the rule passes a gradient."""
    return tf.clip_by_value(weights, -1.0, 1.0)


# %% The network: the hidden part runs on the server, with or without a rule
def train(overrides):
    """Returns the accuracy on test digits after each epoch."""
    keras.utils.set_random_seed(0)
    hidden = [
        BinaryDense(128),
        keras.layers.BatchNormalization(),
        keras.layers.Lambda(tf.sign),
        BinaryDense(128),
        keras.layers.BatchNormalization(),
        keras.layers.Lambda(tf.sign),
        BinaryDense(10),
        keras.layers.BatchNormalization(),
    ]
    model = keras.Sequential([keras.Input((data.PIXELS,)), gr.keras.RemoteLayer(hidden, client, overrides=overrides)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    test = (digits.test_x, digits.test_labels)
    history = model.fit(digits.train_x, digits.train_labels, 64, EPOCHS, validation_data=test, verbose=0)
    return history.history["val_accuracy"]


with_rule = train({"Sign": "ste_sign"})
without_rule = train(None)

# %% The result
figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
epochs = range(1, EPOCHS + 1)
axes.plot(epochs, with_rule, "o-", color="C0", label="Sign → ste_sign")
axes.plot(epochs, without_rule, "s--", color="C1", label="TensorFlow's gradient of Sign (zero)")
axes.set(title="A network of signs on test digits", xlabel="epoch", ylabel="accuracy", ylim=(0, 1))
axes.grid(alpha=0.3)
axes.legend(loc="center right")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "binary_network.png", dpi=120)

print(f"accuracy with ste_sign: {with_rule[-1]:.3f}, without a rule: {without_rule[-1]:.3f}")
assert with_rule[-1] >= WANTED_ACCURACY, with_rule
assert without_rule[-1] < 0.7, without_rule
