"""Clients' certificates: which of a certificate's names is a tenant's.

A certificate names at most one tenant. Only the types of names that a setting allows count (RFC 5280, section 4.2.1.6),
each as a whole; where there is none or more than one, the certificate names nobody. The common name counts only where
there are no alternative names (RFC 9525, section 6.3), or where it is asked for.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from cryptography import x509
from cryptography.x509.oid import NameOID

from gradrule_server.identity.principal import Principal, check_tenant

_log = logging.getLogger(__name__)

# Certificates that are remembered, so that each is read once and not with each call.
_MAX_REMEMBERED = 4096
_SHOWN = 160

_TYPES: Mapping[str, type[x509.GeneralName]] = {
    "uri": x509.UniformResourceIdentifier,
    "dns": x509.DNSName,
    "email": x509.RFC822Name,
}
COMMON_NAME = "common-name"
AUTO = "auto"


class ClientCertificates:
    """Finds the tenant of a certificate that TLS has checked. Safe to use from several threads.

    name: the type of name that counts: uri, dns, email, common-name, or auto: any of the first three, and the common
    name where there are no alternative names. admins: tenants whose certificates are administrators'.
    """

    def __init__(self, name: str = AUTO, admins: frozenset[str] = frozenset()) -> None:
        self._name = name
        self._admins = admins
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Principal | None] = OrderedDict()

    def find(self, pem: bytes) -> Principal | None:
        """Whose certificate it is; None where it names nobody, or has expired since the connection was opened."""
        digest = hashlib.sha256(pem).digest()
        with self._lock:
            is_known = digest in self._found
            principal = self._found.get(digest)
        if not is_known:
            principal = self._read(pem)
            with self._lock:
                self._found[digest] = principal
                while len(self._found) > _MAX_REMEMBERED:
                    self._found.popitem(last=False)
        return None if principal is None or principal.is_expired else principal

    def _read(self, pem: bytes) -> Principal | None:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            tenant = self._tenant(certificate)
            expires_at = certificate.not_valid_after_utc.timestamp()
        except (ValueError, TypeError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as cause:
            _log.warning("a client's certificate names no tenant: %s", str(cause)[:_SHOWN])
            return None
        return Principal(tenant, tenant in self._admins, expires_at)

    def _tenant(self, certificate: x509.Certificate) -> str:
        """`ValueError` where none of the names counts, or more than one does."""
        try:
            alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            alternatives = None
        if self._name == COMMON_NAME or (self._name == AUTO and alternatives is None):
            found = [item.value for item in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        else:
            types = tuple(_TYPES.values()) if self._name == AUTO else (_TYPES[self._name],)
            found = [item.value for item in alternatives or () if isinstance(item, types)]
        return _only(found, self._name)


def _only(names: Sequence[str | bytes], kind: str) -> str:
    what = "uri, dns and email" if kind == AUTO else kind
    if len(names) != 1:
        more = "; --tls-client-name says which type counts" if names and kind == AUTO else ""
        raise ValueError(f"it has {len(names)} names of the types that count ({what}), and must have one{more}")
    name = names[0]
    if not isinstance(name, str):
        raise ValueError(f"its name of the type {what} is no text")
    return check_tenant(name)
