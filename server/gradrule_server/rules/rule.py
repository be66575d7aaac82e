"""Holds the content of a rule (an expression, a graph, or code of the engine, with params) and binds it to ops."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property

from gradrule.v1 import errors_pb2, graph_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.policy import NodeLimits, check_parsed_size
from gradrule_server.rules.graph_rule import CheckedGraph, bind_graph, check_dy, check_nodes, parse_graph
from gradrule_server.rules.language import Formula, lower, parse
from gradrule_server.rules.language.syntax_tree import is_function, param_name_problem
from gradrule_server.rules.params import Param, read_param_value, write_param
from gradrule_server.rules.signature import RuleGraph, Signature

_DIGEST_VERSION = b"gradrule.rule.v1"


@dataclass(frozen=True, eq=False)
class RuleContent:
    """The content of a rule: one of `expression`, `graph_bytes` and `code`, with its params.

    Attributes:
        expression: The text of an expression.
        graph_bytes: An encoded graph.
        params: The params, including those of `gradient`; params with the same name are the same param.
        code: The name of a rule that is code of the engine; only catalogue rules can be code.
        embedded: Whether the graph is part of a program's graph; see `parse_graph`.
        gradient: The rule for the gradient of this rule.
        formula: The parsed expression.

    The constructor argument `checked` says that the rule was checked before, maybe by a version that refused less; a
    graph is then parsed when it is first used.

    Raises:
        GradruleError: INVALID_RULE, INVALID_EXPRESSION, or an error of `parse_graph`.
    """

    expression: str | None = None
    graph_bytes: bytes | None = None
    params: tuple[Param, ...] = ()
    code: str | None = None
    embedded: bool = False
    gradient: RuleContent | None = None
    checked: InitVar[bool] = False
    formula: Formula | None = field(init=False, repr=False)
    _own_params: Sequence[str] = field(init=False, repr=False)

    def __post_init__(self, checked: bool) -> None:
        names = [param.name for param in self.params]
        formula = None if self.expression is None else parse(self.expression, names, stored=checked)
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
        # Parse a checked graph only when it is needed: the nodes take ten times the memory of the bytes.
        if not checked and self._graph is not None and not self.embedded:
            check_dy(self._graph)

    @cached_property
    def _graph(self) -> CheckedGraph | None:
        """The rule's parsed graph."""
        if self.graph_bytes is None:
            return None
        return parse_graph(self.graph_bytes, self._own_params, embedded=self.embedded)

    @classmethod
    def from_definition(cls, definition: rule_pb2.RuleDefinition, bounds: NodeLimits | None = None) -> RuleContent:
        """Parses and checks a definition from a caller.

        Raises:
            GradruleError: INVALID_RULE, INVALID_EXPRESSION, INVALID_PARAM, an error of `parse_graph`, or LIMIT_EXCEEDED
                if the parsed graph would take too much memory.
        """
        return cls._from(definition, bounds or NodeLimits())

    @classmethod
    def from_stored(cls, name: str, definition: rule_pb2.RuleDefinition) -> RuleContent:
        """Parses a definition that `to_definition` wrote; without expression and graph, `name` is code of the engine.

        Graphs are not checked again. Params may have names of functions that were added to the language later.

        Raises:
            GradruleError: INVALID_RULE, if the engine has no code for the rule.
        """
        if definition.WhichOneof("form") is None and _is_code(name):
            return cls(code=name, params=_read_params(definition, names_are_new=False))
        return cls._from(definition, None)

    @classmethod
    def _from(cls, definition: rule_pb2.RuleDefinition, bounds: NodeLimits | None) -> RuleContent:
        """Parses a definition. `bounds`: the limits for a new rule; None: the definition was stored before."""
        params = _read_params(definition, names_are_new=bounds is not None)
        gradient = _read_gradient(definition, bounds)
        match definition.WhichOneof("form"):
            case "expression":
                return cls(expression=definition.expression, params=params, gradient=gradient, checked=bounds is None)
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
        """Returns the message that `from_definition` reads, or, for code, a message for `from_stored`."""
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
        """SHA-256 (hex) of form, names of params, and gradient. Default values and ranges do not count."""
        if self.graph_bytes is not None:
            form = [b"graph", self.graph_bytes]
        elif self.code is not None:
            form = [b"code", self.code.encode()]
        else:
            form = [b"expression", (self.expression or "").strip().encode()]
        parts = [_DIGEST_VERSION, *form, *(param.name.encode() for param in self.params)]
        if self.gradient is not None:
            # No param can have this name, so it separates the gradient from the params.
            parts += [b"gradient of it", self.gradient.digest.encode()]
        hashed = hashlib.sha256()
        for part in parts:
            # Prefix each part with its length, so that different lists of parts have different hashes.
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()

    @property
    def per_sample(self) -> bool | None:
        """Whether gradients of examples along axis 0 never depend on other examples; None: unknown (graphs, code)."""
        return None if self.formula is None else self.formula.per_sample

    @property
    def uses_default(self) -> bool:
        """Whether the rule has the op's own gradient as a variable. Code computes that gradient itself if needed."""
        if self.formula is not None:
            return self.formula.uses_default
        return self._graph is not None and any(variable.startswith("default") for variable in self._graph.variables)

    def check_nodes(self, bounds: NodeLimits) -> list[Finding]:
        """Returns OP_NOT_ALLOWED, LIMIT_EXCEEDED and INVALID_TENSOR for nodes of the rule's graph that may not run."""
        # Embedded graphs are checked with the program's graph.
        found = [] if self._graph is None or self.embedded else check_nodes(self._graph, bounds)
        return found if self.gradient is None else [*found, *self.gradient.check_nodes(bounds)]

    @property
    def size(self) -> int:
        """A lower bound for the number of nodes that each use of the rule adds; 1 for expressions and code."""
        own = 1 if self._graph is None else len(self._graph.graph.node)
        return own if self.gradient is None else own + self.gradient.size

    def bind(self, signature: Signature) -> RuleGraph:
        """Returns the rule as a graph for an op of these types. Raises RULE_ARITY, RULE_NOT_APPLICABLE, RULE_OUTPUT."""
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
            problem = f"{entry.name!r} is a function of the language; use {entry.name + '_'!r}, for example"
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
    """Returns whether a param has the name of a function; only catalogue rules may have one (`clip` of ste_sign)."""
    if not is_function(param):
        return False
    # Import late: the catalogue imports this module.
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
    if source.format not in (rule_pb2.GRAPH_FORMAT_UNSPECIFIED, rule_pb2.GRAPH_FORMAT_GRAPH_DEF):
        raise error(
            errors_pb2.ERROR_REASON_UNSUPPORTED, "a rule's graph must be a GraphDef", field="definition.graph.format"
        )
    match source.WhichOneof("source"):
        case "blob_sha256":
            raise error(
                errors_pb2.ERROR_REASON_UNSUPPORTED,
                "a rule's graph must be part of the rule, not a blob",
                field="definition.graph",
            )
        case "serialized":
            # The size of an inline graph was checked with the request that holds it.
            if bounds is not None:
                check_parsed_size(source.serialized, graph_pb2.Graph, bounds, field="graph")
            return source.serialized
        case "inline_graph":
            return source.inline_graph.SerializeToString(deterministic=True)
        case _:
            raise error(errors_pb2.ERROR_REASON_INVALID_RULE, "the rule's graph is empty", field="definition.graph")
