from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import errors_pb2, graph_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.quotas import Quota
from gradrule_server.registry.backup import RegistryPlace, check
from gradrule_server.registry.rule_entries import ReadOnlyRules, rule_message
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from gradrule_server.rules.catalogue import BUILTINS, BuiltinRule
from tests.unit.registry.rows import count_again, execute, is_sqlite, kept_bytes

OPS = ("Sign", "Relu", "Identity")
QUANTIZE = "where(abs(x) <= 1, dy, 0)"
STE_SIGN = next(rule for rule in BUILTINS if rule.name == "ste_sign")
ALIASED = dataclasses.replace(STE_SIGN, aliases=("hard_tanh_ste",))

USER = rule_pb2.RULE_KIND_USER
BUILTIN = rule_pb2.RULE_KIND_BUILTIN
OP = rule_pb2.RULE_KIND_OP
ANY = rule_pb2.RULE_KIND_UNSPECIFIED


def expression(text: str, **params: float | None) -> rule_pb2.RuleDefinition:
    definition = rule_pb2.RuleDefinition(expression=text)
    for name, value in params.items():
        param = definition.params.add(name=name)
        if value is not None:
            param.default_value.number = value
    return definition


def ranged(text: str, range_: str, **params: float | None) -> rule_pb2.RuleDefinition:
    definition = expression(text, **params)
    for param in definition.params:
        param.range = range_
    return definition


def test_gradient_of_a_rule_is_stored_and_part_of_its_digest(store: Store) -> None:
    definition = expression("dy * exp(x)")
    definition.gradient.CopyFrom(expression("(dy * x2, None, b * dy * y)", b=2.0))
    created = RuleRegistry(store, OPS).create("Soft", definition, "")
    kept = RuleRegistry(store, OPS)
    assert kept.create("Soft", definition, "").message.digest == created.message.digest
    told = rule_message(kept.get("Soft")).definition
    assert told.gradient.expression == "(dy * x2, None, b * dy * y)"
    assert [param.name for param in told.params] == ["b"]
    definition.ClearField("gradient")
    with pytest.raises(GradruleError) as caught:
        kept.create("Soft", definition, "")
    assert caught.value.reason == errors_pb2.ERROR_REASON_RULE_EXISTS


@pytest.fixture
def registry(store: Store) -> RuleRegistry:
    return RuleRegistry(store, ReadOnlyRules.from_op_types(OPS, (ALIASED,)))


