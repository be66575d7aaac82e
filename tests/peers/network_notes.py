"""Says why relevances of whole networks differ from zennit's, by network, preset, and whether norms are folded."""

from __future__ import annotations

from collections.abc import Mapping

_FIRST = (
    "zennit's first layer is one module, the query's projection; gradrule's are all linear layers that the input "
    "reaches first: the projections of query, key and value"
)

EXPLANATIONS: Mapping[tuple[str, str, bool], str] = {
    ("BERT", "epsilon_plus_flat", False): _FIRST,
    ("BERT", "epsilon_alpha2_beta1_flat", False): _FIRST,
}
