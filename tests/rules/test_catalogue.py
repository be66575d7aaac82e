"""The catalogue as a table: names, params, required metadata, and a case for every rule."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from gradrule.common import op_definitions
from gradrule_server.engine.code_rules import CODE_RULES
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs.selectors import GROUPS
from gradrule_server.rules import Param, RuleContent, Signature
from gradrule_server.rules.catalogue import BUILTINS, BuiltinRule, Catalogue
from tests.rules.code_cases import CODE_CASES
from tests.rules.expression_cases import CASES
from tests.unit.rules.running import number_of

# Family → one line per rule: name, aliases, then params with their defaults (`seed=` has none).
PROMISED: Mapping[str, str] = {
    "straight_through": """
        ste straight_through
        ste_sign ste_tern ste_heaviside clip=1
        approx_sign
        swish_sign beta=5
        magnitude_aware_sign clip=1
        dorefa_activation
        sign_clip_gradient c=1
        ede k=1 t=1
        reste o=3 t=1.5 m=.1
        ewgs delta=1e-3
        clamp_window lo= hi=
        abs_binary_sign
        log_tailed_relu alpha=0
        lower_bound
        upper_bound
        passthrough_sigmoid
        dorefa_weight
        dorefa_gradient bits=6 seed=
        pact
        lsq qn= qp=
        fake_quant num_bits=8 narrow_range=0
        argmax_softmax tau=1
        gumbel_softmax tau=1 seed=
    """,
    "surrogate": """
        fast_sigmoid superspike slope=25
        superspike_unit alpha=1
        soft_sign alpha=2
        atan alpha=2
        sigmoid_surrogate slope=25
        tanh_surrogate alpha=1
        erf alpha=2
        heavi_erfc k=.5
        circ alpha=.5
        triangle gamma=.3
        piecewise_quadratic alpha=1
        piecewise_exp alpha=1
        boxcar rect alpha=1
        gaussian lens=.5 gamma=.5
        multi_gaussian lens=.5 h=.15 s=6 gamma=.5
        slayer alpha=5 gamma=1
        piecewise_leaky_relu w=1 c=.01
        leaky_k_relu leak=0 k=1
        leaky_spike_operator slope=.1
        stochastic_spike_operator mean=0 var=.2 seed=
        spike_rate_escape beta=1 slope=25
        sparse_fast_sigmoid slope=25 band=1 mode=0
        heaviside_gradient
        s2nn alpha=4 beta=1
        q_pseudo_spike q=2
        nonzero_sign_log_abs alpha=1
        squarewave_fourier n=2 period=8
        multi_level levels=
    """,
    "attribution": """
        guided_relu guided_backprop
        deconvnet
        relu_beta_smooth beta=10
        linearize
        elrp_activation eps=1e-4
        redirected_relu step= warmup=16
        redirected_relu6 step= warmup=16
        maxpool_as_avgpool
        maxpool_smooth eps=.01
        rectgrad q=98
        deeplift_rescale baseline=0 eps=1e-5
        lrp_epsilon eps=1e-6
        lrp_0
        lrp_zplus eps=1e-6
        lrp_alpha_beta alpha=2 beta=1 eps=1e-6
        lrp_gamma gamma=.25 eps=1e-6
        lrp_zbox low= high= eps=1e-6
        lrp_wsquare eps=1e-6
        lrp_flat eps=1e-6
        lrp_norm eps=1e-6
        lrp_pass
    """,
    "flow": """
        gradient_reversal scale=1
        gradient_scale factor=
        gradient_clip low=-1 high=1
        gradient_clip_norm norm=1
        gradient_zero
        gradient_mask mask=
        gradient_sign
        gradient_normalize eps=1e-6
        gradient_noise eta=.3 step= seed=
        nan_to_zero
        tanh_agree
        feedback_alignment seed=0
    """,
    "stable": """
        log1pexp
        safe_sqrt
        safe_norm
        safe_log eps=1e-7
        safe_div
        eigh_lorentzian eps=1e-12
    """,
}


def line_of(rule: BuiltinRule) -> str:
    """Returns the rule as a line of the table, with numbers as floats."""
    params = [f"{param.name}={'' if param.default is None else float(param.default)}" for param in rule.params]
    return " ".join([rule.name, *rule.aliases, *params])


def with_floats(line: str) -> str:
    words = [word.partition("=") for word in line.split()]
    return " ".join(f"{name}{sign}{float(value) if value else ''}" for name, sign, value in words)


@pytest.mark.parametrize("family", PROMISED)
def test_catalogue_has_all_listed_rules(family: str) -> None:
    lines = [line_of(rule) for rule in BUILTINS if BUILTINS.family_of(rule) == family]
    promised = [with_floats(line) for line in PROMISED[family].split("\n") if line.strip()]
    assert [line for line in lines if line in promised] == promised


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in BUILTINS if not rule.code] == list(CASES)
    code = {rule.name for rule in BUILTINS if rule.code}
    assert code == CODE_CASES
    assert code == set(CODE_RULES)


LINE_OF_CODE = r"\.(py|h):\d+"


@pytest.mark.parametrize("rule", list(BUILTINS), ids=lambda rule: rule.name)
def test_every_rule_has_all_metadata(rule: BuiltinRule) -> None:
    assert rule.description.endswith(".")
    assert re.search(rf"{LINE_OF_CODE}|arXiv:|doi:|own choice", rule.reference)
    if any(param.default is not None for param in rule.params):
        assert re.search(rf"{LINE_OF_CODE}|own choice|as the op's|one of the paper's", rule.reference)
    assert rule.formula
    assert all(param.description for param in rule.params)
    for word in rule.op_types:
        assert word in GROUPS or op_definitions.find(word) is not None, word
    if rule.code:
        assert all(
            param.name in rule.formula or (param.name == "eps" and "st(" in rule.formula) for param in rule.params
        )
        return
    assert rule.formula == rule.expression
    assert rule.content.formula is not None
    assert {param.name for param in rule.params} == rule.content.formula.params_used
    assert set(CASES[rule.name].other) == {param.name for param in rule.params}
    assert (CASES[rule.name].true is not None) == rule.true_gradient
    # A default seed or step would silently stay the same in every call.
    assert all(param.default is None for param in rule.params if param.name in ("seed", "step"))


@pytest.mark.parametrize("rule", list(BUILTINS), ids=lambda rule: rule.name)
def test_rule_round_trip(rule: BuiltinRule) -> None:
    definition = rule.content.to_definition()
    content = RuleContent.from_stored(rule.name, definition)
    assert content.digest == rule.content.digest
    assert content.code == rule.content.code
    assert content.to_definition() == definition
    if rule.code:
        with pytest.raises(GradruleError, match="neither an expression nor a graph"):
            RuleContent.from_definition(definition)
    else:
        assert RuleContent.from_definition(definition).digest == rule.content.digest


def test_digests_are_distinct() -> None:
    alike: dict[str, list[str]] = {}
    for rule in BUILTINS:
        alike.setdefault(rule.content.digest, []).append(rule.name)
    # Rules with one formula and several common names.
    assert [names for names in alike.values() if len(names) > 1] == [
        ["ste", "lrp_pass"],
        ["passthrough_sigmoid", "linearize"],
    ]


def test_names_and_aliases_find_their_rule() -> None:
    assert BUILTINS["superspike"] is BUILTINS["fast_sigmoid"]
    assert BUILTINS["straight_through"].name == "ste"
    assert "guided_backprop" in BUILTINS
    assert BUILTINS.family_of(BUILTINS["log1pexp"]) == "stable"
    with pytest.raises(KeyError, match="Did you mean 'ste_sign'"):
        BUILTINS["ste_sgn"]


@pytest.mark.parametrize("taken", ["one", "uno"])
def test_duplicate_name_is_refused(taken: str) -> None:
    first = BuiltinRule("one", "dy", ".", ".", aliases=("uno",))
    second = BuiltinRule("two", "dy", ".", ".", aliases=(taken,))
    with pytest.raises(ValueError, match=rf"'{taken}' of the rule 'two' \(late\) is taken by the rule 'one' \(early\)"):
        Catalogue([("early", [first]), ("late", [second])])


def test_invalid_row_is_refused() -> None:
    with pytest.raises(GradruleError, match="unknown name 'alpha'"):
        BuiltinRule("one", "alpha * dy", ".", ".")
    with pytest.raises(ValueError, match="'one' is code and lacks a formula"):
        BuiltinRule("one", None, ".", ".")
    with pytest.raises(ValueError, match="outside its range"):
        Param("alpha", 0.0, "steepness", "> 0")


def test_code_rule_needs_an_op() -> None:
    number = number_of("float32")
    with pytest.raises(GradruleError, match="'lrp_epsilon' is part of the server's code and needs an op") as caught:
        BUILTINS["lrp_epsilon"].content.bind(Signature((number, number), (number,)))
    assert reason_name(caught.value.reason) == "RULE_NOT_APPLICABLE"


def test_rule_for_one_input_refuses_ops_with_more() -> None:
    number = number_of("float32")
    with pytest.raises(GradruleError) as caught:
        BUILTINS["gradient_reversal"].content.bind(Signature((number, number), (number,)))
    assert reason_name(caught.value.reason) == "RULE_ARITY"
