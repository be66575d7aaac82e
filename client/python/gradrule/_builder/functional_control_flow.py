"""Converts control flow of version 1 (Switch, Merge, Enter, Exit) to If and While nodes with functions.

TensorFlow 1 writes such graphs, and so does freezing with `lower_control_flow=True`. Loops become While nodes, the
inner ones first. A Merge becomes an output of an If node: the nodes between it and the Switch nodes of one condition
are the branches. A graph of another form stays as it is; servers then refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gradrule._builder.flat_bodies import FlatBody, FunctionWriter, UnsupportedControlFlowError, output_name, parsed
from gradrule._builder.names import UniqueNames
from gradrule.common.dtypes import as_dt
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import Node
from gradrule.v1.tensor_pb2 import Dt, TensorShape

_UNUSED = "unused_control_flow_input"


def with_functions(data: bytes) -> bytes:
    """Returns a serialized GraphDef with control flow of version 2; the same bytes if there is nothing to convert."""
    if b"Merge" not in data:
        return data
    graph = graph_pb2.Graph.FromString(data)
    if not any(node.op in ("Merge", "Switch") for node in graph.node):
        return data
    names = UniqueNames()
    for name in [*(node.name for node in graph.node), *(item.signature.name for item in graph.library.function)]:
        names.reserve(name)
    body = _Converter({node.name: node for node in graph.node}, FunctionWriter(graph.library, names))
    try:
        body.convert_loops()
        body.convert_conditionals()
    except (UnsupportedControlFlowError, KeyError, IndexError):
        # Nodes or attributes that are missing are for the server to report.
        return data
    used = {name for node in body.nodes.values() for name, _ in body.all_inputs(node)}
    kept = [node for node in body.nodes.values() if node.name in used or not node.name.startswith(_UNUSED)]
    del graph.node[:]
    graph.node.extend(kept)
    return graph.SerializeToString(deterministic=True)


@dataclass(slots=True)
class _Loop:
    """Describes the loop variables of a frame: their nodes, in one order; and its loop-invariant inputs."""

    enters: list[Node]
    merges: list[Node]
    nexts: list[Node]
    invariants: list[Node]
    condition: Node
    switches: dict[str, Node] = field(default_factory=dict)
    """Switch nodes by the name of their Merge."""


class _Converter(FlatBody):
    """Converts the control flow of a body."""

    # Loops.

    def convert_loops(self) -> None:
        """Replaces all loops by While nodes, the inner ones first."""
        while any(node.op == "Enter" for node in self.nodes.values()):
            frames = dict.fromkeys(node.attr["frame_name"].s for node in self.nodes.values() if node.op == "Enter")
            inner = [frame for frame in frames if not self._has_inner(self._loop(frame))]
            if not inner:
                raise UnsupportedControlFlowError("frames contain each other")
            for frame in inner:
                self._convert_loop(self._loop(frame), frame.decode())

    def _loop(self, frame: bytes) -> _Loop:
        enters = [n for n in self.nodes.values() if n.op == "Enter" and n.attr["frame_name"].s == frame]
        by_name = {node.name: node for node in enters}
        found = _Loop([], [], [], [], Node())
        for merge in self.nodes.values():
            sources = [self.nodes[name] for name, output in self.all_inputs(merge) if output >= 0]
            entering = [node for node in sources if node.name in by_name]
            if merge.op == "Merge" and entering:
                nexts = [node for node in sources if node.op == "NextIteration"]
                if len(entering) != 1 or len(nexts) != 1:
                    raise UnsupportedControlFlowError(merge.name)
                found.enters += entering
                found.merges.append(merge)
                found.nexts += nexts
        merges = {merge.name for merge in found.merges}
        conditions = set()
        for node in self.nodes.values():
            if node.op == "Switch" and parsed(node.input[0])[0] in merges:
                condition = self.nodes[parsed(node.input[1])[0]]
                if condition.op == "LoopCond":
                    found.switches[parsed(node.input[0])[0]] = node
                    conditions.add(condition.name)
        if len(conditions) != 1 or len(found.switches) > len(merges):
            raise UnsupportedControlFlowError(frame.decode())
        found.condition = self.nodes[conditions.pop()]
        used = {node.name for node in found.enters}
        found.invariants = [node for node in enters if node.name not in used]
        return found

    def _has_inner(self, loop: _Loop) -> bool:
        """Returns whether there is another loop inside."""
        own = {node.name for node in [*loop.merges, *loop.enters, *loop.invariants]}
        pending = [name for node in [*loop.nexts, loop.condition] for name, _ in self.all_inputs(node)]
        seen = set(own)
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                if self.nodes[name].op in ("Exit", "Enter"):
                    return True
                pending += [producer for producer, _ in self.all_inputs(self.nodes[name])]
        return False

    def _convert_loop(self, loop: _Loop, frame: str) -> None:
        # TensorFlow's gradient of While takes the first two inputs as a counter and the maximum number of iterations.
        added = [self.constant(f"{frame}/loop_counter", 0), self.constant(f"{frame}/maximum_iterations", -1)]
        first = len(added)
        inputs = [*added, *(node.input[0] for node in [*loop.enters, *loop.invariants])]
        types = [self.dtype(*parsed(text)) for text in inputs]
        arguments: dict[tuple[str, int], str] = {}
        for index, merge in enumerate(loop.merges, first):
            arguments[merge.name, 0] = f"arg{index}"
            if merge.name in loop.switches:
                arguments[loop.switches[merge.name].name, 1] = f"arg{index}"
        invariants = {node.name: f"arg{i}" for i, node in enumerate(loop.invariants, first + len(loop.merges))}
        arguments |= {(name, 0): argument for name, argument in invariants.items()}
        own = {name for name, _ in arguments} | {node.name for node in loop.enters} | {loop.condition.name}
        if self.controls([*loop.merges, *loop.switches.values()]):
            raise UnsupportedControlFlowError(f"{frame}: a Merge or Switch of a loop has control inputs")
        # The loop waits by its counter: TensorFlow's gradient of While appends inputs, also behind control inputs.
        self.nodes[added[0]].input.extend(self.controls([*loop.enters, *loop.invariants]))
        functions, holders = [], set[str]()
        for what, ends in (("cond", [loop.condition]), ("body", loop.nexts)):
            texts = [self._held(node, own, holders) for node in ends]
            body, results = self.copied(texts, arguments, types, lambda name: name not in own)
            body.convert_conditionals()
            if what == "body":
                results = [body.count("arg0"), ("arg1", 0), *results, *((name, 0) for name in invariants.values())]
            functions.append(self._library.add(f"{_identifier(frame)}_{what}", types, body, results))
        node = self.add(frame, "While", inputs)
        node.attr["T"].list.type.extend(map(as_dt, types))
        node.attr["cond"].func.name, node.attr["body"].func.name = functions
        node.attr["output_shapes"].list.shape.extend([TensorShape(unknown_rank=True)] * len(types))
        node.attr["_num_original_outputs"].i = len(types)
        outputs = {
            switch.name: index
            for index, merge in enumerate(loop.merges, first)
            if (switch := loop.switches.get(merge.name)) is not None
        }
        for exit_node in self.nodes.values():
            if exit_node.op == "Exit" and parsed(exit_node.input[0])[0] in outputs:
                exit_node.op = "Identity"
                exit_node.input[0] = output_name(node.name, outputs[parsed(exit_node.input[0])[0]])
        self.remove(own | {node.name for node in loop.nexts} | holders)

    def _held(self, node: Node, own: set[str], holders: set[str]) -> str:
        """Returns what a node of a loop passes on; if it waits for other nodes too, an Identity that does so."""
        controls = [text for text in self.controls([node]) if text[1:] not in own]
        if not controls:
            return node.input[0]
        holders.add(holder := self._waiting(node.name, node.input[0], controls))
        return holder

    def _waiting(self, name: str, text: str, controls: list[str]) -> str:
        """Adds an Identity of a tensor that waits for other nodes too; returns its name."""
        holder = self.add(f"{name}/controlled", "Identity", [text, *controls])
        holder.attr["T"].type = as_dt(self.dtype(*parsed(text)))
        return str(holder.name)

    def count(self, argument: str) -> tuple[str, int]:
        """Adds a node with the next number; returns its output."""
        node = self.add(f"{argument}/next", "AddV2", [argument, self.constant(f"{argument}/one", 1)])
        node.attr["T"].type = Dt.DT_INT32
        return node.name, 0

    # Conditionals.

    def convert_conditionals(self) -> None:
        """Replaces all Merge nodes by outputs of If nodes; removes what only the branches used."""
        merges = [node for node in self.nodes.values() if node.op == "Merge"]
        names = {node.name for node in merges}
        # What a Merge depends on stays the same until it is converted, so one search for each is enough.
        waiting = {node.name: self._merges_behind(node, names) for node in merges}
        waiters: dict[str, list[Node]] = {}
        for node in merges:
            for name in waiting[node.name]:
                waiters.setdefault(name, []).append(node)
        ready = {node.name: self._condition(node) for node in merges if not waiting[node.name]}
        while ready:
            condition = next(iter(ready.values()))
            group = [self.nodes[name] for name, other in ready.items() if other == condition]
            self._convert_conditional(group, condition)
            for merge in group:
                del ready[merge.name], waiting[merge.name]
            for merge in group:
                for node in waiters.get(merge.name, ()):
                    waiting[node.name].discard(merge.name)
                    if not waiting[node.name]:
                        ready[node.name] = self._condition(node)
        if waiting:
            raise UnsupportedControlFlowError(f"{next(iter(waiting))} depends on itself")
        self.remove({node.name for node in self.nodes.values() if node.op == "Switch"})

    def _merges_behind(self, merge: Node, merges: set[str]) -> set[str]:
        """Returns the Merge nodes that a Merge depends on, without those behind them."""
        producers = [name for name, _ in self.all_inputs(merge)]
        return self.dependencies(producers, lambda name: name not in merges) & merges

    def _selector(self, switch: Node) -> str:
        """Returns the condition of a Switch; copies of a condition count as the condition."""
        return output_name(*parsed(self._copies(switch)[-1]))

    def _copies(self, switch: Node) -> list[str]:
        """Returns the condition of a Switch as it takes it, then what each copy (Identity) was made of."""
        texts, seen = [switch.input[1]], set[str]()
        while self.nodes[name := parsed(texts[-1])[0]].op == "Identity":
            if name in seen:
                raise UnsupportedControlFlowError(f"{name} depends on itself")
            seen.add(name)
            texts.append(self.nodes[name].input[0])
        return texts

    def _sides(self, text: str) -> dict[str, set[int]]:
        """Returns which outputs of Switch nodes a tensor depends on, by condition."""
        found: dict[str, set[int]] = {}
        pending, seen = [parsed(text)], set[tuple[str, int]]()
        while pending:
            name, output = pending.pop()
            if (name, output) in seen:
                continue
            seen.add((name, output))
            node = self.nodes[name]
            if node.op == "Switch":
                # A control input from a Switch itself holds in both branches.
                if output >= 0:
                    found.setdefault(self._selector(node), set()).add(output)
            else:
                pending += self.all_inputs(node)
        return found

    def _condition(self, merge: Node) -> str:
        """Returns the condition that selects an input of a Merge."""
        sides = [self._sides(text) for text in merge.input if not text.startswith("^")]
        if len(sides) != 2:
            raise UnsupportedControlFlowError(merge.name)
        found = [
            condition
            for condition in {**sides[0], **sides[1]}
            if len(sides[0].get(condition, {0})) == len(sides[1].get(condition, {0})) == 1
            and sides[0].get(condition) != sides[1].get(condition)
        ]
        if len(found) != 1:
            raise UnsupportedControlFlowError(merge.name)
        return found[0]

    def _convert_conditional(self, merges: list[Node], condition: str) -> None:
        ends: tuple[list[str], list[str]] = ([], [])
        inside = self._inside(condition)
        for merge in merges:
            texts = [text for text in merge.input if not text.startswith("^")]
            sides = [self._sides(text).get(condition) for text in texts]
            if sides[0] == {1} or sides[1] == {0}:
                texts.reverse()
            # A Merge may wait for nodes of both branches; each branch then waits for its own.
            waited = [text for text in self.controls([merge]) if text[1:] in inside]
            for side, text in enumerate(texts):
                own = [control for control in waited if self._sides(control).get(condition) == {side}]
                waited = [control for control in waited if control not in own]
                ends[side].append(self._waiting(merge.name, text, own) if own else text)
            if waited:
                raise UnsupportedControlFlowError(f"{merge.name} waits for a node of no branch")
        inside = self._inside(condition)
        inputs: dict[str, int] = {}
        reached: dict[str, None] = {}
        for branch in ends:
            for name in sorted(self.dependencies([parsed(text)[0] for text in branch], inside.__contains__)):
                reached[name] = None
                for text in self.nodes[name].input if name in inside else ():
                    if not text.startswith("^") and parsed(text)[0] not in inside:
                        inputs.setdefault(self._unswitched(text, condition), len(inputs))
            for text in branch:
                if parsed(text)[0] not in inside:
                    inputs.setdefault(self._unswitched(text, condition), len(inputs))
        types = [self.dtype(*parsed(text)) for text in inputs]
        arguments = {
            (node.name, output): f"arg{inputs[output_name(*parsed(node.input[0]))]}"
            for node in self.nodes.values()
            if node.op == "Switch" and self._selector(node) == condition
            for output in (0, 1)
            if output_name(*parsed(node.input[0])) in inputs
        }
        arguments |= {parsed(text): f"arg{index}" for text, index in inputs.items()}
        functions = []
        for what, branch in (("else", ends[0]), ("then", ends[1])):
            body, results = self.copied(branch, arguments, types, inside.__contains__)
            name = f"{_identifier(merges[0].name)}_{what}"
            functions.append(self._library.add(name, types, body, results))
        controls = self._controls_of_branches(merges, reached, inside, condition)
        node = self.add(f"{merges[0].name}/If", "If", [condition, *inputs, *controls])
        node.attr["Tcond"].type = Dt.DT_BOOL
        node.attr["Tin"].list.type.extend(map(as_dt, types))
        node.attr["Tin"].list.SetInParent()
        node.attr["Tout"].list.type.extend(merge.attr["T"].type for merge in merges)
        node.attr["else_branch"].func.name, node.attr["then_branch"].func.name = functions
        for index, merge in enumerate(merges):
            dtype = merge.attr["T"].type
            merge.op = "Identity"
            del merge.input[:]
            merge.input.append(output_name(node.name, index))
            merge.attr.clear()
            merge.attr["T"].type = dtype
        if any((merge.name, 1) in self.all_inputs(user) for merge in merges for user in self.nodes.values()):
            raise UnsupportedControlFlowError("the index of the branch is used")

    def _controls_of_branches(
        self, merges: list[Node], reached: Iterable[str], inside: set[str], condition: str
    ) -> list[str]:
        """Returns control inputs for an If node: those of the nodes that it replaces, except from its branches."""
        own = [
            self.nodes[name]
            for name in reached
            if self.nodes[name].op == "Switch" and self._selector(self.nodes[name]) == condition
        ]
        copies = {parsed(text)[0]: None for switch in own for text in self._copies(switch)[:-1]}
        inner = [self.nodes[name] for name in reached if name in inside]
        outer = self.controls([*own, *(self.nodes[name] for name in copies), *merges])
        # A node may wait for a Switch itself, and so for what the Switch takes.
        switches = {f"^{node.name}": f"^{parsed(node.input[0])[0]}" for node in own}
        found = [switches.get(text, text) for text in [*outer, *self.controls(inner)]]
        return self.waited_for(text for text in found if text[1:] not in inside)

    def _unswitched(self, text: str, condition: str) -> str:
        """Returns the tensor that a branch takes: the input of a Switch, or a tensor of outside."""
        node = self.nodes[parsed(text)[0]]
        if node.op == "Switch" and self._selector(node) == condition:
            return output_name(*parsed(node.input[0]))
        return output_name(*parsed(text))

    def _inside(self, condition: str) -> set[str]:
        """Returns the nodes that depend on a Switch of the condition, but on no Merge of it."""
        switches = [
            node.name for node in self.nodes.values() if node.op == "Switch" and self._selector(node) == condition
        ]
        return self.dependents(switches, lambda node: node.op not in ("Switch", "Merge")) - set(switches)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
