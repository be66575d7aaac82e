"""Runs functions and layers of PyTorch so that the derivatives of rules can repeat the same run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gradrule._bridges.local_rules import LocalRule
from gradrule._bridges.torch_arrays import TORCH


class Run:
    """One run of a function or layer, which rules can repeat: with the same random numbers, weights and mode.

    Repetitions change no buffer of the layer, such as the moving averages of a batch norm.

    Attributes:
        weights: The weights of the layer in this run, which must not change before the backward pass.

    Args:
        function: The function, or runs the layer without its rule.
        layer: The layer.
        may_draw: Whether the function may draw random numbers.
        may_repeat: Whether the rule may repeat the run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        layer: nn.Module | None = None,
        *,
        may_draw: bool = True,
        may_repeat: bool = True,
    ) -> None:
        self._function, self._may_draw, self._may_repeat = function, may_draw and may_repeat, may_repeat
        self._random_state: list[tuple[torch.device, torch.Tensor]] = []
        parts = layer.modules() if layer is not None and may_repeat else ()
        self._parts = [_State(part) for part in parts]
        self.weights = [value for part in self._parts for value in part.parameters.values() if value is not None]

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
        assert self._may_repeat
        with torch.random.fork_rng(
            [device for device, _ in self._random_state if device.type == "cuda"], enabled=self._may_draw
        ):
            for device, state in self._random_state:
                if device.type == "cuda":
                    torch.cuda.set_rng_state(state, device)
                else:
                    torch.set_rng_state(state)
            with contextlib.ExitStack() as stack:
                for part in self._parts:
                    stack.enter_context(part.restored())
                y: torch.Tensor = self._function(*xs)
        return y


class _State:
    """What a layer computes with at the time of a run, without the layers in it."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._is_training = layer, layer.training
        self.parameters = dict(layer._parameters)
        self._buffers = _copied(layer._buffers)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores it within the block, with copies of the buffers."""
        layer = self._layer
        now = layer.training, layer._parameters, layer._buffers
        try:
            layer.training, layer._parameters, layer._buffers = (
                self._is_training,
                dict(self.parameters),
                _copied(self._buffers),
            )
            yield
        finally:
            layer.training, layer._parameters, layer._buffers = now


def _copied(buffers: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else value.clone() for name, value in buffers.items()}


def uses_output(rule: LocalRule, x: torch.Tensor) -> bool:
    """Returns whether a rule for data like x has the output as a variable."""
    return rule.uses("y0", dtype_name(x))


def may_repeat(rule: LocalRule, x: torch.Tensor) -> bool:
    """Returns whether the gradient of a rule for data like x may repeat the run."""
    return rule.uses_default or uses_output(rule, x)


def gradient(
    rule: LocalRule, run: Run, x: torch.Tensor, y: torch.Tensor | None, dy: torch.Tensor, node: str | None = None
) -> torch.Tensor:
    """Returns the gradient of a rule.

    Args:
        rule: The rule.
        run: The run.
        x: The data.
        y: The output; None if the rule does not use it.
        dy: The upstream gradient.
        node: As for `LocalRule.gradient`.
    """
    values = {"x0": x, "dy0": dy}
    if y is not None:
        # In the second differentiation, the output has the function's own gradient.
        values["y0"] = run.again(x) if torch.is_grad_enabled() else y
    if rule.uses_default:
        _, pull_back = torch.func.vjp(run.again, x)
        values["default0"] = pull_back(dy)[0]
    found: torch.Tensor = rule.gradient(TORCH, dtype_name(x), values, node)
    return found


def dtype_name(x: torch.Tensor) -> str:
    """Returns the name of a tensor's element type."""
    return str(x.dtype).removeprefix("torch.")
