"""Applies rules to functions and models of PyTorch, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from gradrule._bridges import torch_layers
from gradrule._bridges.local_rules import LocalRule, params_of
from gradrule._bridges.torch_arrays import TORCH
from gradrule._builder.names import did_you_mean, glob_pattern
from gradrule._builder.rules import OverrideValue, RuleLike, rule_and_params
from gradrule.errors import (
    InactiveOverrideError,
    InvalidOverrideError,
    InvalidTensorError,
    UnmatchedOverrideError,
    UnsupportedError,
)

Selector: TypeAlias = "type[nn.Module] | str | nn.Module"
ModuleOverrides: TypeAlias = "Mapping[Selector, OverrideValue] | Sequence[tuple[Selector, OverrideValue]]"


def surrogate(rule: RuleLike, forward: str | Callable[[Any], Any] = "heaviside", **params: Any) -> Surrogate:
    """Returns an elementwise function with a rule as its gradient, computed by PyTorch without a server.

    `surrogate("fast_sigmoid", slope=10.0)` is a step whose gradient is that of a fast sigmoid, as spiking networks use;
    `surrogate("ste_sign", "sign")` a sign with a straight-through estimator.

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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the function of a tensor.

        Raises:
            InvalidTensorError: x is no tensor.
            GradruleError: The rule does not fit the type of x; raised by `backward`.
        """
        if not isinstance(x, torch.Tensor):
            raise InvalidTensorError(f"a surrogate is a function of a torch tensor, not of a {type(x).__name__}")
        found: torch.Tensor = _WithRule.apply(_Run(self._forward, may_draw=self._may_draw), self._rule, x)
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


class _Run:
    """One run of a function or layer, which rules can repeat with the same random numbers.

    Repetitions change no buffer of the layer, such as the moving averages of a batch norm.
    Args:
        function: The function, or runs the layer without its rule.
        layer: The layer.
        may_draw: Whether the function may draw random numbers.
    """

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None, *, may_draw: bool = True) -> None:
        self._function, self._layer, self._may_draw = function, layer, may_draw
        self._random_state: list[tuple[torch.device, torch.Tensor]] = []

    def first(self, *xs: torch.Tensor) -> torch.Tensor:
        """Returns the function of tensors."""
        if self._may_draw:
            devices = {x.device for x in xs if x.is_cuda}
            self._random_state = [(device, torch.cuda.get_rng_state(device)) for device in devices]
            self._random_state.append((torch.device("cpu"), torch.get_rng_state()))
        y: torch.Tensor = self._function(*xs)
        # Functions such as the identity return x itself.
        return y.view_as(y) if any(y is x for x in xs) else y

    def again(self, *xs: torch.Tensor) -> torch.Tensor:
        """Returns the same again, for derivatives of the function."""
        with torch.random.fork_rng(
            [device for device, _ in self._random_state if device.type == "cuda"], enabled=self._may_draw
        ):
            for device, state in self._random_state:
                if device.type == "cuda":
                    torch.cuda.set_rng_state(state, device)
                else:
                    torch.set_rng_state(state)
            with _copied_buffers(self._layer):
                y: torch.Tensor = self._function(*xs)
        return y


@contextlib.contextmanager
def _copied_buffers(layer: nn.Module | None) -> Iterator[None]:
    """Gives a layer copies of its buffers, within the block."""
    parts = [] if layer is None else [(part, part._buffers) for part in layer.modules() if part._buffers]
    try:
        for part, buffers in parts:
            part._buffers = {name: None if value is None else value.clone() for name, value in buffers.items()}
        yield
    finally:
        for part, buffers in parts:
            part._buffers = buffers


class _WithRule(torch.autograd.Function):
    """Computes a function whose gradient is a rule: (run, rule, x) → y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: _Run, rule: LocalRule, x: torch.Tensor) -> torch.Tensor:
        return run.first(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.run, ctx.rule, x = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        return None, None, _gradient(ctx.rule, ctx.run, x, y, dy)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, tangent: torch.Tensor) -> torch.Tensor:
        # An elementwise rule is its own transpose.
        x, y = ctx.saved_tensors
        return _gradient(ctx.rule, ctx.run, x, y, tangent)


