"""Surrogates of gradrule.torch and gradrule.jax, compared with the same rules in TensorFlow."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradrule as gr
import gradrule.jax
import gradrule.torch
from gradrule.errors import (
    InvalidExpressionError,
    InvalidOverrideError,
    InvalidParamError,
    InvalidTensorError,
    MissingParamError,
    UnknownParamError,
    UnknownRuleError,
    UnsupportedError,
)
from gradrule_server.errors import GradruleError
from gradrule_server.rules import Signature
from gradrule_server.rules.catalogue import BUILTINS
from tests.unit.rules.running import number_of, run

# PyTorch's forward mode uses it itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

X = np.float32([-3.0, -1.0, -0.4, 0.0, 0.2, 0.9, 1.0, 2.5])
DY = np.float32([1.0, -2.0, 0.5, 3.0, -1.0, 0.25, 2.0, 1.0])
ONE_FLOAT = Signature((number_of("float32"),), (number_of("float32"),))


def elementwise_rules() -> list[Any]:
    """Returns the rules of the catalogue that fit an op with one input and have defaults for all params."""
    found = []
    for rule in BUILTINS:
        if rule.code or any(param.default is None for param in rule.params):
            continue
        try:
            rule.content.bind(ONE_FLOAT)
        except GradruleError:
            continue
        found.append(rule)
    return found


def by_tensorflow(rule: Any, y: Any) -> Any:
    """Returns the rule's gradient, with zeros as the op's own gradient."""
    params = {f"param/{param.name}": param.default for param in rule.params}
    values = {"x0": X, "y0": y, "dy0": DY, "default0": np.zeros_like(X), "salt": 0, **params}
    (found,) = run(rule.content.bind(ONE_FLOAT), values)
    return np.broadcast_to(found, X.shape)


RULES = elementwise_rules()


def test_most_rules_of_the_catalogue_are_tried() -> None:
    assert len(RULES) >= 60


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_of_the_catalogue_equal_tensorflow(rule: Any) -> None:
    x = torch.tensor(X, requires_grad=True)
    y = gradrule.torch.surrogate(rule.name)(x)
    np.testing.assert_array_equal(y.detach(), X > 0)
    y.backward(torch.tensor(DY))
    wanted = by_tensorflow(rule, np.float32(X > 0))
    np.testing.assert_allclose(x.grad, wanted, rtol=2e-5, atol=1e-6)
    z, pull_back = jax.vjp(jax.jit(gradrule.jax.surrogate(rule.name)), X)
    np.testing.assert_array_equal(z, X > 0)
    np.testing.assert_allclose(pull_back(jnp.asarray(DY))[0], wanted, rtol=2e-5, atol=1e-6)


def test_params_formulas_and_rules_are_taken() -> None:
    x = torch.tensor(X, requires_grad=True)
    gradrule.torch.surrogate("fast_sigmoid", slope=10.0)(x).sum().backward()
    np.testing.assert_allclose(x.grad, 1 / (1 + 10 * np.abs(X)) ** 2, rtol=1e-6)
    for rule in ("dy * k * x", gr.Rule("dy * k * x", params={"k": 7.0})):
        (found,) = torch.autograd.grad(gradrule.torch.surrogate(rule, "sign", k=2.0)(x).sum(), x)
        np.testing.assert_array_equal(found, 2 * X)
        wanted = jax.grad(lambda v, rule=rule: gradrule.jax.surrogate(rule, "sign", k=2.0)(v).sum())(X)
        np.testing.assert_array_equal(wanted, 2 * X)


def test_default_is_the_gradient_of_the_forward_function() -> None:
    x = torch.tensor(X, requires_grad=True)
    (found,) = torch.autograd.grad(gradrule.torch.surrogate("2 * default", torch.sin)(x).sum(), x)
    np.testing.assert_allclose(found, 2 * np.cos(X), rtol=1e-5, atol=1e-6)
    by_jax = jax.grad(lambda v: gradrule.jax.surrogate("2 * default", jnp.sin)(v).sum())(X)
    np.testing.assert_allclose(by_jax, 2 * np.cos(X), rtol=1e-5, atol=1e-6)


def test_16_bit_types_are_computed_in_float32() -> None:
    """At 0.25 the derivative of the sigmoid with slope 25 is 0 if computed in bfloat16, and 0.048 rounded once."""
    x = torch.tensor([0.25], dtype=torch.bfloat16, requires_grad=True)
    gradrule.torch.surrogate("sigmoid_surrogate", slope=25.0)(x).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    s = 1 / (1 + np.exp(-25 * 0.25))
    assert x.grad.item() == pytest.approx(25 * s * (1 - s), rel=4e-3)
    by_jax = jax.grad(lambda v: gradrule.jax.surrogate("sigmoid_surrogate", slope=25.0)(v).sum())
    assert float(by_jax(jnp.asarray([0.25], jnp.bfloat16))[0]) == x.grad.item()


def test_second_derivatives_are_those_of_the_rule() -> None:
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gradrule.torch.surrogate("atan")(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    a = np.pi * X.astype(np.float64)
    np.testing.assert_allclose(second, -2 * np.pi * a / (1 + a**2) ** 2, rtol=1e-5)
    by_jax = jax.grad(lambda v: jax.grad(lambda w: gradrule.jax.surrogate("atan")(w).sum())(v).sum())(X)
    np.testing.assert_allclose(by_jax, second, rtol=2e-4, atol=1e-5)


def test_outputs_have_their_own_gradient_in_second_derivatives() -> None:
    """The first gradient of the square with the rule dy y² is x⁴, so the second is 4x³."""
    square, rule = (lambda v: v * v), gr.Rule("dy * y * y")
    x = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gradrule.torch.surrogate(rule, square)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 4 * x.detach() ** 3)
    by_jax = jax.grad(lambda v: jax.grad(lambda w: gradrule.jax.surrogate(rule, square)(w).sum())(v).sum())
    np.testing.assert_allclose(by_jax(np.float32([0.3, -0.2])), second, rtol=1e-5)


def test_rounding_in_jax_has_the_gradient_of_the_rule() -> None:
    found = jax.grad(lambda v: gradrule.jax.surrogate("ste", "round")(v).sum())(X)
    np.testing.assert_array_equal(found, np.ones_like(X))


def test_transforms_of_torch_func_work() -> None:
    spike = gradrule.torch.surrogate("atan")
    x = torch.tensor(X).reshape(4, 2)
    per_row = torch.func.vmap(torch.func.grad(lambda row: spike(row).sum()))(x)
    leaf = x.clone().requires_grad_()
    spike(leaf).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(per_row, leaf.grad)
    _, pushed = torch.func.jvp(spike, (x,), (torch.full_like(x, 2.0),))
    torch.testing.assert_close(pushed, 2 * leaf.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_functions_use_the_rule() -> None:
    spike, x = gradrule.torch.surrogate("atan"), torch.tensor(X, requires_grad=True)
    torch.compile(lambda v: spike(2 * v).sum(), backend="eager")(x).backward()
    np.testing.assert_allclose(x.grad, 2 / (1 + (np.pi * 2 * X) ** 2), rtol=1e-5)


def test_a_surrogate_can_be_pickled() -> None:
    spike = gradrule.torch.surrogate("fast_sigmoid", slope=3.0)
    again = pickle.loads(pickle.dumps(spike))
    assert repr(again) == "surrogate('fast_sigmoid', 'heaviside', slope=3.0)"
    x = torch.tensor(X, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(again(x).sum(), x), torch.autograd.grad(spike(x).sum(), x))


def test_a_spiking_network_trains_in_pytorch_alone() -> None:
    """A leaky integrate-and-fire neuron learns to fire a given number of times."""
    torch.manual_seed(0)
    spike = gradrule.torch.surrogate("fast_sigmoid", slope=5.0)
    inputs, wanted = torch.rand(25, 20), 7.0
    weights = torch.zeros(20, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.02)
    for _ in range(100):
        potential, count = torch.zeros(()), torch.zeros(())
        for current in inputs @ weights:
            potential = 0.9 * potential + current
            fired = spike(potential - 1.0)
            potential, count = potential - fired, count + fired
        optimizer.zero_grad()
        ((count - wanted) ** 2).backward()
        optimizer.step()
    assert abs(count.item() - wanted) <= 1


def test_surrogates_of_other_values_are_refused() -> None:
    with pytest.raises(InvalidTensorError, match="not of a float"):
        gradrule.torch.surrogate("atan")(0.5)


@pytest.mark.parametrize("make", [gradrule.torch.surrogate, gradrule.jax.surrogate])
def test_wrong_rules_and_params_are_refused(make: Any) -> None:
    with pytest.raises(UnknownRuleError, match="fast_sigmoid"):
        make("fast_sigmoidd")
    with pytest.raises(UnsupportedError, match="needs the op's weights"):
        make("lrp_epsilon")
    with pytest.raises(UnknownParamError, match="no param 'steepness'"):
        make("fast_sigmoid", steepness=1.0)
    with pytest.raises(InvalidParamError, match="outside its range"):
        make("fast_sigmoid", slope=-1.0)
    with pytest.raises(InvalidParamError, match="a number or an array of numbers"):
        make("fast_sigmoid", slope="steep")
    with pytest.raises(InvalidParamError, match="outside its range"):
        make("fast_sigmoid", slope=torch.tensor(-5.0))
    with pytest.raises(MissingParamError, match="needs the param 'k'"):
        make(gr.Rule("k * dy", params=["k"]))
    with pytest.raises(InvalidExpressionError):
        make("dy * (x")
    with pytest.raises(InvalidOverrideError, match="heaviside, sign, round"):
        make("atan", "step")


def test_outputs_of_surrogates_may_be_changed_in_place() -> None:
    for rule in ("atan", gr.Rule("dy * (y + 1)")):
        x = torch.tensor(X, requires_grad=True)
        spike = gradrule.torch.surrogate(rule)
        (wanted,) = torch.autograd.grad((2 * spike(x)).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(spike(x).mul_(2).sum(), x)[0], wanted)


def test_params_get_no_gradient_in_second_derivatives_either() -> None:
    slope = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor(X, requires_grad=True)
    spike = gradrule.torch.surrogate("fast_sigmoid", slope=slope)
    (first,) = torch.autograd.grad(spike(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), slope, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    "forward", [lambda x: x.sum(), lambda x: x > 0, lambda x: x[:2]], ids=["shape", "dtype", "part"]
)
def test_forward_functions_that_return_something_else_are_refused(forward: Any) -> None:
    for surrogate, given in ((gradrule.torch.surrogate, torch.tensor(X)), (gradrule.jax.surrogate, jnp.asarray(X))):
        with pytest.raises(InvalidTensorError, match=r"like x, (torch\.)?float32 of shape"):
            surrogate("ste", forward)(given)


def test_forward_functions_with_weights_are_those_of_the_run() -> None:
    """PyTorch refuses the backward pass if a module's weights have changed since."""
    layer, x = torch.nn.PReLU(), torch.tensor(X, requires_grad=True)
    y = gradrule.torch.surrogate("2 * default", layer)(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
