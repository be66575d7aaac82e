"""Formats a rule and its params as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gradrule._builder.graph_sources import graph_bytes
from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.cli import output


def number(value: Any) -> str:
    """Formats a param's value: `1` for 1.0."""
    return f"{value:g}" if isinstance(value, float) else str(np.asarray(value).tolist())


def params(infos: Sequence[ParamInfo]) -> str:
    """Formats params as `clip=1, seed`; `seed` has no default."""
    return ", ".join(info.name if info.default is None else f"{info.name}={number(info.default)}" for info in infos)


def param_rows(infos: Sequence[ParamInfo]) -> list[list[str]]:
    """Returns table rows for `PARAM_COLUMNS`."""
    return [
        [info.name, "must be given" if info.default is None else number(info.default), info.range, info.description]
        for info in infos
    ]


PARAM_COLUMNS = ("param", "default", "range", "meaning")


def formula(rule: RuleInfo) -> str:
    """Returns the text of what the rule computes."""
    if rule.formula or rule.expression is not None:
        return rule.formula or rule.expression or ""
    if rule.graph is not None:
        return f"a graph of {len(rule.graph)} bytes"
    return "TensorFlow's own" if rule.kind == "op" else ""


def rule_json(rule: RuleInfo) -> dict[str, object]:
    """Converts a rule to JSON; a graph is represented by its size."""
    found = asdict(rule)
    found["graph_bytes"] = None if rule.graph is None else len(rule.graph)
    del found["graph"]
    found["params"] = {name: _value(value) for name, value in rule.params.items()}
    found["gradient"] = None if rule.gradient is None else _gradient_json(rule.gradient)
    found["param_infos"] = _params_json(rule.param_infos)
    return found


def gradient(rule: RuleInfo) -> str:
    """Formats the rule's gradient, and the gradient of that: `dy * 2; of that: dy`."""
    found, carried = [], rule.gradient
    while carried is not None:
        found.append(carried.expression or f"a graph of {_size(carried)} bytes")
        carried = carried.gradient
    return "; of that: ".join(found)


def _gradient_json(rule: Rule) -> dict[str, object]:
    return {
        "expression": rule.expression,
        "graph_bytes": None if rule.graph is None else _size(rule),
        "params": {name: _value(value) for name, value in (rule.params or {}).items()},
        "gradient": None if rule.gradient is None else _gradient_json(rule.gradient),
    }


def _size(rule: Rule) -> int:
    return len(graph_bytes(rule.graph))


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
