"""gradrule.pytensor, compared with finite differences and with PyMC's own distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.gradient import hessian_vector_product, verify_grad

import gradrule as gr
import gradrule.pytensor
from gradrule.errors import UnsupportedError
from tests.bridges import examples


def test_gradients_pass_pytensors_check(smooth: Any) -> None:
    remote = gradrule.pytensor.remote(smooth)
    rng = np.random.default_rng(0)
    for y in ("y", "z"):
        verify_grad(lambda x, w, y=y: remote(x=x, w=w)[y], [examples.X, examples.W], rng=rng)
    verify_grad(lambda w: pytensor.grad(remote(x=examples.X, w=w)["z"], w), [examples.W], rng=rng)


def test_second_derivatives_and_forward_mode_equal_numpy(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float64", [3])
    g.reduce_sum(g.op_output("Sin", x) * x, axis=[0], name="f")
    remote = gradrule.pytensor.remote(client.compile(g, fetches=["f"], ys=["f"], xs=["x"]))
    at, v = np.array([0.3, -1.0, 2.0]), np.array([1.0, 2.0, -1.0])
    point, vector = pt.dvector("point"), pt.dvector("vector")
    products = pytensor.function([point, vector], hessian_vector_product(remote(point), [point], [vector]))
    np.testing.assert_allclose(products(at, v)[0], (2 * np.cos(at) - at * np.sin(at)) * v, rtol=1e-12)
    pushed = pytensor.function([point, vector], pytensor.gradient.Rop(remote(point), point, vector))
    np.testing.assert_allclose(pushed(at, v), np.sum((np.sin(at) + at * np.cos(at)) * v), rtol=1e-12)


def test_overrides_apply(binary: Any) -> None:
    x, w = pt.fmatrix("x"), pt.fmatrix("w")
    gradients = pytensor.grad(gradrule.pytensor.remote(binary)(x, w), [x, w])
    given = np.float32(examples.X), np.float32(examples.W)
    for found, wanted in zip(
        pytensor.function([x, w], gradients)(*given), examples.straight_through(*given), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_functions_with_other_params_are_other_functions(client: Any) -> None:
    program = client.compile(
        examples.binary_graph(), fetches=["loss"], ys=["loss"], xs=["x", "w"], overrides={"Sign": "fast_sigmoid"}
    )
    x = pt.fmatrix("x")
    gradients = [
        pytensor.grad(
            gradrule.pytensor.remote(program, params={"Sign": {"slope": slope}})(x, examples.W.astype("f4")), x
        )
        for slope in (1.0, 100.0)
    ]
    mild, steep = pytensor.function([x], gradients)(np.float32(examples.X))
    assert np.abs(mild).max() > 2 * np.abs(steep).max()


@pytest.fixture(scope="session")
def logp(client: Any) -> Any:
    """Returns the function of the log density of normal data, given the mean."""
    g = gr.Graph()
    mean, data = g.placeholder("mean", "float64", []), g.placeholder("data", "float64", [None])
    g.multiply(g.reduce_sum(g.op_output("Square", data - mean), axis=[0]), -0.5, name="logp")
    return gradrule.pytensor.remote(client.compile(g, fetches=["logp"], ys=["logp"], xs=["mean"]))


def test_a_value_and_its_gradient_take_one_request(logp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    evaluate = type(logp.program).evaluate

    def counted(*arguments: Any, **named: Any) -> Any:
        requests.append(named)
        return evaluate(*arguments, **named)

    monkeypatch.setattr(type(logp.program), "evaluate", counted)
    mean, data = pt.dscalar("mean"), np.array([0.5, -1.0, 2.0])
    value = logp(mean, data) / 2
    at, (value_at, slope_at) = 0.3, (-0.25 * np.sum((data - 0.3) ** 2), 0.5 * np.sum(data - 0.3))
    found = pytensor.function([mean], [value, pytensor.grad(value, mean)])(at)
    assert len(requests) == 1
    np.testing.assert_allclose(found, [value_at, slope_at], rtol=1e-12)
    # An upstream gradient that depends on the value needs the value first.
    squared = pytensor.function([mean], [value**2, pytensor.grad(value**2, mean)])(at)
    assert len(requests) == 3
    np.testing.assert_allclose(squared, [value_at**2, 2 * value_at * slope_at], rtol=1e-12)


def test_nuts_samples_the_posterior(logp: Any) -> None:
    """Samples the mean of normal data with a flat prior: the posterior is normal, with a known mean and deviation."""
    drawn = np.random.default_rng(3).normal(2.0, 1.0, size=50)
    with pymc.Model():
        variable = pymc.Flat("mean", initval=0.0)
        pymc.Potential("likelihood", logp(mean=variable, data=drawn))
        trace = pymc.sample(
            400, tune=200, chains=1, cores=1, random_seed=5, progressbar=False, compute_convergence_checks=False
        )
    samples = trace.posterior["mean"].to_numpy().ravel()
    assert np.mean(samples) == pytest.approx(drawn.mean(), abs=0.05)
    assert np.std(samples) == pytest.approx(1 / np.sqrt(50), rel=0.25)


def sample_two_chains(logp: Any, mp_ctx: str) -> Any:
    """Returns samples of two chains, each in a process of its own."""
    with pymc.Model():
        variable = pymc.Flat("mean", initval=0.0)
        pymc.Potential("likelihood", logp(mean=variable, data=[1.0, 2.0, 3.0]))
        options = {"random_seed": 5, "progressbar": False, "compute_convergence_checks": False}
        return pymc.sample(20, tune=20, chains=2, cores=2, mp_ctx=mp_ctx, **options)


@pytest.mark.parametrize("mp_ctx", ["forkserver", "spawn"])
def test_chains_run_in_other_processes(logp: Any, mp_ctx: str) -> None:
    samples = sample_two_chains(logp, mp_ctx).posterior["mean"].to_numpy()
    assert samples.shape == (2, 20)
    assert np.ptp(samples) > 0


def test_complex_programs_are_refused(client: Any) -> None:
    program = client.compile(examples.complex_graph(), fetches=["y"], ys=["y"], xs=["z"])
    with pytest.raises(UnsupportedError, match="'z' is complex128"):
        gradrule.pytensor.remote(program)


def test_programs_that_draw_random_numbers_are_refused(dropout: Any) -> None:
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        gradrule.pytensor.remote(dropout)


def test_types_that_pytensor_lacks_are_refused(client: Any) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", "bfloat16", [2]), name="y")
    with pytest.raises(UnsupportedError, match="bfloat16, which PyTensor does not have"):
        gradrule.pytensor.remote(client.compile(g, fetches=["y"], ys=["y"], xs=["x"]))