def names_of(registry: RuleRegistry, kind: rule_pb2.RuleKind.ValueType, size: int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        entries, token = registry.list(kind, size, token)
        pages.append([entry.name for entry in entries])
        if not token:
            return pages


def test_user_rule_survives_a_restart(open_store: Callable[[], Store]) -> None:
    store = open_store()
    definition = expression("where(abs(x) <= w, dy, 0)", w=1.0)
    made = RuleRegistry(store, OPS).create("rules/QuantizeGrad", definition, "Clipped.")
    store.close()

    store = open_store()
    registry = RuleRegistry(store, OPS)
    kept = registry.get("QuantizeGrad")
    assert rule_message(kept) == rule_message(made)
    assert registry.get("rules/QuantizeGrad") is kept
    rule = rule_message(kept)
    assert rule.name == "rules/QuantizeGrad"
    assert rule.kind == USER
    assert rule.definition == definition
    assert rule.description == "Clipped."
    assert len(rule.digest) == 64
    assert rule.create_time.seconds > 1_600_000_000
    assert rule.per_sample
    store.close()


def test_per_sample_is_read_from_the_expression(registry: RuleRegistry) -> None:
    assert rule_message(registry.create("a", expression("dy / sum(x)"), "")).per_sample is False
    assert not rule_message(registry.get("Sign")).HasField("per_sample")


def test_equal_content_returns_the_existing_rule(registry: RuleRegistry) -> None:
    made = registry.create("Q", expression(QUANTIZE), "first")
    revision = registry.revision
    assert registry.create("Q", expression(QUANTIZE), "second") is made
    assert registry.revision == revision


@pytest.mark.parametrize(
    "other",
    [
        expression("a * dy", a=2.0),
        expression("a * dy", a=None),
        expression("a * dy", a=0.0),
        expression("dy * 3 * a", a=1.0),
        ranged("a * dy", "> 0", a=1.0),
    ],
)
def test_name_of_another_rule_is_refused(registry: RuleRegistry, other: rule_pb2.RuleDefinition) -> None:
    made = registry.create("Q", expression("a * dy", a=1.0), "")
    with pytest.raises(GradruleError) as refusal:
        registry.create("Q", other, "")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_RULE_EXISTS
    time = made.message.create_time.ToJsonString()
    for part in ("'Q'", "USER", "a * dy", time, "replace it (replace=True), delete it first"):
        assert part in refusal.value.message
    assert refusal.value.resource is not None
    assert refusal.value.resource.name == "rules/Q"
    assert registry.get("Q") is made


def test_user_rule_is_replaced_at_once(store: Store) -> None:
    quota, bytes_quota = Quota(1, "rules", "--tenant-rules"), Quota(10_000, "bytes", "--tenant-registry-bytes")
    registry = RuleRegistry(store, ReadOnlyRules.from_op_types(OPS, (ALIASED,)), quota=quota, bytes_quota=bytes_quota)
    registry.create("Q", expression("a * dy", a=1.0), "a long description")
    revision = registry.revision
    made = registry.create("Q", expression("2 * dy"), "", may_replace=True)
    assert registry.get("Q") is made
    assert (registry.revision, len(registry)) == (revision + 1, 1)
    assert (quota.used, bytes_quota.used) == (1, kept_bytes(store))
    assert rule_message(RuleRegistry(store, OPS).get("Q")) == rule_message(made)
    # A rule takes the bytes of the one that it replaces.
    bytes_quota.limit = bytes_quota.used
    registry.create("Q", expression("3 * dy"), "", may_replace=True)
    bytes_quota.limit = 1
    made = registry.create("Q", expression("2 * dy"), "", may_replace=True)
    assert bytes_quota.used == kept_bytes(store)
    bytes_quota.limit = 10_000
    # Equal content with another description replaces the description, otherwise nothing is written.
    assert registry.create("Q", expression("2 * dy"), "", may_replace=True) is made
    assert registry.create("Q", expression("2 * dy"), "doubles", may_replace=True).message.description == "doubles"
    for taken in ("ste_sign", "hard_tanh_ste", "Sign"):
        with pytest.raises(GradruleError) as refusal:
            registry.create(taken, expression("2 * dy"), "", may_replace=True)
        assert refusal.value.reason == errors_pb2.ERROR_REASON_RULE_EXISTS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ste_sign", ["BUILTIN rule 'ste_sign'", "choose another name"]),
        ("hard_tanh_ste", ["BUILTIN rule 'ste_sign'"]),
        ("Sign", ["OP rule 'Sign'", "TensorFlow's gradient of Sign"]),
    ],
)
def test_names_of_read_only_rules_are_refused(registry: RuleRegistry, name: str, parts: list[str]) -> None:
    with pytest.raises(GradruleError) as refusal:
        registry.create(name, STE_SIGN.content.to_definition(), "")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_RULE_EXISTS
    for part in parts:
        assert part in refusal.value.message
    with pytest.raises(GradruleError) as refusal:
        registry.delete(name)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_RULE_READ_ONLY


@pytest.mark.parametrize("name", ["a", "_", "A.b-c_9", "a" * 128, "rules/a"])
def test_valid_names_are_accepted(registry: RuleRegistry, name: str) -> None:
    assert registry.create(name, expression(QUANTIZE), "").name == name.removeprefix("rules/")


@pytest.mark.parametrize(
    "name",
    ["", "9a", "-a", ".a", "a" * 129, "a/b", "builtin/a", "a b", "a\n", "é", "default", "rules/inline"],
)
def test_invalid_names_are_refused(registry: RuleRegistry, name: str) -> None:
    with pytest.raises(GradruleError) as refusal:
        registry.create(name, expression(QUANTIZE), "")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_INVALID_RULE
    assert refusal.value.findings[0].field == "rule.name"


def test_invalid_definition_leaves_nothing(registry: RuleRegistry) -> None:
    with pytest.raises(GradruleError) as refusal:
        registry.create("Q", expression("where(abs(x) <= 1, dy"), "")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_INVALID_EXPRESSION
    with pytest.raises(GradruleError):
        registry.get("Q")


