"""The rules of the catalogue that are code: they need weights, a transposed op, a sort or a forward of their own.

Each takes a target, dense upstream gradients and params (float64), and gives one gradient, or None, per input. A rule
refuses an op that it is not for with RULE_NOT_APPLICABLE while the program is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gradrule_server.engine.code_rules.common import CodeRuleFunction
from gradrule_server.engine.code_rules.linear import feedback_alignment
from gradrule_server.engine.code_rules.lrp import (
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
"""By the rule's name in the catalogue."""

__all__ = ["CODE_RULES"]
