"""Implements the rules of the catalogue that are code.

Each rule takes a target, dense upstream gradients and params (float64), and returns one gradient, or None, per input.
It raises RULE_NOT_APPLICABLE for an op that it does not support, while the program is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradrule_server.engine.code_rules import linear, nonlinear
from gradrule_server.engine.code_rules.target import CodeRuleFunction

CODE_RULES: Mapping[str, CodeRuleFunction] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            linear.lrp_epsilon,
            linear.lrp_0,
            linear.lrp_zplus,
            linear.lrp_alpha_beta,
            linear.lrp_gamma,
            linear.lrp_zbox,
            linear.lrp_wsquare,
            linear.lrp_flat,
            linear.lrp_norm,
            nonlinear.rectgrad,
            nonlinear.deeplift_rescale,
            nonlinear.maxpool_as_avgpool,
            nonlinear.maxpool_smooth,
            linear.feedback_alignment,
            nonlinear.eigh_lorentzian,
        )
    }
)
"""Rules by their name in the catalogue."""

SALTED = frozenset({"feedback_alignment"})
"""Rules whose gradients depend on the name of the node."""

__all__ = ["CODE_RULES", "SALTED"]
