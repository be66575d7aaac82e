"""Trains a spiking network in PyTorch with a surrogate gradient: locally, and as a program on a server.

A neuron of a spiking network sends 1 when its potential exceeds a threshold, and 0 otherwise. The gradient of this step
is 0, so training replaces it by a surrogate: here that of a fast sigmoid (Zenke and Ganguli 2018, SuperSpike,
arXiv:1705.11146). `gradrule.torch.surrogate` gives a function of PyTorch with this gradient, without a server. Then
the same network is a graph on a server, and PyTorch trains it through `gradrule.torch.remote_module`.

Prints the accuracy on test digits, about 0.95, and the largest difference between both gradients, about 1e-7.
Picture: out/examples/spiking_network.png, the spikes of one digit and both training curves.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import gradrule as gr
import gradrule.torch
from gradrule.cli.demo import data

TICKS, HIDDEN, STEPS, BATCH = 8, 64, 150, 64
DECAY, THRESHOLD, SLOPE = 0.8, 1.0, 5.0
WANTED_ACCURACY = 0.85
OUT = Path("out/examples")

client = gr.local()
digits = data.load(seed=0)  # handwritten digits of 8 × 8 pixels between -1 and 1, shape (n, 64)
rng = np.random.default_rng(0)
start = {
    "w1": rng.normal(0, 0.3, (data.PIXELS, HIDDEN)).astype(np.float32),
    "w2": rng.normal(0, 0.1, (HIDDEN, data.CLASSES)).astype(np.float32),
}

# %% The network in PyTorch: leaky neurons that get the pixels as a current at each tick
spike = gradrule.torch.surrogate("fast_sigmoid", slope=SLOPE)


def network(x, w1, w2):
    """Returns the logits, and the spikes of all ticks with shape (TICKS, n, HIDDEN)."""
    current = x @ w1
    potential, spikes = torch.zeros_like(current), []
    for _ in range(TICKS):
        potential = DECAY * potential + current
        spikes.append(spike(potential - THRESHOLD))
        potential = potential - THRESHOLD * spikes[-1].detach()  # a spike lowers the potential
    return torch.stack(spikes).sum(0) @ w2, torch.stack(spikes)


def local_loss(x, labels, w1, w2):
    return torch.nn.functional.cross_entropy(network(x, w1, w2)[0], labels)


# %% The same network as a graph, for example because the server has the GPU
g = gr.Graph()
x = g.placeholder("x", "float32", [None, data.PIXELS])
labels = g.placeholder("labels", "int64", [None])
w1 = g.placeholder("w1", "float32", start["w1"].shape)
w2 = g.placeholder("w2", "float32", start["w2"].shape)
current = g.matmul(x, w1)
potential, count = g.zeros_like(current), g.zeros_like(current)
for _ in range(TICKS):
    potential = DECAY * potential + current
    spikes = g.cast(potential - THRESHOLD > 0.0, "float32")
    potential = potential - THRESHOLD * g.stop_gradient(spikes)
    count = count + spikes
losses, _ = g.sparse_softmax_cross_entropy_with_logits(g.matmul(count, w2), labels)
g.reduce_mean(losses, axis=[0], name="loss")

surrogate = {"@step": ("fast_sigmoid", {"slope": SLOPE})}  # a comparison and a cast, as one unit
program = client.compile(g, fetches="loss", ys="loss", xs=["w1", "w2"], overrides=surrogate)
remote = gradrule.torch.remote_module(program, **start)


# %% Training, the same for both
def train(loss_of, weights):
    """Updates the weights by Adam; returns the loss of each step."""
    optimizer = torch.optim.Adam(weights, lr=0.01)
    batches = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        chosen = batches.integers(len(digits.train_x), size=BATCH)
        optimizer.zero_grad()
        loss = loss_of(torch.tensor(digits.train_x[chosen]), torch.tensor(digits.train_labels[chosen]))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def accuracy(w1, w2):
    """Returns the share of test digits that the network in PyTorch recognises."""
    logits, _ = network(torch.tensor(digits.test_x), w1, w2)
    return (logits.argmax(1).numpy() == digits.test_labels).mean()


local = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
batch = torch.tensor(digits.train_x), torch.tensor(digits.train_labels)
local_loss(*batch, **local).backward()
remote(x=batch[0], labels=batch[1]).backward()
difference = max((local[name].grad - getattr(remote, name).grad).abs().max().item() for name in start)

local_losses = train(lambda x, labels: local_loss(x, labels, **local), list(local.values()))
remote_losses = train(lambda x, labels: remote(x=x, labels=labels), list(remote.parameters()))
reached = accuracy(**local), accuracy(remote.w1, remote.w2)

# %% The result
_, seen = network(torch.tensor(digits.test_x[:1]), **local)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
neurons, ticks = np.nonzero(seen[:, 0].detach().numpy().T)
left.scatter(ticks + 1, neurons, marker="|", color="black")
left.set(
    title=f"spikes for a {digits.test_labels[0]}",
    xlabel="tick",
    ylabel="neuron",
    xlim=(0.5, TICKS + 0.5),
    ylim=(-1, HIDDEN),
)
right.plot(local_losses, color="C0", linewidth=3, alpha=0.5, label="surrogate in PyTorch")
right.plot(remote_losses, color="C1", linewidth=1, label="program on the server")
right.set(title="training loss", xlabel="step", ylabel="cross entropy", yscale="log")
right.legend()
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "spiking_network.png", dpi=120)

print(f"accuracy: {reached[0]:.3f} locally, {reached[1]:.3f} with the server's gradients")
print(f"largest difference of the first gradients: {difference:.1e}")
assert min(reached) >= WANTED_ACCURACY, reached
assert difference < 1e-5, difference
