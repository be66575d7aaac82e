"""Overrides of PyTorch models, compared with the same rules on the server."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradrule as gr
from gradrule.errors import (
    InactiveOverrideError,
    InvalidOverrideError,
    MissingParamError,
    RuleNotApplicableError,
    UnknownParamError,
    UnmatchedOverrideError,
    UnsupportedError,
)
from gradrule.torch import override

RNG = np.random.default_rng(7)
X = RNG.normal(size=(4, 6))
IMAGES = RNG.normal(size=(2, 8, 8, 3))
LAYER_RULES: list[tuple[str, dict[str, float]]] = [
    ("lrp_epsilon", {}),
    ("lrp_epsilon", {"eps": 0.25}),
    ("lrp_0", {}),
    ("lrp_zplus", {}),
    ("lrp_alpha_beta", {"alpha": 3.0, "beta": 2.0}),
    ("lrp_gamma", {"gamma": 0.5}),
    ("lrp_zbox", {"low": -4.0, "high": 4.0}),
    ("lrp_wsquare", {}),
    ("lrp_flat", {}),
]


def gradient(model: nn.Module, x: Any, overrides: Any) -> Any:
    """Returns the gradient of the sum of a model's outputs, with overrides."""
    given = torch.tensor(x, requires_grad=True)
    with override(model, overrides):
        model(given).sum().backward()
    assert given.grad is not None
    return given.grad.numpy()


def dense_graph(layers: list[nn.Linear]) -> gr.Graph:
    """Returns the graph of dense layers with biases and relus between them, whose last output is y."""
    g = gr.Graph()
    h = g.placeholder("x", "float64", [None, layers[0].in_features])
    for index, layer in enumerate(layers):
        weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()
        last = index == len(layers) - 1
        h = g.op_output("BiasAdd", g.matmul(h, g.constant(weight)), g.constant(bias), name="y" if last else None)
        if not last:
            h = g.op_output("Relu", h)
    return g


@pytest.fixture(scope="module")
def dense() -> tuple[Any, gr.Graph]:
    """Returns a network in PyTorch and its graph."""
    torch.manual_seed(1)
    first, second = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
    return nn.Sequential(first, nn.ReLU(), second), dense_graph([first, second])


@pytest.mark.parametrize(("rule", "params"), LAYER_RULES, ids=str)
def test_rules_of_dense_layers_equal_the_servers(client: Any, dense: Any, rule: str, params: Any) -> None:
    model, graph = dense
    found = gradient(model, X, {nn.Linear: (rule, params)})
    overrides = [gr.Override(rule, layer="@dense", params=params)]
    wanted = client.evaluate(graph, {"x": X}, ys=["y"], xs=["x"], overrides=overrides).gradients["x"]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("rule", "params"), LAYER_RULES, ids=str)
def test_rules_of_convolutions_equal_the_servers(client: Any, rule: str, params: Any) -> None:
    torch.manual_seed(2)
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1).double()
    g = gr.Graph()
    x = g.placeholder("x", "float64", [None, 8, 8, 3])
    kernel = g.constant(layer.weight.detach().numpy().transpose(2, 3, 1, 0))
    padded = g.op_output("Pad", x, g.constant([[0, 0], [1, 1], [1, 1], [0, 0]]))
    h = g.op_output("Conv2D", padded, kernel, strides=[1, 2, 2, 1], padding="VALID")
    assert layer.bias is not None
    g.op("BiasAdd", h, g.constant(layer.bias.detach().numpy()), name="y")
    overrides = [gr.Override(rule, layer="@convolution", params=params)]
    wanted = client.evaluate(g, {"x": IMAGES}, ys=["y"], xs=["x"], overrides=overrides).gradients["x"]
    found = gradient(layer, IMAGES.transpose(0, 3, 1, 2), {nn.Conv2d: (rule, params)})
    if rule in ("lrp_flat", "lrp_wsquare", "lrp_zbox"):
        # PyTorch pads inside the layer; these rules give relevance to the padding, or use it, in TensorFlow's graph.
        found, wanted = found[:, :, 2:-2, 2:-2], wanted[:, 2:-2, 2:-2]
    np.testing.assert_allclose(found.transpose(0, 2, 3, 1), wanted, rtol=1e-9, atol=1e-12)


def test_transposed_convolutions_keep_the_relevance() -> None:
    layer = nn.ConvTranspose2d(3, 4, 3, stride=2, bias=False).double()
    x = IMAGES.transpose(0, 3, 1, 2)
    y = layer(torch.tensor(x))
    np.testing.assert_allclose(gradient(layer, x, {layer: "lrp_0"}).sum(), y.numel(), rtol=1e-9)


@pytest.mark.parametrize("rule", ["guided_relu", "deconvnet", ("relu_beta_smooth", {"beta": 3.0})])
def test_rules_of_activations_equal_the_servers(client: Any, dense: Any, rule: Any) -> None:
    model, graph = dense
    wanted = client.evaluate(graph, {"x": X}, ys=["y"], xs=["x"], overrides={"Relu": rule}).gradients["x"]
    np.testing.assert_allclose(gradient(model, X, {nn.ReLU: rule}), wanted, rtol=1e-9, atol=1e-12)


