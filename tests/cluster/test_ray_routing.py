"""Tests how `gradrule.ray` chooses replicas and counts requests, without a cluster."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gradrule.common.placement import Load, preferred
from gradrule.errors import InvalidParamError
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2

with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("ray")
    from ray import serve
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
    from ray.serve._private.config import DeploymentConfig
    from ray.serve.request_router import PendingRequest, ReplicaID

    from gradrule.ray import replica, rpcs
    from gradrule.ray.autoscaling import autoscaling_policy
    from gradrule.ray.leaving_replicas import LeavingReplicas
    from gradrule.ray.proxy import RequestWindow, call_metadata
    from gradrule.ray.replica import Replica, StreamCounter, call_options
    from gradrule.ray.routing import ProgramRouter, program_key
    from gradrule.ray.rpcs import RPCS, Rpc
    from gradrule.ray.stream_requests import StreamRequests

KEYS = [f"program {number}" for number in range(1000)]


def request(x: bytes = b"", **target: object) -> bytes:
    feeds = [tensor_pb2.NamedTensor(name=x.decode())]
    return evaluate_pb2.EvaluateRequest(feeds=feeds, **target).SerializeToString()


def with_header(x: bytes = b"", **target: Any) -> bytes:
    header = evaluate_pb2.EvaluateHeader(feeds=[evaluate_pb2.TensorHeader(name=x.decode())], **target)
    return evaluate_pb2.EvaluateRequest(header=header.SerializeToString(), contents=[b""]).SerializeToString()


def test_each_rpc_has_a_method_of_its_own() -> None:
    # Ray Serve calls methods of a deployment by the last part of the RPC's path.
    assert len({rpc.method for rpc in RPCS}) == len(RPCS) > 15
    assert all(callable(getattr(Replica, rpc.method)) for rpc in RPCS)


@pytest.mark.parametrize("name", ["config", "tls_cert", "tls_client_ca", "http_port"])
def test_settings_that_cannot_work_in_a_replica_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParamError, match=f"cannot have the setting {name}: "):
        Replica({name: 0})
    monkeypatch.setenv(f"GRADRULE_{name.upper()}", "1")
    with pytest.raises(InvalidParamError, match=f"cannot have the setting {name}: "):
        Replica({})


def test_tokens_must_be_encrypted_in_front_of_ray_serve() -> None:
    with pytest.raises(InvalidParamError, match="sent unencrypted"):
        Replica({"tokens": "/tokens"})


@pytest.mark.parametrize(
    ("options", "settings", "refusal"),
    [
        ({"num_replicas": 2}, {}, "2 replicas need a registry that they share"),
        ({"autoscaling_config": {"max_replicas": 3}}, {}, "3 replicas need a registry that they share"),
        ({"num_replicas": 2}, {"registry": "postgresql://h/d", "data_dir": "/data"}, "cannot share the folder /data"),
    ],
)
def test_replicas_that_cannot_share_their_state_are_refused(
    options: dict[str, Any], settings: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(_deployment_config=DeploymentConfig(**options))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    with pytest.raises(InvalidParamError, match=refusal):
        Replica(settings)


def test_requests_for_one_program_have_one_key() -> None:
    spec = program_pb2.ProgramSpec(fetches=["y"])
    assert program_key(request(b"a", program="programs/p")) == program_key(request(b"b", program="programs/p")) != ""
    assert program_key(request(b"a", spec=spec)) == program_key(request(b"b", spec=spec)) != ""
    assert program_key(with_header(b"a", program="programs/p")) == program_key(request(program="programs/p"))
    others = {request(program="programs/p"), request(program="programs/q"), request(spec=spec)}
    assert len({program_key(one) for one in others}) == 3


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\xff", request(b"x"), with_header(b"x")])
def test_requests_without_a_program_have_no_key(data: bytes) -> None:
    assert program_key(data) == ""


def test_server_gets_the_deadline_and_the_metadata_of_the_client_only() -> None:
    sent = [("authorization", "Bearer a"), ("authorization", "Bearer b"), ("x-trace-bin", b"\0")]
    # Ray Serve reads these names. Its router would keep each request with a multiplexed_model_id in memory.
    names = ("request_id", "session_id", "multiplexed_model_id", "gradrule-timeout-s")
    context = SimpleNamespace(invocation_metadata=lambda: [*sent, *((name, "1") for name in names)])
    context.time_remaining = lambda: 2.5
    passed = call_metadata(Rpc("/gradrule.v1.GradientService/Evaluate"), request(program="programs/p"), context)
    assert dict(passed)["session_id"] == program_key(request(program="programs/p"))
    assert "1" not in dict(passed).values()
    assert "multiplexed_model_id" not in dict(passed)
    options = call_options(SimpleNamespace(invocation_metadata=lambda: passed))
    assert options == {"metadata": sent, "timeout": 2.5}


def order(key: str, calls: dict[str, tuple[int, int]], *, program_bound: int = 2, replica_bound: int = 8) -> list[str]:
    """Returns the order of replicas, given the calls of the program and of all programs on each."""
    loads = [Load(name, name, *counts) for name, counts in calls.items()]
    return preferred(key, loads, program_bound=program_bound, replica_bound=replica_bound)


def idle(names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names, (0, 0))


def test_programs_spread_over_replicas_and_move_only_when_theirs_goes() -> None:
    before = {key: order(key, idle("abcd"))[0] for key in KEYS}
    # 1,000 programs over 4 replicas: 250 each, with a standard deviation of 14.
    assert all(180 < count < 320 for count in Counter(before.values()).values())
    after = {key: order(key, idle("abc"))[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == "d"}


def test_a_program_that_is_called_often_gets_further_replicas() -> None:
    first, second, *_ = order("program", idle("abcd"))
    calls, chosen = idle("abcd"), []
    for _ in range(20):
        chosen.append(order("program", calls)[0])
        calls[chosen[-1]] = (calls[chosen[-1]][0] + 1,) * 2
    assert chosen[:4] == [first, first, second, second]
    assert set(chosen) == set(calls)


def test_calls_of_other_programs_move_a_program_at_the_larger_bound() -> None:
    first, second, *_ = order("program", idle("abcd"))
    assert order("program", {**idle("abcd"), first: (1, 7)})[0] == first
    assert order("program", {**idle("abcd"), first: (1, 8)})[0] == second
    # Where all replicas have many calls, such as idle streams, the average decides.
    busy = dict.fromkeys("abcd", (0, 100))
    assert order("program", {**busy, first: (1, 110)})[0] == first
    assert order("program", {**busy, first: (1, 200)})[0] == second
    assert order("program", {**busy, first: (2, 100)})[0] == second
    assert order("program", {**busy, first: (2, 99)})[0] == first


def test_busy_replicas_are_tried_last_and_the_least_busy_first() -> None:
    assert order("program", {"a": (2, 19), "b": (2, 18), "c": (0, 0)}) == ["c", "b", "a"]


class FakeReplica:
    """A replica without calls, as Ray Serve's router sees it."""

    max_ongoing_requests = 100_000

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


