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
from gradrule_server.engine.memory_check import MemoryCheck
from gradrule_server.engine.response_writer import ResponseWriter
from gradrule_server.link.v1 import link_pb2


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the built function: the value of a placeholder or variable, an upstream gradient, a direction.

    `default`: what it is in calls that do not give it.
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
    """A function of feeds, fed grad_ys, directions and params, in this order, that returns fetches and derivatives."""

    function: Any = None
    inputs: list[Input] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of inputs by further names that calls may use."""
    grad_ys: list[Input] = field(default_factory=list)
    stacked: bool = False
    """Whether all fed grad_ys, and so all gradients, have one more axis in front, of one size."""
    directions: list[Input] = field(default_factory=list)
    """Tangents of a JVP, vectors of an HVP."""
    params: list[ParamInput] = field(default_factory=list)
    max_rank: int = 0
    """Rank that what a call gives may have."""
    max_unpacking: int = 0
    """Bytes that packed tensors of a call may have unpacked, by bytes packed, besides what every call may have."""
    small: bool = False
    """Few ops and no loops or branches: faster on the calling thread than on TensorFlow's threads."""
    memory_check: MemoryCheck | None = None
    """Whether a call fits into the engine's memory."""
    unused: list[bool] = field(default_factory=list)
    """Per input: whether the results do not depend on it, so that a call need not feed it."""
    outputs: list[str] = field(default_factory=list)
    kind: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_VJP
    layout: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Of the derivatives, per entry: an x, a y (JVP), or a y and an x (Jacobian), as asked, and the form."""
    unbatched: bool = False
    """Whether calls never run together, as the program asks."""
    jit: JitChoice | None = None
    """Set where XLA may compile the program."""
    updates: list[str] = field(default_factory=list)
    """Variables whose new values come last among the results."""
    two_parts: TwoPartProgram | None = None
    """Set where the forward and the backward part are functions of their own; `function` is then the forward part."""
    statuses: list[override_pb2.ResolutionStatus.ValueType] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    without_gradient: list[link_pb2.WithoutGradient] = field(default_factory=list)
    call: GraphCall = field(init=False)
    """Runs `function` on NumPy arrays."""
    feed_plan: FeedPlan = field(init=False)
    writer: ResponseWriter = field(init=False)
    specs: dict[str, list[tensor_pb2.TensorSpec]] = field(default_factory=dict)
