"""The rules that ship with the server, one file per family."""

from gradrule_server.rules.catalogue import attribution, flow, lrp, quantisers, stable, straight_through, surrogate
from gradrule_server.rules.catalogue.table import BuiltinRule as BuiltinRule
from gradrule_server.rules.catalogue.table import Catalogue as Catalogue

BUILTINS = Catalogue(
    [
        ("straight_through", (*straight_through.RULES, *quantisers.RULES)),
        ("surrogate", surrogate.RULES),
        ("attribution", (*attribution.RULES, *lrp.RULES)),
        ("flow", flow.RULES),
        ("stable", stable.RULES),
    ]
)
