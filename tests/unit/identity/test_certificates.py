"""Tests which name of a client certificate is its tenant, and which certificates name no tenant."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID, ObjectIdentifier

from gradrule_server.identity.certificates import ClientCertificates

KEY = ec.generate_private_key(ec.SECP256R1())

URI, DNS, EMAIL = x509.UniformResourceIdentifier, x509.DNSName, x509.RFC822Name
IP = x509.IPAddress(ipaddress.ip_address("10.0.0.1"))
OTHER = x509.OtherName(ObjectIdentifier("1.3.6.1.4.1.311.20.2.3"), b"\x0c\x05alice")
FOLDER = x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alice")]))


def certificate(
    common: Sequence[str] = (), alternatives: Sequence[x509.GeneralName] | None = (), hours: int = 1
) -> bytes:
    """A certificate in PEM; `alternatives`: None for no extension of them."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(hours=hours))
    )
    if alternatives is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


def tenant(pem: bytes, name: str = "auto") -> str | None:
    found = ClientCertificates(name).find(pem)
    return None if found is None else found.tenant


@pytest.mark.parametrize(
    ("common", "alternatives", "found"),
    [
        ((), [URI("spiffe://example/ada")], "spiffe://example/ada"),
        (("ada",), [URI("spiffe://example/ada")], "spiffe://example/ada"),
        ((), [DNS("ada.example")], "ada.example"),
        ((), [EMAIL("ada@example.org")], "ada@example.org"),
        (("ada",), None, "ada"),
        # The common name counts only where there are no alternative names at all.
        (("ada",), [IP], None),
        (("ada",), [], None),
        # Several names: which is meant, nobody knows.
        ((), [URI("spiffe://example/ada"), DNS("ada.example")], None),
        ((), [URI("spiffe://a/ada"), URI("spiffe://a/grace")], None),
        ((), [URI("spiffe://a/ada"), URI("spiffe://a/ada")], None),
        (("ada", "grace"), None, None),
        ((), None, None),
        # Names of other types are no tenant's.
        ((), [IP], None),
        ((), [OTHER], None),
        ((), [FOLDER], None),
        ((), [IP, OTHER, FOLDER, URI("spiffe://example/ada")], "spiffe://example/ada"),
        # What a name must not hold.
        ((), [URI("alice\0.evil")], None),
        ((), [DNS("alice\0.evil")], None),
        (("alice\0.evil",), None, None),
        ((), [URI("alice\n")], None),
        ((), [URI("alice\x7f")], None),
        ((), [URI(" alice")], None),
        ((), [URI("")], None),
        ((), [URI("a" * 129)], None),
        (("ali\u202ece",), None, None),
        (("alice\u0085",), None, None),
    ],
    ids=str,
)  # fmt: skip
def test_certificate_names_one_tenant_or_none(
    common: Sequence[str], alternatives: Sequence[x509.GeneralName] | None, found: str | None
) -> None:
    assert tenant(certificate(common, alternatives)) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [("uri", "spiffe://example/ada"), ("dns", "ada.example"), ("email", None), ("common-name", "ada"), ("auto", None)],
)
def test_setting_chooses_the_type_of_name(name: str, found: str | None) -> None:
    alternatives = [URI("spiffe://example/ada"), DNS("ada.example"), EMAIL("a@example.org"), EMAIL("b@example.org")]
    assert tenant(certificate(["ada"], alternatives), name) == found


def test_invalid_certificate_names_no_tenant(caplog: pytest.LogCaptureFixture) -> None:
    certificates = ClientCertificates()
    for pem in (b"", b"junk", certificate(["ada"], None)[:-100]):
        for _ in range(3):
            assert certificates.find(pem) is None
    # One line for each certificate, not for each call.
    assert len(caplog.messages) == 3


def test_expired_certificate_names_no_tenant() -> None:
    assert tenant(certificate(["ada"], None, hours=-1)) is None
    found = ClientCertificates().find(certificate(["ada"], None))
    assert found is not None
    assert found.expires_at is not None


def test_certificates_of_admin_tenants_are_administrators() -> None:
    certificates = ClientCertificates(admins=frozenset({"ops"}))
    found = [certificates.find(certificate([name], None)) for name in ("ops", "ada")]
    assert [principal.is_admin for principal in found if principal is not None] == [True, False]
