"""Who calls: from a credential to a principal. No gRPC."""

from gradrule_server.identity.credentials import Credentials
from gradrule_server.identity.principal import OPEN, Principal, check_tenant, denied, require_admin, unauthenticated

__all__ = ["OPEN", "Credentials", "Principal", "check_tenant", "denied", "require_admin", "unauthenticated"]