def test_norm_of_average_pooling_shares_relevance_by_value() -> None:
    x = np.array([[[1.0, 3.0, 0.0, 0.0]]])
    np.testing.assert_allclose(
        gradient(nn.AvgPool1d(2), x, {nn.AvgPool1d: ("lrp_norm", {"eps": 1e-9})}), [[[0.25, 0.75, 0, 0]]]
    )


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(6)], ids=lambda layer: type(layer).__name__)
def test_default_is_the_gradient_of_the_run_in_training(layer: nn.Module) -> None:
    """Dropout does not draw again, and batch norm does not count the batch again, also in second derivatives."""
    plain, layer = copy.deepcopy(layer.double()), layer.double()
    dy = torch.tensor(RNG.normal(size=X.shape))

    def derivatives(of: nn.Module, factor: Any) -> tuple[Any, Any]:
        """Returns y, the gradient times `factor`, and its gradient."""
        x = torch.tensor(X, requires_grad=True)
        torch.manual_seed(3)
        y = of(x)
        torch.rand(7)
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        first = factor(first, x)
        return (y, first, *torch.autograd.grad((first * dy).sum(), x))

    wanted = derivatives(plain, lambda own, x: own * x)
    with override(layer, {layer: gr.Rule("default * x")}):
        found = derivatives(layer, lambda own, x: own)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    after = torch.rand(1)
    torch.manual_seed(3)
    plain(torch.tensor(X)), torch.rand(7)
    assert after == torch.rand(1)


class Add(nn.Module):  # type: ignore[misc]
    """Adds two tensors."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def test_norm_shares_the_relevance_of_a_sum() -> None:
    layer, (a, b) = Add(), torch.tensor([[1.0, 3.0], [3.0, -1.0]]).requires_grad_()
    with override(layer, {Add: ("lrp_norm", {"eps": 1e-9})}):
        found = torch.autograd.grad(layer(a, b), (a, b), torch.tensor([8.0, 8.0]))
    torch.testing.assert_close(found, (torch.tensor([2.0, 12.0]), torch.tensor([6.0, -4.0])))
    with pytest.raises(RuleNotApplicableError, match="without weights"):
        gradient(nn.Linear(6, 2).double(), X, {nn.Linear: "lrp_norm"})
    with pytest.raises(UnsupportedError, match="other arguments"), override(layer, {Add: "lrp_pass"}):
        layer(a, b)


def test_layers_that_work_in_place_keep_their_input_for_the_rule() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    x = np.array([-1.0, 2.0])
    np.testing.assert_array_equal(gradient(model, x, {nn.ReLU: gr.Rule("dy * x")}), x)


def test_the_first_selector_that_fits_wins() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Tanh())
    x = np.array([0.3, -0.8])
    own = gradient(model, x, {})
    found = gradient(model, x, [("0.0", "default"), ("0.*", "2 * default"), (model[1], gr.Rule("3 * default"))])
    np.testing.assert_allclose(found, 6 * own)


def test_the_model_is_as_before_after_the_block(dense: Any) -> None:
    model, _ = dense
    x = torch.tensor(X, requires_grad=True)
    (before,) = torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(RuntimeError, match="stop"), override(model, {nn.ReLU: "deconvnet"}):
        raise RuntimeError("stop")
    (after,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(before, after)
    assert "forward" not in vars(model[1])


def test_blocks_may_be_nested() -> None:
    model = nn.Sequential(nn.Tanh())
    x = torch.tensor([0.5], requires_grad=True)
    with override(model, {nn.Tanh: gr.Rule("2 * dy")}):
        with override(model, {nn.Tanh: gr.Rule("3 * dy")}):
            assert torch.autograd.grad(model(x).sum(), x)[0].item() == 3
        assert torch.autograd.grad(model(x).sum(), x)[0].item() == 2
    assert "forward" not in vars(model[0])


def test_overrides_that_do_nothing_are_refused(dense: Any) -> None:
    model, _ = dense
    with pytest.raises(UnmatchedOverrideError, match="Linear, ReLU, Sequential"), override(model, {nn.Conv2d: "lrp_0"}):
        pass
    taken = [(nn.Linear, "lrp_0"), ("0", "lrp_flat")]
    with pytest.raises(UnmatchedOverrideError, match="an earlier override"), override(model, taken):
        pass
    x = torch.tensor(X, requires_grad=True)
    unused = {nn.ReLU: "guided_relu", nn.Linear: "lrp_0"}
    with pytest.raises(InactiveOverrideError, match="ReLU"), override(model, unused):
        model[0](x).sum().backward()


def test_wrong_overrides_are_refused(dense: Any) -> None:
    model, _ = dense
    with pytest.raises(InvalidOverrideError, match="a selector is"), override(model, {3: "lrp_0"}):
        pass
    with pytest.raises(InvalidOverrideError, match="presets are for graphs"), override(model, "epsilon_plus"):
        pass
    with pytest.raises(MissingParamError, match="'low'"), override(model, {nn.Linear: "lrp_zbox"}):
        pass
    with pytest.raises(UnknownParamError, match="'gamma'"), override(model, {nn.Linear: ("lrp_0", {"gamma": 1.0})}):
        pass
    with pytest.raises(UnsupportedError, match="runs on a server"), override(model, {nn.ReLU: "rectgrad"}):
        pass
    with pytest.raises(RuleNotApplicableError, match="not for ReLU"):
        gradient(model, X, {nn.ReLU: "lrp_0"})
    attention = nn.MultiheadAttention(6, 2)
    with pytest.raises(UnsupportedError, match="other arguments"), override(attention, {attention: "lrp_pass"}):
        attention(torch.zeros(1, 6), torch.zeros(1, 6), torch.zeros(1, 6))
