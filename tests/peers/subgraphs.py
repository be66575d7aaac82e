"""Reference values of rules on several ops: regions, and the eigenvectors of a symmetric matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.peers.cases import DTYPES, Collection
from tests.peers.elementwise import autograd, grid
from tests.peers.libraries import snn, torch


def add_subgraphs(collection: Collection) -> None:
    """Regions against torch's gradient of what they compute, and eigenvectors."""
    random = np.random.default_rng(11)
    for dtype in DTYPES:
        x, dy = grid(dtype)
        collection.add(
            "log1pexp",
            "torch",
            "logaddexp(x, 0), region Log(1+Exp(x))",
            dtype,
            {"kind": "graph", "graph": "log1pexp"},
            {"x": x, "dy": dy},
            {"x": autograd(lambda x: torch.logaddexp(x, torch.zeros_like(x)))(x, dy)},
        )
        _add_step(collection, dtype)
        _add_norm(collection, dtype, random)
        _add_softmax(collection, dtype, random)
        _add_eigenvectors(collection, dtype, random)


def _add_step(collection: Collection, dtype: str) -> None:
    """How spiking code fires: potential > threshold, cast to numbers. The gradient goes to both sides."""
    x, dy = grid(dtype)
    threshold = np.array(0.5, dtype)
    for rule, params, what, spike in (
        ("fast_sigmoid", {"slope": 25.0}, "fast_sigmoid", snn.fast_sigmoid(25)),
        ("atan", {"alpha": 2.0}, "atan", snn.atan(2.0)),
    ):
        tensors = [torch.tensor(value, requires_grad=True) for value in (x, threshold)]
        spikes = spike(tensors[0] - tensors[1])
        gradients = torch.autograd.grad(spikes, tensors, torch.tensor(dy).to(spikes.dtype))
        collection.add(
            rule,
            "snntorch",
            f"{what} at a threshold, pattern @step",
            dtype,
            {"kind": "graph", "graph": "step"},
            {"x": x, "threshold": threshold, "dy": dy},
            {name: gradient.numpy() for name, gradient in zip(("x", "threshold"), gradients, strict=True)},
            params,
        )


def _add_norm(collection: Collection, dtype: str, random: np.random.Generator) -> None:
    x = random.normal(size=7).astype(dtype)
    dy = np.array(1.5, dtype)
    collection.add(
        "safe_norm",
        "torch",
        "linalg.vector_norm, region Sqrt(Sum(Square(x)))",
        dtype,
        {"kind": "graph", "graph": "safe_norm"},
        {"x": x, "dy": dy},
        {"x": autograd(torch.linalg.vector_norm)(x, dy)},
    )


def _add_softmax(collection: Collection, dtype: str, random: np.random.Generator) -> None:
    x, dy = (random.normal(size=(4, 5)).astype(dtype) for _ in range(2))
    for tau in (1.0, 0.5):

        def softmax(x: Any, tau: float = tau) -> Any:
            return torch.softmax(x / tau, -1)

        collection.add(
            "argmax_softmax",
            "torch",
            "softmax(x/tau), region OneHot(ArgMax(x))",
            dtype,
            {"kind": "graph", "graph": "argmax_softmax"},
            {"x": x, "dy": dy},
            {"x": autograd(softmax)(x, dy)},
            {"tau": tau},
        )


def _add_eigenvectors(collection: Collection, dtype: str, random: np.random.Generator) -> None:
    """A function of eigenvalues and eigenvectors that does not see the vectors' signs."""
    half = random.normal(size=(5, 5))
    orthogonal, _ = np.linalg.qr(half)
    values = np.array([-2.0, -0.5, 0.75, 2.0, 4.0])
    matrix = ((orthogonal * values) @ orthogonal.T).astype(dtype)
    matrix = (matrix + matrix.T) / 2
    weights, of_values, of_vectors = (random.normal(size=shape).astype(dtype) for shape in ((5, 5), (5,), (5,)))

    def function(a: Any) -> Any:
        e, v = torch.linalg.eigh(a)
        seen = torch.sum(torch.tensor(weights) * v, 0) ** 2
        return torch.sum(torch.tensor(of_values) * e) + torch.sum(torch.tensor(of_vectors) * seen)

    gradient = autograd(function)(matrix, np.array(1, dtype))
    for eps in (1e-14, 1e-12):
        collection.add(
            "eigh_lorentzian",
            "torch",
            "linalg.eigh, symmetric part of the gradient",
            dtype,
            {"kind": "graph", "graph": "eigenvectors", "post": "symmetric"},
            {
                "x": matrix,
                "dy": np.array(1, dtype),
                "weights": weights,
                "of_values": of_values,
                "of_vectors": of_vectors,
            },
            {"x": (gradient + gradient.T) / 2},
            {"eps": eps},
            floor=1e-2,
            tolerance=1e-3 if dtype == "float32" else None,
        )
