"""Numbers the matched nodes for the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradrule_server.graphs.ir import Body, nodes_of
from gradrule_server.graphs.resolution_context import ForeignGradient, Resolved
from gradrule_server.graphs.resolve import FOREIGN_GRADIENT


@dataclass(frozen=True, slots=True)
class Mark:
    """The rule of the nodes whose attribute `_gradrule_mark` is the index of this mark.

    Attributes:
        rule: Index of the rule (-1: `default`, -2: foreign gradient).
        node: Public name of the node.
        foreign: Name of the foreign gradient.
        outputs: Number of outputs of a subgraph; 0 for a single node.
        inputs: Number of inputs that the rule receives; None: all.
        rank: Rank of the outputs to which the mark applies; None: all ranks.
        otherwise: Index of the mark that applies to outputs of other ranks; None: no mark.
        op_type: Op type of a subgraph, for messages.
        is_step: As in `Subgraph`.
        every_order: As in `Match`.
    """

    rule: int
    node: str
    foreign: str = ""
    outputs: int = 0
    inputs: int | None = None
    rank: int | None = None
    otherwise: int | None = None
    op_type: str = ""
    is_step: bool = False
    every_order: bool = False


def mark(roots: Iterable[Body], resolved: Mapping[int, Resolved]) -> list[Mark]:
    """Sets `mark` of all nodes that have matches, and returns the marks. Nodes that share a match share a mark.

    `resolved`: the matches, by id() of the node.
    """
    marks: list[Mark] = []
    numbers: dict[int, int] = {}
    for _, node in itertools.chain.from_iterable(map(nodes_of, roots)):
        found = resolved.get(id(node))
        if not found:
            continue
        if id(found[0]) not in numbers:
            numbers[id(found[0])] = len(marks)
            last = len(marks) + len(found) - 1
            for item in found:
                number = len(marks)
                if isinstance(item, ForeignGradient):
                    marks.append(Mark(FOREIGN_GRADIENT, item.node, item.name))
                else:
                    item.mark = number
                    otherwise = number + 1 if number < last else None
                    marks.append(
                        Mark(
                            item.rule,
                            item.node,
                            outputs=item.outputs,
                            inputs=item.inputs,
                            rank=item.rank,
                            otherwise=otherwise,
                            op_type=item.op_type if item.outputs else "",
                            is_step=item.is_step,
                            every_order=item.every_order,
                        )
                    )
        node.mark = numbers[id(found[0])]
    return marks
