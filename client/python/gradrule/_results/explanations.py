"""Holds the explanation of a program: the rule of each node, findings, and pictures of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradrule._builder.tensor_specs import TensorSpec
from gradrule._results.call_results import Resolution, resolutions, specs
from gradrule.errors import Detail, of_reason, reason_name
from gradrule.v1 import program_pb2


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a program would be, without running it. `findings` lists all that is wrong; then the rest is empty.

    graph: the GraphDef's bytes that were explained.
    """

    overrides: list[Resolution]
    default_gradient_nodes: list[str]
    findings: list[Detail]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    ys: Mapping[str, TensorSpec]
    xs: Mapping[str, TensorSpec]
    rewritten: list[str]
    graph: bytes = field(default=b"", repr=False)

    def svg(self) -> str:
        """The graph as an SVG picture: folded by scope, nodes coloured by rule, the path from xs to ys drawn."""
        from gradrule import _picture

        return _picture.draw_svg(self, self.graph)

    def html(self) -> str:
        """The same as a page in one file, in which scopes fold and nodes can be searched."""
        from gradrule import _picture

        return _picture.draw_html(self, self.graph)

    def raise_for_findings(self) -> None:
        """Raises the error that `evaluate` or `compile` would raise, if there is one."""
        if self.findings:
            first = self.findings[0]
            raise of_reason(first.reason, first.message, details=self.findings)


def explanation(
    response: program_pb2.CompileProgramResponse, aliases: Mapping[str, str] | None = None, graph: bytes = b""
) -> Explanation:
    """From the answer of CompileProgram with validate_only.

    aliases: names of tensors in the result. graph: the bytes that were asked about.
    """
    program = response.program
    return Explanation(
        overrides=resolutions(program.overrides),
        default_gradient_nodes=list(program.default_gradient_nodes),
        findings=[Detail(reason_name(item.reason), item.message, item.node, item.field) for item in response.findings],
        inputs=specs(program.inputs, aliases),
        outputs=specs(program.outputs, aliases),
        ys=specs(program.ys, aliases),
        xs=specs(program.xs, aliases),
        rewritten=list(program.rewritten),
        graph=graph,
    )
