"""Checks the numbers of optimizer settings, for client and server."""

from __future__ import annotations

import math
from collections.abc import Mapping

_SHARE = (0.0, 1.0)
_NOT_NEGATIVE = (0.0, math.inf)
_NOT_POSITIVE = (-math.inf, 0.0)

# Smallest and largest value of settings. Keras accepts other values, and then trains wrongly.
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("momentum", "rho", "beta_1", "beta_2"), _SHARE),
    **dict.fromkeys(("learning_rate", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm"), _NOT_NEGATIVE),
    **dict.fromkeys(("epsilon", "epsilon_1", "epsilon_2", "initial_accumulator_value", "beta"), _NOT_NEGATIVE),
    **dict.fromkeys(("l1_regularization_strength", "l2_regularization_strength"), _NOT_NEGATIVE),
    **dict.fromkeys(("l2_shrinkage_regularization_strength", "clip_threshold"), _NOT_NEGATIVE),
    **dict.fromkeys(("learning_rate_power", "beta_2_decay"), _NOT_POSITIVE),
}


def setting_fault(name: str, value: float, *, is_switch: bool) -> str | None:
    """Returns what is wrong with the value of a setting, or None. `is_switch`: whether only 0 and 1 are valid."""
    if not math.isfinite(value):
        return f"{name} is {value:g}; expected a finite number"
    least, most = _RANGES.get(name, (-math.inf, math.inf))
    if not least <= value <= most:
        bounds = [f">= {least:g}"] * math.isfinite(least) + [f"<= {most:g}"] * math.isfinite(most)
        return f"{name} is {value:g}; expected a number {' and '.join(bounds)}"
    if is_switch and value not in (0.0, 1.0):
        return f"{name} is a switch, 0 or 1, not {value:g}"
    return None
