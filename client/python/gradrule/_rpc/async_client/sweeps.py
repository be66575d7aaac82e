"""Implements the client's method that evaluates one graph under many override maps, or many values of params."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

from gradrule import _progress
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._comparison.sweep import Many, Run, Sweep, SweepResult, runs_of
from gradrule._messages.call_arguments import (
    Batching,
    CallParams,
    Feeds,
    GradYs,
    GroupedNames,
    Jit,
    Names,
    NoGradient,
    ProgramArguments,
    UnconnectedGradients,
)
from gradrule._messages.feed_values import casting
from gradrule._messages.transfer_options import Transfer
from gradrule._progress import Progress
from gradrule._results import call_results
from gradrule._rpc.async_client.base import AsyncClientBase
from gradrule._rpc.async_transport import AsyncPipeline
from gradrule.errors import GradruleError, InvalidParamError


class AsyncSweepMethods(AsyncClientBase):
    """Implements the client's method `sweep`."""

    async def sweep(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        maps: Many[Overrides | None] | None = None,
        *,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: Many[CallParams] | None = None,
        dense_gradients: bool = False,
        stacked_grad_ys: bool = False,
        batching: Batching | None = None,
        jit: Jit = "off",
        cast: bool = False,
        transfer: Transfer | None = None,
        in_flight: int = 2,
        progress: Progress = None,
        timeout: float | None = None,
    ) -> AsyncIterator[SweepResult]:
        """Evaluates one graph on the same feeds under many override maps: `async for done in client.sweep(…)`.

        Or, with `params`, under one override map with many values of its rules' params. That compiles nothing more
        than the first of them; each override map is compiled.

        Args:
            graph: As in `evaluate`. It is sent once.
            feeds: As in `evaluate`. Values of more than 1 MiB are sent once.
            maps: Override maps, each as `evaluate` takes it as `overrides`; None in their place: the graph's own
                gradients. A dict gives each a label, in a list the label is the index.
            fetches: As in `evaluate`. With maps, outputs of more than 1 MiB are fetched once, and the results share
                the arrays, unless the graph draws random numbers.
            ys: As in `evaluate`.
            xs: As in `evaluate`.
            grad_ys: As in `evaluate`.
            stop_gradients: As in `evaluate`.
            unconnected_gradients: As in `evaluate`.
            overrides: The override map whose params vary; only with `params`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            params: Instead of maps: choices of params, each as `evaluate` takes it. A dict gives each a label, in a
                list the label is the index.
            dense_gradients: As in `evaluate`.
            stacked_grad_ys: As in `evaluate`.
            batching: As in `evaluate`.
            jit: As in `evaluate`.
            cast: As in `evaluate`.
            transfer: As in `evaluate`.
            in_flight: Maximum number of calls that run at the same time.
            progress: A function that gets a `gr.ProgressReport` after each result; True: a bar, if standard error is a
                terminal or this is a notebook. Uploads are reported too.
            timeout: Seconds for each call; default: that of `connect`.

        Yields:
            A `SweepResult` for each map or choice of params, in their order: its `label`, and the `result` that
            `evaluate` returns. A map that fails does not end the sweep: its `error` is set, and reading its `result`
            raises it. A loop that ends early cancels the calls that run.

        Raises:
            InvalidOverrideError: There are neither maps nor params, or both, or `maps` is one override map.
            InvalidParamError: `in_flight` is less than 1, or `params` are those of one call.
            GradruleError: The graph or a feed is not valid.
        """
        if in_flight < 1:
            raise InvalidParamError(f"in_flight is at least 1, not {in_flight}")
        if cast:
            feeds, grad_ys = casting(feeds), casting(grad_ys)
        arguments = ProgramArguments(
            fetches,
            ys,
            xs,
            grad_ys,
            stop_gradients,
            unconnected_gradients,
            None,
            no_gradient,
            rewrites,
            dense_gradients=dense_gradients,
            batching=batching,
            jit=jit,
        )
        runs = runs_of(maps, overrides, params)
        chosen = self._transfer if transfer is None else transfer.checked_for_call()
        sweep = Sweep(graph, feeds, runs, arguments, stacked_grad_ys, chosen)
        pipeline: AsyncPipeline[call_results.Result] = AsyncPipeline(self, timeout)
        waiting, started = deque(runs), deque[tuple[Run, GradruleError | None]]()
        task = _progress.start(progress, "running", len(runs), "calls")
        try:
            while waiting or started:
                while waiting and len(started) < (1 if sweep.must_wait else in_flight):
                    run = waiting.popleft()
                    started.append((run, await self._start_run(sweep, run, pipeline, progress, timeout)))
                run, error = started.popleft()
                outcome: call_results.Result | GradruleError
                try:
                    outcome = error or sweep.with_outputs(await pipeline.next_result())
                except GradruleError as refusal:
                    outcome = refusal
                task.advance()
                yield SweepResult(run.label, outcome)
        finally:
            task.close()
            await pipeline.cancel()

    async def _start_run(
        self,
        sweep: Sweep,
        run: Run,
        pipeline: AsyncPipeline[call_results.Result],
        progress: Progress,
        timeout: float | None,
    ) -> GradruleError | None:
        """Sends the call of a run, after the blobs that the server lacks for it. Returns the error if that fails."""
        try:
            call = sweep.call(run)
            blobs = sweep.not_uploaded(call.blobs)
            if blobs:
                await self._send_blobs(blobs, timeout, progress)
            pipeline.start(call)
        except GradruleError as refusal:
            return refusal
        return None
