"""Computes the gradients of a checked rule and its forward function, for any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.cli.rules.sites import NoSiteError, Site
from gradrule.cli.values import EXPRESSION
from gradrule.common.tensor_codec import Array
from gradrule.errors import MissingFeedError

if TYPE_CHECKING:
    from gradrule import Client


@dataclass(frozen=True)
class Subject:
    """Holds a rule and its site. of: an op type or `expr:FORMULA` to compare the rule with, or None."""

    client: Client
    rule: RuleInfo | Rule
    site: Site
    params: Mapping[str, Any]
    of: str | None = None

    @property
    def op_type(self) -> str | None:
        """Returns the rule's op; None for a formula, whose values are the rule's `y`."""
        return None if self._formula is not None else self.site.op_type

    @property
    def has_forward(self) -> bool:
        """Returns whether the forward function is known."""
        return self._formula is not None or self.site.op_type is not None or self.site.is_step

    @property
    def forward_name(self) -> str:
        """Returns the text of the forward function."""
        return self._formula or self.site.forward

    @property
    def _formula(self) -> str | None:
        return self.of.removeprefix(EXPRESSION) if self.of is not None and self.of.startswith(EXPRESSION) else None

    def gradients(
        self, x: Array, dy: Array | None = None, others: Mapping[str, Any] | None = None
    ) -> list[Array | None]:
        """Returns one gradient per input."""
        y = self.forward(x) if self.op_type is None and self.has_forward else None
        try:
            sampled = self.client.sample_rule(
                self.rule.name if isinstance(self.rule, RuleInfo) else self.rule,
                x=x,
                y=y,
                dy=dy,
                params=dict(self.params) or None,
                op_type=self.op_type,
                **self._further(x, others),
            )
        except MissingFeedError as refusal:
            raise NoSiteError(f"{refusal.message} (an op with --op-type or --of, further inputs with --feed)") from None
        return list(sampled.gradients.values())

    def gradient(self, x: Array, dy: Array | None = None) -> Array:
        """Returns the gradient of the first input; zeros if it has none."""
        found = self.gradients(x, dy)[0]
        return np.zeros_like(x) if found is None else found

    def forward(self, x: Array, others: Mapping[str, Any] | None = None) -> Array:
        """Computes the forward function: the op, the step or the formula."""
        import gradrule as gr

        further = self._further(x, others)
        if self._formula is not None:
            # The formula runs as a rule, whose gradient is the value.
            rule = gr.Rule(f"({self._formula}) + 0 * dy")
            value = self.client.sample_rule(rule, x=x, **further).gradients["dx"]
            assert value is not None
            return value
        if self.site.is_step:
            return (x > 0).astype(x.dtype)
        assert self.site.op_type is not None
        graph = gr.Graph()
        feeds: dict[Any, Any] = {"x": x, **further}
        handles = [graph.placeholder(name, value.dtype, value.shape) for name, value in feeds.items()]
        outputs = graph.op(self.site.op_type, *handles, name="forward", **self.site.attrs)
        first = outputs if not isinstance(outputs, tuple) else outputs[0]
        return self.client.evaluate(graph, feeds, fetches=[first]).outputs[first]

    def _further(self, x: Array, others: Mapping[str, Any] | None) -> dict[str, Any]:
        return {name: np.asarray(value, x.dtype) for name, value in (others or self.site.inputs).items()}
