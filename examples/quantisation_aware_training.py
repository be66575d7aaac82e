"""Trains a network with 2-bit weights and activations, whose step sizes and clipping levels are learned too.

Weights: learned step size quantisation (LSQ, Esser et al. 2020, arXiv:1902.08153): w ≈ s · round(clip(w / s, -2, 1)),
where rounding passes the gradient and the step s gets one of its own. In the graph these are ordinary ops; an override
makes them one region with the rule `lsq`. Activations: PACT (Choi et al. 2018, arXiv:1805.06085): clipped at a learned
level, then rounded to 4 values; `Minimum` gets the rule `pact`, and `Round` a straight-through estimator.

The variables and the optimizer are on the server (a session). Compares three trainings from the same start: in floats,
with these rules, and with the ops' own gradients, which are 0 at the rounding.

Prints the accuracy on test digits: about 0.97 in floats, 0.94 with 2 bits, and 0.2 with the ops' own gradients.
Picture: out/examples/quantisation_aware_training.png, the losses, and the weights before and after rounding.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import gradrule as gr
from gradrule.cli.demo import data

STEPS, BATCH, HIDDEN = 300, 64, 64
LOWEST, HIGHEST = -2, 1  # 2 bits with a sign
LEVELS = 3  # 2 bits without a sign: 0, 1, 2, 3
WANTED_ACCURACY, LARGEST_LOSS = 0.88, 0.06
OUT = Path("out/examples")

client = gr.local()
digits = data.load(seed=0)  # handwritten digits of 8 × 8 pixels between -1 and 1, shape (n, 64)


# %% The network, in floats or quantised
def quantise_weights(g, w, name, value):
    """Adds s · round(clip(w / s)) with a variable s; its start is that of the paper."""
    s = g.variable(f"{name}/step", np.float32(2 * np.abs(value).mean() / np.sqrt(HIGHEST)))
    return g.multiply(s, g.round(g.clip_by_value(w / s, LOWEST, HIGHEST)), name=f"{name}/quantised")


def quantise_activation(g, x, name):
    """Adds min(relu(x), level), rounded to LEVELS + 1 values, with a variable level."""
    level = g.variable(f"{name}/level", np.float32(3.0))
    clipped = g.minimum(g.relu(x), level)
    return g.round(clipped * (LEVELS / level)) * (level / LEVELS)


def network(*, quantised):
    """Returns the graph of a network with one hidden layer."""
    rng = np.random.default_rng(0)
    g = gr.Graph()
    h = g.placeholder("x", "float32", [None, data.PIXELS])
    labels = g.placeholder("labels", "int64", [None])
    for name, width, units in (("first", data.PIXELS, HIDDEN), ("second", HIDDEN, data.CLASSES)):
        value = rng.normal(0, np.sqrt(2 / width), (width, units)).astype(np.float32)
        w = g.variable(f"{name}/w", value)
        w = quantise_weights(g, w, name, value) if quantised else w
        h = h @ w + g.variable(f"{name}/b", np.zeros(units, np.float32))
        if name == "first":
            h = quantise_activation(g, h, name) if quantised else g.relu(h)
    losses, _ = g.sparse_softmax_cross_entropy_with_logits(g.identity(h, name="logits"), labels)
    g.reduce_mean(losses, axis=[0], name="loss")
    return g


lsq = [
    gr.Override(
        "lsq",
        region=gr.Region([f"{name}/w", f"{name}/step"], f"{name}/quantised"),
        params={"qn": LOWEST, "qp": HIGHEST},
    )
    for name in ("first", "second")
]
rules = [*lsq, gr.Override("pact", op_type="Minimum"), gr.Override("ste", op_type="Round")]


# %% Training
def train(g, overrides):
    """Returns accuracy on test digits, losses, and the trained variables."""
    rng = np.random.default_rng(1)
    with client.session(g, overrides=overrides) as session:
        losses = []
        for _ in range(STEPS):
            chosen = rng.integers(len(digits.train_x), size=BATCH)
            feeds = {"x": digits.train_x[chosen], "labels": digits.train_labels[chosen]}
            losses.append(session.step(feeds, "loss", gr.optimizers.Adam(0.005)).loss)
        logits = session.evaluate({"x": digits.test_x}, "logits").outputs["logits"]
        return (logits.argmax(1) == digits.test_labels).mean(), losses, session.read()


runs = {
    "floats": train(network(quantised=False), None),
    "2 bits, LSQ and PACT": train(network(quantised=True), rules),
    "2 bits, own gradients": train(network(quantised=True), None),
}

# %% The result
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for color, (name, (accuracy, losses, _)) in zip(("C2", "C0", "C1"), runs.items(), strict=True):
    smooth = np.convolve(losses, np.ones(10) / 10, mode="valid")
    left.plot(smooth, color=color, label=f"{name}: accuracy {accuracy:.2f}")
left.set(title="training loss, mean of 10 steps", xlabel="step", ylabel="cross entropy", yscale="log")
left.legend(loc="upper right", bbox_to_anchor=(1.0, 0.8))
variables = runs["2 bits, LSQ and PACT"][2]
w, step = variables["first/w"].ravel(), float(variables["first/step"])
right.hist(w, bins=80, color="C7", label="before rounding")
for number, level in enumerate(range(LOWEST, HIGHEST + 1)):
    right.axvline(level * step, color="C0", linestyle="--", label=None if number else "the four values after rounding")
right.set(title=f"weights of the first layer, learned step {step:.2f}", xlabel="weight", ylabel="number of weights")
right.margins(y=0.35)
right.legend(loc="upper left", framealpha=1.0)
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "quantisation_aware_training.png", dpi=120)

reached = {name: accuracy for name, (accuracy, _, _) in runs.items()}
print("accuracy: " + "; ".join(f"{name}: {accuracy:.3f}" for name, accuracy in reached.items()))
assert reached["2 bits, LSQ and PACT"] >= WANTED_ACCURACY, reached
assert reached["floats"] - reached["2 bits, LSQ and PACT"] <= LARGEST_LOSS, reached
