"""Runs a healthy client beside an attack: its requests have known answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import numpy as np

from gradrule.v1 import evaluate_pb2
from tests.battery import answer_checks
from tests.service import raw

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_DEADLINE_S = 60.0


def request(number: int) -> bytes:
    """Makes y = sign(x) and its gradient under a rule, with values unique to the request."""
    spec = {"fetches": ["y"], "vjp": raw.vjp()}
    message = raw.request(raw.sign_graph(), {"x": raw.tensor(_values(number))}, **spec)
    override = message.spec.overrides.add()
    override.selector.op_type = "Sign"
    override.definition.expression = "dy * x"
    return message.SerializeToString()


def wrong(number: int, answer: bytes) -> str:
    """Returns what is wrong with the answer to `request(number)`; empty if nothing."""
    message = evaluate_pb2.EvaluateResponse.FromString(answer)
    values = np.asarray(_values(number), np.float32)
    got = [message.outputs[0].value.inline_tensor, message.gradients[0].dense] if message.gradients else []
    if len(got) != 2:
        return f"request {number}: {len(message.outputs)} outputs, {len(message.gradients)} gradients"
    for name, tensor, wanted in zip(("y", "dy/dx"), got, (np.sign(values), values), strict=True):
        found = np.frombuffer(tensor.tensor_content, np.float32)
        if not np.array_equal(found, wanted):
            return f"request {number}: {name} is {found.tolist()}, not {wanted.tolist()}"
    return ""


def _values(number: int) -> list[float]:
    return [float(number % 65_521 + 1), -float(number % 251 + 1), 0.5]


@dataclass
class HealthyCalls:
    """Counts what a healthy client saw. errors: by reason, including those that a retry cured."""

    asked: int = 0
    answered: int = 0
    failed: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Returns the seconds within which this share of the answers came."""
        return float(np.quantile(self.seconds, share)) if self.seconds else 0.0


class HealthyClient:
    """Sends a request at every interval until it is stopped; retries until the deadline where the server allows it."""

    def __init__(self, target: str, every_s: float = 0.05, *, token: str | None = None) -> None:
        self._target = target
        self._every_s = every_s
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._stopping = asyncio.Event()
        self.seen = HealthyCalls()

    async def run(self) -> None:
        """Works until `stop`."""
        async with grpc.aio.insecure_channel(self._target, options=_OPTIONS) as channel:
            while not self._stopping.is_set():
                await self._ask(channel)
                with_timeout = asyncio.wait_for(self._stopping.wait(), self._every_s)
                try:
                    await with_timeout
                except TimeoutError:
                    continue

    def stop(self) -> None:
        """Stops after the current request."""
        self._stopping.set()

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        seen = self.seen
        number = seen.asked
        seen.asked += 1
        started = time.monotonic()
        while True:
            try:
                answer: bytes = await channel.unary_unary(EVALUATE)(
                    request(number), timeout=_DEADLINE_S, metadata=self._metadata
                )
            except grpc.RpcError as failure:
                judged = answer_checks.check_failure(failure)
                reason = judged.reason or judged.what
                seen.errors[reason] = seen.errors.get(reason, 0) + 1
                if judged.retry_after_s is not None and time.monotonic() - started < _DEADLINE_S:
                    await asyncio.sleep(judged.retry_after_s)
                    continue
                seen.failed += 1
                return
            seen.seconds.append(time.monotonic() - started)
            fault = wrong(number, answer)
            if fault:
                seen.wrong.append(fault)
            else:
                seen.answered += 1
            return
