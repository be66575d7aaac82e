"""Implements the rules of the catalogue that are code.

Each rule takes a target, dense upstream gradients and params (float64), and returns one gradient, or None, per input.
It raises RULE_NOT_APPLICABLE for an op that it does not support, while the program is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradrule_server.engine.code_rules.linear import (
    feedback_alignment,
    lrp_0,
    lrp_alpha_beta,
    lrp_epsilon,
    lrp_flat,
    lrp_gamma,
    lrp_norm,
    lrp_wsquare,
    lrp_zbox,
    lrp_zplus,
)
from gradrule_server.engine.code_rules.nonlinear import (
    deeplift_rescale,
    eigh_lorentzian,
    maxpool_as_avgpool,
    maxpool_smooth,
    rectgrad,
)
from gradrule_server.engine.code_rules.target import CodeRuleFunction

CODE_RULES: Mapping[str, CodeRuleFunction] = MappingProxyType(
    {
        "lrp_epsilon": lrp_epsilon,
        "lrp_0": lrp_0,
        "lrp_zplus": lrp_zplus,
        "lrp_alpha_beta": lrp_alpha_beta,
        "lrp_gamma": lrp_gamma,
        "lrp_zbox": lrp_zbox,
        "lrp_wsquare": lrp_wsquare,
        "lrp_flat": lrp_flat,
        "lrp_norm": lrp_norm,
        "rectgrad": rectgrad,
        "deeplift_rescale": deeplift_rescale,
        "maxpool_as_avgpool": maxpool_as_avgpool,
        "maxpool_smooth": maxpool_smooth,
        "feedback_alignment": feedback_alignment,
        "eigh_lorentzian": eigh_lorentzian,
    }
)
"""Rules by their name in the catalogue."""

SALTED = frozenset({"feedback_alignment"})
"""Rules whose gradients depend on the name of the node."""

__all__ = ["CODE_RULES", "SALTED"]
