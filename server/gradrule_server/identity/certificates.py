"""Reads the tenant's name from a client certificate.

A certificate must hold exactly one name of the types that a setting allows (RFC 5280, section 4.2.1.6); otherwise it
names no tenant. The common name counts only if the certificate has no alternative names (RFC 9525, section 6.3), or if
the setting asks for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from cryptography import x509
from cryptography.x509.oid import NameOID

from gradrule_server.identity.principal import Principal, check_tenant

_log = logging.getLogger(__name__)

# Number of certificates whose principals are cached, so that calls do not parse the certificate again.
_CACHE_SIZE = 4096
_MAX_CAUSE_LENGTH = 160

_TYPES: Mapping[str, type[x509.GeneralName]] = {
    "uri": x509.UniformResourceIdentifier,
    "dns": x509.DNSName,
    "email": x509.RFC822Name,
}
COMMON_NAME = "common-name"
AUTO = "auto"


class ClientCertificates:
    """Finds the principal of a certificate that TLS has verified. Safe to use from several threads.

    Args:
        name: The type of name that counts: `uri`, `dns`, `email`, `common-name`, or `auto`: any of the first three, or
            the common name if there are no alternative names.
        admins: Tenants whose certificates belong to administrators.
    """

    def __init__(self, name: str = AUTO, admins: frozenset[str] = frozenset()) -> None:
        self._name = name
        self._admins = admins
        self._read_cached = functools.lru_cache(_CACHE_SIZE)(self._read)

    def find(self, pem: bytes) -> Principal | None:
        """Returns the certificate's principal.

        None if the certificate names no tenant, or has expired since the connection was opened.
        """
        principal = self._read_cached(pem)
        return None if principal is None or principal.is_expired else principal

    def _read(self, pem: bytes) -> Principal | None:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            tenant = self._tenant(certificate)
            expires_at = certificate.not_valid_after_utc.timestamp()
        except (ValueError, TypeError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as cause:
            _log.warning("a client's certificate names no tenant: %s", str(cause)[:_MAX_CAUSE_LENGTH])
            return None
        return Principal(tenant, tenant in self._admins, expires_at)

    def _tenant(self, certificate: x509.Certificate) -> str:
        """Returns the tenant's name. Raises `ValueError` unless exactly one name counts."""
        try:
            alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            alternatives = None
        if self._name == COMMON_NAME or (self._name == AUTO and alternatives is None):
            found = [item.value for item in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        else:
            types = tuple(_TYPES.values()) if self._name == AUTO else (_TYPES[self._name],)
            found = [item.value for item in alternatives or () if isinstance(item, types)]
        return _single_name(found, self._name)


def _single_name(names: Sequence[str | bytes], kind: str) -> str:
    what = "uri, dns and email" if kind == AUTO else kind
    if len(names) != 1:
        more = "; --tls-client-name says which type counts" if names and kind == AUTO else ""
        raise ValueError(f"it has {len(names)} names of the types that count ({what}), and must have one{more}")
    name = names[0]
    if not isinstance(name, str):
        raise ValueError(f"its name of the type {what} is not text")
    return check_tenant(name)
