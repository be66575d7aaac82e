"""Finds the shape of 13 atoms with `scipy.optimize`, with gradients and Hessian-vector products from a server.

The energy of the cluster is the sum of the Lennard-Jones potential 4 (r^-12 - r^-6) over all pairs. Its smallest value
for 13 atoms is known: -44.3268, an icosahedron (Hoare and Pal 1971, doi:10.1080/00018737100101231). The graph computes
only the energy; the gradient, and the product of the Hessian with a vector, come from the server.

Compares L-BFGS, which needs gradients, with the Newton method `trust-ncg`, which also needs Hessian-vector products,
and so converges quadratically near the minimum.

Prints the energies and the largest force on an atom that remains.
Picture: out/examples/scipy_optimize.png, the largest force by iteration, and the cluster.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import optimize

import gradrule as gr
import gradrule.scipy

ATOMS, KNOWN_ENERGY = 13, -44.326801
OUT = Path("out/examples")

client = gr.local()

# %% The energy as a graph
g = gr.Graph()
x = g.placeholder("x", "float64", [ATOMS, 3])
distance2 = g.reduce_sum(g.square(g.expand_dims(x, 1) - g.expand_dims(x, 0)), axis=[2])
pairs = g.boolean_mask(distance2, np.triu(np.ones((ATOMS, ATOMS), bool), k=1))  # each pair once
g.reduce_sum(4.0 * (pairs**-6.0 - pairs**-3.0), axis=[0], name="energy")

program = client.compile(g, fetches=["energy"], ys=["energy"], xs=["x"])
energy = gradrule.scipy.value_and_grad(program, x="x")

# %% Start: an icosahedron of the wrong size, whose atoms are moved at random
golden = (1 + 5**0.5) / 2
corners = [(0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
icosahedron = np.array([np.roll(corner, turn) for corner in corners for turn in range(3)] + [(0, 0, 0)])
start = 0.8 * icosahedron + np.random.default_rng(0).normal(0, 0.1, (ATOMS, 3))


def minimize(method, **options):
    """Returns SciPy's result and the largest force after each iteration."""
    forces = []

    def note(now):
        forces.append(np.abs(energy(now)[1]).max())

    hessp = energy.hessp if method == "trust-ncg" else None
    found = optimize.minimize(
        energy, energy.pack(x=start), jac=True, hessp=hessp, method=method, callback=note, options=options
    )
    return found, forces


quasi_newton, forces_quasi_newton = minimize("L-BFGS-B", gtol=1e-9, ftol=0.0, maxiter=200)
newton, forces_newton = minimize("trust-ncg", gtol=1e-9)
cluster = energy.unpack(newton.x)["x"]

# %% The result
figure = plt.figure(figsize=(10, 4.2), layout="constrained")
left = figure.add_subplot(1, 2, 1)
left.semilogy(forces_quasi_newton, "o-", color="C1", markersize=4, label="L-BFGS: gradients")
left.semilogy(forces_newton, "s-", color="C0", markersize=4, label="trust-ncg: also Hessian-vector products")
left.set(title="convergence", xlabel="iteration", ylabel="largest force on an atom", ylim=(1e-9, 1e5))
left.grid(alpha=0.3)
left.legend(loc="upper right")
right = figure.add_subplot(1, 2, 2, projection="3d")
for first in range(ATOMS):
    for second in range(first):
        if np.linalg.norm(cluster[first] - cluster[second]) < 1.3:  # neighbours
            right.plot(*cluster[[first, second]].T, color="C7", linewidth=1)
right.scatter(*cluster.T, s=150, color="C0", depthshade=True)
right.set(title=f"energy {newton.fun:.4f}", xticks=[], yticks=[], zticks=[], aspect="equal")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "scipy_optimize.png", dpi=120)

for name, found, forces in (("L-BFGS", quasi_newton, forces_quasi_newton), ("trust-ncg", newton, forces_newton)):
    print(f"{name}: energy {found.fun:.6f}, largest force {forces[-1]:.1e} after {len(forces)} iterations")
assert abs(newton.fun - KNOWN_ENERGY) < 1e-5, newton.fun
assert abs(quasi_newton.fun - KNOWN_ENERGY) < 1e-5, quasi_newton.fun
assert forces_newton[-1] < 1e-6, forces_newton[-1]
