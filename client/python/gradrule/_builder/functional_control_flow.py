"""Converts control flow of version 1 (Switch, Merge, Enter, Exit) to If and While nodes with functions.

TensorFlow 1 writes such graphs, and so does freezing with `lower_control_flow=True`. Loops become While nodes, the
inner ones first. A Merge becomes an output of an If node: the nodes between it and the Switch nodes of one condition
are the branches. A graph of another form stays as it is; servers then refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrule._builder.flat_bodies import FlatBody, FunctionWriter, OtherFormError, output_name, parsed
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
    except (OtherFormError, KeyError, IndexError):
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
                raise OtherFormError("frames contain each other")
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
                    raise OtherFormError(merge.name)
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
            raise OtherFormError(frame.decode())
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
        functions = []
        for what, ends in (("cond", [loop.condition]), ("body", loop.nexts)):
            texts = [node.input[0] for node in ends]
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
        self.remove(own | {node.name for node in loop.nexts})

    def count(self, argument: str) -> tuple[str, int]:
        """Adds a node with the next number; returns its output."""
        node = self.add(f"{argument}/next", "AddV2", [argument, self.constant(f"{argument}/one", 1)])
        node.attr["T"].type = Dt.DT_INT32
        return node.name, 0

    # Conditionals.

    def convert_conditionals(self) -> None:
        """Replaces all Merge nodes by outputs of If nodes; removes what only the branches used."""
        while merges := [node for node in self.nodes.values() if node.op == "Merge"]:
            behind = {node.name: self._merges_behind(node) for node in merges}
            first = next((node for node in merges if not behind[node.name]), None)
            if first is None:
                raise OtherFormError(merges[0].name)
            condition = self._condition(first)
            group = [first] + [
                node
                for node in merges
                if node is not first and not behind[node.name] and self._condition(node) == condition
            ]
            self._convert_conditional(group, condition)
        self.remove({node.name for node in self.nodes.values() if node.op == "Switch"})

    def _merges_behind(self, merge: Node) -> bool:
        """Returns whether a Merge depends on another one."""
        return any(
            self.nodes[name].op == "Merge" for name in self.before([merge.name], lambda name: True) - {merge.name}
        )

    def _selector(self, switch: Node) -> str:
        """Returns the condition of a Switch; copies of a condition count as the condition."""
        name, output = parsed(switch.input[1])
        while self.nodes[name].op == "Identity":
            name, output = parsed(self.nodes[name].input[0])
        return output_name(name, output)

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
            raise OtherFormError(merge.name)
        found = [
            condition
            for condition in {**sides[0], **sides[1]}
            if len(sides[0].get(condition, {0})) == len(sides[1].get(condition, {0})) == 1
            and sides[0].get(condition) != sides[1].get(condition)
        ]
        if len(found) != 1:
            raise OtherFormError(merge.name)
        return found[0]

    def _convert_conditional(self, merges: list[Node], condition: str) -> None:
        ends: tuple[list[str], list[str]] = ([], [])
        for merge in merges:
            texts = [text for text in merge.input if not text.startswith("^")]
            sides = [self._sides(text).get(condition) for text in texts]
            if sides[0] == {1} or sides[1] == {0}:
                texts.reverse()
            ends[0].append(texts[0])
            ends[1].append(texts[1])
        inside = self._inside(condition)
        inputs: dict[str, int] = {}
        for branch in ends:
            for name in self.before([parsed(text)[0] for text in branch], inside.__contains__):
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
        node = self.add(f"{merges[0].name}/If", "If", [condition, *inputs])
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
            raise OtherFormError("the index of the branch is used")

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
        return self.after(switches, lambda node: node.op not in ("Switch", "Merge")) - set(switches)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
