"""Formats a rule, its params and examples of its use as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradrule._builder.graph_sources import graph_bytes
from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.viz._setups import EXAMPLE_PARAMS

PARAM_COLUMNS = ("param", "default", "range", "meaning")
_SECOND_INPUT = re.compile(r"\bx1\b")
# A layer with a bias has two ops; its rules need both.
_LAYERS = "@linear"
_ANY_OP = "Identity"
_FAMILIES_OF_REGIONS = ("straight_through", "stable")


def number_text(value: Any) -> str:
    """Formats a param's value: `1` for 1.0."""
    return f"{value:g}" if isinstance(value, float) else str(np.asarray(value).tolist())


def params_text(infos: Sequence[ParamInfo]) -> str:
    """Formats params as `clip=1, seed`; `seed` has no default."""
    return ", ".join(
        info.name if info.default is None else f"{info.name}={number_text(info.default)}" for info in infos
    )


def param_rows(infos: Sequence[ParamInfo]) -> list[list[str]]:
    """Returns table rows for `PARAM_COLUMNS`."""
    return [
        [
            info.name,
            "required" if info.default is None else number_text(info.default),
            info.range,
            info.description,
        ]
        for info in infos
    ]


def formula_text(rule: RuleInfo) -> str:
    """Returns the text of what the rule computes."""
    if rule.formula or rule.expression is not None:
        return rule.formula or rule.expression or ""
    if rule.graph is not None:
        return f"a graph of {len(rule.graph)} bytes"
    return "TensorFlow's own" if rule.kind == "op" else ""


def gradient_text(rule: RuleInfo) -> str:
    """Formats the rule's gradient, and the gradient of that: `dy * 2; its gradient: dy`."""
    found, definition = [], rule.gradient
    while definition is not None:
        found.append(definition.expression or f"a graph of {graph_size(definition)} bytes")
        definition = definition.gradient
    return "; its gradient: ".join(found)


def graph_size(rule: Rule) -> int:
    """Returns the number of bytes of a rule's graph."""
    return len(graph_bytes(rule.graph))


@dataclass(frozen=True)
class Example:
    """Holds an example of an override.

    Attributes:
        overrides: Python expression of the argument `overrides`.
        flag: Flag of the shell command with its value.
    """

    overrides: str
    flag: str

    @property
    def python(self) -> str:
        """Returns the Python call."""
        return f'client.evaluate(graph, feeds, ys=["y"], xs=["x"], overrides={self.overrides})'

    @property
    def shell(self) -> str:
        """Returns the shell command."""
        return f"gradrule evaluate graph.pb --feed x=x.npy --y y --x x {self.flag}"


def rule_example(rule: RuleInfo) -> Example:
    """Returns an override with a selector that suits the rule."""
    params = _missing(rule.param_infos)
    python_params = f", params={_python(params)}" if params else ""
    named = rule.name + _flag_params(params)
    if not rule.op_types and rule.family in _FAMILIES_OF_REGIONS:
        inputs = ["x", "s"] if _SECOND_INPUT.search(rule.expression or "") else ["x"]
        region = f'gr.Region({str(inputs).replace(chr(39), chr(34))}, ["y"])'
        return Example(
            f'[gr.Override("{rule.name}", region={region}{python_params})]',
            _flag("--override", f"region:{','.join(inputs)}>y={named}"),
        )
    op_type = rule.op_types[0] if rule.op_types else _ANY_OP
    if op_type == _LAYERS:
        return Example(
            f'[gr.Override("{rule.name}", layer="@linear"{python_params})]',
            _flag("--override", f"layer:@linear={named}"),
        )
    value = f'("{rule.name}", {_python(params)})' if params else f'"{rule.name}"'
    return Example(f'{{"{op_type}": {value}}}', _flag("--override", f"{op_type}={named}"))


def preset_example(preset: PresetInfo) -> Example:
    """Returns the preset with its required params."""
    params = _missing(preset.params)
    arguments = "".join(f", {name}={value!r}" for name, value in params.items())
    return Example(f'gr.Preset("{preset.name}"{arguments})', _flag("--preset", preset.name + _flag_params(params)))


def _missing(infos: tuple[ParamInfo, ...]) -> dict[str, Any]:
    return {info.name: EXAMPLE_PARAMS.get(info.name, 1.0) for info in infos if info.default is None}


def _flag_params(params: dict[str, Any]) -> str:
    return ":" + ",".join(f"{name}={value}" for name, value in params.items()) if params else ""


def _flag(flag: str, value: str) -> str:
    return f"{flag} {shlex.quote(value)}"


def _python(params: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {value!r}' for name, value in params.items()) + "}"
