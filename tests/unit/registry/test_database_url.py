"""Tests the checks of PostgreSQL URLs, and that no message shows a part of a password."""

from __future__ import annotations

import pytest

from gradrule_server.registry.database_url import check_url, describe_url
from gradrule_server.settings import Settings, SettingsError


@pytest.mark.parametrize(
    "password",
    ["sec[ret]", "sec[ret", "sec\u2100ret", "sec ret", "sec\nret", "sec\0ret", "sec@ret", "sec/ret", "sec#ret"],
)
def test_refusal_shows_no_part_of_a_password(password: str) -> None:
    url = f"postgresql://user:{password}@host/database"
    with pytest.raises(ValueError, match="percent-encode") as refusal:
        check_url(url)
    assert "sec" not in str(refusal.value)
    assert "ret" not in str(refusal.value)
    with pytest.raises(SettingsError) as refused:
        Settings.load([], {"GRADRULE_REGISTRY": url, "GRADRULE_DATA_DIR": "/nowhere"})
    assert "sec" not in str(refused.value)
    assert "ret" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql://u:p@h/d\n", "postgresql://u:p@h:port/d", "mysql://u:p@h/d"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"percent-encode|expected postgresql://USER@HOST:PORT/DATABASE"):
        check_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h1:1,[::1]:2/d?target_session_attrs=read-write", "postgresql://u@h1:1,[::1]:2/d"),
        ("postgres://h/d?password=secret", "postgresql://h/d"),
        ("postgresql:///d?host=/run/postgresql", "postgresql:///d"),
        ("postgresql://u:se%40cret@%2Frun%2Fpostgresql/d", "postgresql://u@%2Frun%2Fpostgresql/d"),
    ],
)
def test_valid_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert describe_url(check_url(url)) == shown
