"""Runs the requests of one frame: together if the program may merge them, else one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeAlias

from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.batching.merging import (
    BatchedCall,
    MergedRuns,
    count_examples,
    group_key_for,
    padded_size,
    run_together,
    split_calls,
)
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.run import respond
from gradrule_server.errors import GradruleError
from gradrule_server.link.batching import unpack_batch
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.messages import split_values
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

_Answering: TypeAlias = Callable[[int], AbstractContextManager[None]]


class BatchRunner:
    """Runs RUN_BATCH frames. Thread-safe.

    find_program: finds a program by its key. answering: a context that answers a
    request with the error that is raised within it.
    """

    def __init__(
        self,
        frames: FrameSocket,
        reader: ArgumentReader,
        find_program: Callable[[str], BuiltProgram],
        answering: _Answering,
    ) -> None:
        self._frames = frames
        self._reader = reader
        self._find_program = find_program
        self._answering = answering

    def run(self, number: int, payload: bytes | memoryview) -> None:
        """Runs all requests of a frame, which are of one program; then sends a notice that the frame is done.

        The caller must send an error as the FAULT of the frame: the front end answers the remaining requests with it.
        """
        notice = link_pb2.BatchNotice()
        self._run_all(payload, notice)
        self._frames.send(Kind.BATCH_NOTICE, number, notice.SerializeToString())

    def _run_all(self, payload: bytes | memoryview, notice: link_pb2.BatchNotice) -> None:
        most, requests = unpack_batch(payload)
        calls: list[BatchedCall] = []
        built: BuiltProgram | None = None
        for request_id, part in requests:
            with self._answering(request_id):
                received = split_values(part)
                request = link_pb2.RunRequest.FromString(received.message)
                notice.key = request.key
                built = self._find_program(request.key)
                started_ns = time.monotonic_ns()
                given = self._reader.read(built, request, received.values)
                calls.append(_with_group(built, BatchedCall(request_id, received.received_ns, started_ns, given)))
        if built is not None:
            self._run(built, calls, most, notice)

    def _run(self, built: BuiltProgram, calls: Sequence[BatchedCall], most: int, notice: link_pb2.BatchNotice) -> None:
        groups: dict[object, list[BatchedCall]] = {}
        for call in calls:
            # Calls that run alone go first, so that they do not wait for the batches.
            groups.setdefault(call.group_key if call.examples else None, []).append(call)
        for call in groups.pop(None, []):
            self._answer_alone(built, call)
        runs = built.merged_runs
        if runs is None:
            return
        is_merged = False
        for group in groups.values():
            for chunk in split_calls(group, most):
                is_merged |= len(chunk) > 1
                self._answer_chunk(built, runs, chunk, most)
        notice.reason = runs.refusal
        if runs.refusal:
            notice.outcome = link_pb2.BatchNotice.OUTCOME_REFUSED
        elif runs.are_equal and (is_merged or len(calls) < 2):
            notice.outcome = link_pb2.BatchNotice.OUTCOME_EQUAL

    def _answer_chunk(self, built: BuiltProgram, runs: MergedRuns, calls: Sequence[BatchedCall], most: int) -> None:
        if len(calls) == 1 or runs.refusal:
            for call in calls:
                self._answer_alone(built, call)
        elif not runs.are_equal:
            done = [(call, results) for call in calls if (results := self._answer_alone(built, call)) is not None]
            if len(done) > 1:
                runs.compare(built, [call for call, _ in done], [results for _, results in done])
        else:
            examples = sum(call.examples for call in calls)
            try:
                parts = run_together(built, runs, calls, padded_size(examples, most))
            except Exception as cause:
                if not isinstance(cause, GradruleError):
                    _log.exception("calls failed together; they run alone")
                # One call may be invalid, or they may be too large together: alone, each gets its own answer.
                done_alone = [self._answer_alone(built, call) is not None for call in calls]
                if all(done_alone):
                    runs.refuse("calls that succeed alone failed together")
                return
            for call, results in zip(calls, parts, strict=True):
                self._answer(built, call, results, examples)

    def _answer_alone(self, built: BuiltProgram, call: BatchedCall) -> Arrays | None:
        """Runs and answers one call; returns its results, None if it failed."""
        with self._answering(call.request_id):
            results = built.run(call.arguments)
            self._answer(built, call, results, 0)
            return results
        return None

    def _answer(self, built: BuiltProgram, call: BatchedCall, results: Arrays, batch_size: int) -> None:
        with self._answering(call.request_id):
            answer = respond(built, results, call.given, call.received_ns, call.started_ns, batch_size)
            self._frames.send(Kind.RAN, call.request_id, answer)


def _with_group(built: BuiltProgram, call: BatchedCall) -> BatchedCall:
    """Returns the call with its number of examples and its group, if it can run with others."""
    runs = built.merged_runs
    examples = count_examples(built, runs, call.arguments) if runs is not None and not runs.refusal else 0
    if runs is None or not examples:
        return call
    return replace(call, examples=examples, group_key=group_key_for(built, runs, call.arguments))
