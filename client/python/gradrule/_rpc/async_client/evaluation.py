"""Implements the methods of the client that evaluate, differentiate and explain graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradrule import _progress
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._comparison import compare
from gradrule._comparison.compare import Comparison
from gradrule._messages import derivatives, rpc_calls
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
from gradrule._messages.request_messages import sent_graph
from gradrule._messages.transfer_options import Transfer
from gradrule._progress import Progress
from gradrule._results import call_results
from gradrule._rpc.async_client.base import AsyncClientBase


class AsyncEvaluationMethods(AsyncClientBase):
    """Implements the client's methods that take a graph and return values or gradients."""

    async def evaluate(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        *,
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        dense_gradients: bool = False,
        stacked_grad_ys: bool = False,
        batching: Batching | None = None,
        jit: Jit = "off",
        cast: bool = False,
        transfer: Transfer | None = None,
        timeout: float | None = None,
    ) -> call_results.Result:
        """Computes outputs and gradients of a graph in one call, as `Session.run` and `tf.gradients` do.

        Args:
            graph: A `Graph`, a GraphDef, or its bytes.
            feeds: Values by tensor: lists, numbers, arrays of NumPy, tensors of TensorFlow, PyTorch and JAX, data
                frames. Lists take the tensor's dtype, and so do arrays of which no value changes thereby.
            fetches: Tensors to return.
            ys: Tensors to differentiate.
            xs: Tensors with respect to which to differentiate. A dict of group names to tensors groups the gradients
                in the same way.
            grad_ys: Upstream gradients, by y or in the order of ys: arrays of y's dtype and shape, or names of tensors.
                A y without one gets ones.
            stop_gradients: Tensors that count as constants.
            unconnected_gradients: Gradient if no y depends on x: `"none"` or `"zero"`.
            overrides: A dict of op type to rule, or a list of `Override` and `Preset`; the first match wins.
            no_gradient: What to do with an op on the path that has no gradient: `"error"`; `"default"` as TensorFlow
                does; `"pass"` the upstream gradient on; `"zero"`.
            rewrites: Changes made to the graph first. `"fold_batch_norm"` folds batch norms into the linear ops before
                them.
            params: Values of rules' params, by the override's label, then by param.
            dense_gradients: Return the gradient of a gather as an array, not as a `Sparse`.
            stacked_grad_ys: Pull back many upstream gradients at once: each array in `grad_ys` has one more axis in
                front, all of one size, and so has each gradient.
            batching: `gr.Batching(axis=0)` lets the server run concurrent calls of the program together: declares that
                axis 0 counts examples, and that the results of an example do not depend on others; None: calls run
                alone.
            jit: `"on"` lets XLA compute all calls; the first with new shapes takes seconds. Results are equal up to
                rounding. A program whose ops XLA would compute differently is refused. `"off"`: TensorFlow's kernels.
            cast: Convert arrays in `feeds` and `grad_ys` even if that rounds values.
            transfer: How tensors are transferred in this call; default: as `connect` says.
            timeout: Seconds; default: that of `connect`.

        Returns:
            Outputs by fetch, gradients by x with x's dtype and shape, and the rule that each node got.

        Raises:
            InvalidGraphError: The graph cannot be read or is not valid.
            UnknownTensorError: A name is no tensor of the graph.
            FeedDtypeError: An array does not have the tensor's dtype, and cannot be converted without a loss.
            UnmatchedOverrideError: An override matches no node.
            InactiveOverrideError: An override matches only nodes that are not differentiated.
            NoGradientError: An op on the path has no gradient and `no_gradient` is `"error"`.
            ExecutionFailedError: The graph failed while it ran.
            GradruleError: Base class of these and all other failures.
        """
        if cast:
            feeds, grad_ys = casting(feeds), casting(grad_ys)
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
        chosen = self._transfer if transfer is None else transfer.checked_for_call()
        call = rpc_calls.evaluate(sent_graph(graph), feeds, params, arguments, stacked_grad_ys, chosen)
        return await self._run(call, timeout)

    async def explain(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        *,
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        dense_gradients: bool = False,
        timeout: float | None = None,
    ) -> call_results.Explanation:
        """Reports the rule of each node, and all errors, without running the graph.

        Args:
            graph: As in `evaluate`.
            feeds: As in `evaluate`; checked by the client, not sent.
            fetches: As in `evaluate`.
            ys: As in `evaluate`.
            xs: As in `evaluate`.
            grad_ys: As in `evaluate`; arrays are checked by the client, not sent.
            stop_gradients: As in `evaluate`.
            unconnected_gradients: As in `evaluate`.
            overrides: As in `evaluate`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            params: As in `evaluate`; checked by the client, not sent.
            dense_gradients: As in `evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            The rule of each node, and the errors that the server found.

        Raises:
            GradruleError: The request is not valid, or names something that the graph or the overrides lack.
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
        )
        return await self._run(rpc_calls.explain(graph, feeds, params, arguments), timeout)

    async def compare(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        *,
        ys: Names,
        xs: Names,
        overrides: Mapping[str, Overrides | None],
        grad_ys: GradYs | None = None,
        finite_differences: bool = True,
        rewrites: Sequence[str] = (),
        progress: Progress = None,
        timeout: float | None = None,
    ) -> Comparison:
        """Compares the gradients of a graph under several lists of overrides, its own, and finite differences.

        Args:
            graph: As in `evaluate`.
            feeds: As in `evaluate`.
            ys: As in `evaluate`.
            xs: As in `evaluate`, without groups.
            overrides: By label, what `evaluate` takes as `overrides`.
            grad_ys: As in `evaluate`.
            finite_differences: Compute them too, with two evaluations for each element of a small x.
            rewrites: As in `evaluate`.
            progress: A function that gets a `gr.ProgressReport` after each call; True: a bar, if standard error is a
                terminal or this is a notebook.
            timeout: Seconds for each call; default: that of `connect`.

        Returns:
            The gradients, norms of the upstream gradients of all tensors on the path, and where each label first
            differs from the default.

        Raises:
            InvalidDerivativeError: ys or xs are empty.
            InvalidOverrideError: A label is not a string or is reserved.
            GradruleError: A call failed; the message names the label.
        """
        steps = compare.plan(graph, feeds, ys, xs, overrides, grad_ys, finite_differences, rewrites)
        with _progress.start(progress, "running", None, "calls") as task:
            return await self._follow(steps, timeout, task=task)

    async def jvp(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        tangents: Feeds,
        *,
        ys: Names,
        xs: Names,
        stop_gradients: Names = (),
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> derivatives.Tangents:
        """Computes Jacobian-vector products: for each y the sum over xs of dy/dx · tangent.

        If an override gives a gradient, the product is the transpose of the rule's computation at upstream gradients of
        zero.

        Args:
            graph: As in `evaluate`.
            feeds: As in `evaluate`.
            tangents: By x, arrays of x's dtype and shape; an x without one counts as a constant.
            ys: As in `evaluate`.
            xs: As in `evaluate`, without groups.
            stop_gradients: As in `evaluate`.
            overrides: As in `evaluate`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            params: As in `evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            By y an array of y's dtype and shape: zeros if y depends on no x with a tangent, None if y's dtype has no
            derivatives.

        Raises:
            InvalidDerivativeError: A tangent belongs to no x.
            GradruleError: As in `evaluate`.
        """
        arguments = ProgramArguments(
            (), ys, xs, None, stop_gradients, overrides=overrides, no_gradient=no_gradient, rewrites=rewrites
        )
        return await self._run(
            derivatives.jvp(sent_graph(graph), feeds, tangents, params, arguments, self._transfer), timeout
        )

    async def jacobian(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        *,
        ys: Names,
        xs: GroupedNames,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        batched: bool = False,
        timeout: float | None = None,
    ) -> derivatives.Jacobians:
        """Computes Jacobians. Each row is pulled back by itself, with the overrides.

        Per-example gradients are the Jacobian of a vector of losses, one for each example: for a weight `w` its shape
        is (examples, w's shape).

        Args:
            graph: As in `evaluate`.
            feeds: As in `evaluate`.
            ys: As in `evaluate`.
            xs: As in `evaluate`.
            stop_gradients: As in `evaluate`.
            unconnected_gradients: As in `evaluate`.
            overrides: As in `evaluate`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            params: As in `evaluate`.
            batched: Axis 0 of each y and x counts examples; return only the parts in which both have the same example,
                as `GradientTape.batch_jacobian` does for independent examples. Others are computed right, but slowly.
            timeout: Seconds; default: that of `connect`.

        Returns:
            By y, then by x, an array of shape (y's shape, x's shape), or, `batched`, (examples, rest of y's shape, rest
            of x's shape); None if y does not depend on x.

        Raises:
            GradruleError: As in `evaluate`.
        """
        arguments = ProgramArguments(
            (), ys, xs, None, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites
        )
        call = derivatives.jacobian(sent_graph(graph), feeds, params, arguments, self._transfer, batched=batched)
        return await self._run(call, timeout)

    async def hvp(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        vectors: Feeds,
        *,
        ys: Names,
        xs: GroupedNames,
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> derivatives.Products:
        """Computes Hessian-vector products: for each x the gradient of the sum over xs of (ds/dx) · vector.

        s is the sum of all ys, each weighted by its upstream gradient.
        Overrides hold in the first differentiation, those of order `"all"` (`Override`) in the second too.

        Args:
            graph: As in `evaluate`.
            feeds: As in `evaluate`.
            vectors: By x, arrays of x's dtype and shape; an x without one has a vector of zeros.
            ys: As in `evaluate`.
            xs: As in `evaluate`.
            grad_ys: Upstream gradients by y or in the order of ys, arrays; default: ones.
            stop_gradients: As in `evaluate`.
            unconnected_gradients: As in `evaluate`.
            overrides: As in `evaluate`.
            no_gradient: As in `evaluate`.
            rewrites: As in `evaluate`.
            params: As in `evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            By x an array of x's dtype and shape, a `Sparse`, or None if there is no second derivative.

        Raises:
            InvalidDerivativeError: A vector belongs to no x.
            GradruleError: As in `evaluate`.
        """
        arguments = ProgramArguments(
            (), ys, xs, grad_ys, stop_gradients, unconnected_gradients, overrides, no_gradient, rewrites
        )
        return await self._run(
            derivatives.hvp(sent_graph(graph), feeds, vectors, params, arguments, self._transfer), timeout
        )
