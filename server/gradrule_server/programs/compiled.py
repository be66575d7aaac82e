"""Holds what the front end needs to run a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2, program_pb2, rule_pb2
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import NodeLimits
from gradrule_server.programs.engine_cache import Loadable
from gradrule_server.rules import Param
from gradrule_server.rules.params import BoundParams, ParamTable


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        key: The program's digest.
        program: Bytes of the `Program` message, without a name.
        tail: Bytes that end each answer to a call that holds the program.
        digests_tail: Bytes that end all answers: the digests.
        params: The params that calls may set.
        placeholders: Canonical names of the graph's placeholders. Feeding these never needs another program.
        used_rules: Indices of the rules that nodes have; the params of others have no effect.
    """

    key: str
    program: bytes
    tail: bytes
    digests_tail: bytes
    params: ParamTable
    placeholders: frozenset[str]
    used_rules: frozenset[int]

    @property
    def message(self) -> program_pb2.Program:
        """The description that clients receive."""
        return program_pb2.Program.FromString(self.program)

    def param_settings(self, params: Mapping[str, evaluate_pb2.ParamValues]) -> list[link_pb2.ParamSetting]:
        """Returns the settings for the params of one call. Raises `GradruleError` for invalid ones."""
        values: dict[str, Mapping[str, rule_pb2.ParamValue]] = {label: item.values for label, item in params.items()}
        return [
            link_pb2.ParamSetting(rule=setting.rule, name=setting.name, value=setting.value)
            for setting in self.params.call_settings(values, self.used_rules)
        ]


@dataclass(frozen=True, slots=True)
class RunnableProgram:
    """A compiled program, and what an engine needs to load it again."""

    compiled: CompiledProgram
    loadable: Loadable

    @property
    def size(self) -> int:
        """Its approximate size in the front end, bytes."""
        return len(self.loadable.request) + len(self.compiled.program) + len(self.compiled.tail)


def join_compiled(
    prepared: link_pb2.PreparedProgram, finished: link_pb2.FinishedProgram, bounds: NodeLimits
) -> CompiledProgram:
    """Joins the answers of a compile worker from before and after an engine compiled the program."""
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
