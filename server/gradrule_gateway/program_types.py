"""Finds the element types of a program's tensors, so that lists in JSON get the types that the program needs."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import Any

from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_gateway.conversion import Types, program_types
from gradrule_gateway.deadlines import Deadline
from gradrule_gateway.problems import Problem
from gradrule_gateway.upstream import Metadata, Upstream

_GET = "/gradrule.v1.ProgramService/GetProgram"
_COMPILE = "/gradrule.v1.ProgramService/CompileProgram"
_ENTRIES = 1024
# A program can be deleted and its name given to another one.
_KEEP_S = 30.0


class ProgramTypes:
    """Asks the server for the types of programs, with the caller's credential, and keeps them for half a minute.

    Args:
        upstream: The connection to the server.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._kept: OrderedDict[bytes, tuple[float, Types]] = OrderedDict()

    async def find(
        self, request: evaluate_pb2.EvaluateRequest, metadata: Metadata, deadline: Deadline
    ) -> tuple[Types, bytes, bool]:
        """Returns the types, a key for `forget`, and whether they were kept from an earlier call.

        The types are empty if the program is not valid: the call itself then fails with all findings.
        """
        key = _key(request, metadata)
        kept = self._kept.get(key)
        if kept is not None and time.monotonic() - kept[0] < _KEEP_S:
            self._kept.move_to_end(key)
            return kept[1], key, True
        types = await self._ask(request, metadata, deadline)
        if types:
            self._kept[key] = time.monotonic(), types
            while len(self._kept) > _ENTRIES:
                self._kept.popitem(last=False)
        return types, key, False

    def forget(self, key: bytes) -> None:
        """Drops the types of a program."""
        self._kept.pop(key, None)

    async def _ask(self, request: evaluate_pb2.EvaluateRequest, metadata: Metadata, deadline: Deadline) -> Types:
        path, question, read = _question(request)
        try:
            answer, _ = await self._upstream.unary(path, question.SerializeToString(), metadata, deadline.remaining_s())
        except Problem as problem:
            if problem.status < 500 and problem.code not in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED"):
                return {}
            raise
        return program_types(read(answer).program)


def _question(request: evaluate_pb2.EvaluateRequest) -> tuple[str, Any, Any]:
    if request.HasField("spec"):
        compile_request = program_pb2.CompileProgramRequest(spec=request.spec, validate_only=True)
        return _COMPILE, compile_request, program_pb2.CompileProgramResponse.FromString
    return _GET, program_pb2.GetProgramRequest(name=request.program), program_pb2.GetProgramResponse.FromString


def _key(request: evaluate_pb2.EvaluateRequest, metadata: Metadata) -> bytes:
    target = evaluate_pb2.EvaluateRequest(program=request.program)
    if request.HasField("spec"):
        target.spec.CopyFrom(request.spec)
    credential = next((value for name, value in metadata if name == "authorization"), "")
    found = hashlib.sha256(target.SerializeToString(deterministic=True))
    found.update(b"\0" + credential.encode())
    return found.digest()
