from __future__ import annotations

import base64

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry import paging


@pytest.mark.parametrize(("asked", "given"), [(0, 100), (1, 1), (1000, 1000), (5000, 1000)])
def test_page_size(asked: int, given: int) -> None:
    assert paging.page_size(asked) == given


def test_negative_page_size() -> None:
    with pytest.raises(GradruleError) as refusal:
        paging.page_size(-1)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST


@pytest.mark.parametrize("place", [["0", "straße"], [""], ["a/b", "\x00", "c"]])
def test_a_token_gives_its_place_back(place: list[str]) -> None:
    assert paging.decode("rules/0", paging.encode("rules/0", place)) == place


@pytest.mark.parametrize(
    "token",
    [
        "abc",
        "é",
        " ",
        "AAAA",
        paging.encode("rules/1", ["0", "a"]),
        paging.encode("rules/0", ["0", "a"])[:-4],
        paging.encode("rules/0", ["0", "a"]) + "AAAA",
        base64.urlsafe_b64encode(b"\x00" * 6 + b'[1, "rules/0", "0", "a"]').decode(),
    ],
)
def test_a_foreign_token_is_refused(token: str) -> None:
    with pytest.raises(GradruleError) as refusal:
        paging.decode("rules/0", token)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_MALFORMED_REQUEST
    assert refusal.value.findings[0].field == "page_token"
