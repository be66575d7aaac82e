"""Defines compiled programs, and the methods of the client that make and find them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Self

from gradrule import _progress
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._messages import derivatives, forward_calls, rpc_calls
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
    groups_of,
)
from gradrule._messages.feed_values import casting
from gradrule._messages.program_calls import ProgramBase, merged
from gradrule._messages.transfer_options import Transfer
from gradrule._progress import Progress
from gradrule._results import call_results
from gradrule._rpc.async_client.base import AsyncClientBase
from gradrule._rpc.async_client.forward import AsyncForwardHandle
from gradrule._rpc.async_transport import AsyncPipeline, ManyFeeds, iterate
from gradrule.errors import InvalidDerivativeError, InvalidParamError
from gradrule.v1 import program_pb2

_NO_MORE: Any = object()


class AsyncProgramMethods(AsyncClientBase):
    """Implements the client's methods for programs."""

    async def compile(
        self,
        graph: GraphLike,
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
        dense_gradients: bool = False,
        batching: Batching | None = None,
        jit: Jit = "off",
        name: str | None = None,
        progress: Progress = None,
        timeout: float | None = None,
    ) -> AsyncProgram:
        """Compiles a program, which the server keeps until it is deleted.

        Params are given in the overrides, or with each call.

        Args:
            graph: As in `evaluate`.
            fetches: As in `evaluate`.
            ys: As in `evaluate`.
            xs: As in `evaluate`.
            grad_ys: Names of tensors, by y or in the order of ys; calls give arrays.
            stop_gradients: As in `evaluate`.
            unconnected_gradients: As in `evaluate`.
            overrides: As in `evaluate`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            dense_gradients: As in `evaluate`.
            batching: As in `evaluate`.
            jit: As in `evaluate`.
            name: Id of the program; default: derived from its content. Equal content returns the existing program.
            progress: A function that gets a `gr.ProgressReport` for each step; True: a bar, if standard error is a
                terminal or this is a notebook. Uploads of the graph and of its variables are reported too.
            timeout: Seconds; default: that of `connect`.

        Returns:
            The program.

        Raises:
            ProgramExistsError: The name belongs to a program with other content.
            QuotaExceededError: The tenant has too many programs.
            GradruleError: As in `evaluate`.
        """
        arguments = ProgramArguments(
            fetches,
            ys,
            xs,
            grad_ys,
            stop_gradients,
            unconnected_gradients,
            overrides,
            no_gradient,
            rewrites,
            dense_gradients=dense_gradients,
            batching=batching,
            jit=jit,
        )
        call = rpc_calls.compile_program(graph, name, arguments)
        with _progress.start(progress, "compiling", None, ""):
            message = await self._run(call, timeout, progress)
        return AsyncProgram(self, message, groups_of(xs, graph))

    async def program(self, name: str, *, timeout: float | None = None) -> AsyncProgram:
        """Returns the program with a name.

        Args:
            name: `programs/{id}`, or the id.
            timeout: Seconds; default: that of `connect`.

        Raises:
            ProgramNotFoundError: There is no program with this name.
        """
        message = await self._unary(
            "ProgramService/GetProgram",
            program_pb2.GetProgramRequest(name=rpc_calls.full_name("programs", name)),
            program_pb2.GetProgramResponse,
            lambda response: response.program,
            timeout,
        )
        return AsyncProgram(self, message)

    async def list_programs(self, *, timeout: float | None = None) -> list[AsyncProgram]:
        """Lists all programs by name.

        Args:
            timeout: Seconds for each page; default: that of `connect`.
        """
        request = program_pb2.ListProgramsRequest(page_size=rpc_calls.PAGE_SIZE)
        programs: list[AsyncProgram] = []
        while True:
            messages, request.page_token = await self._unary(
                "ProgramService/ListPrograms",
                request,
                program_pb2.ListProgramsResponse,
                lambda response: (response.programs, response.next_page_token),
                timeout,
            )
            programs += [AsyncProgram(self, message) for message in messages]
            if not request.page_token:
                return programs

    async def delete_program(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes a program.

        Args:
            name: `programs/{id}`, or the id.
            timeout: Seconds; default: that of `connect`.

        Raises:
            ProgramNotFoundError: There is no program with this name.
        """
        request = program_pb2.DeleteProgramRequest(name=rpc_calls.full_name("programs", name))
        await self._unary(
            "ProgramService/DeleteProgram", request, program_pb2.DeleteProgramResponse, lambda _: None, timeout
        )


class AsyncProgram(ProgramBase):
    """Calls a compiled program; calls send only tensors. Made by `AsyncClient.compile` and `AsyncClient.program`."""

    def __init__(self, client: AsyncClientBase, message: Any, groups: call_results.Groups = None) -> None:
        super().__init__(message, groups)
        self._client = client

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._client, self._message, self._groups)

    async def __call__(self, feeds: Feeds | None = None, /, **named: Any) -> call_results.Result:
        """Runs the program.

        Args:
            feeds: Values by tensor.
            **named: Values by tensor, as keywords.

        Returns:
            As `evaluate`.
        """
        return await self.evaluate(merged(feeds, named))

    async def evaluate(
        self,
        feeds: Feeds | None = None,
        *,
        grad_ys: GradYs | None = None,
        params: CallParams | None = None,
        stacked_grad_ys: bool = False,
        cast: bool = False,
        transfer: Transfer | None = None,
        timeout: float | None = None,
    ) -> call_results.Result:
        """Runs the program.

        Args:
            feeds: Values by tensor, as in `AsyncClient.evaluate`.
            grad_ys: Upstream gradients, by y or in the order of ys: arrays of y's dtype and shape.
            params: Values of rules' params, by the override's label, then by param.
            stacked_grad_ys: As in `AsyncClient.evaluate`.
            cast: As in `AsyncClient.evaluate`.
            transfer: As in `AsyncClient.evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            Outputs by fetch, and gradients by x with x's dtype and shape.

        Raises:
            MissingFeedError: A placeholder has no value.
            UnknownFeedError: A name is no placeholder of the program.
            FeedDtypeError: An array has another dtype than its placeholder, and cannot be converted without a loss.
            ExecutionFailedError: The graph failed while it ran.
            GradruleError: Base class of these and all other failures.
        """
        if cast:
            feeds, grad_ys = casting(feeds), casting(grad_ys)
        chosen = self._client._transfer if transfer is None else transfer.checked_for_call()
        return await self._client._run(self._call(feeds, params, grad_ys, stacked_grad_ys, chosen), timeout)

    async def forward(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        ttl: float | None = None,
        repeat_if_lost: bool = True,
        transfer: Transfer | None = None,
        timeout: float | None = None,
    ) -> AsyncForwardHandle:
        """Runs the forward pass once; the handle's `vjp` pulls back any number of times.

        `async with await program.forward(…) as handle` closes it at the end of the block.

        Args:
            feeds: As in `evaluate`.
            params: As in `evaluate`.
            ttl: Seconds for which the server keeps the run after its last use; a setting of the server is the default
                and the maximum.
            repeat_if_lost: Whether `vjp` repeats the forward pass if the server no longer has the run. The handle then
                keeps a copy of the feeds. A program that draws random numbers is never repeated.
            transfer: As in `evaluate`.
            timeout: Seconds, also the default of the handle's calls; default: that of `connect`.

        Raises:
            InvalidParamError: `ttl` is not positive.
            QuotaExceededError: The server keeps too many handles, or too many bytes for them.
            GradruleError: As in `evaluate`.
        """
        chosen = self._client._transfer if transfer is None else transfer.checked_for_call()
        forward = forward_calls.of_program(self, feeds, params, chosen, repeat_if_lost=repeat_if_lost)
        handle = AsyncForwardHandle(self._client, forward, ttl, timeout, chosen)
        await handle._run_forward(timeout)
        return handle

    async def map(
        self,
        feeds: ManyFeeds,
        in_flight: int = 16,
        *,
        grad_ys: Iterable[GradYs] | None = None,
        params: CallParams | None = None,
        cast: bool = False,
        transfer: Transfer | None = None,
        progress: Progress = None,
        timeout: float | None = None,
    ) -> AsyncIterator[call_results.Result]:
        """Runs the program on each of many feeds, several at a time: `async for result in program.map(batches)`.

        Args:
            feeds: Feeds of each call, as in `evaluate`.
            in_flight: Maximum number of calls that run at the same time.
            grad_ys: Upstream gradients of each call, as in `evaluate`.
            params: As in `evaluate`.
            cast: As in `evaluate`.
            transfer: As in `evaluate`.
            progress: A function that gets a `gr.ProgressReport` after each result; True: a bar, if standard error is a
                terminal or this is a notebook.
            timeout: Seconds for each call; default: that of `connect`.

        Yields:
            Results in the order of the feeds.

        Raises:
            InvalidParamError: `in_flight` is less than 1.
            InvalidDerivativeError: `grad_ys` has fewer entries than `feeds`.
            GradruleError: A call failed. The error is raised in the order of the feeds; running calls are cancelled.
        """
        if in_flight < 1:
            raise InvalidParamError(f"in_flight is at least 1, not {in_flight}")
        chosen = self._client._transfer if transfer is None else transfer.checked_for_call()
        pipeline: AsyncPipeline[call_results.Result] = AsyncPipeline(self._client, timeout)
        upstream: Iterator[Any] = repeat(None) if grad_ys is None else iter(grad_ys)
        task = _progress.start(progress, "running", _progress.total_of(feeds), "calls")
        try:
            async for one in iterate(feeds):
                if len(pipeline) >= in_flight:
                    result = await pipeline.next_result()
                    task.advance()
                    yield result
                given = next(upstream, _NO_MORE)
                if given is _NO_MORE:
                    raise InvalidDerivativeError("grad_ys has fewer entries than feeds: give one for each call")
                values, given = (casting(one), casting(given)) if cast else (one, given)
                pipeline.start(rpc_calls.with_own_arrays(self._call(values, params, given, transfer=chosen)))
            while len(pipeline):
                result = await pipeline.next_result()
                task.advance()
                yield result
        finally:
            task.close()
            await pipeline.cancel()

    async def jvp(
        self,
        feeds: Feeds | None,
        tangents: Feeds,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> derivatives.Tangents:
        """Computes Jacobian-vector products of the program's ys and xs. Compiled at its first use.

        Args:
            feeds: As in `evaluate`.
            tangents: As in `AsyncClient.jvp`.
            params: As in `evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.jvp`.

        Raises:
            GradruleError: As in `AsyncClient.jvp`.
        """
        call = derivatives.program_jvp(self, feeds, tangents, params, self._client._transfer)
        return await self._client._run(call, timeout)

    async def jacobian(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        batched: bool = False,
        timeout: float | None = None,
    ) -> derivatives.Jacobians:
        """Computes Jacobians of the program's ys and xs. Compiled at its first use.

        Args:
            feeds: As in `evaluate`.
            params: As in `evaluate`.
            batched: As in `AsyncClient.jacobian`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.jacobian`.

        Raises:
            GradruleError: As in `AsyncClient.jacobian`.
        """
        call = derivatives.program_jacobian(self, feeds, params, self._client._transfer, batched=batched)
        return await self._client._run(call, timeout)

    async def hvp(
        self,
        feeds: Feeds | None,
        vectors: Feeds,
        *,
        grad_ys: GradYs | None = None,
        params: CallParams | None = None,
        every_order: bool = False,
        timeout: float | None = None,
    ) -> derivatives.Products:
        """Computes Hessian-vector products of the program's ys and xs. Compiled at its first use.

        Args:
            feeds: As in `evaluate`.
            vectors: As in `AsyncClient.hvp`.
            grad_ys: As in `evaluate`.
            params: As in `evaluate`.
            every_order: Apply the overrides of the graph's nodes to both differentiations, whatever their order, as
                custom gradients of PyTorch, JAX and TensorFlow do.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.hvp`.

        Raises:
            GradruleError: As in `AsyncClient.hvp`.
        """
        call = derivatives.program_hvp(
            self, feeds, vectors, grad_ys, params, self._client._transfer, every_order=every_order
        )
        return await self._client._run(call, timeout)

    async def delete(self, *, timeout: float | None = None) -> None:
        """Deletes the program from the server.

        Args:
            timeout: Seconds; default: that of `connect`.

        Raises:
            ProgramNotFoundError: The program was deleted before.
        """
        request = program_pb2.DeleteProgramRequest(name=self.name)
        await self._client._unary(
            "ProgramService/DeleteProgram", request, program_pb2.DeleteProgramResponse, lambda _: None, timeout
        )
