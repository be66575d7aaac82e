"""Makes elementwise functions of PyTorch whose gradients are rules, without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gradrule._bridges.local_rules import LocalRule
from gradrule._bridges.torch_runs import Run, gradient, may_repeat, uses_output
from gradrule._builder.rules import RuleLike
from gradrule.errors import InvalidOverrideError, InvalidTensorError


def surrogate(rule: RuleLike, forward: str | Callable[[Any], Any] = "heaviside", **params: Any) -> Surrogate:
    """Returns an elementwise function with a rule as its gradient, computed by PyTorch without a server.

    `surrogate("fast_sigmoid", slope=10.0)` is a step whose gradient is that of a fast sigmoid, as spiking networks use;
    `surrogate("ste_sign", "sign")` a sign with a straight-through estimator.

    The numbers of a random rule depend on its seed only: give each surrogate a seed of its own.

    Args:
        rule: The name of an elementwise rule of the catalogue, a formula, or a `gr.Rule`.
        forward: The function itself: "heaviside" (1 where x > 0, otherwise 0), "sign", "round" (halves to even), or a
            function of a tensor that returns one of the same shape and dtype.
        **params: Values of the rule's params: numbers, arrays, or tensors, which get no gradient.

    Returns:
        A function of a tensor of a floating type, which returns a tensor of the same dtype and shape. 16-bit types are
        computed in float32 and rounded once. It works with double backward, `torch.func` and `torch.compile`'s graph
        breaks, and can be pickled if `forward` can.

    Raises:
        UnknownRuleError: The catalogue has no such rule.
        UnsupportedError: The rule runs on a server only, as rules for LRP do, which need the op's weights.
        InvalidOverrideError: `forward` is no function, nor the name of one.
        GradruleError: The formula or a param is invalid.
    """
    return Surrogate(rule, forward, params)


class Surrogate:
    """An elementwise function with a rule as its gradient, which `surrogate` returns."""

    def __init__(self, rule: RuleLike, forward: str | Callable[[Any], Any], params: Mapping[str, Any]) -> None:
        self._given = rule, forward, dict(params)
        self._rule = LocalRule(rule, params)
        function = _FORWARD.get(forward) if isinstance(forward, str) else forward
        if not callable(function):
            raise InvalidOverrideError(f"forward is a function, or one of {', '.join(_FORWARD)}; not {forward!r}")
        self._forward: Callable[[Any], Any] = function
        self._may_draw = not isinstance(forward, str)

    @torch.compiler.disable(reason="rules are not compiled")  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the function of a tensor.

        Raises:
            InvalidTensorError: x is no tensor, or `forward` returns no tensor of the shape and dtype of x.
            GradruleError: The rule does not fit the type of x; raised by `backward`.
        """
        if not isinstance(x, torch.Tensor):
            raise InvalidTensorError(f"a surrogate is a function of a torch tensor, not of a {type(x).__name__}")
        layer = self._forward if isinstance(self._forward, nn.Module) else None
        run = Run(self._forward, layer, may_draw=self._may_draw, may_repeat=may_repeat(self._rule, x))
        found: torch.Tensor = _WithRule.apply(run, self._rule, x)
        return found

    def __repr__(self) -> str:
        rule, forward, params = self._given
        named = "".join(f", {name}={value!r}" for name, value in params.items())
        return f"surrogate({rule!r}, {forward!r}{named})"

    def __reduce__(self) -> Any:
        return Surrogate, self._given


_FORWARD: Mapping[str, Callable[[Any], Any]] = {
    "heaviside": lambda x: (x > 0).to(x.dtype),
    "sign": torch.sign,
    "round": torch.round,
}


class _WithRule(torch.autograd.Function):
    """Computes a function whose gradient is a rule: (run, rule, x) → y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Run, rule: LocalRule, x: torch.Tensor) -> torch.Tensor:
        y = run.first(x)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            given = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise InvalidTensorError(
                f"the forward function of a surrogate returns a tensor like x, {x.dtype} of shape {tuple(x.shape)}; "
                f"this one returned {given}"
            )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.run, ctx.rule, x = inputs
        # A copy of the output, because the user may change it in place.
        y = output.detach().clone() if uses_output(ctx.rule, x) else None
        ctx.save_for_backward(x, y, *ctx.run.weights)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, y, *_ = ctx.saved_tensors
        return None, None, gradient(ctx.rule, ctx.run, x, y, dy)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, tangent: torch.Tensor) -> torch.Tensor:
        # An elementwise rule is its own transpose.
        x, y, *_ = ctx.saved_tensors
        return gradient(ctx.rule, ctx.run, x, y, tangent)