def test_builtin_rules_have_all_metadata(registry: RuleRegistry) -> None:
    for name in ("ste_sign", "builtin/ste_sign", "hard_tanh_ste", "builtin/hard_tanh_ste", "rules/builtin/ste_sign"):
        rule = rule_message(registry.get(name))
        assert rule.name == "rules/ste_sign"
    assert rule.kind == BUILTIN
    assert rule.definition == STE_SIGN.content.to_definition()
    assert rule.aliases == ["hard_tanh_ste"]
    assert rule.description
    assert rule.digest == STE_SIGN.content.digest
    assert rule.formula == STE_SIGN.expression
    assert rule.family == "straight_through"
    assert rule.per_sample
    assert not rule.true_gradient
    assert not rule.hides_builtin
    assert [param.range for param in rule.definition.params] == ["> 0"]


def test_all_builtin_rules_are_listed_with_formula_and_family(store: Store) -> None:
    registry = RuleRegistry(store, OPS)
    told = [rule_message(entry) for entry in registry.list(BUILTIN, 1000, "")[0]]
    assert len(told) == len(BUILTINS)
    for rule in told:
        row = BUILTINS[rule.name.removeprefix("rules/")]
        assert (rule.formula, rule.family) == (row.formula, BUILTINS.family_of(row))
        assert rule.true_gradient == row.true_gradient
        assert (rule.per_sample if rule.HasField("per_sample") else None) == row.per_sample
        assert rule.definition.expression == (row.expression or "")
    code = rule_message(registry.get("lrp_epsilon"))
    assert code.definition.WhichOneof("form") is None
    assert [param.name for param in code.definition.params] == ["eps"]
    assert len(code.digest) == 64
    with pytest.raises(GradruleError, match=r"BUILTIN rule 'lrp_epsilon' \(x \* vjp"):
        registry.create("lrp_epsilon", expression("dy"), "")


def test_ranges_of_user_rules_are_stored(open_store: Callable[[], Store]) -> None:
    store = open_store()
    definition = ranged("a * dy", "> 0, integer", a=2.0)
    made = RuleRegistry(store, OPS).create("Q", definition, "")
    assert rule_message(made).formula == "a * dy"
    assert rule_message(made).family == ""
    store.close()
    store = open_store()
    registry = RuleRegistry(store, OPS)
    assert rule_message(registry.get("Q")).definition == definition
    assert registry.create("Q", definition, "") is registry.get("Q")
    with pytest.raises(GradruleError, match="outside its range"):
        registry.create("R", ranged("a * dy", "> 0", a=-1.0), "")
    store.close()


def test_rules_of_an_earlier_server_are_read(open_store: Callable[[], Store]) -> None:
    """A definition without ranges, and with a param whose name has become a function's since."""
    store = open_store()
    RuleRegistry(store, OPS).create("Q", expression("2 * dy"), "")
    earlier = expression("normal * dy", normal=1.0).SerializeToString()
    execute(store, "UPDATE rules SET definition = :definition", definition=earlier)
    kept = rule_message(RuleRegistry(store, OPS).get("Q"))
    assert kept.definition == expression("normal * dy", normal=1.0)
    store.close()


def test_op_rules_follow_the_engine(registry: RuleRegistry) -> None:
    rule = rule_message(registry.get("Relu"))
    assert (rule.name, rule.kind, list(rule.op_types)) == ("rules/Relu", OP, ["Relu"])
    assert not rule.HasField("definition")
    revision = registry.revision
    registry.set_read_only(ReadOnlyRules.from_op_types(["Sign", "Floor"]))
    assert registry.revision > revision
    assert registry.get("Floor").kind == OP
    with pytest.raises(GradruleError):
        registry.get("Relu")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sign", "Did you mean 'Sign'"),
        ("ste_sing", "Did you mean 'ste_sign'"),
        ("builtin/ste_sing", "Did you mean 'ste_sign'"),
        ("rules/QuantiseGrad", "Did you mean 'QuantizeGrad'?"),
        ("builtin/Sign", "there is no rule 'builtin/Sign'"),
        ("", "there is no rule ''."),
    ],
)
def test_error_for_an_unknown_rule_suggests_similar_names(registry: RuleRegistry, name: str, hint: str) -> None:
    registry.create("QuantizeGrad", expression(QUANTIZE), "")
    for call in (registry.get, registry.delete):
        with pytest.raises(GradruleError) as refusal:
            call(name)
        assert refusal.value.reason == errors_pb2.ERROR_REASON_UNKNOWN_RULE
        assert hint in refusal.value.message


