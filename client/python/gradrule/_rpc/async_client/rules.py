"""Implements the methods of the client that register, list, delete and sample rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.rules import Params, Rule
from gradrule._messages import rpc_calls
from gradrule._messages.sample_requests import sample_request
from gradrule._results import rule_infos
from gradrule._rpc.async_client.base import AsyncClientBase
from gradrule.errors import InvalidRuleError
from gradrule.v1 import rule_pb2

_KINDS = {"op": rule_pb2.RULE_KIND_OP, "builtin": rule_pb2.RULE_KIND_BUILTIN, "user": rule_pb2.RULE_KIND_USER}


class AsyncRuleMethods(AsyncClientBase):
    """Implements the client's methods for rules and presets."""

    async def create_rule(
        self,
        name: str,
        expression: str | None = None,
        *,
        graph: GraphLike | None = None,
        params: Params | Iterable[str] | None = None,
        gradient: Rule | None = None,
        description: str = "",
        replace: bool = False,
        timeout: float | None = None,
    ) -> rule_infos.RuleInfo:
        """Registers a rule: an expression over `x, y, dy, default` and params, or a graph.

        Args:
            name: Name of the rule. Equal content under the same name returns the rule that exists.
            expression: The gradient by x, for example `"where(abs(x) <= 1, dy, 0)"`.
            graph: A graph that computes the gradient, instead of an expression.
            params: Default values by name, None for a param that each use must give a value; or only names.
            gradient: The rule for the gradient of this rule, see `Rule`.
            description: Text for readers.
            replace: Replace your rule of this name if it has other content; programs compiled with it keep it.
            timeout: Seconds; default: that of `connect`.

        Returns:
            The rule as the server holds it.

        Raises:
            InvalidExpressionError: The expression cannot be read.
            InvalidRuleError: The rule is not valid.
            RuleExistsError: The name belongs to a rule with other content, and `replace` is not set.
        """
        definition = Rule(expression, graph=graph, params=params, gradient=gradient).definition()
        rule = rule_pb2.Rule(name=rpc_calls.full_name("rules", name), definition=definition, description=description)
        return await self._unary(
            "RuleService/CreateRule",
            rule_pb2.CreateRuleRequest(rule=rule, replace=replace),
            rule_pb2.CreateRuleResponse,
            lambda response: rule_infos.rule_info(response.rule),
            timeout,
        )

    async def get_rule(self, name: str, *, timeout: float | None = None) -> rule_infos.RuleInfo:
        """Returns the rule with a name.

        Args:
            name: Name of the rule.
            timeout: Seconds; default: that of `connect`.

        Raises:
            UnknownRuleError: There is no rule with this name.
        """
        return await self._unary(
            "RuleService/GetRule",
            rule_pb2.GetRuleRequest(name=name),
            rule_pb2.GetRuleResponse,
            lambda response: rule_infos.rule_info(response.rule),
            timeout,
        )

    async def list_rules(
        self, kind: rule_infos.RuleKind | None = None, *, timeout: float | None = None
    ) -> list[rule_infos.RuleInfo]:
        """Lists rules.

        Args:
            kind: `"user"`, `"builtin"` or `"op"`; None: all kinds.
            timeout: Seconds for each page; default: that of `connect`.

        Raises:
            InvalidRuleError: There is no such kind.
        """
        if kind is not None and kind not in _KINDS:
            raise InvalidRuleError(f"a kind of rules is 'op', 'builtin' or 'user', not {kind!r}")
        request = rule_pb2.ListRulesRequest(page_size=rpc_calls.PAGE_SIZE)
        if kind is not None:
            request.kind = _KINDS[kind]
        rules: list[rule_infos.RuleInfo] = []
        while True:
            page, request.page_token = await self._unary(
                "RuleService/ListRules",
                request,
                rule_pb2.ListRulesResponse,
                lambda response: ([rule_infos.rule_info(rule) for rule in response.rules], response.next_page_token),
                timeout,
            )
            rules += page
            if not request.page_token:
                return rules

    async def delete_rule(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes a user's rule. Programs that were compiled with it keep it.

        Args:
            name: Name of the rule.
            timeout: Seconds; default: that of `connect`.

        Raises:
            UnknownRuleError: There is no rule with this name.
            RuleReadOnlyError: The rule is builtin or belongs to an op.
        """
        request = rule_pb2.DeleteRuleRequest(name=name)
        await self._unary("RuleService/DeleteRule", request, rule_pb2.DeleteRuleResponse, lambda _: None, timeout)

    async def list_presets(self, *, timeout: float | None = None) -> list[rule_infos.PresetInfo]:
        """Lists presets: named lists of overrides, for `gr.Preset`.

        Args:
            timeout: Seconds; default: that of `connect`.
        """
        return await self._unary(
            "RuleService/ListPresets",
            rule_pb2.ListPresetsRequest(),
            rule_pb2.ListPresetsResponse,
            lambda response: list(map(rule_infos.preset_info, response.presets)),
            timeout,
        )

    async def sample_rule(
        self,
        rule: str | Rule,
        *,
        x: Any = None,
        y: Any = None,
        dy: Any = None,
        params: Params | None = None,
        op_type: str | None = None,
        attrs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> rule_infos.SampleResult:
        """Runs a rule on values, without a graph.

        Lists of numbers become float32, except for inputs that the op takes as integers only; arrays keep their dtype.

        Args:
            rule: Name of a rule, a formula such as `"dy * x"`, or a `Rule`.
            x: Value of the first input, of any shape.
            y: Value of the first output; default: computed by `op_type`.
            dy: Upstream gradient, of y's shape; default: ones.
            params: Values of params by name; default: the rule's.
            op_type: The op whose gradient the rule replaces.
            attrs: Attributes of the op that do not follow from its inputs.
            timeout: Seconds; default: that of `connect`.
            **more: Values of further variables: `x1`, `y1`, `dy1`, `default`, ….

        Returns:
            The gradient by each input.

        Raises:
            UnknownRuleError: There is no rule with this name.
            InvalidTensorError: A value is not an array of numbers.
        """
        values = {"x": x, "y": y, "dy": dy, **more}
        request = sample_request(rule, values, params, op_type, attrs)
        return await self._unary(
            "RuleService/SampleRule", request, rule_pb2.SampleRuleResponse, rule_infos.sample_result, timeout
        )
