"""Which value of a variable a node of a body meets: that of the last write among its ancestors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradrule_server.graphs.findings import Findings, Reason
from gradrule_server.graphs.ir import Node, Ref
from gradrule_server.graphs.variable_table import Variable

# Each node remembers its last writes as bits of a number; more of them would cost memory in the square.
_MAX_WRITES = 10_000


class Versions:
    """The writes of one body, numbered producers before consumers. `initial`: where a variable's value comes in."""

    def __init__(self, count: int, initial: Callable[[Variable], Ref], findings: Findings) -> None:
        self._masks = [0] * count
        self._initial = initial
        self._findings = findings
        self._refs: list[Ref] = []
        # Per variable the bits of its writes.
        self._writes: dict[Variable, int] = {}

    def reach(self, index: int, node: Node) -> int:
        """Takes a node up, after all that it depends on; returns the writes that it depends on."""
        masks, before = self._masks, 0
        for producer, _ in node.inputs:
            before |= masks[producer]
        for control in node.controls:
            before |= masks[control]
        masks[index] = before
        return before

    def at(self, variable: Variable, before: int) -> Ref:
        """The variable's value behind these writes."""
        own = before & self._writes.get(variable, 0)
        return self._refs[own.bit_length() - 1] if own else self._initial(variable)

    def write(self, index: int, written: Iterable[tuple[Variable, Ref]]) -> None:
        """A node gives variables new values."""
        for variable, ref in written:
            if len(self._refs) >= _MAX_WRITES:
                message = f"The graph assigns to variables more than {_MAX_WRITES} times."
                self._findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
                self._findings.raise_if_any()
            bit = 1 << len(self._refs)
            self._refs.append(ref)
            known = self._writes.get(variable, 0)
            # An earlier write of the variable can be seen by nothing behind this one.
            self._masks[index] = (self._masks[index] & ~known) | bit
            self._writes[variable] = known | bit

    def last(self) -> dict[Variable, Ref]:
        """The last value of each variable that was written."""
        return {variable: self._refs[bits.bit_length() - 1] for variable, bits in self._writes.items()}
