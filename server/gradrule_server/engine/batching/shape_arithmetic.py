"""Evaluates ops on small tensors of integers, mostly shapes, of which some are multiples of the batch size B."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from gradrule_server.engine.batching.values import (
    UNKNOWN,
    Extent,
    GradientAxes,
    NotPerExample,
    Number,
    Value,
    added,
    as_array,
    divided,
    get_numbers,
    integers,
    is_equal,
    largest,
    multiplied,
    remainder,
    subtracted,
    value_from_numbers,
)

Attr: TypeAlias = Callable[[str], Any]
_Rule: TypeAlias = "Callable[[list[Value], Attr], Value | list[Value]]"

MAX_NUMBERS = 64
"""Most elements of a tensor whose numbers are followed."""


def _elementwise(function: Callable[[Any, Any], Any]) -> _Rule:
    def rule(inputs: list[Value], attr: Attr) -> Value:
        a, b = np.broadcast_arrays(get_numbers(inputs[0]), get_numbers(inputs[1]))
        result = np.empty(a.shape, object)
        for index in np.ndindex(a.shape):
            result[index] = function(a[index], b[index])
        return value_from_numbers(result)

    return rule


def _identity(inputs: list[Value], attr: Attr) -> Value:
    return inputs[0]


def _cast(inputs: list[Value], attr: Attr) -> Value:
    if not (attr("DstT").is_integer or attr("DstT").is_bool):
        raise NotPerExample("computes with the number of examples")
    numbers = get_numbers(inputs[0])
    if not attr("DstT").is_bool:
        return value_from_numbers(numbers)
    result = np.empty(numbers.shape, object)
    for index in np.ndindex(numbers.shape):
        number: Any = numbers[index]
        # The number of examples is at least 1, so it is true.
        result[index] = UNKNOWN if number is UNKNOWN else bool(number)
    return value_from_numbers(result)


def _known(value: Value) -> list[int]:
    found = integers(value)
    if found is None:
        raise NotPerExample("takes axes or positions that are not known before it runs")
    return found


def _concat(inputs: list[Value], attr: Attr) -> Value:
    (axis,) = _known(inputs[-1])
    return value_from_numbers(np.concatenate([get_numbers(value) for value in inputs[:-1]], axis))


def _pack(inputs: list[Value], attr: Attr) -> Value:
    return value_from_numbers(np.stack([get_numbers(value) for value in inputs], attr("axis")))


def _unpack(inputs: list[Value], attr: Attr) -> list[Value]:
    numbers = np.moveaxis(get_numbers(inputs[0]), attr("axis"), 0)
    return [value_from_numbers(np.array(numbers[index], object)) for index in range(attr("num"))]


def _gather(inputs: list[Value], attr: Attr) -> Value:
    if attr("batch_dims"):
        raise NotPerExample("gathers sizes by batch")
    (axis,) = _known(inputs[2])
    index = np.array(_known(inputs[1]), int).reshape(inputs[1].numbers.shape)  # type: ignore[union-attr]
    return value_from_numbers(np.array(np.take(get_numbers(inputs[0]), index, axis), object))


def _strided_slice(inputs: list[Value], attr: Attr) -> Value:
    begin, end, strides = (_known(value) for value in inputs[1:4])
    if attr("ellipsis_mask") or attr("new_axis_mask"):
        raise NotPerExample("slices sizes in a way that is not followed")
    index: list[Any] = []
    for axis, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << axis
        if attr("shrink_axis_mask") & bit:
            index.append(first)
            continue
        index.append(slice(None if attr("begin_mask") & bit else first, None if attr("end_mask") & bit else last, step))
    return value_from_numbers(np.array(get_numbers(inputs[0])[tuple(index)], object))


def _slice(inputs: list[Value], attr: Attr) -> Value:
    begin, size = _known(inputs[1]), _known(inputs[2])
    index = tuple(slice(first, None if count < 0 else first + count) for first, count in zip(begin, size, strict=True))
    return value_from_numbers(get_numbers(inputs[0])[index])


def _reshape(inputs: list[Value], attr: Attr) -> Value:
    return value_from_numbers(get_numbers(inputs[0]).reshape(_known(inputs[1])))


def _expand_dims(inputs: list[Value], attr: Attr) -> Value:
    (axis,) = _known(inputs[1])
    return value_from_numbers(np.expand_dims(get_numbers(inputs[0]), axis))


def _squeeze(inputs: list[Value], attr: Attr) -> Value:
    return value_from_numbers(np.squeeze(get_numbers(inputs[0]), tuple(attr("squeeze_dims")) or None))


def _reduced(function: Callable[[Any, Any], Any], start: Any) -> _Rule:
    def rule(inputs: list[Value], attr: Attr) -> Value:
        numbers = get_numbers(inputs[0])
        axes = {axis % numbers.ndim for axis in _known(inputs[1])} if numbers.ndim else set()
        if not axes:
            return value_from_numbers(numbers)
        if len(axes) < numbers.ndim:
            raise NotPerExample("reduces sizes in a way that is not followed")
        total = np.array(functools.reduce(function, numbers.flat, start), object)
        return value_from_numbers(total.reshape([1] * numbers.ndim) if attr("keep_dims") else total)

    return rule


def _both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    return UNKNOWN if UNKNOWN in (a, b) else bool(a and b)


def _range(inputs: list[Value], attr: Attr) -> Value:
    (start,), (limit,), (delta,) = (_known(value) for value in inputs)
    return value_from_numbers(_few(list(range(start, limit, delta))))


def _fill(inputs: list[Value], attr: Attr) -> Value:
    result = np.empty(_known(inputs[0]), object)
    if result.size > MAX_NUMBERS:
        raise NotPerExample("has too many numbers")
    result[...] = get_numbers(inputs[1]).item()
    return value_from_numbers(result)


def _few(numbers: list[Any]) -> np.ndarray:
    if len(numbers) > MAX_NUMBERS:
        raise NotPerExample("has too many numbers")
    return as_array(numbers)


def _dynamic_stitch(inputs: list[Value], attr: Attr) -> Value:
    half = len(inputs) // 2
    placed: dict[int, Any] = {}
    for indices, data in zip(inputs[:half], inputs[half:], strict=True):
        placed.update(zip(_known(indices), get_numbers(data).flat, strict=True))
    if sorted(placed) != list(range(len(placed))):
        raise NotPerExample("stitches sizes in a way that is not followed")
    return value_from_numbers(_few([placed[index] for index in range(len(placed))]))


def _invert_permutation(inputs: list[Value], attr: Attr) -> Value:
    return value_from_numbers(as_array([int(index) for index in np.argsort(_known(inputs[0]))]))


def _concat_offset(inputs: list[Value], attr: Attr) -> list[Value]:
    (axis,) = _known(inputs[0])
    results: list[Value] = []
    offset: Number = 0
    for value in inputs[1:]:
        numbers = get_numbers(value)
        offsets: list[Number] = [0] * numbers.size
        offsets[axis] = offset
        results.append(value_from_numbers(as_array(offsets)))
        offset = added(offset, numbers[axis])
    return results


def _broadcast_gradient_args(inputs: list[Value], attr: Attr) -> list[Value]:
    """Returns the axes along which the gradients of two broadcast tensors are summed."""
    a, b = (list(get_numbers(value)) for value in inputs)
    rank = max(len(a), len(b))
    first, second = ((([1] * (rank - len(sizes))) + sizes)[:1] for sizes in (a, b))
    if UNKNOWN in (*first, *second):
        raise NotPerExample("broadcasts along an axis of unknown size")
    for axis, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)):
        if axis < rank - 1 and (isinstance(x, Extent) or isinstance(y, Extent)):
            raise NotPerExample("broadcasts along an axis whose size is the number of examples")
    rows = max((size.factor for size in (*first, *second) if isinstance(size, Extent)), default=0)
    if first == second:
        return [GradientAxes(rows, with_batch=False)] * 2
    if first != [1] and second != [1]:
        raise NotPerExample("broadcasts along the batch")
    return [GradientAxes(rows, with_batch=sizes == [1]) for sizes in (first, second)]


NUMERIC: Mapping[str, _Rule] = {
    "Add": _elementwise(added),
    "AddV2": _elementwise(added),
    "All": _reduced(_both, True),
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "Cast": _cast,
    "ConcatOffset": _concat_offset,
    "ConcatV2": _concat,
    "DynamicStitch": _dynamic_stitch,
    "Equal": _elementwise(is_equal),
    "ExpandDims": _expand_dims,
    "Fill": _fill,
    "FloorDiv": _elementwise(divided),
    "FloorMod": _elementwise(remainder),
    "GatherV2": _gather,
    "Identity": _identity,
    "InvertPermutation": _invert_permutation,
    "LogicalAnd": _elementwise(_both),
    "Maximum": _elementwise(largest),
    "Mul": _elementwise(multiplied),
    "Pack": _pack,
    "PreventGradient": _identity,
    "Prod": _reduced(multiplied, 1),
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StopGradient": _identity,
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(subtracted),
    "Unpack": _unpack,
}
"""Rules by op type: each computes numbers of outputs from inputs that are `Uniform` with known numbers, or `Sizes`."""
