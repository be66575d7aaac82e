"""Certificate files that gRPC would accept silently and then not use."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from gradrule_server.front.server import CertificateError, Certificates
from tests.service.certificates import Authority


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    one, other = authority.server("one"), authority.server("other")
    Certificates(one.certificate, one.key, authority.file)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for files, why in (
        ((one.certificate, other.key, None), "is not the key"),
        ((one.key, one.key, None), "no certificate"),
        ((one.certificate, one.certificate, None), "no private key"),
        ((one.certificate, one.key, empty), "authorities"),
        ((one.certificate, one.key, one.key), "authorities"),
        ((empty, one.key, None), "no certificate"),
        ((tmp_path / "nowhere", one.key, None), "cannot be read"),
    ):
        with pytest.raises(CertificateError, match=why):
            Certificates(*files)


def test_a_renewed_certificate_is_read_before_a_client_connects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Problems of the new files are logged at once."""
    authority = Authority(tmp_path, "authority")
    one, other = authority.server("one"), authority.server("other")
    certificates = Certificates(one.certificate, one.key, None)
    shutil.copy(other.certificate, one.certificate)
    certificates.refresh()
    certificates.refresh()
    assert caplog.text.count("the previous certificate stays in use") == 1
    shutil.copy(other.key, one.key)
    with caplog.at_level(logging.INFO):
        certificates.refresh()
    assert "the certificate was read again" in caplog.text
