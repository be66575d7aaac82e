"""Numbers the nodes that run and that an override took, for the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradrule_server.graphs.ir import Body
from gradrule_server.graphs.prune import nodes_of
from gradrule_server.graphs.resolution_context import ForeignGradient, Resolved
from gradrule_server.graphs.resolve import FOREIGN_GRADIENT


@dataclass(frozen=True, slots=True)
class Mark:
    """What a node's `_gradrule_mark` counts: index of the rule (-1 `default`, -2 foreign), public name of the node.

    `outputs`: of a subgraph, how many tensors come out; 0 for a single node; `inputs`: how many go in that the rule
    sees; None: all. `rank`: the mark holds only for outputs of this rank, else the mark numbered `otherwise`.
    `op_type`: a subgraph's, for people; `is_step`: as in `Subgraph`; `every_order`: as in `Match`.
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
    """Numbers what was resolved for the nodes (by id) that are there; a match that several nodes stand for once."""
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