def test_deleted_rule_stays_deleted(open_store: Callable[[], Store]) -> None:
    store = open_store()
    registry = RuleRegistry(store, OPS)
    registry.create("Q", expression(QUANTIZE), "")
    revision = registry.revision
    registry.delete("rules/Q")
    assert registry.revision > revision
    with pytest.raises(GradruleError):
        registry.get("Q")
    assert registry.create("Q", expression("2 * dy"), "").name == "Q"
    registry.delete("Q")
    store.close()
    store = open_store()
    with pytest.raises(GradruleError):
        RuleRegistry(store, OPS).get("Q")
    store.close()


def test_limit_refuses_only_new_rules(store: Store) -> None:
    registry = RuleRegistry(
        store, OPS, quota=Quota(2, "rules", "--max-rules", reason=errors_pb2.ERROR_REASON_LIMIT_EXCEEDED)
    )
    registry.create("a", expression(QUANTIZE), "")
    registry.create("b", expression(QUANTIZE), "")
    with pytest.raises(GradruleError) as refusal:
        registry.create("c", expression(QUANTIZE), "")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
    registry.create("b", expression(QUANTIZE), "")
    registry.delete("a")
    registry.create("c", expression(QUANTIZE), "")


def upgraded(store: Store, builtins: Iterable[BuiltinRule], ops: Iterable[str]) -> RuleRegistry:
    """A server without built-ins and ops makes rules; one that has them starts on its data."""
    before = RuleRegistry(store, ReadOnlyRules.from_op_types([], ()))
    for name in ("ste_sign", "Sign", "mine"):
        before.create(name, expression("7 * dy"), "")
    return RuleRegistry(store, ReadOnlyRules.from_op_types(ops, builtins))


def test_user_rule_keeps_its_name_if_an_upgrade_adds_a_rule_of_that_name(store: Store) -> None:
    registry = upgraded(store, (ALIASED,), OPS)
    hidden = registry.clashes
    assert hidden == ("Sign", "ste_sign")
    for name in ("ste_sign", "Sign", "mine"):
        assert registry.get(name).kind == USER
    assert rule_message(registry.get("ste_sign")).hides_builtin
    assert [entry.name for entry in registry.list(USER, 100, "")[0] if entry.message.hides_builtin] == ["ste_sign"]
    for name in ("builtin/ste_sign", "builtin/hard_tanh_ste", "hard_tanh_ste"):
        assert not registry.get(name).message.hides_builtin
        assert registry.get(name).kind == BUILTIN
        assert rule_message(registry.get(name)).name == "rules/builtin/ste_sign"
    # Each listed name means the rule that it is listed with; the hidden OP rule has none.
    assert names_of(registry, ANY, 100) == [["Sign", "mine", "ste_sign", "builtin/ste_sign", "Identity", "Relu"]]
    for entry in registry.list(ANY, 100, "")[0]:
        assert registry.get(entry.name) == entry

    registry.delete("ste_sign")
    registry.delete("Sign")
    assert registry.clashes == ()
    assert rule_message(registry.get("ste_sign")).name == "rules/ste_sign"
    assert registry.get("Sign").kind == OP


def test_pages_are_ordered_by_kind_and_name(registry: RuleRegistry) -> None:
    for name in ("c", "A", "b"):
        registry.create(name, expression(QUANTIZE), "")
    everything = ["A", "b", "c", "ste_sign", "Identity", "Relu", "Sign"]
    for size in range(1, 9):
        pages = names_of(registry, ANY, size)
        assert list(itertools.chain(*pages)) == everything
        assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
        assert pages[-1]
    assert names_of(registry, USER, 2) == [["A", "b"], ["c"]]
    assert names_of(registry, BUILTIN, 0) == [["ste_sign"]]
    assert names_of(registry, OP, 2) == [["Identity", "Relu"], ["Sign"]]


def test_pages_neither_repeat_nor_skip_rules_during_changes(registry: RuleRegistry) -> None:
    for name in ("b", "d", "f"):
        registry.create(name, expression(QUANTIZE), "")
    first, token = registry.list(ANY, 2, "")
    assert [entry.name for entry in first] == ["b", "d"]
    registry.delete("d")
    registry.create("a", expression(QUANTIZE), "")
    registry.create("e", expression(QUANTIZE), "")
    second, _ = registry.list(ANY, 3, token)
    assert [entry.name for entry in second] == ["e", "f", "ste_sign"]


