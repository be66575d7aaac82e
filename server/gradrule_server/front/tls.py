"""Reads the server's certificate from files, and reads it again when they change."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from gradrule_server.identity.watched_file import WatchedFile

_log = logging.getLogger(__name__)


class CertificateError(Exception):
    """Certificate files cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _Files:
    chain: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """A certificate with its key, and optionally the authorities of client certificates. Raises `CertificateError`.

    New connections use a renewed certificate; existing connections stay as they are.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = certificate, key, client_ca
        self._lock = threading.Lock()
        self._files = self._given = self._read()
        # Certificate and key are renewed one after the other, so they are read again after any change.
        self._watched = [WatchedFile(path, Path.read_bytes, OSError) for path in self._paths if path is not None]
        self._seen = self._contents()

    def credentials(self) -> grpc.ServerCredentials:
        """Returns gRPC credentials that ask for the current certificate whenever a client connects."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._files),
            self._renewed,  # type: ignore[arg-type]  # None says that nothing changed, which the stubs do not know
            require_client_authentication=self._files.client_ca is not None,
        )

    def refresh(self) -> None:
        """Reads the files again if they have changed. Blocks."""
        for file in self._watched:
            file.refresh()
        with self._lock:
            contents = self._contents()
            if contents == self._seen:
                return
            self._seen = contents
            try:
                self._files = self._read()
            except CertificateError as cause:
                _log.warning("%s; the previous certificate stays in use", cause)
            else:
                _log.info("the certificate was read again")

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificate if it has changed since gRPC's last call. Threads of gRPC call this."""
        with self._lock:
            if self._files == self._given:
                return None
            self._given = self._files
            return _configuration(self._files)

    def _contents(self) -> list[bytes]:
        return [file.value() for file in self._watched]

    def _read(self) -> _Files:
        certificate, key, client_ca = self._paths
        files = _Files(_read_file(certificate), _read_file(key), None if client_ca is None else _read_file(client_ca))
        _check(files, certificate, key, client_ca)
        return files


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.client_ca)


def _check(files: _Files, certificate: Path, key: Path, client_ca: Path | None) -> None:
    """Raises `CertificateError` for files that gRPC would accept silently although no client could connect."""
    try:
        chain = x509.load_pem_x509_certificates(files.chain)
    except ValueError as cause:
        raise CertificateError(f"{certificate} holds no certificate in PEM: {cause}") from cause
    try:
        private = load_pem_private_key(files.key, None)
    except (ValueError, TypeError) as cause:
        raise CertificateError(f"{key} holds no private key in PEM without a password: {cause}") from cause
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise CertificateError(f"{key} is not the key of the certificate in {certificate}")
    if files.client_ca is not None:
        try:
            x509.load_pem_x509_certificates(files.client_ca)
        except ValueError as cause:
            raise CertificateError(f"{client_ca} holds no certificates of authorities in PEM: {cause}") from cause


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise CertificateError(f"{path} cannot be read: {cause.strerror or cause}") from cause
