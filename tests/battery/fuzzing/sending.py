"""Sends cases to a server concurrently and checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gradrule_server.link.v1 import link_pb2
from tests.battery import answer_checks
from tests.battery.answer_checks import Judgement, Verdict
from tests.battery.fuzzing.cases import Case
from tests.battery.fuzzing.seeds import methods

IN_FLIGHT = 64
DEADLINE_S = 20.0
# Statuses that ask for a later retry: the case has not been processed yet.
_AGAIN = {"ENGINE_UNAVAILABLE", "OVERLOADED"}
_PATIENCE_S = 90.0
_PAUSE_S = 0.3
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass
class Outcome:
    """Holds the judgements of all answers of a case, and its duration."""

    judgements: list[Judgement] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        return [judgement.what for judgement in self.judgements if judgement.verdict is Verdict.FAULT]

    @property
    def reasons(self) -> list[str]:
        return [judgement.reason for judgement in self.judgements if judgement.verdict is Verdict.REFUSED]


def channel(target: str) -> grpc.aio.Channel:
    """Opens a connection without retries and limits."""
    return grpc.aio.insecure_channel(
        target, options=[*_OPTIONS, ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    )


async def send(channel: grpc.aio.Channel, case: Case, deadline_s: float = DEADLINE_S) -> Outcome:
    """Sends a case until it has been processed, and checks the answers."""
    started = time.monotonic()
    while True:
        outcome = await _send_once(channel, case, deadline_s)
        outcome.seconds = time.monotonic() - started
        if not set(outcome.reasons) & _AGAIN or outcome.faults:
            return outcome
        if outcome.seconds > _PATIENCE_S:
            outcome.judgements.append(Judgement(Verdict.FAULT, what=f"{outcome.reasons} for {_PATIENCE_S:g} s"))
            return outcome
        await asyncio.sleep(_PAUSE_S)


async def _send_once(channel: grpc.aio.Channel, case: Case, deadline_s: float) -> Outcome:
    method = methods()[case.method]
    outcome = Outcome()
    try:
        if not method.requests_stream:
            answer: bytes = await channel.unary_unary(method.path)(case.messages[0], timeout=deadline_s)
            outcome.judgements.append(answer_checks.check_answer(method.response, answer))
        elif not method.responses_stream:
            upload: Any = channel.stream_unary(method.path)(_each(case.messages), timeout=deadline_s)
            outcome.judgements.append(answer_checks.check_answer(method.response, await upload))
        else:
            # The deadlines of a session's messages add up.
            all_s = deadline_s * max(1, len(case.messages))
            stream: Any = channel.stream_stream(method.path)(_each(case.messages), timeout=all_s)
            async for answer in stream:
                outcome.judgements.append(answer_checks.check_answer(method.response, answer))
            due, came = sum(_is_due(case.method, message) for message in case.messages), len(outcome.judgements)
            if came < due:
                what = f"{came} answers to {due} messages of a stream that ended well"
                outcome.judgements.append(Judgement(Verdict.FAULT, what=what))
    except grpc.RpcError as failure:
        outcome.judgements.append(_unless_lost(answer_checks.check_failure(failure)))
    return outcome


def _is_due(method: str, message: bytes) -> bool:
    """Returns whether a message of a stream has an answer: all but parts of a request and cancellations."""
    if method != "GradientService/StreamEvaluate":
        return True
    try:
        return link_pb2.RawStreamRequest.FromString(message).WhichOneof("request") not in {"cancel", "chunk"}
    except DecodeError:
        return True


def _unless_lost(judged: Judgement) -> Judgement:
    """Reports a fault where only gRPC gave a status: the server's shorter deadline should have answered."""
    if not judged.is_bare or judged.reason == "RESOURCE_EXHAUSTED":
        return judged
    return replace(judged, verdict=Verdict.FAULT, what=f"no answer: {judged.reason} {judged.what}")


async def _each(messages: tuple[bytes, ...]) -> Any:
    for message in messages:
        yield message


@dataclass
class Tally:
    """Counts all outcomes of a run."""

    cases: int = 0
    sent_bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    good: int = 0
    slowest_s: float = 0.0

    def add(self, case: Case, outcome: Outcome) -> None:
        """Counts one outcome."""
        self.cases += 1
        self.sent_bytes += sum(map(len, case.messages))
        self.kinds[case.kind] += 1
        self.reasons.update(outcome.reasons)
        self.good += sum(judgement.verdict is Verdict.GOOD for judgement in outcome.judgements)
        self.slowest_s = max(self.slowest_s, outcome.seconds)