def test_rules_refuse_a_token_of_another_list(registry: RuleRegistry) -> None:
    _, token = registry.list(ANY, 1, "")
    for kind, foreign in ((OP, token), (ANY, "nonsense")):
        with pytest.raises(GradruleError) as refusal:
            registry.list(kind, 1, foreign)
        assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST


def test_one_of_several_concurrent_creations_of_a_name_succeeds(store: Store) -> None:
    registry = RuleRegistry(store, OPS)
    outcomes: list[str] = []

    def work(number: int) -> None:
        try:
            registry.create("Q", expression(f"{number} * dy"), "")
            outcomes.append("made")
        except GradruleError as refusal:
            assert refusal.reason == errors_pb2.ERROR_REASON_RULE_EXISTS
            outcomes.append("refused")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["made"] + ["refused"] * 7
    assert [row.definition for row in store.rules()] == [rule_message(registry.get("Q")).definition.SerializeToString()]


LATER = expression("word_of_a_later_version(x)").SerializeToString()


def test_unreadable_row_affects_only_its_rule(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RuleRegistry(store, OPS).create("Q", expression(QUANTIZE), "")
    junk: dict[str, dict[str, Any]] = {
        "later": {"definition": LATER},
        "wire": {"definition": b"\xff\xff"},
        "none": {"definition": b""},
        "text": {"definition": "text"},
        "number": {"definition": 7},
        "time": {"create_time_us": "now"},
        "end": {"create_time_us": 2**63 - 1},
        "blob": {"description": b"\xff"},
        "moved": {"name": "no name!"},
    }
    if not is_sqlite(store):
        # PostgreSQL refuses values of other types.
        junk = {name: changed for name, changed in junk.items() if name not in ("text", "number", "time")}
    for name, changed in junk.items():
        RuleRegistry(store, OPS).create(name, expression("dy"), "")
        for column, value in changed.items():
            execute(store, f"UPDATE rules SET {column} = :value WHERE name = :name", value=value, name=name)
    invalid_utf_8 = "CAST(x'ff' AS TEXT)" if is_sqlite(store) else r"'\xff'"
    execute(store, f"UPDATE rules SET description = {invalid_utf_8} WHERE name = 'none'")
    caplog.clear()
    quota, bytes_quota = (Quota(100, "", ""), Quota(10_000, "", ""))
    registry = RuleRegistry(store, OPS, quota=quota, bytes_quota=bytes_quota)
    assert [line for line in caplog.messages if "'later'" in line] == caplog.messages
    assert f"{len(junk)} stored rules of tenant 'default' cannot be read" in caplog.text
    assert [entry.name for entry in registry.list(USER, 0, "")[0]] == ["Q"]
    count_again(store)
    assert len(registry) == len(junk) + 1
    with pytest.raises(GradruleError, match=r"'wire' cannot be read: .*; create it again, or delete it") as refusal:
        registry.get("rules/wire")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_UNKNOWN_RULE
    # A rule of that name replaces it; deleting it removes it; what has no name that can be said stays.
    assert registry.create("wire", expression(QUANTIZE), "").name == "wire"
    for name in junk.keys() - {"wire", "moved"}:
        registry.delete(name)
    assert (quota.used, len(registry)) == (3, 3)
    assert [entry.name for entry in RuleRegistry(store, OPS).list(USER, 0, "")[0]] == ["Q", "wire"]
    if is_sqlite(store):
        assert len(check(RegistryPlace(tmp_path / "data")).unreadable) == 1


@pytest.mark.parametrize(
    ("definition", "description", "field"),
    [
        (expression("dy"), "d" * (8 * 1024 + 1), "rule.description"),
        (expression("dy"), "\N{LATIN SMALL LETTER SHARP S}" * (4 * 1024 + 1), "rule.description"),
        (expression("dy" + " " * (1 << 20)), "", "rule.definition"),
        (rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=bytes(1 << 20))), "", "rule.definition"),
    ],
)
def test_too_large_rules_are_refused(
    registry: RuleRegistry, definition: rule_pb2.RuleDefinition, description: str, field: str
) -> None:
    with pytest.raises(GradruleError, match="has at most") as refusal:
        registry.create("Q", definition, description)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
    assert refusal.value.findings[0].field == field
    assert len(registry) == 0
    registry.create("Q", expression("dy"), "d" * (8 * 1024))


