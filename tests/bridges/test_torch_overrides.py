"""Overrides of PyTorch models, compared with the same rules on the server."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import OrderedDict
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


def test_rules_use_the_weights_of_the_run() -> None:
    """PyTorch refuses a backward pass after weights that a rule needs have changed."""
    torch.manual_seed(0)
    for rule in ("lrp_epsilon", "lrp_wsquare", "default * 2"):
        layer, x = nn.Linear(5, 5), torch.rand(2, 5, requires_grad=True)
        with override(layer, {nn.Linear: rule}):
            y = layer(x)
            with torch.no_grad():
                layer.weight.mul_(-2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_rules_use_weights_that_were_replaced_since() -> None:
    layer = nn.Linear(4, 4, bias=False).double()
    x = torch.tensor(X[:, :4], requires_grad=True)
    for rule in ("lrp_0", gr.Rule("2 * default")):
        with override(layer, {nn.Linear: rule}):
            (wanted,) = torch.autograd.grad(layer(x).sum(), x)
            y, own = layer(x).sum(), layer.weight
            layer.weight = nn.Parameter(torch.zeros_like(own))
            (found,) = torch.autograd.grad(y, x)
            layer.weight = own
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(6)], ids=lambda layer: type(layer).__name__)
def test_default_keeps_the_mode_of_the_run(layer: nn.Module) -> None:
    """The gradient is that of training, though the model is in evaluation mode by then."""
    layer = layer.double()

    def own() -> Any:
        torch.manual_seed(3)
        x = torch.tensor(X, requires_grad=True)
        y = layer.train()(x)
        layer.eval()
        return torch.autograd.grad((y**3).sum(), x)

    wanted = own()
    with override(layer, {layer: gr.Rule("default")}):
        torch.testing.assert_close(own(), wanted)


class BinaryLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that computes with the signs of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.sign(self.weight))


def test_relevance_of_layers_that_compute_with_other_weights_is_refused() -> None:
    with (
        pytest.raises(RuleNotApplicableError, match="BinaryLinear has a forward of its own"),
        override(nn.Sequential(BinaryLinear(5, 5)), {nn.Linear: "lrp_0"}),
    ):
        pass


def test_relevance_of_normalized_weights_is_that_of_the_weights_of_the_run() -> None:
    """Of `weight_norm`, old and new, the layer has the product as its weight."""
    x = torch.tensor(X, requires_grad=True)
    for norm in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm):
        with pytest.warns(FutureWarning) if norm is nn.utils.weight_norm else contextlib.nullcontext():
            layer = norm(nn.Linear(6, 3, bias=False).double())
        with override(layer, {nn.Linear: "lrp_0"}):
            y = layer(x)
            (found,) = torch.autograd.grad(y, x, y.detach())
        torch.testing.assert_close(found.sum(), y.sum())


def test_models_cannot_be_copied_within_the_block() -> None:
    model = nn.Sequential(nn.ReLU())
    with override(model, {nn.ReLU: "guided_relu"}):
        model(torch.ones(1))
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled within a block"):
                copied(model)
    assert pickle.loads(pickle.dumps(model))(torch.ones(1)) == 1


def test_random_rules_draw_the_numbers_of_the_server(client: Any) -> None:
    """Each layer draws its own: those of the node with its name."""
    rule = gr.Rule("dy * uniform(dy, 3)")
    model = nn.Sequential(OrderedDict(a=nn.Sequential(OrderedDict(relu=nn.ReLU())), b=nn.ReLU()))
    x = np.ones(6)
    g = gr.Graph()
    h = g.op("Relu", g.placeholder("x", "float64", [6]), name="a/relu")
    g.op("Relu", h, name="b")
    drawn = []
    for layer, node in (("a.relu", "a/relu"), ("b", "b")):
        overrides = [gr.Override(rule, node=node)]
        drawn.append(client.evaluate(g, {"x": x}, ys=["b"], xs=["x"], overrides=overrides).gradients["x"])
        np.testing.assert_allclose(gradient(model, x, {layer: rule}), drawn[-1])
    assert not np.allclose(*drawn)


class Functional(nn.Module):  # type: ignore[misc]
    """A model with a declared layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x)


def test_layers_that_do_not_run_are_reported() -> None:
    with pytest.raises(InactiveOverrideError, match="no layer of the override ReLU ran"):
        gradient(Functional(), X, {nn.ReLU: "guided_relu"})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_layers_that_pytorch_does_not_call_are_refused() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(8, 2))
    with pytest.raises(RuleNotApplicableError, match=r"'0.out_proj': 'default'"):
        override(attention, {nn.Linear: "lrp_0"}).__enter__()
    scripted = torch.jit.script(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.jit"):
        override(scripted, {"1": "guided_relu"}).__enter__()


@pytest.mark.parametrize(
    ("rule", "layer"),
    [("guided_relu", nn.Linear(4, 1)), ("dy * x", nn.Linear(4, 1)), ("dy * y", nn.Linear(4, 3))],
    ids=str,
)
def test_elementwise_rules_of_layers_that_change_the_shape_are_refused(rule: str, layer: nn.Module) -> None:
    with (
        pytest.raises(RuleNotApplicableError, match=r"Linear, which gave \(2, .\) for"),
        override(layer, {layer: rule}),
    ):
        layer(torch.ones(2, 4, requires_grad=True))


def test_outputs_may_be_changed_in_place_after_the_layer() -> None:
    """As PyTorch's own layers: an activation in place, and the sum of a residual block."""
    torch.manual_seed(4)
    conv, x = nn.Conv2d(2, 2, 3, padding=1).double(), torch.tensor(RNG.normal(size=(1, 2, 5, 5)), requires_grad=True)
    for rule in ("lrp_zplus", "lrp_epsilon"):
        with override(conv, {nn.Conv2d: rule}):
            (wanted,) = torch.autograd.grad(nn.functional.relu(conv(x) + x).sum(), x)
            y = conv(x)
            y += x
            (found,) = torch.autograd.grad(nn.functional.relu(y, inplace=True).sum(), x)
        torch.testing.assert_close(found, wanted)


def test_a_block_can_be_used_again_and_names_of_shared_layers_are_known() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Identity(), relu, nn.Tanh(), relu)
    block = override(model, {"3": gr.Rule("3 * dy")})
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        with block:
            (found,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(found, 9 * (1 - torch.tanh(x.detach()) ** 2))
    with pytest.raises(UnmatchedOverrideError, match=r"by the class, as nn\.ReLU"):
        override(model, {"ReLU": "guided_relu"}).__enter__()


# PyTorch's forward mode uses it itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    model, x = nn.ReLU(), torch.ones(3)
    with (
        override(model, {nn.ReLU: "guided_relu"}),
        pytest.raises(UnsupportedError, match="for reverse mode"),
    ):
        torch.func.jvp(model, (x,), (x,))
