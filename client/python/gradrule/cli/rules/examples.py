"""Shows how to use a rule or a preset: one line of Python and one shell command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.cli.rules.sites import EXAMPLE_PARAMS

_SECOND_INPUT = re.compile(r"\bx1\b")
# A layer with a bias has two ops; its rules need both.
_LAYERS = "@linear"
_ANY_OP = "Identity"
_FAMILIES_OF_REGIONS = ("straight_through", "stable")


@dataclass(frozen=True)
class Example:
    """Holds one example. overrides: the Python argument. flag: the shell's flag with its value."""

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


def of_rule(rule: RuleInfo) -> Example:
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
            f'[gr.Override("{rule.name}", pattern=("@linear", "@bias"){python_params})]',
            _flag("--override", f"pattern:@linear+@bias={named}"),
        )
    value = f'("{rule.name}", {_python(params)})' if params else f'"{rule.name}"'
    return Example(f'{{"{op_type}": {value}}}', _flag("--override", f"{op_type}={named}"))


def of_preset(preset: PresetInfo) -> Example:
    """Returns the preset with its required params."""
    params = _missing(preset.params)
    words = "".join(f", {name}={value!r}" for name, value in params.items())
    return Example(f'gr.Preset("{preset.name}"{words})', _flag("--preset", preset.name + _flag_params(params)))


def _missing(infos: tuple[ParamInfo, ...]) -> dict[str, Any]:
    return {info.name: EXAMPLE_PARAMS.get(info.name, 1.0) for info in infos if info.default is None}


def _flag_params(params: dict[str, Any]) -> str:
    return ":" + ",".join(f"{name}={value}" for name, value in params.items()) if params else ""


def _flag(flag: str, value: str) -> str:
    return f"{flag} {shlex.quote(value)}"


def _python(params: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {value!r}' for name, value in params.items()) + "}"