DEPLOYMENT = DeploymentID(name="gradrule", app_name="gradrule")


def router(replicas: str = "abcd", **bounds: int) -> ProgramRouter:
    """Returns a router as a proxy has it. Needs a running event loop."""
    made = ProgramRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**bounds)
    made.update_replicas([FakeReplica(name) for name in replicas])
    return made


def call(number: int, program: str = "program") -> PendingRequest:
    metadata = RequestMetadata(f"call {number}", f"internal {number}", session_id=program)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


async def send(router: ProgramRouter, request: PendingRequest) -> ReplicaID:
    """Does what Ray Serve does to send a request, and returns where it goes."""
    replica = (await router._choose_replica_for_request(request)).replica_id
    router.on_send_request(replica)
    return replica


async def test_calls_that_arrive_at_once_are_spread_by_their_program() -> None:
    tested = router()
    chosen = await asyncio.gather(*(send(tested, call(number)) for number in range(16)))
    assert len(set(chosen)) == 4
    # 25 % more than the average of 4.
    assert max(Counter(chosen).values()) <= 6
    other = router()
    programs = await asyncio.gather(*(send(other, call(number, f"program {number}")) for number in range(16)))
    idle_router = [await send(router(), call(0, f"program {number}")) for number in range(16)]
    assert programs == idle_router


async def test_calls_of_a_program_are_counted_until_they_end() -> None:
    tested = router()
    calls = tested._program_calls
    sent = [(await send(tested, call(number)), f"internal {number}") for number in range(8)]
    assert len(calls) == 8
    first = sent[0][0]
    assert calls.count(first, "program") >= 2
    assert calls.count(first, "other") == 0
    # An answer may be complete before Ray Serve calls `on_request_routed`.
    for replica, number in sent[:4]:
        tested.on_request_completed(replica, number)
        tested.on_request_completed(replica, number)
    assert len(calls) == 4
    gone = sent[-1][0]
    tested.update_replicas([FakeReplica(name) for name in "abcd" if name != gone.unique_id])
    assert calls.count(gone, "program") == 0
    for replica, number in sent:
        tested.on_request_completed(replica, number)
    assert len(calls) == 0
    assert calls._counts == {}


