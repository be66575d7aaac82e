"""Derivatives beyond gradients, as methods of the client and its programs."""

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


class Derivatives(ABC):
    """What a client can ask of a graph."""

    _transfer: Transfer

    @abstractmethod
    def _run(self, call: Call[R], timeout: float | None) -> R: ...

    def jvp(
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
        """Jacobian-vector products: by y the sum over xs of dy/dx · tangent, of y's type and shape.

        tangents: by x, of x's type and shape, keyed like feeds; an x without one counts as a constant. Zeros where a y
        depends on no x with a tangent; None where a y is of a type without derivatives. Where an override gives a
        gradient, the product is the transpose of what its rule computes, taken at upstream gradients of zero. The other
        words are those of `evaluate`.
        """
        words = Words((), ys, xs, None, stop_gradients, overrides=overrides, no_gradient=no_gradient, rewrites=rewrites)
        return self._run(self._transfer.applied(_derivatives.jvp(graph, feeds, tangents, params, words)), timeout)

    def jacobian(
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
        """Jacobians: by y, then by x, an array of shape (y's shape, x's shape); None where y does not depend on x.

        batched: axis 0 of each y and x counts examples, none of which depends on another, as in
        `GradientTape.batch_jacobian`; the shape is (examples, rest of y's shape, rest of x's shape). Per-example
        gradients are the Jacobian of a vector of losses, one for each example: by a weight `w` its shape is (examples,
        w's shape). Each row is pulled back by itself, with the overrides. The other words are those of `evaluate`.
        """
        words = Words((), ys, xs, None, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites)
        return self._run(
            self._transfer.applied(_derivatives.jacobian(graph, feeds, params, words, batched=batched)), timeout
        )

    def hvp(
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
        """Hessian-vector products: by x the gradient of the sum over xs of (d sum(ys)/dx) · vector.

        vectors: by x, of x's type and shape, keyed like feeds; an x without one counts as one whose vector is zeros.
        An array, a `Sparse`, or None where there is no second derivative. Overrides hold in the first differentiation,
        those of order `all` (`Override`) in the second too. The other words are those of `evaluate`.
        """
        words = Words((), ys, xs, None, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites)
        return self._run(self._transfer.applied(_derivatives.hvp(graph, feeds, vectors, params, words)), timeout)


class ProgramDerivatives(ProgramBase):
    """What a program can be asked of its ys and xs, besides gradients. Compiled at its first use."""

    _client: Derivatives

    def jvp(
        self,
        feeds: Feeds | None,
        tangents: Feeds,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Tangents:
        """As `Client.jvp`, of the program's ys and xs."""
        call = _derivatives.program_jvp(self._message, feeds, tangents, params)
        return self._client._run(self._client._transfer.applied(call), timeout)

    def jacobian(
        self,
        feeds: Feeds | None = None,
        *,
        batched: bool = False,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Jacobians:
        """As `Client.jacobian`, of the program's ys and xs."""
        call = _derivatives.program_jacobian(self._message, feeds, params, self._groups, batched=batched)
        return self._client._run(self._client._transfer.applied(call), timeout)

    def hvp(
        self,
        feeds: Feeds | None,
        vectors: Feeds,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> _derivatives.Products:
        """As `Client.hvp`, of the program's ys and xs."""
        call = _derivatives.program_hvp(self._message, feeds, vectors, params, self._groups)
        return self._client._run(self._client._transfer.applied(call), timeout)
