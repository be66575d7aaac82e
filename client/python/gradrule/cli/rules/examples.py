"""How a rule or a preset of the catalogue is used: one line of Python and one for the shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.cli.rules.sites import EXAMPLE_PARAMS

_SECOND_INPUT = re.compile(r"\bx1\b")
# A layer is two ops where it has a bias, and its rules want both in sight.
_LAYERS = "@linear"
_ANY_OP = "Identity"
_FAMILIES_OF_REGIONS = ("straight_through", "stable")


@dataclass(frozen=True)
class Example:
    """overrides: Python's expression of the argument. flag: the shell's flag with its value."""

    overrides: str
    flag: str

    @property
    def python(self) -> str:
        """The whole call."""
        return f'client.evaluate(graph, feeds, ys=["y"], xs=["x"], overrides={self.overrides})'

    @property
    def shell(self) -> str:
        """The whole command."""
        return f"gradrule evaluate graph.pb --feed x=x.npy --y y --x x {self.flag}"


def of_rule(rule: RuleInfo) -> Example:
    """An override of the kind that the rule is meant for."""
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
    """The preset with the params that must be given."""
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
