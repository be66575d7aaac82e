"""Adds nodes for random numbers that depend only on the seed and the op, so that a call can be repeated."""

from __future__ import annotations

from gradrule.v1 import graph_pb2
from gradrule_server.rules.dtypes import Dt
from gradrule_server.rules.graph_builder import GraphBuilder
from gradrule_server.rules.language.functions import FLOAT
from gradrule_server.rules.language.reductions import Context
from gradrule_server.rules.language.values import Value, coerce

SALT = "salt"

# TensorFlow's number of the Philox generator, which gives the same numbers on CPU and GPU.
_PHILOX = 1
# Odd, so that all multiples differ modulo 2**64; large, so that the numbers of different ops differ.
_STRIDE = 0x9E3779B97F4A7C15


def salt(builder: GraphBuilder) -> str:
    """Adds the placeholder for the number of the op."""
    return builder.placeholder(SALT, Dt.DT_INT64, scalar=True)


def draw(context: Context, op: str, like: Value, seed: Value, salted: str, number: int) -> Value:
    """Adds random numbers of the shape and type of `like`, with the seed [seed, salt + number * stride] modulo 2**64.

    The numbers are those of TensorFlow's `stateless_uniform` and `stateless_normal`. The older ops of these names give
    the same numbers, but XLA does not compile them.

    Args:
        context: The conversion.
        op: The op that draws the numbers.
        like: The value whose shape and type the numbers have.
        seed: The seed.
        salted: The placeholder of `salt`.
        number: A number that differs for each draw of a rule.
    """
    builder = context.builder
    like = context.numeric(like)
    tensor, dtype = context.strong(like)
    context.require(dtype, FLOAT, "uniform" if "Uniform" in op else "normal")
    offset = (number * _STRIDE + 2**63) % 2**64 - 2**63
    own = builder.add("AddV2", salted, builder.constant(offset, Dt.DT_INT64), T=Dt.DT_INT64) if offset else salted
    pair = builder.add("Pack", _seed_as_int64(builder, seed), own, T=Dt.DT_INT64, N=_int(2), axis=_int(0))
    key = builder.add("StatelessRandomGetKeyCounter", pair, Tseed=Dt.DT_INT64)
    shape = builder.add("Shape", tensor, T=dtype, out_type=Dt.DT_INT32)
    algorithm = builder.constant(_PHILOX, Dt.DT_INT32)
    drawn = builder.add(op, shape, key, f"{key}:1", algorithm, dtype=dtype, Tshape=Dt.DT_INT32)
    return Value(dtype, drawn, sources=like.sources)


def _seed_as_int64(builder: GraphBuilder, seed: Value) -> str:
    """Returns the seed as an int64 of rank 0. A param may be a tensor of one element."""
    if seed.constant is not None:
        return coerce(seed, Dt.DT_INT64, builder)
    given = builder.add("Cast", seed.tensor or "", SrcT=seed.dtype, DstT=Dt.DT_INT64, Truncate=False)
    return builder.add(
        "Reshape",
        given,
        builder.constant([], Dt.DT_INT32),
        name="seed_wants_one_number",
        T=Dt.DT_INT64,
        Tshape=Dt.DT_INT32,
    )


def _int(value: int) -> graph_pb2.AttrValue:
    return graph_pb2.AttrValue(i=value)
