"""Binds elementwise rules for use in this process, without a server.

The expression language and the catalogue are the server's, in the same distribution; they need no package that the
client does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradrule._bridges.rule_graphs import OPS, Library, run_rule_graph
from gradrule._builder.rules import Params, Rule, RuleLike, named_or_rule
from gradrule.common.dtypes import NUMBERS
from gradrule.errors import (
    GradruleError,
    InvalidOverrideError,
    InvalidParamError,
    MissingParamError,
    UnknownParamError,
    UnknownRuleError,
    UnsupportedError,
    error_for_reason,
)
from gradrule_server import errors as server_errors
from gradrule_server.rules import Param, RuleContent, RuleGraph, Signature, salt_for
from gradrule_server.rules.catalogue import BUILTINS

_COMPUTED_IN = {"float16": "float32", "bfloat16": "float32"}


class LocalRule:
    """A rule for ops with one input and one output of the same type, with values of its params.

    Args:
        rule: The name of a rule of the catalogue, a formula, or a `gr.Rule`.
        params: Values of its params: numbers, or arrays or tensors that broadcast against x.

    Raises:
        UnknownRuleError: The catalogue has no such rule. Rules of users are known to servers only.
        UnsupportedError: The rule is code of the engine, or its graph has an op that only TensorFlow has.
        UnknownParamError: The rule has no such param.
        MissingParamError: A param without a default has no value.
        InvalidParamError: A value is outside the param's range.
        GradruleError: The formula is invalid, as in `client.create_rule`.
    """

    def __init__(self, rule: RuleLike, params: Params) -> None:
        chosen = named_or_rule(rule)
        self.name = chosen if isinstance(chosen, str) else repr(chosen)
        self._content = _content(chosen, params)
        values = _checked(self.name, self._content.params, params)
        self._params = {f"param/{name}": value for name, value in values.items()}
        self._bound: dict[str, RuleGraph] = {}

    @property
    def uses_default(self) -> bool:
        """Whether the rule has the op's own gradient as a variable."""
        return self._content.uses_default

    def uses(self, variable: str, dtype: str) -> bool:
        """Returns whether the rule has a variable, such as `y0`; False if the rule does not fit the type."""
        try:
            return variable in self._bound_for(_COMPUTED_IN.get(dtype, dtype)).inputs
        except GradruleError:
            return False

    def _bound_for(self, dtype: str) -> RuleGraph:
        bound = self._bound.get(dtype)
        if bound is None:
            bound = self._bound[dtype] = self._bind(dtype)
        return bound

    def gradient(self, library: Library, dtype: str, values: Mapping[str, Any], node: str | None = None) -> Any:
        """Returns the gradient of the input, of the type and shape of `x0`. 16-bit types are computed in float32.

        Args:
            library: The array library of the values.
            dtype: Name of their element type.
            values: Arrays by variable: `x0`, `dy0` and, if the rule uses them, `y0` and `default0`.
            node: The name of the op; random rules draw other numbers for each.

        Raises:
            GradruleError: The rule does not fit an op with one input, or not this type.
        """
        wide = _COMPUTED_IN.get(dtype, dtype)
        bound = self._bound_for(wide)
        given = values if wide == dtype else {name: library.cast(value, wide) for name, value in values.items()}
        salt = np.int64(0 if node is None else salt_for(node))
        given = {**given, **self._params, "salt": salt}
        (found,) = run_rule_graph(library, bound.graph, bound.results, bound.inputs, given)
        x = values["x0"]
        if tuple(found.shape) != tuple(x.shape):
            if found.shape:
                raise error_for_reason(
                    "RULE_OUTPUT", f"the rule {self.name} gives shape {tuple(found.shape)} for {tuple(x.shape)}"
                )
            # A gradient of rank 0 is broadcast, as on the server.
            found = found + library.cast(library.function("zeros_like")(x), wide)
        return found if wide == dtype else library.cast(found, dtype)

    def _bind(self, dtype: str) -> RuleGraph:
        if dtype not in NUMBERS:
            raise UnsupportedError(f"the rule {self.name} does not take {dtype}")
        number = NUMBERS[dtype]
        try:
            bound = self._content.bind(Signature((number,), (number,)))
        except server_errors.GradruleError as cause:
            raise _as_client_error(cause) from None
        if bound.results[0] is None:
            raise InvalidOverrideError(f"the rule {self.name} gives no gradient")
        known = {*OPS, "Placeholder", "Const"}
        for node in bound.graph.node:
            if node.op not in known:
                raise UnsupportedError(f"the rule {self.name} has the op {node.op}, which runs on a server only")
        return bound


def params_of(name: str, params: Params) -> dict[str, Any]:
    """Returns the values of the params of a rule of the catalogue, with its defaults.

    Raises:
        UnknownParamError, MissingParamError, InvalidParamError: As `LocalRule`.
    """
    values = _checked(name, BUILTINS[name].params, params)
    return {param: float(value) if np.ndim(value) == 0 else value for param, value in values.items()}


def _checked(rule: str, declared: Sequence[Param], params: Params) -> dict[str, Any]:
    known = [param.name for param in declared]
    for name in params:
        if name not in known:
            raise UnknownParamError(f"the rule {rule} has no param {name!r}. Params: {', '.join(known) or 'none'}")
    values = {}
    for param in declared:
        value = params.get(param.name, param.default)
        if value is None:
            raise MissingParamError(f"the rule {rule} needs the param {param.name!r}: it has no default")
        is_tensor = hasattr(value, "detach")
        # Params get no gradient.
        value = value.detach() if is_tensor else value
        try:
            numbers = np.asarray(value.cpu() if is_tensor else value, np.float64)
        except (TypeError, ValueError):
            raise InvalidParamError(
                f"the param {param.name!r} of the rule {rule} is a number or an array of numbers, not {value!r}"
            ) from None
        outside = param.problem(numbers if numbers.shape else float(numbers))
        if outside is not None:
            raise InvalidParamError(outside)
        value = value if is_tensor else numbers
        values[param.name] = value
    return values


def _content(rule: RuleLike, params: Params) -> RuleContent:
    if isinstance(rule, Rule):
        try:
            return RuleContent.from_definition(rule.definition(params))
        except server_errors.GradruleError as cause:
            raise _as_client_error(cause) from None
    name = rule.removeprefix("builtin/")
    if name not in BUILTINS:
        hint = server_errors.did_you_mean(name, [known.name for known in BUILTINS])
        raise UnknownRuleError(
            f"the catalogue has no rule {name!r}.{hint} Rules of users are known to servers only; a formula is "
            f"gr.Rule({name!r})"
        )
    content = BUILTINS[name].content
    if content.code is not None:
        raise UnsupportedError(f"the rule {name!r} is no formula: it needs the op's weights, and runs on a server only")
    return content


def _as_client_error(cause: server_errors.GradruleError) -> GradruleError:
    return error_for_reason(server_errors.reason_name(cause.reason), cause.message)
