"""`AdminService`: how the server is doing, for administrators."""

from __future__ import annotations

from collections.abc import Callable

from gradrule.v1 import admin_pb2
from gradrule_server.front.calls import Call, MethodTable
from gradrule_server.identity import require_admin

ADMIN_SERVICE = "gradrule.v1.AdminService"


class AdminServicer:
    """`AdminService`. status: tells how the server is doing."""

    def __init__(self, status: Callable[[], admin_pb2.ServerStatus]) -> None:
        self._status = status

    def methods(self) -> MethodTable:
        return {"GetServerStatus": (admin_pb2.GetServerStatusRequest, self.status)}

    async def status(self, call: Call[admin_pb2.GetServerStatusRequest]) -> admin_pb2.GetServerStatusResponse:
        require_admin(call.principal)
        return admin_pb2.GetServerStatusResponse(status=self._status())
