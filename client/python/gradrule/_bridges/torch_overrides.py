"""Gives layers of PyTorch models rules as gradients, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn

from gradrule._bridges import torch_layers
from gradrule._bridges.local_rules import LocalRule, params_of
from gradrule._bridges.torch_runs import Run, dtype_name, gradient, may_repeat, uses_output
from gradrule._builder.names import did_you_mean, glob_pattern
from gradrule._builder.rules import OverrideValue, rule_and_params
from gradrule.errors import (
    InactiveOverrideError,
    InvalidOverrideError,
    RuleNotApplicableError,
    UnmatchedOverrideError,
    UnsupportedError,
)

Selector: TypeAlias = "type[nn.Module] | str | nn.Module"
ModuleOverrides: TypeAlias = "Mapping[Selector, OverrideValue] | Sequence[tuple[Selector, OverrideValue]]"


def override(module: nn.Module, overrides: ModuleOverrides) -> contextlib.AbstractContextManager[nn.Module]:
    """Gives layers of a PyTorch model other gradients, within the block: computed by PyTorch without a server.

    `with override(model, {nn.ReLU: "guided_relu"}): model(x).sum().backward()` is guided backpropagation;
    `{nn.Linear: "lrp_epsilon", nn.Conv2d: "lrp_zplus", nn.ReLU: "lrp_pass", nn.BatchNorm2d: "lrp_pass"}` is LRP.

    Only layers that are modules are found, not calls of functions such as `torch.relu`. A layer with a rule gets no
    gradients of its weights. Results that were computed within the block keep the rules for a backward pass after it,
    which PyTorch refuses if weights that a rule needs were changed in between. A model cannot be copied within the
    block. Random rules draw other numbers for each layer: those of the server for a node with the layer's name, with
    `/` for `.`.

    Args:
        module: The model. Layers with rules must not be compiled by `torch.jit`.
        overrides: Rules by selector, as a dict or a list of pairs; the first selector that fits a layer wins. A
            selector is a class, which includes its subclasses; a name as in `module.named_modules()`, in which `*`
            stands for a part of a name without dots and `**` for any parts; or a module itself. A rule is a name of
            the catalogue, a formula, a `gr.Rule`, a pair of one of these and its params, or "default" for the layer's
            own gradient. Rules for one input fit layers with one tensor as input and one of the same shape as output;
            `lrp_epsilon` and its kind fit Linear, Conv1d to Conv3d and ConvTranspose1d to ConvTranspose3d, and
            subclasses without a `forward` of their own; `lrp_norm` average pooling and other layers without weights
            that add, also of several tensors.

    Returns:
        A context manager, which gives the model. It can be used several times.

    Raises:
        UnmatchedOverrideError: A selector fits no layer, or only layers that an earlier one took.
        InactiveOverrideError: At the end of the block: none of the layers that a selector took has run, or gradients
            were computed with other rules, and none of them passed these layers.
        RuleNotApplicableError: The rule is not for this kind of layer: at the start of the block, or, if that depends
            on its shapes, when the layer runs.
        UnsupportedError: A layer is compiled by `torch.jit`, or has other arguments than tensors.
        GradruleError: As `surrogate`.
    """
    return _Block(module, overrides)


class _Block(contextlib.ContextDecorator):
    """The context manager that `override` returns; it can be used again."""

    def __init__(self, module: nn.Module, overrides: ModuleOverrides) -> None:
        self._module, self._pairs = module, _pairs(overrides)
        self._entered: list[contextlib.AbstractContextManager[nn.Module]] = []

    def __enter__(self) -> nn.Module:
        applied = [_Applied(selector, value) for selector, value in self._pairs]
        block = _overridden(self._module, applied)
        module = block.__enter__()
        self._entered.append(block)
        return module

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


@contextlib.contextmanager
def _overridden(module: nn.Module, applied: Sequence[_Applied]) -> Iterator[nn.Module]:
    changed: list[tuple[nn.Module, Any]] = []
    uncalled = _layers_of_attention(module)
    try:
        for layer, names in _layers(module).items():
            found = next((one for one in applied if any(one.fits(name, layer) for name in names)), None)
            if found is None:
                continue
            found.count += 1
            if found.rule is None:
                continue
            found.check(layer, names[0])
            if layer in uncalled:
                raise RuleNotApplicableError(
                    f"MultiheadAttention uses the weights of {names[0]!r} and does not call it, so that it cannot have "
                    f"a rule: write {names[0]!r}: 'default' before {_text(found.selector)}"
                )
            # An attribute of the instance hides the method of its class; an outer block may have set one.
            changed.append((layer, vars(layer).get("forward")))
            layer.forward = _Forward(found, layer, names[0])
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
    for one in applied:
        if one.rule is None or one.is_used:
            continue
        if not one.has_run:
            raise InactiveOverrideError(
                f"no layer of the override {_text(one.selector)} ran within the block. Calls of functions, such as "
                "torch.relu, are not found: use modules"
            )
        if any(other.is_used for other in applied):
            raise InactiveOverrideError(
                f"gradients were computed, but none of them passed a layer of the override {_text(one.selector)}: "
                "the result does not depend on its layers"
            )


class _Applied:
    """One override within a block.

    Attributes:
        count: Number of the layers that it took.
        has_run: Whether one of them has run.
        is_used: Whether a backward pass has used it.
        rule: The name of a rule of layers, or another rule; None: the layer's own gradient.
    """

    def __init__(self, selector: Selector, value: OverrideValue) -> None:
        self.selector, self.count, self.has_run, self.is_used = selector, 0, False, False
        rule, params = rule_and_params(value, f"the override {_text(selector)}")
        self.rule: str | LocalRule | None = None
        self._params: Mapping[str, Any] = {}
        name = rule.removeprefix("builtin/") if isinstance(rule, str) else ""
        if name == "lrp_norm" or name in torch_layers.RULES:
            self.rule, self._params = name, params_of(name, params or {})
        elif rule != "default":
            self.rule = LocalRule(rule, params or {})
        glob = selector.replace(".", "/") if isinstance(selector, str) else ""
        self._pattern = glob_pattern(glob)

    @property
    def takes_several(self) -> bool:
        """Whether the rule is for layers with several inputs, too."""
        return self.rule == "lrp_norm"

    def fits(self, name: str, layer: nn.Module) -> bool:
        """Returns whether the selector takes a layer with a name."""
        if isinstance(self.selector, str):
            return self._pattern.fullmatch(name.replace(".", "/")) is not None
        return isinstance(layer, self.selector) if isinstance(self.selector, type) else layer is self.selector

    def check(self, layer: nn.Module, name: str) -> None:
        """Raises an error for a layer to which the rule cannot be applied."""
        if isinstance(layer, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"the layer {name!r} is compiled by torch.jit, so that it cannot have a rule: give the model before "
                "torch.jit.script or torch.jit.trace"
            )
        if isinstance(self.rule, str):
            (torch_layers.check_norm if self.rule == "lrp_norm" else torch_layers.check_linear)(layer, self.rule)

    def keeps_output(self, x: torch.Tensor) -> bool:
        """Returns whether the rule needs the output of the layer."""
        if isinstance(self.rule, LocalRule):
            return uses_output(self.rule, x)
        return self.rule == "lrp_norm" or self.rule in torch_layers.USE_OUTPUT

    def may_repeat(self, x: torch.Tensor) -> bool:
        """Returns whether the rule may run the layer again."""
        return may_repeat(self.rule, x) if isinstance(self.rule, LocalRule) else self.keeps_output(x)

    def weights(self, layer: Any) -> tuple[Any, ...]:
        """Returns the weight and the bias with which a layer runs now, if the rule needs them."""
        return (layer.weight, layer.bias) if self.rule in torch_layers.RULES else ()

    def check_shapes(self, layer: nn.Module, x: torch.Tensor, y: Any) -> None:
        """Raises an error if an elementwise rule is applied to a layer that changes the shape."""
        if not isinstance(y, torch.Tensor):
            raise UnsupportedError(f"{type(layer).__name__} returns no tensor, so no rule can be its gradient")
        if (
            isinstance(self.rule, LocalRule)
            and x.shape != y.shape
            and (self.rule.uses("dy0", dtype_name(x)) or uses_output(self.rule, x))
        ):
            raise RuleNotApplicableError(
                f"the rule {self.rule.name} is for layers whose output has the shape of the input, not for "
                f"{type(layer).__name__}, which gave {tuple(y.shape)} for {tuple(x.shape)}"
            )

    def gradients(
        self,
        layer: _Forward,
        run: Run,
        xs: Sequence[torch.Tensor],
        y: torch.Tensor | None,
        weights: Sequence[Any],
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradient of each input of a layer, in its run."""
        if isinstance(self.rule, LocalRule):
            return (gradient(self.rule, run, xs[0], y, dy, layer.node),)
        assert self.rule is not None
        if y is not None and torch.is_grad_enabled():
            # In the second differentiation, the output has the layer's own gradient.
            y = run.again(*xs)
        if self.rule == "lrp_norm":
            assert y is not None
            return torch_layers.norm(self._params["eps"], run.again, xs, y, dy)
        weight, bias = weights
        return (torch_layers.relevance(layer.layer, self.rule, self._params, weight, bias, xs[0], y, dy),)


