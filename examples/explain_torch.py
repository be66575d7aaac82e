"""Explains a ResNet of PyTorch by layer-wise relevance propagation (LRP) and guided backpropagation, on the server.

Trains a small residual network (He et al. 2016, arXiv:1512.03385) for a moment in PyTorch: it says whether an image
shows a disk or a cross. `gr.from_torch` makes it a graph whose nodes have the names of its modules. Guided
backpropagation (Springenberg et al. 2014, arXiv:1412.6806) is a rule for all ReLUs; LRP with the composite EpsilonPlus
(Anders et al. 2021, arXiv:2106.13200) is a preset of rules for all layers.

Prints the accuracy, about 1, and the share of each map that is near the shape: at least 0.4 for both; a map without
information would have 0.14.
Picture: out/examples/explain_torch.png, the maps for four images.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import gradrule as gr

SIDE, IMAGES, STEPS, RADIUS = 32, 400, 120, 6
WANTED = {"accuracy": 0.95, "guided backpropagation": 0.4, "LRP": 0.4}
OUT = Path("out/examples")

client = gr.local()
torch.manual_seed(0)
rng = np.random.default_rng(0)

# %% Images of a disk or a cross, and where it is
classes = rng.integers(0, 2, IMAGES)
centres = rng.uniform(RADIUS, SIDE - RADIUS, (2, IMAGES, 1, 1))
row, column = np.mgrid[:SIDE, :SIDE]
dy, dx = row - centres[0], column - centres[1]
disk = np.hypot(dx, dy) < 4
cross = (np.minimum(abs(dx), abs(dy)) < 1.5) & (np.maximum(abs(dx), abs(dy)) < 5)
shapes = np.where(classes[:, None, None] == 0, disk, cross)
near = np.maximum(abs(dx), abs(dy)) < RADIUS
images = (shapes + rng.normal(0, 0.2, shapes.shape))[:, None].astype(np.float32)


# %% A residual network in PyTorch
class Block(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x):
        h = self.relu(self.norm1(self.conv1(x)))
        return self.relu(x + self.norm2(self.conv2(h)))


class ResNet(nn.Module):
    """A convolution, two residual blocks, a mean over the image, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks, self.head = nn.Sequential(Block(16), Block(16)), nn.Linear(16, 2)

    def forward(self, image):
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


model, targets = ResNet(), torch.from_numpy(classes)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(STEPS):
    chosen = torch.randint(100, IMAGES, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.from_numpy(images)[chosen]), targets[chosen]).backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    accuracy = (model(torch.from_numpy(images[:100])).argmax(1) == targets[:100]).float().mean().item()

# %% The same network as a graph: the gradient of the class's score under two sets of rules
graph = gr.from_torch(model, torch.from_numpy(images[:2]))
call = {
    "feeds": {"image": images[:100]},
    "ys": "output",
    "xs": "image",
    "grad_ys": [np.eye(2, dtype="f4")[classes[:100]]],
}
guided = client.evaluate(graph, **call, overrides={"Relu": "guided_relu"})
lrp = client.evaluate(graph, **call, overrides=[gr.Preset("epsilon_plus")], rewrites=["fold_batch_norm"])
maps = {
    "guided backpropagation": abs(guided.gradients["image"][:, 0]),
    "LRP": np.maximum(lrp.gradients["image"][:, 0], 0),
}

# %% Figures and picture
shares = {name: float((heat * near[:100]).sum() / heat.sum()) for name, heat in maps.items()}
found = {"accuracy": accuracy, **shares}
for name, value in found.items():
    print(f"{name}: {value:.2f}")
assert all(found[name] >= wanted for name, wanted in WANTED.items()), found

figure, axes = plt.subplots(4, 3, figsize=(6, 8), layout="constrained")
for index, line in enumerate(axes):
    for axis, (name, heat) in zip(line, {"image": images[:, 0], **maps}.items(), strict=True):
        axis.imshow(heat[index], cmap="gray" if name == "image" else "hot")
        axis.set_title(name if index == 0 else "")
        axis.axis("off")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "explain_torch.png")
