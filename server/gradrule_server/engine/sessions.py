"""Keeps the variables of sessions on the device until the front end ends the session."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from gradrule.v1 import errors_pb2, session_pb2
from gradrule_server.engine.arguments import ArgumentReader, read_packing
from gradrule_server.engine.derivatives import DENSE, SPARSE, split_tensors
from gradrule_server.engine.kept_bytes import saved_bytes
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.engine.response_writer import ResponseWriter, results_of
from gradrule_server.engine.run import ForwardRuns, end_of_response
from gradrule_server.engine.tensor_sources import VariableCache
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error
from gradrule_server.errors import error
from gradrule_server.link.messages import ReceivedRequest
from gradrule_server.link.v1 import link_pb2

_MAX_ENDED = 4096

Values = dict[str, tf.Tensor]


@dataclass(slots=True, eq=False)
class _Session:
    values: Values = field(default_factory=dict)
    optimizer: Any = None
    """A `StepOptimizer`; Keras is imported by the first step only."""
    steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bytes_with(self, values: Values) -> int:
        """Returns the bytes of the session with these values and its optimizer."""
        slots = 0 if self.optimizer is None else self.optimizer.slot_bytes
        return saved_bytes(list(values.values())) + int(slots)


class Sessions:
    """Runs sessions, by the front end's names. Thread-safe; the messages of one session are handled in turn.

    A message that fails changes nothing.
    """

    def __init__(
        self,
        reader: ArgumentReader,
        variable_cache: VariableCache,
        find_program: Callable[[str], BuiltProgram],
        forward_runs: ForwardRuns,
    ) -> None:
        self._reader = reader
        self._variable_cache = variable_cache
        self._find_program = find_program
        self._forward_runs = forward_runs
        self._sessions: dict[str, _Session] = {}
        # Names of sessions that ended before the message that opens them was read.
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def handle(self, request: link_pb2.SessionRequest, received: ReceivedRequest) -> link_pb2.SessionReply:
        """Handles one message. Raises SESSION_LOST for an unknown session, QUOTA_EXCEEDED if it gets too large.

        `received`: the payload of the message, for the tensors of a run.
        """
        with self._lock:
            if request.assign.opens and request.session not in self._ended:
                self._sessions[request.session] = _Session()
            session = self._sessions.get(request.session)
        if session is None:
            raise error(errors_pb2.ERROR_REASON_SESSION_LOST, "the engine does not have the session any more")
        reply = link_pb2.SessionReply()
        with session.lock:
            match request.WhichOneof("action"):
                case "assign":
                    given = request.assign.variables
                    values = self._variable_cache.tensors(given, request.blob_folder)
                    new = dict(zip((item.spec.name for item in given), values, strict=True))
                    new = {**session.values, **new}
                    reply.bytes = self._check_size(session, new, request)
                    session.values = new
                case "read":
                    self._read(session, request.read, reply)
                case "restore":
                    self._restore(session, request)
                case _:
                    self._run(session, request.run, received, request, reply)
            reply.step = session.steps
            if not reply.bytes:
                reply.bytes = session.bytes_with(session.values)
        return reply

    def end(self, name: str) -> None:
        """Ends a session and frees its memory."""
        with self._lock:
            session = self._sessions.pop(name, None)
            if session is None:
                self._ended[name] = None
                while len(self._ended) > _MAX_ENDED:
                    self._ended.popitem(last=False)
        if session is not None and session.optimizer is not None:
            with session.lock:
                session.optimizer = None
                session.values.clear()
            # Optimizers, their variables and functions form reference cycles.
            gc.collect()

    def _read(self, session: _Session, request: link_pb2.SessionRead, reply: link_pb2.SessionReply) -> None:
        names, packing = request.variables, read_packing(request.packing)
        _require_values(session, names, "variables")
        optimizer = session.optimizer if request.optimizer_state else None
        slots = {} if optimizer is None else optimizer.slots
        writer = ResponseWriter(packing)
        writer.add_outputs(names, results_of(map(session.values.__getitem__, names)), reply.VARIABLES_FIELD_NUMBER)
        count = len(writer.parts)
        writer.add_outputs(slots, results_of(slots.values()), session_pb2.OptimizerState.SLOTS_FIELD_NUMBER)
        reply.MergeFromString(b"".join(writer.parts[:count]))
        if optimizer is not None:
            state = reply.optimizer_state
            state.MergeFromString(b"".join(writer.parts[count:]))
            state.optimizer.CopyFrom(optimizer.message)
            state.step = session.steps
            state.variables.extend(optimizer.variables)

    def _restore(self, session: _Session, message: link_pb2.SessionRequest) -> None:
        """Creates the optimizer with slots of an earlier session."""
        from gradrule_server.engine.session_optimizer import StepOptimizer

        request = message.restore
        if request.step < 0 or not request.variables:
            what = f"step is {request.step}" if request.step < 0 else "it names no variables"
            raise error(
                errors_pb2.ERROR_REASON_INVALID_OPTIMIZER,
                f"the optimizer's state is not valid: {what}",
                field="start.optimizer_state",
            )
        _require_values(session, request.variables, "start.optimizer_state.variables")
        slots = self._variable_cache.tensors(request.slots, message.blob_folder)
        optimizer = StepOptimizer(request.optimizer, {name: session.values[name] for name in request.variables})
        optimizer.restore(dict(zip((item.spec.name for item in request.slots), slots, strict=True)))
        session.optimizer, session.steps = optimizer, request.step
        try:
            self._check_size(session, session.values, message)
        except BaseException:
            session.optimizer, session.steps = None, 0
            raise

    def _run(
        self,
        session: _Session,
        request: link_pb2.SessionRun,
        received: ReceivedRequest,
        message: link_pb2.SessionRequest,
        reply: link_pb2.SessionReply,
    ) -> None:
        started = time.monotonic_ns()
        built = self._find_program(request.run.key)
        call = self._reader.read(built, request.run, received.values, session.values)
        results = built.run_on_device(call.values)
        outputs, derivatives = results[: len(built.outputs)], results[len(built.outputs) :]
        if request.loss:
            _require_one_element(request.loss, outputs[built.outputs.index(request.loss)])
        end = len(derivatives) - len(built.updates)
        values = {**session.values, **dict(zip(built.updates, derivatives[end:], strict=True))}
        derivatives = derivatives[:end]
        writer = ResponseWriter(call.packing)
        if request.store:
            values |= dict(zip(request.store, outputs, strict=True))
        else:
            writer.add_outputs(built.outputs, results_of(outputs))
            if not (request.HasField("optimizer") or request.handle):
                writer.add_derivatives(built.kind, built.layout, results_of(derivatives))
        # A caller whose deadline has passed must find its session unchanged.
        if time.monotonic_ns() > message.deadline_ns:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline passed while the program ran")
        if request.HasField("optimizer"):
            values = self._apply_optimizer(
                session, built, request.optimizer, values, _gradients_by_x(built, derivatives), message
            )
        reply.bytes = self._check_size(session, values, message)
        if request.handle:
            # The derivatives of a program in two parts are what its forward part saved.
            _check_kept_size(derivatives, request)
            reply.kept_bytes = self._forward_runs.keep(request.handle, built, derivatives)
        session.values = values
        session.steps += request.HasField("optimizer")
        reply.response = b"".join([*writer.parts, end_of_response(built, received.received_ns, started)])

    def _apply_optimizer(
        self,
        session: _Session,
        built: BuiltProgram,
        message: session_pb2.Optimizer,
        values: Values,
        gradients: Mapping[str, Any],
        request: link_pb2.SessionRequest,
    ) -> Values:
        """Returns the values after one step of the optimizer."""
        # Keras takes seconds to import, and only training needs it.
        from gradrule_server.engine.session_optimizer import StepOptimizer

        if not gradients:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                "the loss depends on none of the variables, so there is nothing to update",
                field="step.loss",
            )
        before = session.optimizer
        if before is None or not before.fits(message, {name: values[name] for name in gradients}):
            session.optimizer = StepOptimizer(message, {name: values[name] for name in gradients})
            try:
                self._check_size(session, values, request)
            except BaseException:
                session.optimizer = before
                raise
            # The old optimizer is freed at once: it has reference cycles.
            gc.collect()
        try:
            new: Values = session.optimizer.step(message, values, gradients)
        except TENSORFLOW_ERRORS as cause:
            raise translate_error(cause, inputs_of=built.inputs_of) from cause
        return {**values, **new}

    def _check_size(self, session: _Session, values: Values, message: link_pb2.SessionRequest) -> int:
        """Returns the bytes of the values and the slots. Raises QUOTA_EXCEEDED if the message allows less."""
        size = session.bytes_with(values)
        if size > message.max_bytes:
            raise error(
                errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
                f"the session would take {size} bytes, slots of its optimiser included; {message.max_bytes} are left "
                f"for it ({message.max_bytes_setting})",
            )
        return size


def _require_values(session: _Session, names: Iterable[str], field: str) -> None:
    missing = [name for name in names if name not in session.values]
    if missing:
        shown = ", ".join(map(repr, missing))
        raise error(
            errors_pb2.ERROR_REASON_MISSING_FEED,
            f"variables without a value: {shown}; assign them, or give them values at the start",
            field=field,
        )


def _require_one_element(loss: str, value: tf.Tensor) -> None:
    """Raises INVALID_DERIVATIVE for a loss with several elements: whether their sum or mean is meant is not known."""
    if value.shape.num_elements() != 1:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
            f"the loss {loss!r} has the shape {value.shape.as_list()}, and a step minimises one number: reduce it in "
            f"the graph with a mean or a sum, and name that",
            field="step.loss",
        )


def _check_kept_size(saved: Sequence[tf.Tensor], request: link_pb2.SessionRun) -> None:
    """Raises QUOTA_EXCEEDED if the tensors that a handle would keep exceed the limit of the run."""
    size = saved_bytes(saved)
    if size > request.max_kept_bytes:
        raise error(
            errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            f"the handle would keep {size} bytes; {request.max_kept_bytes} are left for handles; close some of them, "
            f"or raise the server's {request.max_kept_bytes_setting}",
        )


def _gradients_by_x(built: BuiltProgram, derivatives: Sequence[tf.Tensor]) -> dict[str, Any]:
    """Returns the connected gradients, as tensors or slices, by the name of their x."""
    found: dict[str, Any] = {}
    for (x,), form, parts in split_tensors(built.layout, derivatives):
        if form == DENSE:
            found[x] = parts[0]
        elif form == SPARSE:
            found[x] = tf.IndexedSlices(*parts)
    return found
