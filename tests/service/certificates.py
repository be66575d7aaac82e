"""Creates certificate authorities and certificates for tests."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class CertificateFiles:
    """Holds the files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates and writes them to a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = builder.add_extension(basic, critical=True).sign(self._key, hashes.SHA256())
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def server(self, name: str) -> CertificateFiles:
        """Creates a certificate for this machine."""
        alternatives = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return self._sign(name, alternatives)

    def client(self, name: str, *, alternative: str | None = None) -> CertificateFiles:
        """Creates a client certificate; `name` is its common name."""
        return self._sign(name, [] if alternative is None else [x509.UniformResourceIdentifier(alternative)])

    def _sign(self, name: str, alternatives: list[x509.GeneralName]) -> CertificateFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key.public_key())
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        found = CertificateFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        found.certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        found.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return found


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
    )