async def test_calls_of_a_program_count_while_ray_serve_has_no_news_of_its_replica() -> None:
    tested = router("ab")
    first, second = [ReplicaID(name, deployment_id=DEPLOYMENT) for name in "ab"]
    if await send(tested, call(1)) == second:
        first, second = second, first
    assert await send(tested, call(2)) == first
    tested.on_send_request(second)
    # As 10 s after the last news.
    tested.replica_queue_len_cache.invalidate_key(first)
    assert (await tested.choose_replicas(tested._replicas_list, call(3)))[0][0].replica_id == second


async def test_calls_that_are_cancelled_before_they_are_sent_are_not_counted() -> None:
    tested = router("")
    waiting = asyncio.ensure_future(send(tested, call(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    tested.update_replicas([FakeReplica("a")])
    await send(tested, call(2))
    assert list(tested._program_calls._calls) == ["internal 2"]
    # Cancelled after its replica was chosen, before Ray Serve's coroutine ran.
    chosen = asyncio.ensure_future(send(tested, call(3)))
    while "internal 3" not in tested._program_calls._calls:
        await asyncio.sleep(0)
    chosen.cancel()
    await asyncio.wait([chosen])
    assert chosen.cancelled()
    assert list(tested._program_calls._calls) == ["internal 2"]


async def test_a_call_that_a_replica_refuses_is_counted_on_the_next_one() -> None:
    tested = router("ab")
    request = call(1)
    refused = await send(tested, request)
    tested._program_calls.add("internal 2", refused, "program")
    tested._program_calls.add("internal 3", refused, "program")
    taken = (await tested._choose_replica_for_request(request, is_retry=True)).replica_id
    assert taken != refused
    # Ray Serve reports the end of the refused attempt late.
    tested.on_request_completed(refused, "internal 1")
    assert tested._program_calls.count(taken, "program") == 1
    assert tested._program_calls.count(refused, "program") == 2


def test_replicas_follow_running_and_waiting_requests() -> None:
    context = SimpleNamespace(
        aggregated_metrics={"requests": {"a": 12.0, "b": 20.0}},
        total_queued_requests=8,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10),
    )
    assert autoscaling_policy(context) == (4.0, {})


async def test_a_stream_ends_when_its_own_replica_leaves() -> None:
    one, other = (DeploymentID(name="gradrule", app_name=app) for app in ("one", "other"))
    replicas = {number: ReplicaID(number, deployment_id=one) for number in ("1", "2")}
    leaving = LeavingReplicas()
    told: list[str] = []
    for number, replica in replicas.items():
        leaving.add(f"call {number}", functools.partial(told.append, number))
        leaving.set_replica(f"call {number}", replica, is_leaving=False)
    # The router of another application in the same proxy.
    leaving.keep(other, set())
    leaving.keep(one, {replicas["2"]})
    await asyncio.sleep(0)
    assert told == ["1"]
    # The replica left before Ray Serve said that the call was sent to it.
    leaving.add("late", functools.partial(told.append, "late"))
    leaving.set_replica("late", replicas["1"], is_leaving=True)
    await asyncio.sleep(0)
    assert told == ["1", "late"]


async def test_a_client_that_reads_no_answers_cannot_send_further_requests() -> None:
    message = evaluate_pb2.StreamEvaluateRequest(request_id=1, evaluate=evaluate_pb2.EvaluateRequest())
    answer = evaluate_pb2.StreamEvaluateResponse(request_id=1, evaluate=evaluate_pb2.EvaluateResponse())
    sent = 0

    async def messages() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield message.SerializeToString()

    rpc = Rpc(rpcs.STREAM_EVALUATE, True, True)
    window = RequestWindow(rpc)
    passed: list[bytes] = []

    async def read() -> None:
        passed.extend([each async for each in window.limited(messages())])

    reading = asyncio.ensure_future(read())
    for _ in range(200):
        await asyncio.sleep(0)
    # One more has been taken from the connection.
    assert sent == 33
    for _ in range(10):
        window.count_answer(answer.SerializeToString())
        await asyncio.sleep(0)
    assert sent == 43
    window.close()
    reading.cancel()


async def test_a_request_can_be_cancelled_while_too_many_wait() -> None:
    request = evaluate_pb2.StreamEvaluateRequest(request_id=1, evaluate=evaluate_pb2.EvaluateRequest())
    cancel = evaluate_pb2.StreamEvaluateRequest(request_id=2, cancel=evaluate_pb2.CancelRequest(request_id=1))

    async def messages() -> AsyncIterator[bytes]:
        for message in (*[request] * 32, cancel):
            yield message.SerializeToString()

    window = RequestWindow(Rpc(rpcs.STREAM_EVALUATE, True, True))
    passed = await asyncio.wait_for(_all(window.limited(messages())), 10)
    assert passed[-1] == cancel.SerializeToString()


async def _all(messages: AsyncIterator[bytes]) -> list[bytes]:
    return [message async for message in messages]


def test_a_request_that_was_refused_before_its_last_message_does_not_wait() -> None:
    requests = StreamRequests(Rpc(rpcs.STREAM_EVALUATE, True, True))
    chunk = evaluate_pb2.StreamEvaluateRequest(request_id=7, chunk=b"...").SerializeToString()
    whole = evaluate_pb2.StreamEvaluateRequest(request_id=7, evaluate=evaluate_pb2.EvaluateRequest())
    last = evaluate_pb2.StreamEvaluateRequest()
    last.CopyFrom(whole)
    last.total_bytes = 6
    refusal = evaluate_pb2.StreamEvaluateResponse(request_id=7)
    refusal.status.SetInParent()
    answer = refusal.SerializeToString()
    assert requests.change_by_request(chunk) == 0
    assert requests.change_by_answer(answer) == 0
    assert requests.change_by_request(chunk) == 0
    assert requests.change_by_request(last.SerializeToString()) == 0
    # Not refused.
    assert requests.change_by_request(chunk) == 0
    assert requests.change_by_request(last.SerializeToString()) == 1
    assert requests.change_by_answer(answer) == -1
    # Refused and never completed; then a request without chunks.
    assert requests.change_by_request(chunk) == 0
    assert requests.change_by_answer(answer) == 0
    assert requests.change_by_request(whole.SerializeToString()) == 1
    assert requests.change_by_answer(answer) == -1


def test_requests_that_are_never_completed_are_forgotten() -> None:
    requests = StreamRequests(Rpc(rpcs.STREAM_EVALUATE, True, True))
    for number in range(5000):
        chunk = evaluate_pb2.StreamEvaluateRequest(request_id=number, chunk=b"...")
        assert requests.change_by_request(chunk.SerializeToString()) == 0
    assert len(requests._incomplete) <= 1024


async def test_a_stream_counts_requests_that_have_no_answer_yet() -> None:
    counts = [0]

    def add(change: int) -> None:
        counts.append(counts[-1] + change)

    async def requests() -> object:
        for message in (
            evaluate_pb2.StreamEvaluateRequest(request_id=1, chunk=b"..."),
            evaluate_pb2.StreamEvaluateRequest(request_id=1, evaluate=evaluate_pb2.EvaluateRequest()),
            evaluate_pb2.StreamEvaluateRequest(request_id=2, forward=evaluate_pb2.ForwardRequest()),
            evaluate_pb2.StreamEvaluateRequest(request_id=3, cancel=evaluate_pb2.CancelRequest(request_id=2)),
        ):
            yield message.SerializeToString()

    counter = StreamCounter(Rpc("/gradrule.v1.GradientService/StreamEvaluate", True, True), add)
    passed = [message async for message in counter.counted(requests())]
    assert len(passed) == 4
    assert counts[-1] == 2
    counter.count_response(evaluate_pb2.StreamEvaluateResponse(request_id=1, chunk=b"...").SerializeToString())
    assert counts[-1] == 2
    answer = evaluate_pb2.StreamEvaluateResponse(request_id=1, evaluate=evaluate_pb2.EvaluateResponse())
    counter.count_response(answer.SerializeToString())
    assert counts[-1] == 1
    counter.close()
    assert counts[-1] == 0


async def test_error_of_a_replica_without_its_server_says_so() -> None:
    """Clients would take gRPC's own text for one about the address that they call."""

    class LostCall:
        async def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        async def details(self) -> str:
            return "failed to connect to all addresses; last error: Connection refused"

        async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
            return self.trailers

        trailers: tuple[tuple[str, str], ...] = ()

    call = LostCall()
    assert "Ray Serve starts another one" in (await replica._ending(call, None)).details
    call.trailers = (("x-request-id", "7f"),)
    assert (await replica._ending(call, None)).details == await call.details()
