"""Converts presets to messages for clients."""

from __future__ import annotations

from gradrule.v1 import override_pb2, rule_pb2
from gradrule_server.rules import write_param
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX, Preset


def to_proto(preset: Preset) -> rule_pb2.Preset:
    """Returns the message, with a line of text for each override: `@convolution+@bias → lrp_zplus(eps=1e-06)`."""
    return rule_pb2.Preset(
        name=preset.name,
        description=preset.description,
        reference=preset.reference,
        overrides=map(_describe, preset.overrides),
        params=map(write_param, preset.params),
    )


def _describe(override: override_pb2.GradientOverride) -> str:
    selector = override.selector
    selected = selector.op_type or "+".join(selector.pattern)
    if selector.position.nearest == override_pb2.POSITION_NEAREST_XS:
        selected += " nearest the xs"
    values = ", ".join(f"{name}={value.number:g}" for name, value in sorted(override.params.items()))
    return f"{selected} → {override.rule.removeprefix(BUILTIN_PREFIX)}{f'({values})' if values else ''}"
