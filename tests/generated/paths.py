"""Which nodes depend on which, in an expanded graph. All outputs of a loop or a branch depend on all of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tests.generated.expanded import FLOATS, Body, Node, Ref

Seeds = Mapping[int, Collection[Ref]]
"""Tensors by id() of their body."""

Shortcuts = Mapping[Node, Collection[Ref]]
"""Tensors of the same body to which rules pass a node's gradients on, past the node's own inputs."""


def passes(node: Node) -> bool:
    """Whether gradients can pass through a node."""
    return node.op != "StopGradient" and any(dtype in FLOATS for dtype in node.dtypes)


class Dependents:
    """The nodes with an input that is a seed or depends on one. differentiable: as far as gradients can pass."""

    def __init__(
        self,
        top: Body,
        seeds: Seeds,
        *,
        differentiable: bool = False,
        stopped: Collection[Ref] = (),
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self._top, self._seeds, self._differentiable, self._stopped = top, seeds, differentiable, stopped
        self._shortcuts = shortcuts or {}
        self.nodes: set[Node] = set()
        self._walk(top, ())

    def depends(self, body: Body, ref: Ref) -> bool:
        """Whether a tensor is a seed or depends on one."""
        return body.nodes[ref[0]] in self.nodes or ref in self._seeds.get(id(body), ())

    def _walk(self, body: Body, args: Sequence[bool]) -> None:
        self.nodes.update(node for node, given in zip(body.nodes, args, strict=False) if given)
        stopped = self._stopped if body is self._top else ()
        for node in body.nodes[body.arguments :]:
            if any(ref not in stopped and self.depends(body, ref) for ref in self._shortcuts.get(node, ())):
                self.nodes.add(node)
            if self._differentiable and not passes(node):
                continue
            given = [ref not in stopped and self.depends(body, ref) for ref in node.inputs]
            inner = [self._enter(node, held, given) for held in node.bodies]
            if any(given) or any(inner):
                self.nodes.add(node)

    def _enter(self, node: Node, body: Body, given: Sequence[bool]) -> bool:
        args = [given[node.argument_of(body, arg)] for arg in range(body.arguments)]
        self._walk(body, args)
        if node.is_loop and body is node.bodies[1]:
            # What one turn gives the next one takes. Each walk reaches one argument more, if any.
            for _ in body.results:
                args = [arg or self.depends(body, ref) for arg, ref in zip(args, body.results, strict=True)]
                self._walk(body, args)
        return any(self.depends(body, ref) for ref in body.results)


def needed(
    top: Body,
    targets: Collection[Ref],
    *,
    differentiable: bool = False,
    stopped: Collection[Ref] = (),
    shortcuts: Shortcuts | None = None,
) -> set[Node]:
    """The nodes that targets of the top level depend on, with those that compute the targets."""
    found: set[Node] = set()

    def walk(body: Body, roots: Collection[Ref]) -> None:
        wanted = {ref[0] for ref in roots}
        cut = stopped if body is top else ()
        for node in reversed(body.nodes):
            passed = (shortcuts or {}).get(node, ()) if node.index in wanted else ()
            if passed:
                found.add(node)
                wanted.update(ref[0] for ref in passed if ref not in cut)
            if node.index in wanted and (not differentiable or passes(node)):
                found.add(node)
                wanted.update(ref[0] for ref in node.inputs if ref not in cut)
                for held in node.bodies:
                    walk(held, held.results)

    walk(top, targets)
    return found


def ranks(
    top: Body, members: Collection[Node], path: Collection[Node], shortcuts: Shortcuts, xs: Collection[Ref]
) -> dict[Node, int]:
    """For each member the largest number of other members before it on one path from the xs.

    In loops, in the first turn in which such a path leads to it: outer turns count before inner ones.
    """
    found: dict[Node, int] = {}
    behind: dict[Node, int] = {}

    def count(body: Body, ref: Ref) -> int | None:
        return behind.get(body.nodes[ref[0]], 0 if body is top and ref in xs else None)

    def walk(body: Body, args: Sequence[int | None], turns: int) -> int:
        for turn in range(turns + 1):
            if turn:
                args = [count(body, ref) for ref in body.results]
            for node, given in zip(body.nodes, args, strict=False):
                if given is not None:
                    behind.setdefault(node, given)
            for node in body.nodes[body.arguments :]:
                before = [count(body, ref) for ref in node.inputs]
                counts = [
                    one for one in (*before, *(count(body, ref) for ref in shortcuts.get(node, ()))) if one is not None
                ]
                if node not in path or not counts:
                    continue
                after = max(counts)
                if node in members:
                    found.setdefault(node, after)
                    after += 1
                for held in node.bodies:
                    inner = [before[node.argument_of(held, arg)] for arg in range(held.arguments)]
                    is_repeated = node.is_loop and held is node.bodies[1]
                    after = max(after, walk(held, inner, held.arguments if is_repeated else 0))
                behind.setdefault(node, after)
        return max((one for ref in body.results if (one := count(body, ref)) is not None), default=0)

    walk(top, (), 0)
    return found


def ranks_from_ys(
    top: Body, members: Collection[Node], path: Collection[Node], shortcuts: Shortcuts
) -> dict[Node, int]:
    """For each member the largest number of other members after it on one path to the ys."""
    found: dict[Node, int] = {}

    def walk(body: Body, base: int) -> int:
        ahead = [base] * len(body.nodes)
        for node in reversed(body.nodes[body.arguments :]):
            if node not in path:
                continue
            before = count = ahead[node.index]
            if node in members:
                found[node] = count
                before += 1
            for held in node.bodies:
                before = max(before, walk(held, count))
            for ref in (*node.inputs, *shortcuts.get(node, ())):
                ahead[ref[0]] = max(ahead[ref[0]], before)
        return max(ahead[: body.arguments], default=base)

    walk(top, 0)
    return found