def test_bytes_of_rules_are_counted(store: Store) -> None:
    quota = Quota(200, "bytes of rules and programs", "--tenant-registry-bytes")
    registry = RuleRegistry(store, OPS, bytes_quota=quota)
    registry.create("a", expression("dy"), "d" * 100)
    registry.create("a", expression("dy"), "d" * 100)
    assert 100 < quota.used == kept_bytes(store) < 110
    with pytest.raises(GradruleError, match="--tenant-registry-bytes"):
        registry.create("b", expression("dy"), "d" * 100)
    assert quota.used == kept_bytes(store)
    registry.delete("a")
    assert quota.used == kept_bytes(store) == 0


def test_deleting_releases_the_bytes_of_the_rule(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_sqlite(store):
        pytest.skip("threads that change a shared registry take turns before")
    quota = Quota(1000, "bytes of rules and programs", "--tenant-registry-bytes")
    registry = RuleRegistry(store, OPS, bytes_quota=quota)
    registry.create("a", expression("dy"), "d" * 100)
    lock = registry._changing

    @contextlib.contextmanager
    def after_another() -> Iterator[None]:
        """Another thread replaces the rule by a larger one before this thread gets the lock."""
        monkeypatch.setattr(registry, "_changing", lock)
        registry.delete("a")
        registry.create("a", expression("dy"), "d" * 300)
        with lock:
            yield

    monkeypatch.setattr(registry, "_changing", after_another())
    registry.delete("a")
    assert quota.used == kept_bytes(store) == 0


def test_page_of_large_rules_ends_early(store: Store) -> None:
    registry = RuleRegistry(store, OPS)
    large = expression("dy", a=1.0)
    large.params[0].description = "d" * 1_000_000
    for number in range(9):
        registry.create(f"r{number}", large, "")
    assert [len(page) for page in names_of(registry, USER, 1000)] == [4, 4, 1]
    everything = [name for page in names_of(registry, ANY, 1000) for name in page]
    assert everything == [name for page in names_of(registry, ANY, 1) for name in page]


def graph_rule(size: int) -> rule_pb2.RuleDefinition:
    """Returns a rule with a graph of about this many bytes, without parsing it."""
    graph = graph_pb2.Graph()
    dy = graph.node.add(name="dy", op="Placeholder")
    dy.attr["dtype"].type = tensor_pb2.DT_FLOAT
    dx = graph.node.add(name="dx", op="Identity", input=["dy"])
    dx.attr["T"].type = tensor_pb2.DT_FLOAT
    dx.attr["_note"].s = bytes(size)
    definition = rule_pb2.RuleDefinition()
    definition.graph.serialized = graph.SerializeToString()
    return definition


def test_large_rules_are_read_when_used_and_not_kept(open_store: Callable[[], Store]) -> None:
    """32 rules of 900 KB take less memory than two of them. A restart reads few at a time: 16 from PostgreSQL."""
    store = open_store()
    registry = RuleRegistry(store, OPS)
    definition = graph_rule(900_000)
    tracemalloc.start()
    try:
        for index in range(32):
            registry.create(f"Large{index}", definition, "", is_checked=True)
        after_creating, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        again = RuleRegistry(store, OPS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_creating < 2 * 900_000
    assert peak - after_creating < (20 if store.is_shared else 4) * 900_000
    for rules in (registry, again):
        assert len(rules) == 32
        found = rules.get("Large31")
        assert found.message.digest == rules.create("Large31", definition, "").message.digest
        assert rule_message(found).definition.graph.serialized == definition.graph.serialized


def test_call_is_repeated_if_a_large_rule_was_replaced_while_it_was_read(registry: RuleRegistry) -> None:
    entry = registry.create("Large", graph_rule(20_000), "", is_checked=True)
    registry.create("Large", graph_rule(30_000), "", is_checked=True, may_replace=True)
    with pytest.raises(GradruleError) as caught:
        rule_message(entry)
    assert (caught.value.reason, caught.value.retry_after_s) == (errors_pb2.ERROR_REASON_UNAVAILABLE, 0.0)
    assert rule_message(registry.get("Large")).HasField("definition")
