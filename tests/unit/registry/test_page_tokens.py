from __future__ import annotations

import base64
import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry import page_tokens
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store

ANY = re.compile(".*", re.DOTALL)
NUMBER = re.compile("[0-9]")


def forged(body: bytes) -> str:
    """A token of any body."""
    return base64.urlsafe_b64encode(body).decode()


def refuses(token: str, *parts: re.Pattern[str]) -> None:
    with pytest.raises(GradruleError) as refusal:
        page_tokens.decode("rules/0", token, *parts)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST
    assert refusal.value.findings[0].field == "page_token"


@pytest.mark.parametrize(("asked", "given"), [(0, 100), (1, 1), (1000, 1000), (5000, 1000)])
def test_page_size_is_limited(asked: int, given: int) -> None:
    assert page_tokens.page_size(asked) == given


def test_negative_page_size_is_refused() -> None:
    with pytest.raises(GradruleError) as refusal:
        page_tokens.page_size(-1)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST


@pytest.mark.parametrize("place", [["0", "straße"], [""], ["a/b", "\x00", "c"]])
def test_token_round_trip(place: list[str]) -> None:
    assert page_tokens.decode("rules/0", page_tokens.encode("rules/0", place), *[ANY] * len(place)) == place


@pytest.mark.parametrize(
    "token",
    [
        "abc",
        "é",
        " ",
        "AAAA",
        page_tokens.encode("rules/1", ["0", "a"]),
        page_tokens.encode("rules/0", ["0", "a"])[:-4],
        page_tokens.encode("rules/0", ["0", "a"]) + "AAAA",
        base64.urlsafe_b64encode(b"\x00" * 6 + b'[2, "rules/0", "0", "a"]').decode(),
    ],
)
def test_token_of_another_list_is_refused(token: str) -> None:
    refuses(token, ANY, ANY)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"1",
        b"no JSON",
        b"\xff",
        b"[" * 100_000,
        b"[" * 3_000,
        b"9" * 4_500,
        b"[" + b"9" * 2_900 + b"]",
        b'[2, "rules/0"]',
        b'[2, "rules/0", "0"]',
        b'[2, "rules/0", "0", "a", "b"]',
        b'[2, "rules/0", 0, "a"]',
        b'[2, "rules/0", "0", null]',
        b'[2, "rules/0", "0", ["a"]]',
        b'[2, "rules/0", "x", "a"]',
        b'[2, "rules/0", "0\\n", "a"]',
        b'[2, "rules/0", "0", "\\ud800"]',
        b'[1, "rules/0", "0", "a"]',
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_malformed_token_is_refused(body: bytes) -> None:
    refuses(forged(body), NUMBER, ANY)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | st.lists(_JSON).map(lambda rest: json.dumps([2, "rules/0", *rest]).encode()))
def test_any_token_is_decoded_or_refused(body: bytes) -> None:
    try:
        first, second = page_tokens.decode("rules/0", forged(body), NUMBER, ANY)
    except GradruleError as refusal:
        assert refusal.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST
    else:
        assert int(first) >= 0
        second.encode()


@pytest.mark.parametrize("place", [[], ["x", "a"], ["9", "a"], ["0"], ["0", "a", "b"], ["\ud800"], ["NO ID"], [7]])
def test_lists_refuse_tokens_that_they_did_not_issue(tmp_path: Path, place: list[str]) -> None:
    with contextlib.closing(Store(tmp_path)) as store:
        rules, programs = RuleRegistry(store, ["Sign"]), ProgramRegistry(store, BlobStore(tmp_path / "blobs", 1))
        for call in (
            lambda: rules.list(0, 0, page_tokens.encode("rules/0", place)),
            lambda: programs.list(0, page_tokens.encode("programs", place)),
        ):
            with pytest.raises(GradruleError) as refusal:
                call()
            assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST
