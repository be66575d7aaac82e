"""Holds a built program: its function, the arguments that it takes, and the layout of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from gradrule.v1 import evaluate_pb2, override_pb2, tensor_pb2
from gradrule_server.engine.backward import TwoPartProgram
from gradrule_server.engine.feed_plan import FeedPlan
from gradrule_server.engine.graph_call import GraphCall
from gradrule_server.engine.jit.choice import JitChoice
from gradrule_server.engine.memory import MemoryCheck
from gradrule_server.engine.response_writer import ResponseWriter
from gradrule_server.link.v1 import link_pb2


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the built function: the value of a placeholder or variable, an upstream gradient, a direction.

    `default`: its value in calls that do not feed it.
    """

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    default: tf.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A param of a bound rule, always float64."""

    rule: int
    name: str


@dataclass(slots=True, weakref_slot=True, eq=False)
class BuiltProgram:
    """A program with its function, from feeds, fed grad_ys, directions and params to fetches and derivatives."""

    function: Any = None
    inputs: list[Input] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of inputs, by the other names that calls may use for them."""
    grad_ys: list[Input] = field(default_factory=list)
    stacked: bool = False
    """Whether all fed grad_ys, and so all gradients, have one more axis in front, of one size."""
    directions: list[Input] = field(default_factory=list)
    """Tangents of a JVP, vectors of an HVP."""
    params: list[ParamInput] = field(default_factory=list)
    max_rank: int = 0
    """Highest rank of the tensors of a call."""
    max_unpacking: int = 0
    """Bytes that packed tensors of a call may take unpacked, per byte packed, beyond `FREE_BYTES`."""
    small: bool = False
    """Whether it has few ops and no loops or branches: then it is faster on the calling thread."""
    memory_check: MemoryCheck | None = None
    """Checks that a call fits into the engine's memory."""
    unused: list[bool] = field(default_factory=list)
    """For each input, whether no result depends on it, so that calls need not feed it."""
    outputs: list[str] = field(default_factory=list)
    kind: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_VJP
    layout: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """For each derivative its names (an x, a y of a JVP, or y and x of a Jacobian) and its form."""
    unbatched: bool = False
    """Whether the program forbids that calls run together."""
    jit: JitChoice | None = None
    """Chooses between TensorFlow's kernels and XLA; None if XLA may not compile the program."""
    updates: list[str] = field(default_factory=list)
    """Variables whose new values are the last results."""
    two_parts: TwoPartProgram | None = None
    """Set if the forward and the backward part are separate functions; `function` is then the forward part."""
    statuses: list[override_pb2.ResolutionStatus.ValueType] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    without_gradient: list[link_pb2.WithoutGradient] = field(default_factory=list)
    call: GraphCall = field(init=False)
    """Runs `function` on NumPy arrays."""
    feed_plan: FeedPlan = field(init=False)
    writer: ResponseWriter = field(init=False)
    specs: dict[str, list[tensor_pb2.TensorSpec]] = field(default_factory=dict)
