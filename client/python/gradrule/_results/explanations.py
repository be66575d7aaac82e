"""Holds the explanation of a program: the rule of each node, findings, and pictures of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradrule._builder.notebook_text import html_table, names_text, short_repr
from gradrule._builder.tensor_specs import TensorSpec
from gradrule._results.call_results import Resolution, resolutions, resolutions_table, specs
from gradrule.errors import Detail, of_reason, reason_name
from gradrule.v1 import program_pb2


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Describes what a program would do, without running it.

    Attributes:
        overrides: The rule of each overridden node.
        default_gradient_nodes: Nodes on the path without an override; they keep TensorFlow's gradient.
        findings: All problems of the request; if there are any, the other attributes are empty.
        inputs: Specs of the placeholders to feed, by alias or name.
        outputs: Specs of the fetches, by the names given.
        ys: Specs of the ys, by the names given.
        xs: Specs of the xs, by the names given.
        rewritten: Nodes that rewrites replaced.
        graph: Bytes of the explained GraphDef.
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

    def __repr__(self) -> str:
        problems = f"{len(self.findings)} findings" if self.findings else "no findings"
        return short_repr(
            f"<Explanation ys: {names_text(self.ys)}; xs: {names_text(self.xs)}; {len(self.overrides)} overrides, "
            f"{problems}>"
        )

    def _repr_html_(self) -> str:
        if self.findings:
            rows = [(item.reason, item.node, item.message) for item in self.findings]
            return html_table("Findings", ("reason", "node", "message"), rows)
        return resolutions_table(self.overrides)

    def svg(self) -> str:
        """Returns an SVG picture of the graph: folded by scope, nodes coloured by rule, with the path from xs to ys."""
        from gradrule import _picture

        return _picture.draw_svg(self, self.graph)

    def html(self) -> str:
        """Returns the picture as an HTML page in one file, in which scopes fold and nodes can be searched."""
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
    """Decodes the answer of CompileProgram with validate_only.

    aliases: names of tensors in the result. graph: bytes of the explained graph.
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
