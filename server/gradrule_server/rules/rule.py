"""What a rule is: a formula, a graph or code of the engine, with its params; checked once, bound as often as needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property

from gradrule.v1 import errors_pb2, graph_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.policy import NodeLimits, check_parsed_size
from gradrule_server.rules.graph_rule import GraphForm, bind_graph, read_graph, refused_nodes
from gradrule_server.rules.language import Formula, lower, parse
from gradrule_server.rules.language.names import is_function, param_name_problem
from gradrule_server.rules.params import Param, read_param_value, write_param
from gradrule_server.rules.signature import RuleGraph, Signature

_DIGEST_VERSION = b"gradrule.rule.v1"


@dataclass(frozen=True, eq=False)
class RuleContent:
    """A rule's content: one form, and params. Making one checks it: INVALID_EXPRESSION, …

    The forms are an expression, a graph's bytes, and (of the catalogue alone) `code`, the name by which the engine
    has the rule. `brought`: the graph is one that a program's graph brought along, as `read_graph` says. `gradient`:
    the rule for this one's own gradient; its params are among these, and those of one name are one. `checked`: the
    graph was checked before, and is read only where its nodes are needed.
    """

    expression: str | None = None
    graph_bytes: bytes | None = None
    params: tuple[Param, ...] = ()
    code: str | None = None
    brought: bool = False
    gradient: RuleContent | None = None
    checked: InitVar[bool] = False
    formula: Formula | None = field(init=False, repr=False)
    _own_params: Sequence[str] = field(init=False, repr=False)

    def __post_init__(self, checked: bool) -> None:
        names = [param.name for param in self.params]
        formula = None if self.expression is None else parse(self.expression, names)
        if sum(form is not None for form in (formula, self.graph_bytes, self.code)) != 1:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                "a rule is either an expression or a graph, and this is neither or both",
            )
        if self.gradient is not None:
            added = tuple(param for param in self.gradient.params if param.name not in names)
            object.__setattr__(self, "params", self.params + added)
        object.__setattr__(self, "_own_params", names)
        object.__setattr__(self, "formula", formula)
        # A graph that was checked before stays bytes until its nodes are needed: they take ten times as much memory.
        if not checked:
            _ = self._graph

    @cached_property
    def _graph(self) -> GraphForm | None:
        """The rule's graph, read at its first use."""
        if self.graph_bytes is None:
            return None
        return read_graph(self.graph_bytes, self._own_params, brought=self.brought)

    @classmethod
    def from_definition(cls, definition: rule_pb2.RuleDefinition, bounds: NodeLimits | None = None) -> RuleContent:
        """The content that a caller's message says.

        INVALID_RULE, INVALID_EXPRESSION, INVALID_PARAM, LIMIT_EXCEEDED where a graph's bytes would take too much
        memory, or as `read_graph`.
        """
        return cls._from(definition, bounds or NodeLimits())

    @classmethod
    def from_kept(cls, name: str, definition: rule_pb2.RuleDefinition) -> RuleContent:
        """The content of the rule `name` as `to_definition` wrote it; without a form it is code of the engine.

        A function that the language got since then takes no param's name away, and a graph is not checked again.
        INVALID_RULE where there is no such code.
        """
        if definition.WhichOneof("form") is None and _is_code(name):
            return cls(code=name, params=_read_params(definition, names_are_new=False))
        return cls._from(definition, None)

    @classmethod
    def _from(cls, definition: rule_pb2.RuleDefinition, bounds: NodeLimits | None) -> RuleContent:
        """`bounds`: what a new rule is held to; None: it is a kept one."""
        params = _read_params(definition, names_are_new=bounds is not None)
        gradient = _read_gradient(definition, bounds)
        match definition.WhichOneof("form"):
            case "expression":
                return cls(expression=definition.expression, params=params, gradient=gradient)
            case "graph":
                graph_bytes = _graph_bytes(definition.graph, bounds)
                return cls(graph_bytes=graph_bytes, params=params, gradient=gradient, checked=bounds is None)
            case _:
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_RULE,
                    "the rule has neither an expression nor a graph",
                    field="definition",
                )

    def to_definition(self) -> rule_pb2.RuleDefinition:
        """The message that `from_definition` reads; code has no form in it, and `from_kept` reads it."""
        definition = rule_pb2.RuleDefinition()
        if self.expression is not None:
            definition.expression = self.expression
        if self.graph_bytes is not None:
            definition.graph.serialized = self.graph_bytes
        definition.params.extend(map(write_param, self.params))
        if self.gradient is not None:
            definition.gradient.CopyFrom(self.gradient.to_definition())
        return definition

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the form, the params' names and the gradient; default values and ranges do not count."""
        if self.graph_bytes is not None:
            form = [b"graph", self.graph_bytes]
        elif self.code is not None:
            form = [b"code", self.code.encode()]
        else:
            form = [b"expression", (self.expression or "").strip().encode()]
        parts = [_DIGEST_VERSION, *form, *(param.name.encode() for param in self.params)]
        if self.gradient is not None:
            # No param has such a name.
            parts += [b"gradient of it", self.gradient.digest.encode()]
        hashed = hashlib.sha256()
        for part in parts:
            # With its length in front no part can run into the next.
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()

    @property
    def per_sample(self) -> bool | None:
        """True if no example along axis 0 changes another's gradient; None for graphs and code, which are not read."""
        return None if self.formula is None else self.formula.per_sample

    @property
    def uses_default(self) -> bool:
        """True if the rule needs the op's own gradient as a variable; code asks for it where it needs it."""
        if self.formula is not None:
            return self.formula.uses_default
        return self._graph is not None and any(variable.startswith("default") for variable in self._graph.variables)

    def refused(self, bounds: NodeLimits) -> list[Finding]:
        """OP_NOT_ALLOWED, LIMIT_EXCEEDED and INVALID_TENSOR for nodes of the rule's graph that may not run."""
        # What a graph brought along was checked with it.
        found = [] if self._graph is None or self.brought else refused_nodes(self._graph, bounds)
        return found if self.gradient is None else [*found, *self.gradient.refused(bounds)]

    @property
    def size(self) -> int:
        """How many nodes it adds where it is used, at least; 1 for what is not a graph."""
        own = 1 if self._graph is None else len(self._graph.graph.node)
        return own if self.gradient is None else own + self.gradient.size

    def bind(self, signature: Signature) -> RuleGraph:
        """The rule as a graph for an op of these types; RULE_ARITY, RULE_NOT_APPLICABLE, RULE_OUTPUT if it is none."""
        if self.code is not None:
            raise error(
                errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                f"the rule {self.code!r} is part of the server's code and needs an op to run on, with its weights and "
                "attributes: name an op type",
            )
        if self._graph is not None:
            return bind_graph(self._graph, signature)
        assert self.formula is not None
        return lower(self.formula, signature)


