"""A program that an engine has compiled, as the front end keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2, program_pb2, rule_pb2
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import NodeLimits
from gradrule_server.rules import Param
from gradrule_server.rules.param_table import BoundParams, ParamTable


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program that can run. `program`: bytes of the `Program` message, without a name; `tail`: what an answer with an
    inline program ends with.
    """

    key: str
    program: bytes
    tail: bytes
    digests_tail: bytes
    params: ParamTable
    placeholders: frozenset[str]
    """Canonical names of the graph's placeholders: feeding these never needs another program."""
    used_rules: frozenset[int]
    """Indices of the rules that some node carries: only their params matter."""

    @property
    def message(self) -> program_pb2.Program:
        """Returns what is told of the program."""
        return program_pb2.Program.FromString(self.program)

    def settings(self, params: Mapping[str, evaluate_pb2.ParamValues]) -> list[link_pb2.ParamSetting]:
        """Returns the params of one call."""
        values: dict[str, Mapping[str, rule_pb2.ParamValue]] = {label: item.values for label, item in params.items()}
        return [
            link_pb2.ParamSetting(rule=setting.rule, name=setting.name, value=setting.value)
            for setting in self.params.call_settings(values, self.used_rules)
        ]


def compiled(
    prepared: link_pb2.PreparedProgram, finished: link_pb2.FinishedProgram, bounds: NodeLimits
) -> CompiledProgram:
    """Puts together what a compile worker answered, before and after an engine compiled the program."""
    digests = program_pb2.Digests(graph=prepared.graph_digest, program=prepared.key)
    return CompiledProgram(
        key=prepared.key,
        program=finished.program,
        tail=finished.tail,
        digests_tail=evaluate_pb2.EvaluateResponse(digests=digests).SerializeToString(),
        params=_param_table(prepared.params, bounds),
        placeholders=frozenset(prepared.placeholders),
        used_rules=frozenset(prepared.params.used),
    )


def _param_table(message: link_pb2.ParamTable, bounds: NodeLimits) -> ParamTable:
    return ParamTable(
        bounds,
        [
            BoundParams(
                bound.name,
                bound.label,
                tuple(Param(item.name, description=item.description, range=item.range) for item in bound.params),
            )
            for bound in message.rules
        ],
        {(item.rule, item.name): item.value for item in message.settings},
        set(message.default_labels),
    )
