"""The client and its programs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from gradrule import _blobs, _calls, _channel, _deadlines, _requests, _security
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._builder.rules import Params, Rule
from gradrule._client_derivatives import Derivatives, ProgramDerivatives
from gradrule._comparison import compare
from gradrule._comparison.comparisons import Comparison
from gradrule._forward import ForwardHandle
from gradrule._groups import groups_of
from gradrule._program import merged
from gradrule._requests import CallParams, Feeds, GradYs, GroupedNames, Names
from gradrule._results import call_results, explanations, rule_infos
from gradrule._results.status_report import ServerStatus
from gradrule._routes import Routes
from gradrule._sending import CallSender, Started
from gradrule._sessions import METHOD as SESSION_METHOD
from gradrule._sessions import Session
from gradrule._shared_memory import SharedMemory
from gradrule._status import error_of, waiting_error
from gradrule._streams import StreamLostError
from gradrule._transfer import PLAIN, Transfer
from gradrule.errors import (
    BlobNotFoundError,
    EngineUnavailableError,
    GradruleError,
    InvalidParamError,
    MessageTooLargeError,
    UnavailableError,
)

R = TypeVar("R")

_POLL_S = 0.1


def connect(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
    timeout: float = 30.0,
    insecure_token: bool = False,
    stream: bool = True,
    transfer: Transfer = PLAIN,
    shared_memory: bool = True,
) -> Client:
    """A client of the server at `host:port`; nothing is sent yet.

    credentials: what `gradrule.tls` gives, or gRPC's own channel credentials; without them the connection is plain.
    token: sent as a bearer token with each call. timeout: seconds for a call that gives none of its own.
    insecure_token: lets the token travel unencrypted to another machine, which is refused otherwise.
    stream: calls of programs that are repeated share one persistent stream, which takes less time for each; False:
    each travels alone, as it must where a proxy spreads calls over several servers. transfer: how tensors travel, see
    `Transfer`; default: as they are. shared_memory: large tensors of calls of programs lie in memory that is shared
    with the server, where that is on the same host and takes it, and `transfer` does not pack them.
    """
    timeout = _deadlines.seconds(timeout)
    _security.check_token(target, token, is_encrypted=credentials is not None, insecure_token=insecure_token)
    if credentials is None:
        channel = grpc.insecure_channel(
            _channel.address(target), options=_channel.OPTIONS, compression=transfer.grpc_compression
        )
    else:
        channel = grpc.secure_channel(
            _channel.address(target), credentials, options=_channel.OPTIONS, compression=transfer.grpc_compression
        )
    return Client(
        channel, target, token=token, timeout=timeout, stream=stream, transfer=transfer, shared_memory=shared_memory
    )


class Client(Derivatives):
    """A connection to a server. Safe to share between threads; made by `connect` or `local`.

    Every call has a deadline: its `timeout` in seconds, or that of `connect`. Every failure is a `GradruleError`.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        *,
        token: str | None,
        timeout: float,
        stream: bool = True,
        transfer: Transfer = PLAIN,
        shared_memory: bool = True,
    ) -> None:
        self._channel = channel
        self._metadata = _channel.metadata(token) + transfer.metadata
        self._transfer = transfer
        self._timeout = timeout
        routes = Routes(use_stream=stream)
        self._memory = SharedMemory(is_wanted=shared_memory)
        self._sender = CallSender(channel, self._metadata, routes, self._memory, self._closed)
        self.target = target

    # Rules.

    def create_rule(
        self,
        name: str,
        expression: str | None = None,
        *,
        graph: GraphLike | None = None,
        params: Params | Iterable[str] | None = None,
        gradient: Rule | None = None,
        description: str = "",
        timeout: float | None = None,
    ) -> rule_infos.RuleInfo:
        """Registers a rule: an expression over `x, y, dy, default` and params, or a graph.

        params: defaults by name, None where each use must give a value. gradient: the rule for its own gradient, as
        `Rule` says. Equal content under the same name returns the rule that is there; other content raises
        `RuleExistsError`.
        """
        return self._run(_calls.create_rule(name, expression, graph, params, gradient, description), timeout)

    def get_rule(self, name: str, *, timeout: float | None = None) -> rule_infos.RuleInfo:
        """The rule of a name. Raises `UnknownRuleError`."""
        return self._run(_calls.get_rule(name), timeout)

    def list_rules(self, kind: str | None = None, *, timeout: float | None = None) -> list[rule_infos.RuleInfo]:
        """All rules, or those of one kind: `user`, `builtin`, `op`."""
        rules, token = self._run(_calls.list_rules(kind, ""), timeout)
        while token:
            more, token = self._run(_calls.list_rules(kind, token), timeout)
            rules += more
        return rules

    def delete_rule(self, name: str, *, timeout: float | None = None) -> None:
        """Forgets a USER rule; programs compiled with it keep it. Raises `UnknownRuleError`, `RuleReadOnlyError`."""
        self._run(_calls.delete_rule(name), timeout)

    def list_presets(self, *, timeout: float | None = None) -> list[rule_infos.PresetInfo]:
        """All presets: named override lists, for `gr.Preset`."""
        return self._run(_calls.list_presets(), timeout)

    def sample_rule(
        self,
        rule: str | Rule,
        *,
        x: Any = None,
        y: Any = None,
        dy: Any = None,
        params: Params | None = None,
        op_type: str | None = None,
        attrs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> rule_infos.SampleResult:
        """Runs a rule on values, without a graph.

        x, y, dy: values of the rule's variables; further ones (`x1`, `dy1`, `default`, …) by keyword. A missing `dy` is
        ones; a missing `y` or `default` is computed by `op_type`. Lists of numbers are float32, save for inputs that
        the op takes as integers only; arrays keep their type. attrs: attributes of the op that follow from no input.
        """
        values = {"x": x, "y": y, "dy": dy, **more}
        return self._run(_calls.sample_rule(rule, values, params, op_type, attrs), timeout)

    # Evaluation.

    def evaluate(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
        stacked_grad_ys: bool = False,
        batching: bool = True,
        jit: str = "off",
        transfer: Transfer | None = None,
    ) -> call_results.Result:
        """Forward outputs and gradients in one call, in the words of `tf.gradients` and `Session.run`.

        feeds: values by tensor; lists take the tensor's element type, arrays must have it. fetches: tensors to put out.
        ys, xs: what to differentiate with respect to what. grad_ys: upstream gradients, a dict by y or a list in the
        order of ys, of arrays or names of tensors. overrides: a dict of op type to rule, or a list of `Override` and
        `Preset`. no_gradient: what an op on the path without a gradient does: `error`, `default` (as TensorFlow does),
        `pass`, `zero`. rewrites: `fold_batch_norm` folds batch norms into the linear ops before them. params: values by
        the override's label, then by param. stacked_grad_ys: many pull-backs at once, each given grad_y has one more
        axis in front, of one size, and so have all gradients. xs may stand in groups, a dict of names to xs; so do
        the gradients then. dense_gradients: the gradient of a gather comes as an array, not as a `Sparse`. batching:
        whether the server may run calls of the program together, where it has proven that no answer changes. jit:
        `auto` lets XLA compute calls of a program that runs often, where it is faster and comes to the same up to
        rounding; `off`. transfer: how tensors travel in this call; default: as `connect` says.
        """
        words = _requests.Words(
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
        chosen = self._transfer if transfer is None else transfer.of_call()
        call = _calls.evaluate(graph, feeds, params, words, stacked_grad_ys, chosen)
        return self._run(call, timeout)

    def explain(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
    ) -> explanations.Explanation:
        """Which node would get which rule, and all that is wrong, without running anything.

        Takes the words of `evaluate`. Feeds, params and grad_ys decide nothing here and are not sent; those that no
        call could take (names that the graph or the overrides lack, values of another type) are refused all the same.
        """
        words = _requests.Words(
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
        return self._run(_calls.explain(graph, feeds, params, words), timeout)

    def compare(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        ys: Names,
        xs: Names,
        overrides: Mapping[str, Overrides | None],
        *,
        grad_ys: GradYs | None = None,
        finite_differences: bool = True,
        rewrites: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Comparison:
        """The gradients of one graph under several override maps, its own, and finite differences.

        overrides: by a label, what `evaluate` takes. The comparison tells norms of the upstream gradients of all
        tensors on the path, and where each label first differs from the default. finite_differences: False spares the
        evaluations that they take, two for each element of a small x. timeout: of each call.
        """
        steps = compare.plan(graph, feeds, ys, xs, overrides, grad_ys, finite_differences, rewrites)
        return self._follow(steps, timeout)

    # Sessions.

    def session(
        self,
        graph: GraphLike,
        *,
        overrides: Overrides | None = None,
        variables: Mapping[str, Any] | None = None,
        no_gradient: str = "error",
    ) -> Session:
        """Variables that the server holds: `with client.session(graph) as s`, then `s.step(…)`.

        Their first values are those of `graph.variables`, of `variables`, which win, or of the graph's initialisers.
        overrides, no_gradient: as in `evaluate`; they hold wherever something is differentiated.
        """
        return Session(
            self._open_session,
            self._send_blobs,
            self._deadline,
            graph,
            overrides,
            variables,
            no_gradient,
            self._transfer,
        )

    # Programs.

    def compile(
        self,
        graph: GraphLike,
        *,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        name: str | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
        batching: bool = True,
        jit: str = "off",
    ) -> Program:
        """Checks and compiles once what then runs many times; kept by the server until it is deleted.

        The words are those of `evaluate`; grad_ys holds names of tensors. Params stand in the overrides or come with
        each call. name: a wished id; default: made from the content. Equal content returns the program that is there.
        """
        words = _requests.Words(
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
        message = self._run(_calls.compile_program(graph, name, words), timeout)
        return Program(self, message, groups_of(xs, graph))

    def program(self, name: str, *, timeout: float | None = None) -> Program:
        """The program `programs/{id}`, or by its bare id. Raises `ProgramNotFoundError`."""
        return Program(self, self._run(_calls.get_program(name), timeout))

    def list_programs(self, *, timeout: float | None = None) -> list[Program]:
        """All programs, without their `overrides` and `default_gradient_nodes`; `program` returns these."""
        messages, token = self._run(_calls.list_programs(""), timeout)
        while token:
            more, token = self._run(_calls.list_programs(token), timeout)
            messages += more
        return [Program(self, message) for message in messages]

    def delete_program(self, name: str, *, timeout: float | None = None) -> None:
        """Forgets a program. Raises `ProgramNotFoundError`."""
        self._run(_calls.delete_program(name), timeout)

    # Blobs.

    def find_missing_blobs(self, names: Iterable[str], *, timeout: float | None = None) -> list[str]:
        """Which of these SHA-256 the server has no bytes of."""
        return self._run(_blobs.find_missing(names), timeout)

    def upload(self, value: Any, *, timeout: float | None = None) -> str:
        """Sends an array, a graph or bytes, unless the server has them; returns their SHA-256.

        Calls send what the server lacks by themselves; this does it beforehand.
        """
        wanted = _calls.upload(value)
        self._follow(_blobs.uploads({wanted.sha256: wanted.data}), timeout)
        return wanted.sha256

    # The server.

    def server_status(self, *, timeout: float | None = None) -> ServerStatus:
        """How the server is doing: engines, queue, caches, tenants. Raises `PermissionDeniedError`."""
        return self._run(_calls.server_status(), timeout)

    # The connection.

    def wait_ready(self, timeout: float | None = None) -> None:
        """Returns as soon as an engine is ready. Raises `UnavailableError` or `EngineUnavailableError` in time."""
        limit = time.monotonic() + _deadlines.of_call(timeout, self._timeout)
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_channel.HEALTH_METHOD)
        while True:
            left = limit - time.monotonic()
            try:
                answer = check(
                    _channel.HEALTH_REQUEST, timeout=max(left, 0.001), metadata=self._metadata, wait_for_ready=True
                )
            except grpc.RpcError as failure:
                if (error := waiting_error(failure, self.target)) is not None:
                    raise error from None
            except ValueError as cause:
                raise self._closed() from cause
            else:
                if answer == _channel.HEALTH_SERVING:
                    return
            if left < _POLL_S:
                raise EngineUnavailableError(f"the server at {self.target!r} has no engine ready")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Closes the connection; calls under way are cancelled."""
        self._sender.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.target!r}>"

    def _open_session(self, requests: Iterator[bytes]) -> Any:
        try:
            opened: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(SESSION_METHOD)
            return opened(requests, metadata=self._metadata)
        except ValueError as cause:
            raise self._closed() from cause

    def _send_blobs(self, blobs: Mapping[str, _blobs.Data], timeout: float | None) -> None:
        self._follow(_blobs.uploads(blobs), timeout)

    def _deadline(self, timeout: float | None) -> float:
        return _deadlines.of_call(timeout, self._timeout)

    def _run(self, call: _calls.Call[R], timeout: float | None) -> R:
        return self._follow(_blobs.steps(call), timeout) if call.blobs else self._once(call, timeout)

    def _follow(self, steps: Generator[_calls.Call[Any] | _blobs.Upload, Any, R], timeout: float | None) -> R:
        """Takes one step after the other; what comes of them."""
        try:
            step = next(steps)
            while True:
                try:
                    outcome = self._step(step, timeout)
                except GradruleError as refusal:
                    step = steps.throw(refusal)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            found: R = end.value
            return found

    def _step(self, step: _calls.Call[Any] | _blobs.Upload, timeout: float | None) -> Any:
        if not isinstance(step, _blobs.Upload):
            return self._run(step, timeout)
        deadline = step.deadline(_deadlines.of_call(timeout, self._timeout))
        try:
            send: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_blobs.UPLOAD_METHOD)
            return send(step.pieces(), timeout=deadline, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except ValueError as cause:
            raise self._closed() from cause

    def _once(self, call: _calls.Call[R], timeout: float | None) -> R:
        return self._sender.send(call, _deadlines.of_call(timeout, self._timeout))

    def _start(self, call: _calls.Call[R], timeout: float | None) -> Started[R]:
        return self._sender.start(call, _deadlines.of_call(timeout, self._timeout))

    def _finish(self, call: _calls.Call[R], started: Started[R], timeout: float | None) -> R:
        try:
            return started.result()
        except StreamLostError:
            self._sender.note_lost()
        except BlobNotFoundError:
            if not call.blobs:
                raise
        except GradruleError as refusal:
            # What travelled alone may go in chunks. What went over the stream may be sent again, as gRPC does alone.
            if not (
                refusal.code is grpc.StatusCode.UNAVAILABLE
                if started.over_stream
                else isinstance(refusal, MessageTooLargeError)
            ):
                raise
        return self._run(call, timeout)

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"the client of {self.target!r} is closed")


class Program(ProgramDerivatives):
    """A compiled program of a client: only tensors travel. Made by `Client.compile` and `Client.program`."""

    _client: Client

    def __init__(self, client: Client, message: Any, groups: call_results.Groups = None) -> None:
        super().__init__(message, groups)
        self._client = client

    def __call__(self, feeds: Feeds | None = None, /, **named: Any) -> call_results.Result:
        """Runs the program on feeds given as a dict or by keyword."""
        return self.evaluate(merged(feeds, named))

    def evaluate(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        grad_ys: GradYs | None = None,
        stacked_grad_ys: bool = False,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> call_results.Result:
        """Runs the program. grad_ys: arrays, a dict by y or a list in the order of ys.

        stacked_grad_ys, transfer: as in `Client.evaluate`.
        """
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        return self._client._run(self._call(feeds, params, grad_ys, stacked_grad_ys, chosen), timeout)

    def forward(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> ForwardHandle:
        """Runs forward once; `vjp` of what it returns pulls back as often as wanted.

        ttl: seconds that the server keeps it after its last use; default, and most: a setting of the server's. Raises
        `QuotaExceededError` where the server keeps too much already.
        """
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        return ForwardHandle(self._client._run, self, feeds, params, ttl, timeout, chosen)

    def map(
        self,
        feeds: Iterable[Feeds],
        in_flight: int = 16,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> Iterator[call_results.Result]:
        """Runs the program on each of many feeds, `in_flight` at a time; yields results in order.

        The first failure is raised in its turn, and the calls under way are cancelled.
        """
        if in_flight < 1:
            raise InvalidParamError(f"in_flight is at least 1, not {in_flight}")
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        pending: deque[tuple[_calls.Call[call_results.Result], Started[call_results.Result]]] = deque()
        try:
            for one in feeds:
                if len(pending) >= in_flight:
                    yield self._client._finish(*pending.popleft(), timeout)
                call = _calls.with_own_arrays(self._call(one, params, None, transfer=chosen))
                pending.append((call, self._client._start(call, timeout)))
            while pending:
                yield self._client._finish(*pending.popleft(), timeout)
        finally:
            for _, started in pending:
                started.cancel()

    def delete(self, *, timeout: float | None = None) -> None:
        """Makes the server forget the program."""
        self._client.delete_program(self.name, timeout=timeout)
