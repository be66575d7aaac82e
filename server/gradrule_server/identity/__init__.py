"""Authenticates callers: maps a token or a client certificate to a principal. Imports no gRPC."""

from gradrule_server.identity.principal import (
    ANONYMOUS,
    Authenticator,
    Principal,
    check_tenant,
    require_admin,
    unauthenticated,
)

__all__ = ["ANONYMOUS", "Authenticator", "Principal", "check_tenant", "require_admin", "unauthenticated"]
