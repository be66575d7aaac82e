"""Samples the parameters of a differential equation with PyMC's NUTS, whose likelihood runs on a server.

A population grows logistically: dp/dt = r p (1 - p / c). The graph solves the equation with 16 steps of Runge and Kutta
and returns the population after each. To PyMC it is a function like any other, with gradients:
`gradrule.pytensor.remote`. NUTS (Hoffman and Gelman 2014, arXiv:1111.4246) samples the growth rate r, the capacity c,
and the size of the measurements' error.

Prints for each parameter the mean, the 95 % interval, the true value and the effective sample size (of 300 draws).
Picture: out/examples/nuts_pymc.png, the measurements with curves of the posterior, and r against c.
"""

# %%
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pymc
import tensorflow as tf

import gradrule as gr
import gradrule.pytensor

DRAWS, TUNE, CHAINS = 150, 200, 2
END, STEPS = 12.0, 16
START = 0.5  # the population at the time 0
TRUE = {"r": 0.8, "c": 10.0, "error": 1.0}
WANTED_SAMPLES = 50
OUT = Path("out/examples")

client = gr.local()
logging.getLogger("pymc").setLevel(logging.ERROR)


# %% The solver, a function of TensorFlow
def solve(r, c):
    """Returns the population after each step of the size END / STEPS: float64, shape (STEPS,)."""

    def slope(p):
        return r * p * (1.0 - p / c)

    dt = END / STEPS
    found = [tf.constant(START, "float64")]
    for _ in range(STEPS):
        p = found[-1]
        k1 = slope(p)
        k2 = slope(p + dt / 2 * k1)
        k3 = slope(p + dt / 2 * k2)
        k4 = slope(p + dt * k3)
        found.append(p + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return {"population": tf.stack(found[1:])}


graph = gr.trace(solve, ("float64", []), ("float64", []))  # two numbers
program = client.compile(graph, fetches="population", ys="population", xs=["r", "c"])
population = gradrule.pytensor.remote(program)

# %% Measurements, and the model
times = np.arange(1, STEPS + 1) * END / STEPS
clean = program(r=TRUE["r"], c=TRUE["c"]).outputs["population"]
measured = clean + np.random.default_rng(1).normal(0, TRUE["error"], STEPS)

with pymc.Model():
    r = pymc.LogNormal("r", mu=0.0, sigma=0.3)
    c = pymc.LogNormal("c", mu=2.0, sigma=0.3)
    error = pymc.LogNormal("error", mu=0.0, sigma=0.5)
    pymc.Normal("measured", mu=population(r=r, c=c), sigma=error, observed=measured)
    # A forked process cannot use the connection, so the chains run one after the other.
    trace = pymc.sample(DRAWS, tune=TUNE, chains=CHAINS, cores=1, random_seed=0, progressbar=False)

# %% The result
draws = {name: trace.posterior[name].values.ravel() for name in TRUE}
intervals = {name: np.quantile(values, [0.025, 0.975]) for name, values in draws.items()}
samples = {name: float(pymc.ess(trace)[name]) for name in TRUE}

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for r_drawn, c_drawn in zip(draws["r"][::10], draws["c"][::10], strict=True):
    curve = program(r=r_drawn, c=c_drawn).outputs["population"]
    left.plot(times, curve, color="C0", alpha=0.15, label="posterior" if r_drawn == draws["r"][0] else None)
left.plot(times, measured, "o", color="black", label="measured")
left.set(title="population", xlabel="time", ylabel="population")
left.legend()
right.scatter(draws["r"], draws["c"], s=8, color="C0", alpha=0.5, label="draws")
right.plot(TRUE["r"], TRUE["c"], "*", color="C1", markersize=16, label="true values")
right.set(title="posterior", xlabel="growth rate r", ylabel="capacity c")
right.legend()
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "nuts_pymc.png", dpi=120)

for name, (low, high) in intervals.items():
    print(
        f"{name}: {draws[name].mean():.2f}, 95 % in [{low:.2f}, {high:.2f}], true value {TRUE[name]}, "
        f"effective sample size {samples[name]:.0f}"
    )
assert min(samples.values()) >= WANTED_SAMPLES, samples
assert all(abs(values.mean() - TRUE[name]) < 3 * values.std() for name, values in draws.items()), intervals