class _Forward:
    """The forward function of a layer with a rule, within the block."""

    def __init__(self, applied: _Applied, layer: nn.Module, name: str) -> None:
        self.applied, self.layer, self.node = applied, layer, name.replace(".", "/")
        self._own = layer.forward

    @torch.compiler.disable(reason="rules are not compiled")  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        applied, layer = self.applied, self.layer
        if named or not (
            all(isinstance(argument, torch.Tensor) for argument in arguments)
            and (len(arguments) == 1 or (arguments and applied.takes_several))
        ):
            raise UnsupportedError(
                f"{type(layer).__name__} has other arguments than one tensor, so no rule can be its gradient"
            )
        applied.has_run = True
        run = Run(self._run, layer, may_repeat=applied.may_repeat(arguments[0]))
        return _Overridden.apply(self, run, applied.weights(layer), *arguments)

    def _run(self, *xs: torch.Tensor) -> Any:
        # The rule needs x as it was before the layer.
        return self._own(*((x.clone() for x in xs) if getattr(self.layer, "inplace", False) else xs))

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        raise UnsupportedError(_NO_COPIES)

    def __reduce__(self) -> Any:
        raise UnsupportedError(_NO_COPIES)


_NO_COPIES = (
    "a model cannot be copied or pickled within a block of override, because the copy would keep the rules: copy it "
    "before or after the block, or save its state_dict()"
)


