"""Lists the rules that are part of the server, by family."""

from gradrule_server.rules.catalogue import attribution, flow, straight_through, surrogate
from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule as BuiltinRule
from gradrule_server.rules.catalogue.builtin_rules import Catalogue as Catalogue
from gradrule_server.rules.rule import RuleContent

BUILTINS = Catalogue(
    [
        ("straight_through", straight_through.RULES),
        ("surrogate", surrogate.RULES),
        ("attribution", attribution.RULES),
        ("flow", flow.RULES),
        ("stable", flow.STABLE_RULES),
    ]
)


def per_sample(content: RuleContent) -> bool | None:
    """Returns whether the gradient of an example never depends on other examples; None: unknown."""
    return BUILTINS[content.code].per_sample if content.code is not None else content.per_sample
