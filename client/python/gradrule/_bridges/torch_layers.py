"""Computes rules of layer-wise relevance propagation (LRP) for PyTorch's layers.

The formulas are those of the server's rules (docs/reference/rules.md): x is the data, W the weights, b the bias and R
the relevance at the output, which arrives as the upstream gradient. v⁺ is max(v, 0), v⁻ is min(v, 0), and st(z) is
z + eps where z >= 0, else z - eps. Where st(z) is 0, R/st(z) is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradrule.errors import RuleNotApplicableError

Params = Mapping[str, Any]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer with data; 16-bit types are computed in float32.

    Attributes:
        apply: Applies the layer, without its bias, to data and weights.
        bias: The bias in a shape that broadcasts to the output; zero if the layer has none.
        y: The output, for the rules in `USE_OUTPUT`.
    """

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor | None
    r: torch.Tensor

    def transposed(self, weight: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Returns Wᵀr, of the shape of x."""
        _, pull_back = torch.func.vjp(lambda x: self.apply(x, weight), self.x)
        found: torch.Tensor = pull_back(r)[0]
        return found


def check_linear(module: Any, rule: str) -> None:
    """Raises `RuleNotApplicableError` if a rule in `RULES` cannot be applied to a layer."""
    kind: Any = next((kind for kind in LINEAR if isinstance(module, kind)), None)
    if kind is None:
        raise not_applicable(module, rule, "Linear, Conv1d to Conv3d, and ConvTranspose1d to ConvTranspose3d")
    own = type(module)
    computes_as_torch = all(
        getattr(own, name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward")
    )
    if not computes_as_torch:
        raise RuleNotApplicableError(
            f"the rule {rule!r} needs the weights with which a layer computes, and {own.__name__} has a forward of its "
            f"own: let it call a torch.nn.{kind.__name__} with these weights"
        )


def relevance(
    module: nn.Module,
    rule: str,
    params: Params,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    y: torch.Tensor | None,
    dy: torch.Tensor,
) -> torch.Tensor:
    """Returns the relevance of the data of a layer, of the type and shape of x.

    Args:
        module: The layer, to which `check_linear` lets the rule be applied.
        rule: Name of a rule in `RULES`.
        params: Values of the rule's params.
        weight: The weights with which the layer ran.
        bias: The bias with which it ran; None if it has none.
        x: The data.
        y: The output of the layer; None if the rule is not in `USE_OUTPUT`.
        dy: The relevance at the output.
    """
    wide = _computed_in(x.dtype)
    weight, out = weight.to(wide), None if y is None else y.to(wide)
    layer = Layer(_without_bias(module), x.to(wide), weight, _bias(module, bias, weight), out, dy.to(wide))
    return RULES[rule](layer, params).to(x.dtype)


def check_norm(module: nn.Module, rule: str) -> None:
    """Raises `RuleNotApplicableError` if `lrp_norm` cannot be applied to a layer, which has weights."""
    if next(module.parameters(), None) is not None:
        raise not_applicable(module, rule, "average pooling and other layers without weights")


def norm(
    eps: float,
    run: Callable[..., torch.Tensor],
    xs: Sequence[torch.Tensor],
    y: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Returns the relevance of each tensor that a layer adds: x∘Jᵀ(R/st(y)), J the Jacobian of y by x.

    Args:
        eps: Positive number in st.
        run: Runs the layer without the rule: average pooling, or another one without weights.
        xs: The data.
        y: The output of the layer.
        dy: The relevance at the output.
    """
    wide = [x.to(_computed_in(x.dtype)) for x in xs]
    _, pull_back = torch.func.vjp(run, *wide)
    shares = pull_back(_ratio(dy.to(wide[0].dtype), y.to(wide[0].dtype), eps))
    return tuple((own * share).to(x.dtype) for x, own, share in zip(xs, wide, shares, strict=True))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def not_applicable(module: nn.Module, rule: str, meant_for: str) -> RuleNotApplicableError:
    """Returns the error for a rule that is meant for other layers."""
    return RuleNotApplicableError(f"the rule {rule!r} is for {meant_for}, not for {type(module).__name__}")


def _without_bias(module: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if isinstance(module, nn.Linear):
        linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.linear
        return linear
    if isinstance(module, _CONVOLUTIONS):
        return lambda x, weight: module._conv_forward(x, weight, None)
    name = f"conv_transpose{len(module.kernel_size)}d"
    function = getattr(nn.functional, name)
    return lambda x, weight: function(
        x, weight, None, module.stride, module.padding, module.output_padding, module.groups, module.dilation
    )


def _bias(module: Any, bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.zeros((), dtype=weight.dtype, device=weight.device)
    bias = bias.to(weight.dtype)
    return bias if isinstance(module, nn.Linear) else bias.reshape(-1, *(1 for _ in module.kernel_size))


def _positive(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(min=0)


def _negative(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(max=0)


def _ratio(r: torch.Tensor, z: torch.Tensor, eps: Any) -> torch.Tensor:
    """Returns R/st(z), 0 where st(z) is 0."""
    # Not as a tensor of two numbers, which would be float32.
    below = torch.where(z >= 0, z + eps, z - eps)
    is_zero = below == 0
    return torch.where(is_zero, torch.zeros_like(z), r / torch.where(is_zero, torch.ones_like(z), below))


def _by_sign(
    layer: Layer, r: torch.Tensor, eps: Any, of_plus: torch.Tensor, of_minus: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Returns x⁺∘Aᵀu + x⁻∘Bᵀu, u = R/st(Ax⁺ + Bx⁻ + bias)."""
    plus, minus = _positive(layer.x), _negative(layer.x)
    u = _ratio(r, layer.apply(plus, of_plus) + layer.apply(minus, of_minus) + bias, eps)
    return plus * layer.transposed(of_plus, u) + minus * layer.transposed(of_minus, u)


def _epsilon(layer: Layer, params: Params) -> torch.Tensor:
    assert layer.y is not None
    return layer.x * layer.transposed(layer.weight, _ratio(layer.r, layer.y, params.get("eps", 0.0)))


def _zplus(layer: Layer, params: Params) -> torch.Tensor:
    w = layer.weight
    return _by_sign(layer, layer.r, params["eps"], _positive(w), _negative(w), _positive(layer.bias))


def _alpha_beta(layer: Layer, params: Params) -> torch.Tensor:
    w = layer.weight
    opposing = _by_sign(layer, layer.r, params["eps"], _negative(w), _positive(w), _negative(layer.bias))
    return params["alpha"] * _zplus(layer, params) - params["beta"] * opposing


def _gamma(layer: Layer, params: Params) -> torch.Tensor:
    assert layer.y is not None
    gamma, w, b, nothing = params["gamma"], layer.weight, layer.bias, torch.zeros_like(layer.r)
    p, n = w + gamma * _positive(w), w + gamma * _negative(w)
    excited = torch.where(layer.y > 0, layer.r, nothing)
    inhibited = torch.where(layer.y < 0, layer.r, nothing)
    return _by_sign(layer, excited, params["eps"], p, n, b + gamma * _positive(b)) + _by_sign(
        layer, inhibited, params["eps"], n, p, b + gamma * _negative(b)
    )


def _zbox(layer: Layer, params: Params) -> torch.Tensor:
    w, plus, minus = layer.weight, _positive(layer.weight), _negative(layer.weight)
    low, high = (
        torch.as_tensor(params[name], dtype=layer.x.dtype, device=layer.x.device).expand_as(layer.x)
        for name in ("low", "high")
    )
    below = layer.apply(layer.x, w) - layer.apply(low, plus) - layer.apply(high, minus)
    u = _ratio(layer.r, below, params["eps"])
    return layer.x * layer.transposed(w, u) - low * layer.transposed(plus, u) - high * layer.transposed(minus, u)


def _wsquare(layer: Layer, params: Params) -> torch.Tensor:
    squared = layer.weight.square()
    below = layer.apply(torch.ones_like(layer.x), squared) + layer.bias.square()
    return layer.transposed(squared, _ratio(layer.r, below, params["eps"]))


def _flat(layer: Layer, params: Params) -> torch.Tensor:
    ones = torch.ones_like(layer.weight)
    below = layer.apply(torch.ones_like(layer.x), ones)
    return layer.transposed(ones, _ratio(layer.r, below, params["eps"]))


RULES: Mapping[str, Callable[[Layer, Params], torch.Tensor]] = {
    "lrp_epsilon": _epsilon,
    "lrp_0": _epsilon,
    "lrp_zplus": _zplus,
    "lrp_alpha_beta": _alpha_beta,
    "lrp_gamma": _gamma,
    "lrp_zbox": _zbox,
    "lrp_wsquare": _wsquare,
    "lrp_flat": _flat,
}
USE_OUTPUT = frozenset({"lrp_epsilon", "lrp_0", "lrp_gamma"})
"""Rules that use the output of the layer."""
