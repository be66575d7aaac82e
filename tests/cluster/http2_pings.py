"""Sends pings on a connection without calls."""

from __future__ import annotations

import socket
import time
from typing import Any

_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_ACK = 1


def send_pings(address: str, count: int, pause_s: float) -> bool:
    """Sends HTTP/2 pings to a gRPC server; returns whether it answered all of them and kept the connection."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as frames:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, b""))
        for _ in range(count):
            connection.sendall(_frame(_PING, bytes(8)))
            while (frame := _read_frame(frames)) != (_PING, _ACK):
                if frame[0] == _GOAWAY:
                    return False
            time.sleep(pause_s)
    return True


def _frame(kind: int, payload: bytes) -> bytes:
    """Returns a frame of the connection, without flags (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def _read_frame(file: Any) -> tuple[int, int]:
    """Returns type and flags of the next frame."""
    head = file.read(9)
    file.read(int.from_bytes(head[:3], "big"))
    return head[3], head[4]
