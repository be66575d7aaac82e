"""Settings of optimizers are checked when an optimizer is made, and those of a schedule at each step."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import gradrule as gr
from gradrule import optimizers

OPTIMIZERS = [getattr(optimizers, name) for name in optimizers.__all__ if name not in ("Optimizer", "OptimizerState")]
NEVER_NEGATIVE = {"learning_rate_power", "beta_2_decay"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_defaults_are_in_range(optimizer: Any) -> None:
    assert optimizer().message().name == optimizer.__name__


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_number_of_every_optimizer_is_checked(optimizer: Any) -> None:
    for field in fields(optimizer):
        for value in (float("nan"), float("inf"), -float("inf"), 1.0 if field.name in NEVER_NEGATIVE else -1.0):
            with pytest.raises(gr.errors.InvalidOptimizerError, match=f"{optimizer.__name__}: {field.name} is"):
                optimizer(**{field.name: value})


def test_message_names_the_valid_range() -> None:
    with pytest.raises(gr.errors.InvalidOptimizerError, match=r"SGD: learning_rate is -1\.0.* >= 0"):
        optimizers.SGD(-1.0)
    with pytest.raises(gr.errors.InvalidOptimizerError, match=r"momentum is 1\.5.* >= 0 and <= 1"):
        optimizers.SGD(momentum=1.5)
    with pytest.raises(gr.errors.InvalidOptimizerError, match=r"nesterov is 2.*0 or 1"):
        optimizers.SGD(nesterov=2)


def test_schedules_are_checked_at_each_step() -> None:
    optimizer = optimizers.SGD(lambda step: 1.0 - step)
    assert optimizer.message(1).settings["learning_rate"] == 0
    with pytest.raises(gr.errors.InvalidOptimizerError, match=r"returned -1\.0 for step 2.* >= 0"):
        optimizer.message(2)
