"""gradrule.scipy, compared with SciPy's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import optimize, sparse

import gradrule as gr
import gradrule.scipy
from gradrule.errors import FeedDtypeError, FeedShapeError, InvalidDerivativeError, UnknownFeedError
from tests.bridges import examples

START = np.array([-1.2, 1.0, 0.5, 2.0])


@pytest.fixture(scope="module")
def rosenbrock(client: Any) -> Any:
    """Returns an objective that is `scipy.optimize.rosen`."""
    g = gr.Graph()
    x, scale = g.placeholder("x", "float64", [None]), g.placeholder("scale", "float64", [])
    last, first = x[1:], x[:-1]
    curve = scale * g.op_output("Square", last - g.op_output("Square", first))
    g.reduce_sum(curve + g.op_output("Square", 1.0 - first), axis=[0], name="f")
    return gradrule.scipy.value_and_grad(client.compile(g, fetches=["f"], ys=["f"], xs=["x"]), scale=100.0)


def test_values_gradients_and_hessians_equal_scipys(rosenbrock: Any) -> None:
    value, gradient = rosenbrock(START)
    assert value == pytest.approx(optimize.rosen(START), rel=1e-12)
    np.testing.assert_allclose(gradient, optimize.rosen_der(START), rtol=1e-12)
    vector = np.array([1.0, -2.0, 0.5, 3.0])
    np.testing.assert_allclose(rosenbrock.hessp(START, vector), optimize.rosen_hess_prod(START, vector), rtol=1e-12)
    assert optimize.check_grad(lambda x: rosenbrock(x)[0], lambda x: rosenbrock(x)[1], START) < 1e-4


@pytest.mark.parametrize("method", ["L-BFGS-B", "trust-ncg"])
def test_minimize_takes_the_objective(rosenbrock: Any, method: str) -> None:
    hessp = rosenbrock.hessp if method == "trust-ncg" else None
    found = optimize.minimize(rosenbrock, np.full(4, 0.8), jac=True, hessp=hessp, method=method)
    np.testing.assert_allclose(found.x, np.ones(4), atol=1e-4)


def test_least_squares_takes_residuals_and_their_jacobian(client: Any) -> None:
    g = gr.Graph()
    rates, times = g.placeholder("rates", "float64", [2]), g.placeholder("times", "float64", [None])
    data = g.placeholder("data", "float64", [None])
    g.subtract(rates[0] * g.op_output("Exp", -(rates[1] * times)), data, name="r")
    program = client.compile(g, fetches=["r"], ys=["r"], xs=["rates"])
    t = np.linspace(0, 3, 20)
    r = gradrule.scipy.residuals(program, "rates", times=t, data=2.5 * np.exp(-1.3 * t))
    found = optimize.least_squares(r, [1.0, 1.0], jac=r.jac)
    np.testing.assert_allclose(found.x, [2.5, 1.3], rtol=1e-8)
    numeric = optimize.approx_fprime(np.array([1.0, 1.0]), r)
    np.testing.assert_allclose(r.jac([1.0, 1.0]), numeric, rtol=1e-5, atol=1e-6)


def test_residuals_that_do_not_depend_on_x_have_zeros_in_the_jacobian(client: Any) -> None:
    g = gr.Graph()
    x, c = g.placeholder("x", "float64", [2]), g.placeholder("c", "float64", [3])
    g.op("Square", x, name="r")
    g.op("Square", c, name="q")
    program = client.compile(g, fetches=["r", "q"], ys=["r", "q"], xs=["x"])
    r = gradrule.scipy.residuals(program, "x", c=[1.0, 2.0, 3.0])
    np.testing.assert_array_equal(r.jac([3.0, 4.0]), [[6, 0], [0, 8], [0, 0], [0, 0], [0, 0]])


def test_several_inputs_are_one_vector(smooth: Any, client: Any) -> None:
    program = client.compile(examples.smooth_graph(), fetches=["z"], ys=["z"], xs=["x", "w"])
    objective = gradrule.scipy.value_and_grad(program, ["w", "x"])
    vector = objective.pack(x=examples.X, w=examples.W)
    assert vector.shape == (18,)
    unpacked = objective.unpack(vector)
    np.testing.assert_array_equal(unpacked["x"], examples.X)
    np.testing.assert_array_equal(unpacked["w"], examples.W)
    assert optimize.check_grad(lambda v: objective(v)[0], lambda v: objective(v)[1], vector) < 1e-5


def test_a_network_trains(digits_network: Any) -> None:
    program, start = digits_network
    digits = examples.DIGITS
    objective = gradrule.scipy.value_and_grad(
        program, list(start), {"x": digits.train_x[:512]}, labels=digits.train_labels[:512]
    )
    vector = objective.pack(**start)
    squares = np.zeros_like(vector)
    # The loss of a binary network is piecewise constant, so line searches fail: follow the surrogate gradient.
    for _ in range(60):
        _, gradient = objective(vector)
        squares = 0.9 * squares + 0.1 * gradient**2
        vector = np.clip(vector - 0.01 * gradient / (np.sqrt(squares) + 1e-6), -1, 1)
    assert examples.accuracy(program, objective.unpack(vector)) >= examples.WANTED_ACCURACY


def test_wrong_arguments_are_refused(rosenbrock: Any, smooth: Any, client: Any) -> None:
    with pytest.raises(InvalidDerivativeError, match="an objective has one y"):
        gradrule.scipy.value_and_grad(smooth, "w", {"x": examples.X})
    program = client.compile(examples.smooth_graph(), fetches=["y"], ys=["y"], xs=["x"])
    with pytest.raises(InvalidDerivativeError, match="'w' is not one of the program's xs"):
        gradrule.scipy.value_and_grad(program, "w", {"x": examples.X})
    objective = gradrule.scipy.value_and_grad(program, "x", w=examples.W)
    with pytest.raises(FeedShapeError, match=r"make the start with pack"):
        objective(np.zeros(12))
    with pytest.raises(InvalidDerivativeError, match="an objective is one number"):
        objective(objective.pack(x=examples.X))
    with pytest.raises(FeedShapeError, match="the vector has 5 elements"):
        objective(np.zeros(5))
    with pytest.raises(FeedShapeError, match="'x' has shape"):
        objective.pack(x=np.zeros(3))
    with pytest.raises(UnknownFeedError, match="give values for x"):
        objective.pack(w=examples.W)


def test_inputs_and_vectors_that_would_be_rounded_are_refused(client: Any, rosenbrock: Any) -> None:
    """An optimizer would see steps; complex steps would lose their imaginary parts."""
    g = gr.Graph()
    counts, x = g.placeholder("counts", "int32", [3]), g.placeholder("x", "float64", [3])
    g.op("Square", x, name="r")
    g.reduce_sum(g.op_output("Square", x) * g.op_output("Cast", counts, DstT="float64"), axis=[0], name="y")
    program = client.compile(g, fetches=["y"], ys=["y"], xs=["counts", "x"])
    with pytest.raises(InvalidDerivativeError, match="'counts' is int32"):
        gradrule.scipy.value_and_grad(program, "counts", {"x": np.ones(3)})
    with pytest.raises(InvalidDerivativeError, match="x is empty"):
        gradrule.scipy.value_and_grad(program, [], {"x": np.ones(3), "counts": [1, 2, 3]})
    r = gradrule.scipy.residuals(client.compile(g, fetches=["r"], ys=["r"], xs=["x"]), "x")
    with pytest.raises(FeedDtypeError, match=r"jac=residuals\.jac"):
        optimize.least_squares(r, np.ones(3), jac="cs")
    for wrong in (sparse.csr_matrix(np.ones((1, 4))), "abc", [None]):
        with pytest.raises(FeedDtypeError, match="no array of real numbers"):
            rosenbrock.pack(x=wrong)
        with pytest.raises(FeedDtypeError, match="no array of real numbers"):
            rosenbrock(wrong)
