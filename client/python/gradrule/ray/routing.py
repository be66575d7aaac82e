"""Chooses a replica for each call, by its program, so that each replica keeps few programs loaded."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gradrule.common import wire_format
from gradrule.common.placement import preferred

# Ray Serve pickles this module's functions and globals, so it may hold no objects of the process.
from gradrule.ray import leaving_replicas
from gradrule.v1 import evaluate_pb2

_PROGRAM = evaluate_pb2.EvaluateRequest.PROGRAM_FIELD_NUMBER
_SPEC = evaluate_pb2.EvaluateRequest.SPEC_FIELD_NUMBER


def program_key(request: bytes) -> str:
    """Returns a text that is equal for `EvaluateRequest`s of one program; empty if the bytes name none.

    A compiled program is identified by its name, an inline one by the hash of its definition. The tensors are skipped.
    """
    try:
        for number, start, end in wire_format.fields(request, 0, len(request)):
            if number in (_PROGRAM, _SPEC):
                return hashlib.sha256(memoryview(request)[start:end]).hexdigest()[:32]
    except wire_format.MalformedError:
        # The server says what is wrong.
        pass
    return ""


class ProgramRouter(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Sends calls of a program to the same replica while it has room; other calls to the less busy of two replicas.

    Keyword arguments of `request_router_kwargs`:
        min_bound: Calls that the preferred replica of a program may have before another one is used. Default 2.
    """

    def initialize_state(self, min_bound: int = 2) -> None:
        self._min_bound = min_bound

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas; Ray Serve tries one group after the other."""
        if pending_request is None:
            return [candidate_replicas]
        # Wait between rounds if no replica takes the call.
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.session_id
        if not key:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas))), candidate_replicas]
        loads = [
            (replica, str(replica.replica_id), self.replica_queue_len_cache.get(replica.replica_id) or 0)
            for replica in candidate_replicas
        ]
        return [[replica] for replica in preferred(key, loads, self._min_bound)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        leaving_replicas.LEAVING.keep(self._deployment_id, {replica.replica_id for replica in replicas})

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        is_leaving = replica_id not in self.curr_replicas
        leaving_replicas.LEAVING.set_replica(pending_request.metadata.request_id, replica_id, is_leaving=is_leaving)