def _read_gradient(definition: rule_pb2.RuleDefinition, bounds: NodeLimits | None) -> RuleContent | None:
    if not definition.HasField("gradient"):
        return None
    try:
        return RuleContent._from(definition.gradient, bounds)
    except GradruleError as cause:
        raise GradruleError(
            [
                Finding(item.reason, f"the rule's gradient: {item.message}", item.node, f"gradient.{item.field}")
                for item in cause.findings
            ]
        ) from cause


def has_graph(definition: rule_pb2.RuleDefinition) -> bool:
    """Returns whether a rule, or its gradient's rule, is given as a graph."""
    if definition.WhichOneof("form") == "graph":
        return True
    return definition.HasField("gradient") and has_graph(definition.gradient)


def graph_rule(definition: rule_pb2.RuleDefinition, signature: Signature) -> RuleGraph:
    """A rule given as a graph, for an op of these element types."""
    return RuleContent.from_definition(definition).bind(signature)


def _read_params(definition: rule_pb2.RuleDefinition, *, names_are_new: bool) -> tuple[Param, ...]:
    findings: list[Finding] = []
    params: list[Param] = []
    seen: set[str] = set()
    for index, entry in enumerate(definition.params):
        where = f"params[{index}]"
        problem = param_name_problem(entry.name)
        if problem is None and entry.name in seen:
            problem = f"param {entry.name!r} is declared twice"
        if problem is None and names_are_new and _is_function_of_others(entry.name, definition):
            problem = f"{entry.name!r} is a function of the language; {entry.name + '_'!r} would do"
        if problem is not None:
            findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_RULE, problem, field=f"{where}.name"))
        seen.add(entry.name)
        try:
            params.append(_read_param(entry, where))
        except GradruleError as cause:
            findings += cause.findings
    if findings:
        raise GradruleError(findings)
    return tuple(params)


def _read_param(entry: rule_pb2.RuleParam, where: str) -> Param:
    try:
        declared = Param(entry.name, None, entry.description, entry.range)
    except ValueError as cause:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_RULE, f"param {entry.name!r}: {cause}", field=f"{where}.range"
        ) from cause
    if not entry.HasField("default_value"):
        return declared
    field = f"{where}.default_value"
    default = read_param_value(entry.default_value, entry.name, field)
    problem = declared.problem(default)
    if problem is not None:
        raise error(errors_pb2.ERROR_REASON_INVALID_PARAM, f"{problem} (its default value)", field=field)
    return Param(entry.name, default, entry.description, entry.range)


def _is_function_of_others(param: str, definition: rule_pb2.RuleDefinition) -> bool:
    """True for a function's name, except in the catalogue: `clip` of ste_sign is the name that people know."""
    if not is_function(param):
        return False
    # The catalogue is made of RuleContents, so it can be imported only once this module is.
    from gradrule_server.rules.catalogue import BUILTINS

    return not any(
        builtin.expression == definition.expression and any(own.name == param for own in builtin.params)
        for builtin in BUILTINS
        if builtin.expression is not None
    )


def _is_code(name: str) -> bool:
    from gradrule_server.rules.catalogue import BUILTINS

    return name in BUILTINS and BUILTINS[name].code


def _graph_bytes(source: rule_pb2.GraphSource, bounds: NodeLimits | None) -> bytes:
    match source.WhichOneof("source"):
        case "blob_sha256":
            raise error(
                errors_pb2.ERROR_REASON_UNSUPPORTED,
                "a rule's graph travels with the rule, not as a blob: rules are small",
                field="definition.graph",
            )
        case "serialized":
            # What is inline was weighed with the message that it came in.
            if bounds is not None:
                check_parsed_size(source.serialized, graph_pb2.Graph, bounds, field="graph")
            return source.serialized
        case "inline":
            return source.inline.SerializeToString(deterministic=True)
        case _:
            raise error(errors_pb2.ERROR_REASON_INVALID_RULE, "the rule's graph is empty", field="definition.graph")
