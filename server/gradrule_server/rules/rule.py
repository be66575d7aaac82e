"""What a rule is: a formula or a graph with its params, checked once, bound to ops as often as needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.rules.graph_rule import GraphForm, bind_graph, read_graph
from gradrule_server.rules.language import Formula, lower, parse
from gradrule_server.rules.language.names import is_function, param_name_problem
from gradrule_server.rules.params import Param, ParamNumber, read_param_value, write_param_value
from gradrule_server.rules.signature import RuleGraph, Signature

_DIGEST_VERSION = b"gradrule.rule.v1"


@dataclass(frozen=True, eq=False)
class RuleContent:
    """A rule's content: an expression, or a graph's bytes, and params. Making one checks it: INVALID_EXPRESSION, …"""

    expression: str | None = None
    graph_bytes: bytes | None = None
    params: tuple[Param, ...] = ()
    formula: Formula | None = field(init=False, repr=False)
    _graph: GraphForm | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = [param.name for param in self.params]
        formula = None if self.expression is None else parse(self.expression, names)
        graph = None if self.graph_bytes is None else read_graph(self.graph_bytes, names)
        if (formula is None) == (graph is None):
            raise error(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                "a rule is either an expression or a graph, and this is neither or both",
            )
        object.__setattr__(self, "formula", formula)
        object.__setattr__(self, "_graph", graph)

    @classmethod
    def from_definition(cls, definition: rule_pb2.RuleDefinition) -> RuleContent:
        """The content that a message says. INVALID_RULE, INVALID_EXPRESSION, INVALID_PARAM, or as `read_graph`."""
        params = _read_params(definition)
        match definition.WhichOneof("form"):
            case "expression":
                return cls(expression=definition.expression, params=params)
            case "graph":
                return cls(graph_bytes=_graph_bytes(definition.graph), params=params)
            case _:
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_RULE,
                    "the rule has neither an expression nor a graph",
                    field="definition",
                )

    def to_definition(self) -> rule_pb2.RuleDefinition:
        """The message that `from_definition` reads."""
        definition = rule_pb2.RuleDefinition()
        if self.expression is not None:
            definition.expression = self.expression
        if self.graph_bytes is not None:
            definition.graph.serialized = self.graph_bytes
        for param in self.params:
            entry = definition.params.add(name=param.name, description=param.description)
            if param.default is not None:
                entry.default_value.CopyFrom(write_param_value(param.default))
        return definition

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the form and the params' names; their default values do not count."""
        if self.graph_bytes is not None:
            form = [b"graph", self.graph_bytes]
        else:
            form = [b"expression", (self.expression or "").strip().encode()]
        parts = [_DIGEST_VERSION, *form, *(param.name.encode() for param in self.params)]
        hashed = hashlib.sha256()
        for part in parts:
            # With its length in front no part can run into the next.
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()

    @property
    def per_sample(self) -> bool | None:
        """True if no example along axis 0 changes another's gradient; None for graphs, where it is not known."""
        return None if self.formula is None else self.formula.per_sample

    @property
    def uses_default(self) -> bool:
        """True if the rule needs the op's own gradient."""
        if self.formula is not None:
            return self.formula.uses_default
        return self._graph is not None and any(variable.startswith("default") for variable in self._graph.variables)

    def bind(self, signature: Signature) -> RuleGraph:
        """The rule as a graph for an op of these types; RULE_ARITY, RULE_NOT_APPLICABLE, RULE_OUTPUT if it is none."""
        if self._graph is not None:
            return bind_graph(self._graph, signature)
        assert self.formula is not None
        return lower(self.formula, signature)


def graph_rule(definition: rule_pb2.RuleDefinition, signature: Signature) -> RuleGraph:
    """A rule given as a graph, for an op of these element types."""
    return RuleContent.from_definition(definition).bind(signature)


def _read_params(definition: rule_pb2.RuleDefinition) -> tuple[Param, ...]:
    findings: list[Finding] = []
    params: list[Param] = []
    seen: set[str] = set()
    for index, entry in enumerate(definition.params):
        where = f"params[{index}]"
        problem = param_name_problem(entry.name)
        if problem is None and entry.name in seen:
            problem = f"param {entry.name!r} is declared twice"
        if problem is None and is_function(entry.name) and not _is_of_catalogue(definition, entry.name):
            problem = f"{entry.name!r} is a function of the language; {entry.name + '_'!r} would do"
        if problem is not None:
            findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_RULE, problem, field=f"{where}.name"))
        seen.add(entry.name)
        default: ParamNumber | None = None
        if entry.HasField("default_value"):
            default = read_param_value(entry.default_value, entry.name, f"{where}.default_value")
        params.append(Param(entry.name, default, entry.description))
    if findings:
        raise GradruleError(findings)
    return tuple(params)


def _is_of_catalogue(definition: rule_pb2.RuleDefinition, param: str) -> bool:
    """True for a rule of the catalogue: `clip` of ste_sign, `norm` of gradient_clip_norm have the names people know."""
    # The catalogue is made of RuleContents, so it can be imported only once this module is.
    from gradrule_server.rules.catalogue import BUILTINS

    return any(
        builtin.expression == definition.expression and any(own.name == param for own in builtin.params)
        for builtin in BUILTINS
    )


def _graph_bytes(source: rule_pb2.GraphSource) -> bytes:
    match source.WhichOneof("source"):
        case "serialized":
            return source.serialized
        case "inline":
            return source.inline.SerializeToString(deterministic=True)
        case _:
            raise error(errors_pb2.ERROR_REASON_INVALID_RULE, "the rule's graph is empty", field="definition.graph")
