"""Lists the rules that are part of the server, one file for each family."""

from gradrule_server.rules.catalogue import attribution, flow, lrp, quantisers, stable, straight_through, surrogate
from gradrule_server.rules.catalogue.builtin_rules import BuiltinRule as BuiltinRule
from gradrule_server.rules.catalogue.builtin_rules import Catalogue as Catalogue

BUILTINS = Catalogue(
    [
        ("straight_through", (*straight_through.RULES, *quantisers.RULES)),
        ("surrogate", surrogate.RULES),
        ("attribution", (*attribution.RULES, *lrp.RULES)),
        ("flow", flow.RULES),
        ("stable", stable.RULES),
    ]
)
