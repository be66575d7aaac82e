"""Chooses a replica for each call, by its program, so that each replica keeps few programs loaded."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gradrule.common import wire_format
from gradrule.common.placement import Load, preferred

# Ray Serve pickles this module's functions and globals, so it may hold no objects of the process.
from gradrule.ray import leaving_replicas, program_calls
from gradrule.v1 import evaluate_pb2

_PROGRAM = evaluate_pb2.EvaluateRequest.PROGRAM_FIELD_NUMBER
_SPEC = evaluate_pb2.EvaluateRequest.SPEC_FIELD_NUMBER
_HEADER = evaluate_pb2.EvaluateRequest.HEADER_FIELD_NUMBER
_HEADER_PROGRAM = evaluate_pb2.EvaluateHeader.PROGRAM_FIELD_NUMBER


def program_key(request: bytes) -> str:
    """Returns a text that is equal for `EvaluateRequest`s of one program; empty if the bytes name none.

    A compiled program is identified by its name, an inline one by the hash of its definition. The tensors are skipped.
    """
    try:
        for number, start, end in wire_format.fields(request, 0, len(request)):
            if number == _HEADER:
                inner = wire_format.fields(request, start, end)
                start, end = next((found[1:] for found in inner if found[0] == _HEADER_PROGRAM), (end, end))
            if number in (_HEADER, _PROGRAM, _SPEC) and start < end:
                return hashlib.sha256(memoryview(request)[start:end]).hexdigest()[:32]
    except wire_format.MalformedError:
        # The server says what is wrong.
        pass
    return ""


class ProgramRouter(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Sends calls of a program to the same replica while it has room; other calls to the less busy of two replicas.

    A replica has no room for a program's call if one of two bounds is reached, see `preferred`. Keyword arguments of
    `request_router_kwargs`:
        program_bound: Calls of the same program that this proxy has sent to the replica and that have not ended.
            Default 2.
        replica_bound: Calls of all programs on the replica, from all proxies, with open streams. Default 8.
    """

    def initialize_state(self, program_bound: int = 2, replica_bound: int = 8) -> None:
        self._program_bound = program_bound
        self._replica_bound = replica_bound
        self._program_calls = program_calls.ProgramCalls()

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
        loads = [self._load(replica, key) for replica in candidate_replicas]
        ordered = preferred(key, loads, program_bound=self._program_bound, replica_bound=self._replica_bound)
        # Ray Serve may choose replicas for many calls before it sends the first of them.
        if ordered and not pending_request.future.done():
            self._program_calls.add(pending_request.metadata.internal_request_id, ordered[0].replica_id, key)
        return [[replica] for replica in ordered]

    def _load(self, replica: RunningReplica, key: str) -> Load[RunningReplica]:
        program_calls = self._program_calls.count(replica.replica_id, key)
        # Ray Serve forgets a number that is 10 s old.
        calls = max(program_calls, self.replica_queue_len_cache.get(replica.replica_id) or 0)
        return Load(replica, str(replica.replica_id), program_calls, calls)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Counts the call on the replica that Ray Serve sends it to.

        `on_request_routed` would be too late: Ray Serve calls it once the replica has accepted the call, which may have
        ended before. `on_request_completed` follows every return of this method.
        """
        metadata = pending_request.metadata
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._program_calls.remove(metadata.internal_request_id)
            raise
        if metadata.session_id:
            self._program_calls.add(metadata.internal_request_id, replica.replica_id, metadata.session_id)
        return replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        known = {replica.replica_id for replica in replicas}
        self._program_calls.keep(known)
        leaving_replicas.LEAVING.keep(self._deployment_id, known)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        is_leaving = replica_id not in self.curr_replicas
        leaving_replicas.LEAVING.set_replica(pending_request.metadata.request_id, replica_id, is_leaving=is_leaving)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._program_calls.remove(internal_request_id, replica_id)
