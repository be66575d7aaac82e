"""Derivatives beyond gradients, as methods of the async client and its programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from gradrule import _derivatives
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._calls import Call
from gradrule._program import ProgramBase
from gradrule._requests import CallParams, Feeds, GroupedNames, Names, Words
from gradrule._transfer import Transfer

R = TypeVar("R")


class AsyncDerivatives(ABC):
    """What an async client can ask of a graph."""

    _transfer: Transfer

    @abstractmethod
    async def _run(self, call: Call[R], timeout: float | None) -> R: ...

    async def jvp(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        tangents: Feeds,
        ys: Names,
        xs: Names,
        stop_gradients: Names = (),
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Tangents:
        """As `Client.jvp`."""
        words = Words((), ys, xs, None, stop_gradients, overrides=overrides, no_gradient=no_gradient, rewrites=rewrites)
        return await self._run(self._transfer.applied(_derivatives.jvp(graph, feeds, tangents, params, words)), timeout)

    async def jacobian(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        ys: Names,
        xs: GroupedNames,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
        *,
        batched: bool = False,
    ) -> _derivatives.Jacobians:
        """As `Client.jacobian`."""
        words = Words((), ys, xs, None, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites)
        return await self._run(
            self._transfer.applied(_derivatives.jacobian(graph, feeds, params, words, batched=batched)), timeout
        )

    async def hvp(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        vectors: Feeds,
        ys: Names,
        xs: GroupedNames,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Products:
        """As `Client.hvp`."""
        words = Words((), ys, xs, None, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites)
        return await self._run(self._transfer.applied(_derivatives.hvp(graph, feeds, vectors, params, words)), timeout)


class AsyncProgramDerivatives(ProgramBase):
    """What an async program can be asked of its ys and xs, besides gradients. Compiled at its first use."""

    _client: AsyncDerivatives

    async def jvp(
        self,
        feeds: Feeds | None,
        tangents: Feeds,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Tangents:
        """As `AsyncClient.jvp`, of the program's ys and xs."""
        call = _derivatives.program_jvp(self._message, feeds, tangents, params)
        return await self._client._run(self._client._transfer.applied(call), timeout)

    async def jacobian(
        self,
        feeds: Feeds | None = None,
        *,
        batched: bool = False,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Jacobians:
        """As `AsyncClient.jacobian`, of the program's ys and xs."""
        call = _derivatives.program_jacobian(self._message, feeds, params, self._groups, batched=batched)
        return await self._client._run(self._client._transfer.applied(call), timeout)

    async def hvp(
        self,
        feeds: Feeds | None,
        vectors: Feeds,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Products:
        """As `AsyncClient.hvp`, of the program's ys and xs."""
        call = _derivatives.program_hvp(self._message, feeds, vectors, params, self._groups)
        return await self._client._run(self._client._transfer.applied(call), timeout)