def _gradient(rule: LocalRule, run: _Run, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dtype = str(x.dtype).removeprefix("torch.")
    if torch.is_grad_enabled() and rule.uses_output(dtype):
        # In the second differentiation, the output has the function's own gradient.
        y = run.again(x)
    values = {"x0": x, "y0": y, "dy0": dy}
    if rule.uses_default:
        _, pull_back = torch.func.vjp(run.again, x)
        values["default0"] = pull_back(dy)[0]
    found: torch.Tensor = rule.gradient(TORCH, dtype, values)
    return found


@contextlib.contextmanager
def override(module: nn.Module, overrides: ModuleOverrides) -> Iterator[nn.Module]:
    """Gives layers of a PyTorch model other gradients, within the block: computed by PyTorch without a server.

    `with override(model, {nn.ReLU: "guided_relu"}): model(x).sum().backward()` is guided backpropagation;
    `{nn.Linear: "lrp_epsilon", nn.Conv2d: "lrp_zplus", nn.ReLU: "lrp_pass", nn.BatchNorm2d: "lrp_pass"}` is LRP.

    Only layers that are modules are found, not calls of functions such as `torch.relu`. A layer with a rule gets no
    gradients of its weights. Results that were computed within the block keep the rules for a backward pass after it.

    Args:
        module: The model. Its layers must not be compiled by `torch.jit`.
        overrides: Rules by selector, as a dict or a list of pairs; the first selector that fits a layer wins. A
            selector is a class, which includes its subclasses; a name as in `module.named_modules()`, in which `*`
            stands for a part of a name without dots and `**` for any parts; or a module itself. A rule is a name of
            the catalogue, a formula, a `gr.Rule`, a pair of one of these and its params, or "default" for the layer's
            own gradient. Rules for one input fit layers with one tensor as input and one of the same shape as output;
            `lrp_epsilon` and its kind fit Linear, Conv1d to Conv3d and ConvTranspose1d to ConvTranspose3d; `lrp_norm`
            average pooling and other layers without weights that add, also of several tensors.

    Yields:
        The model.

    Raises:
        UnmatchedOverrideError: A selector fits no layer, or only layers that an earlier one took.
        InactiveOverrideError: At the end of the block: gradients were computed, but none of the layers that a selector
            took was among the layers that they passed.
        RuleNotApplicableError: The rule is not for this kind of layer; raised when the layer runs, or by `backward`.
        GradruleError: As `surrogate`.
    """
    applied = [_Applied(selector, value) for selector, value in _pairs(overrides)]
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for name, layer in module.named_modules():
            found = next((one for one in applied if one.fits(name, layer)), None)
            if found is not None:
                found.count += 1
                if found.rule is not None:
                    # An attribute of the instance hides the method of its class; an outer block may have set one.
                    changed.append((layer, vars(layer).get("forward")))
                    layer.forward = found.forward_of(layer)
        for one in applied:
            if not one.count:
                raise UnmatchedOverrideError(_unmatched(one.selector, module))
        yield module
    finally:
        for layer, before in reversed(changed):
            if before is None:
                del layer.forward
            else:
                layer.forward = before
    inactive = [one for one in applied if one.rule is not None and not one.is_used]
    if inactive and any(one.is_used for one in applied):
        raise InactiveOverrideError(
            f"gradients were computed, but none of them passed a layer of the override {_text(inactive[0].selector)}: "
            "its layers did not run, or the result does not depend on them"
        )


class _Applied:
    """One override within a block.

    Attributes:
        count: Number of the layers that it took.
        is_used: Whether a backward pass has used it.
        rule: The rule: (layer, its run, inputs, output, upstream gradient) → gradients; None: the layer's own gradient.
        takes_several: Whether the rule is for layers with several inputs, too.
    """

    def __init__(self, selector: Selector, value: OverrideValue) -> None:
        self.selector, self.count, self.is_used, self.takes_several = selector, 0, False, False
        rule, params = rule_and_params(value, f"the override {_text(selector)}")
        self.rule: Callable[..., tuple[torch.Tensor, ...]] | None = None
        name = rule.removeprefix("builtin/") if isinstance(rule, str) else ""
        if name == "lrp_norm":
            eps, self.takes_several = params_of(name, params or {})["eps"], True
            self.rule = lambda layer, run, xs, y, dy: torch_layers.norm(layer, eps, run.again, xs, y, dy)
        elif name in torch_layers.RULES:
            values = params_of(name, params or {})
            self.rule = lambda layer, run, xs, y, dy: (torch_layers.relevance(layer, name, values, xs[0], y, dy),)
        elif rule != "default":
            local = LocalRule(rule, params or {})
            self.rule = lambda layer, run, xs, y, dy: (_gradient(local, run, xs[0], y, dy),)
        glob = selector.replace(".", "/") if isinstance(selector, str) else ""
        self._pattern = glob_pattern(glob)

    def fits(self, name: str, layer: nn.Module) -> bool:
        if isinstance(self.selector, str):
            return self._pattern.fullmatch(name.replace(".", "/")) is not None
        return isinstance(layer, self.selector) if isinstance(self.selector, type) else layer is self.selector

    def forward_of(self, layer: nn.Module) -> Callable[..., Any]:
        own = layer.forward

        def run(*xs: torch.Tensor) -> Any:
            # The rule needs x as it was before the layer.
            return own(*((x.clone() for x in xs) if getattr(layer, "inplace", False) else xs))

        def forward(*arguments: Any, **named: Any) -> Any:
            if named or not (
                all(isinstance(argument, torch.Tensor) for argument in arguments)
                and (len(arguments) == 1 or (arguments and self.takes_several))
            ):
                raise UnsupportedError(
                    f"{type(layer).__name__} has other arguments than one tensor, so no rule can be its gradient"
                )
            return _Overridden.apply(self, layer, _Run(run, layer), *arguments)

        return forward


class _Overridden(torch.autograd.Function):
    """Runs a layer whose gradient is a rule: (override, layer, run, inputs) → y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(applied: _Applied, layer: nn.Module, run: _Run, *xs: torch.Tensor) -> torch.Tensor:
        return run.first(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.applied, ctx.layer, ctx.run, *xs = inputs
        ctx.save_for_backward(*xs, output)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        *xs, y = ctx.saved_tensors
        ctx.applied.is_used = True
        return None, None, None, *ctx.applied.rule(ctx.layer, ctx.run, xs, y, dy)


def _pairs(overrides: ModuleOverrides) -> list[tuple[Selector, OverrideValue]]:
    if isinstance(overrides, str):
        raise InvalidOverrideError(
            f"overrides are a dict of selectors and rules, not {overrides!r}; presets are for graphs on a server"
        )
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else list(overrides)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise InvalidOverrideError(f"an override is a pair of a selector and a rule, not {pair!r}")
        if not isinstance(pair[0], str | nn.Module) and not (
            isinstance(pair[0], type) and issubclass(pair[0], nn.Module)
        ):
            raise InvalidOverrideError(f"a selector is a class of layers, a name or a layer, not {pair[0]!r}")
    return pairs


def _text(selector: Selector) -> str:
    return selector.__name__ if isinstance(selector, type) else repr(selector)


def _unmatched(selector: Selector, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules() if name]
    kinds = sorted({type(layer).__name__ for layer in module.modules()})
    hint = did_you_mean(selector, names) if isinstance(selector, str) else ""
    return (
        f"the override {_text(selector)} takes no layer of the model.{hint} Its layers are of the classes "
        f"{', '.join(kinds)}; an earlier override may have taken them"
    )
