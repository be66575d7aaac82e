"""Instantiates the functions of a graph.

A function may have attributes (`T`) that each call sets; each set of values gives a separate body.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping

from gradrule.common import op_definitions
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule_server.errors import Findings, Reason, quote
from gradrule_server.graphs.ir import Body, Limits
from gradrule_server.graphs.read import Draft, Substitute, add_arg, add_result, read_function_body

_Key = tuple[str, tuple[tuple[str, bytes], ...]]

_ARGUMENT = re.compile(r"(x|y|dy)(0|[1-9][0-9]{0,5})?")
_RESULT = re.compile(r"dx(0|[1-9][0-9]{0,5})?")


class Library:
    """All functions of a graph by name, and the bodies instantiated so far."""

    def __init__(self, graph: Graph, limits: Limits, findings: Findings) -> None:
        self._limits = limits
        self._findings = findings
        self._functions: dict[str, graph_pb2.Function] = {}
        self._op_defs: dict[str, op_definitions.OpDef] = {}
        self._bodies: dict[_Key, Body | None] = {}
        self._unread: deque[tuple[Draft, graph_pb2.Function, Mapping[str, AttrValue], int]] = deque()
        # The depth of the body that is read.
        self._depth = 0
        self._attr_bytes = 0
        self._node_count = 0
        for function in graph.library.function:
            name = function.signature.name
            if name in self._functions:
                message = f"Function {quote(name)} occurs twice; names of functions must be unique."
                findings.add(Reason.ERROR_REASON_DUPLICATE_NODE, message, name)
            if not name:
                findings.add(Reason.ERROR_REASON_INVALID_GRAPH, "A function of the graph has no name.")
                continue
            self._functions.setdefault(name, function)
        self._gradients = self._registered(graph)
        # Bodies of the embedded gradients that nodes request, by gradient name.
        self.gradients: dict[str, Body] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def names(self) -> list[str]:
        """Returns the names of all functions."""
        return list(self._functions)

    def find_op(self, op_type: str) -> op_definitions.OpDef | None:
        """Returns the op definition of a function or of a TensorFlow op type; None if neither exists."""
        if op_type not in self._functions:
            return op_definitions.find(op_type)
        if op_type not in self._op_defs:
            self._op_defs[op_type] = op_definitions.from_signature(self._functions[op_type].signature)
        return self._op_defs[op_type]

    def body(self, name: str, attrs: Mapping[str, AttrValue], where: str, *, is_gradient: bool = False) -> Body | None:
        """Returns a function's body for a call's attributes; None after an error. `drafts` reads its nodes later.

        `is_gradient`: no call uses it, so that it nests in nothing.
        """
        function = self._functions.get(name)
        if function is None:
            hint = self._findings.suggest_similar(name, self._functions)
            message = f"{where} uses the function {quote(name)}, which the graph does not have.{hint}"
            self._findings.add(Reason.ERROR_REASON_INVALID_ATTR, message)
            return None
        given = {
            attr.name: attrs.get(attr.name, attr.default_value)
            for attr in function.signature.attr
            if attr.name in attrs or attr.HasField("default_value")
        }
        key = (name, tuple((attr, given[attr].SerializeToString(deterministic=True)) for attr in sorted(given)))
        if key not in self._bodies:
            draft = self._signature(function, given)
            self._bodies[key] = draft.body if draft else None
            if draft:
                self._unread.append((draft, function, given, 0 if is_gradient else self._depth + 1))
        return self._bodies[key]

    @property
    def foreign(self) -> frozenset[str]:
        """Names of gradients that the graph registers without the signature of a rule."""
        return frozenset(name for name, function in self._gradients.items() if not self._is_rule(function))

    def add_gradient(self, name: str, where: str, node: str) -> None:
        """Instantiates the embedded gradient `name`, if the graph has it; `drafts` reads its nodes later."""
        function = self._gradients.get(name)
        if function is None or name in self.gradients:
            return
        if function not in self._functions:
            hint = self._findings.suggest_similar(function, self._functions)
            message = (
                f"{where} has the gradient {quote(name)}, which the graph registers as its function "
                f"{quote(function)}; it has no such function.{hint}"
            )
            self._findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, node)
        elif self._is_rule(function):
            body = self.body(function, {}, where, is_gradient=True)
            if body is not None:
                self.gradients[name] = body

    def drafts(self) -> Iterator[Draft]:
        """Reads and yields the drafts of all instantiated bodies, including those instantiated during the iteration."""
        while self._unread:
            draft, function, given, self._depth = self._unread.popleft()
            if self._depth > self._limits.call_depth:
                # Functions that call themselves with more attributes each time would not end.
                self._refuse_size(
                    f"Calls, loops and branches nest more than {self._limits.call_depth} deep (--max-call-depth)."
                )
            self._node_count += len(function.node_def)
            if self._node_count > self._limits.inlined_nodes:
                self._refuse_size(
                    f"Its functions, one per set of attributes, exceed {self._limits.inlined_nodes} nodes."
                )
            read_function_body(draft, function, self._substitution(given), self._findings)
            yield draft

    def _registered(self, graph: Graph) -> dict[str, str]:
        """Returns the registered gradients: function name by gradient name."""
        found: dict[str, str] = {}
        for entry in graph.library.registered_gradients:
            if found.setdefault(entry.registered_op_type, entry.gradient_func) != entry.gradient_func:
                message = f"The gradient {quote(entry.registered_op_type)} is registered twice, as different functions."
                self._findings.add(Reason.ERROR_REASON_DUPLICATE_NODE, message, entry.registered_op_type)
        return found

    def _is_rule(self, function: str) -> bool:
        return function in self._functions and is_rule(self._functions[function].signature)

    def _refuse_size(self, message: str) -> None:
        """Adds LIMIT_EXCEEDED and raises all findings at once, because continuing could take very long."""
        self._findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
        self._findings.raise_if_any()

    def _signature(self, function: graph_pb2.Function, given: Mapping[str, AttrValue]) -> Draft | None:
        signature = function.signature
        draft = Draft(Body(signature.name, is_stateful=signature.is_stateful))
        try:
            for position, arg in enumerate(signature.input_arg):
                notes = function.arg_attr[position].attr if position in function.arg_attr else {}
                add_arg(draft, arg.name, self._types(arg, given), notes, self._findings)
            for arg in signature.output_arg:
                add_result(draft, arg.name, self._types(arg, given))
        except _UnclearType as cause:
            message = f"Function {quote(signature.name)}: the type of {quote(cause.arg)} is unknown: {cause.why}."
            self._findings.add(Reason.ERROR_REASON_INVALID_ATTR, message, signature.name)
            return None
        return draft

    def _types(self, arg: graph_pb2.OpSignature.ArgDef, given: Mapping[str, AttrValue]) -> list[int]:
        if arg.type_list_attr:
            return list(_given(arg, arg.type_list_attr, "list", given).list.type)
        count = _given(arg, arg.number_attr, "i", given).i if arg.number_attr else 1
        if not 0 <= count <= self._limits.listed_outputs:
            raise _UnclearType(arg.name, f"it is a list of {count} tensors")
        dtype = _given(arg, arg.type_attr, "type", given).type if arg.type_attr else arg.type
        if not dtype:
            raise _UnclearType(arg.name, "it has none")
        return [dtype] * count

    def _substitution(self, given: Mapping[str, AttrValue]) -> Substitute:
        def substitute(where: str, attrs: dict[str, AttrValue]) -> dict[str, AttrValue]:
            return {name: self._substituted(where, name, value, given) for name, value in attrs.items()}

        return substitute

    def _substituted(self, where: str, name: str, value: AttrValue, given: Mapping[str, AttrValue]) -> AttrValue:
        field = value.WhichOneof("value")
        if field == "placeholder":
            if value.placeholder in given:
                actual = given[value.placeholder]
                self._attr_bytes += actual.ByteSize()
                if self._attr_bytes > self._limits.attr_bytes:
                    message = f"{where}: attributes passed on to functions take over {self._limits.attr_bytes} bytes."
                    self._refuse_size(message)
                return actual
            message = f"{where}: attribute {name!r} refers to {quote(value.placeholder)}, which the call does not set."
            self._findings.add(Reason.ERROR_REASON_INVALID_ATTR, message)
            return value
        functions = [value.func] if field == "func" else value.list.func if field == "list" else []
        if not any(function.attr for function in functions):
            return value
        copy = AttrValue()
        copy.CopyFrom(value)
        for function in [copy.func] if field == "func" else copy.list.func:
            for key in list(function.attr):
                function.attr[key].CopyFrom(self._substituted(where, key, function.attr[key], given))
        return copy


class _UnclearType(Exception):
    def __init__(self, arg: str, why: str) -> None:
        super().__init__(arg, why)
        self.arg = arg
        self.why = why


def _given(arg: graph_pb2.OpSignature.ArgDef, name: str, field: str, given: Mapping[str, AttrValue]) -> AttrValue:
    value = given.get(name)
    if value is None or value.WhichOneof("value") != field:
        raise _UnclearType(arg.name, f"it follows from the attribute {name!r}, which the call does not set")
    return value


def is_rule(signature: graph_pb2.OpSignature) -> bool:
    """Returns whether a function has a rule's signature: arguments `x`, `y`, `dy`, results `dx`, `dx1`, …."""
    return all(_ARGUMENT.fullmatch(arg.name) for arg in signature.input_arg) and all(
        _RESULT.fullmatch(arg.name) for arg in signature.output_arg
    )
