"""Converts rules and presets to JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.cli import output
from gradrule.viz._rule_text import graph_size


def rule_json(rule: RuleInfo) -> dict[str, object]:
    """Converts a rule to JSON; a graph is represented by its size."""
    found = asdict(rule)
    found["graph_bytes"] = None if rule.graph is None else len(rule.graph)
    del found["graph"]
    found["params"] = {name: _value(value) for name, value in rule.params.items()}
    found["gradient"] = None if rule.gradient is None else _gradient_json(rule.gradient)
    found["param_infos"] = _params_json(rule.param_infos)
    return found


def _gradient_json(rule: Rule) -> dict[str, object]:
    return {
        "expression": rule.expression,
        "graph_bytes": None if rule.graph is None else graph_size(rule),
        "params": {name: _value(value) for name, value in (rule.params or {}).items()},
        "gradient": None if rule.gradient is None else _gradient_json(rule.gradient),
    }


def preset_json(preset: PresetInfo) -> dict[str, object]:
    """Converts a preset to JSON."""
    return {**asdict(preset), "params": _params_json(preset.params)}


def _params_json(infos: Sequence[ParamInfo]) -> list[dict[str, object]]:
    return [
        {"name": info.name, "default": _value(info.default), "description": info.description, "range": info.range}
        for info in infos
    ]


def _value(value: Any) -> object:
    return value if value is None or isinstance(value, float) else output.array_json(value)