class _Overridden(torch.autograd.Function):
    """Runs a layer whose gradient is a rule: (layer, run, weights, inputs) → y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(layer: _Forward, run: Run, weights: tuple[Any, ...], *xs: torch.Tensor) -> torch.Tensor:
        y = run.first(*xs)
        layer.applied.check_shapes(layer.layer, xs[0], y)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.layer, ctx.run, weights, *xs = inputs
        ctx.counts = len(xs), len(weights)
        # A copy of the output, because a later layer may change it in place.
        y = output.detach().clone() if ctx.layer.applied.keeps_output(xs[0]) else None
        # PyTorch refuses the backward pass if one of these has changed.
        ctx.save_for_backward(*xs, y, *weights, *ctx.run.weights)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        inputs, weights = ctx.counts
        saved, applied = ctx.saved_tensors, ctx.layer.applied
        applied.is_used = True
        xs, y = saved[:inputs], saved[inputs]
        found = applied.gradients(ctx.layer, ctx.run, xs, y, saved[inputs + 1 : inputs + 1 + weights], dy)
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "rules of override are for reverse mode: use backward, torch.func.vjp, torch.func.jacrev or "
            "torch.autograd.grad"
        )


def _layers(module: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns the names of each layer; layers that are used in several places have several."""
    found: dict[nn.Module, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        found.setdefault(layer, []).append(name)
    return found


def _layers_of_attention(module: nn.Module) -> set[nn.Module]:
    """Returns the layers that PyTorch's attention has for their weights only."""
    return {
        layer
        for part in module.modules()
        if isinstance(part, nn.MultiheadAttention) and type(part).forward is nn.MultiheadAttention.forward
        for layer in part.children()
    }


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
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    kinds = sorted({type(layer).__name__ for layer in module.modules()})
    hint = did_you_mean(selector, names) if isinstance(selector, str) else ""
    if selector in kinds:
        hint = f" Text is the name of a layer; layers of a class are selected by the class, as nn.{selector}."
    return (
        f"the override {_text(selector)} takes no layer of the model.{hint} Its layers are of the classes "
        f"{', '.join(kinds)}; an earlier override may have taken them"
    )
