"""Rules of ops that move elements: reshape, slice, join, pad, gather, repeat."""

from __future__ import annotations

import math

from gradrule_server.engine.batching.values import (
    UNKNOWN,
    Attr,
    Extent,
    NotPerExample,
    PerExample,
    Rule,
    Shape,
    Uniform,
    Unranked,
    Value,
    get_numbers,
    get_output_tail,
    integers,
    read_axes,
    read_target_shape,
    require_equal_rows,
    require_other_axes,
    require_per_example,
    require_uniform,
)


def reshape(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Reshape: elements stay in order, so those of an example stay together."""
    numbers = list(get_numbers(inputs[1]).flat)
    tail: list[int | None] = [None if number is UNKNOWN else number for number in numbers[1:]]
    if any(isinstance(number, Extent) for number in tail):
        raise NotPerExample("gives a shape in which the batch is not axis 0")
    if isinstance(inputs[0], Uniform):
        raise NotPerExample("reshapes one tensor into as many rows as there are examples")
    elements = inputs[0].elements if isinstance(inputs[0], PerExample) else None
    if not isinstance(inputs[0], PerExample | Unranked) or not numbers:
        raise NotPerExample("has the batch in an input where it mixes examples")
    if isinstance(numbers[0], Extent):
        rows = numbers[0].factor
        others = math.prod(size or 0 for size in tail if size != -1) * rows
        if -1 in tail:
            is_known = elements is not None and None not in tail and others > 0
            tail[tail.index(-1)] = elements // others if is_known and elements is not None else None
        return PerExample(rows, tuple(tail))
    others = math.prod(size or 0 for size in tail)
    if numbers[0] != -1 or None in tail or elements is None or others <= 0 or elements % others or not elements:
        raise NotPerExample("gives a shape in which the batch is not axis 0")
    return PerExample(elements // others, tuple(tail))


def expand_dims(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a new axis after the batch axis."""
    value = require_per_example(inputs[0])
    (axis,) = read_axes(inputs[1], value.rank + 1)
    return PerExample(value.rows, (*value.tail[: axis - 1], 1, *value.tail[axis - 1 :]))


def squeeze(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Squeeze of named axes."""
    value = require_per_example(inputs[0])
    if not attr("squeeze_dims"):
        raise NotPerExample("drops the batch axis where there is one example")
    axes = require_other_axes(attr("squeeze_dims"), value.rank)
    return PerExample(value.rows, tuple(size for axis, size in enumerate(value.tail, 1) if axis not in axes))


def transpose(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Transpose that keeps axis 0 in place."""
    value, order = require_per_example(inputs[0]), integers(inputs[1])
    if order is None or order[0] % value.rank != 0:
        raise NotPerExample("moves the batch axis")
    return PerExample(value.rows, tuple(value.tail[axis % value.rank - 1] for axis in order[1:]))


def concat(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ConcatV2 along an axis other than the batch axis."""
    first = require_equal_rows(inputs[:-1])
    read_axes(inputs[-1], first.rank)
    return PerExample(first.rows, get_output_tail(shapes[0]))


def pack(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Pack along an axis after the batch axis."""
    first = require_equal_rows(inputs)
    (axis,) = require_other_axes([attr("axis")], first.rank + 1)
    return PerExample(first.rows, (*first.tail[: axis - 1], len(inputs), *first.tail[axis - 1 :]))


def unpack(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
    """Handles Unpack along an axis other than the batch axis."""
    value = require_per_example(inputs[0])
    (axis,) = require_other_axes([attr("axis")], value.rank)
    part = PerExample(value.rows, value.tail[: axis - 1] + value.tail[axis:])
    return [part] * len(shapes)


def split(data: int, axis: int) -> Rule:
    """Returns the rule of splits along an axis other than the batch axis. data, axis: numbers of inputs."""

    def rule(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
        value = require_per_example(inputs[data])
        read_axes(inputs[axis], value.rank)
        require_uniform(*(other for index, other in enumerate(inputs) if index != data))
        return [PerExample(value.rows, get_output_tail(shape)) for shape in shapes]

    return rule


def whole_slice(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a slice with all of axis 0."""
    value = require_per_example(inputs[0])
    begin, size = list(get_numbers(inputs[1]).flat), list(get_numbers(inputs[2]).flat)
    is_whole = begin[0] == 0 and (size[0] == -1 or size[0] == Extent(value.rows))
    if not is_whole or any(isinstance(number, Extent) for number in (*begin[1:], *size[1:])):
        raise NotPerExample("slices the batch axis")
    return PerExample(value.rows, get_output_tail(shapes[0]))


def _keeps_axis_0(begin: Value, end: Value, strides: Value, rows: int, attr: Attr) -> None:
    """Raises `NotPerExample` unless a strided slice takes the whole of axis 0."""
    first, last, steps = (list(get_numbers(value).flat) for value in (begin, end, strides))
    if any(isinstance(number, Extent) for number in (*first, *last[1:], *steps)):
        raise NotPerExample("slices by the number of examples")
    if not first or attr("ellipsis_mask") & 1:
        return
    is_whole = (attr("begin_mask") & 1 or first[0] == 0) and (attr("end_mask") & 1 or last[0] == Extent(rows))
    if not is_whole or steps[0] != 1 or (attr("new_axis_mask") | attr("shrink_axis_mask")) & 1:
        raise NotPerExample("slices the batch axis")


def strided_slice(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a slice with all of axis 0."""
    value = require_per_example(inputs[0])
    _keeps_axis_0(inputs[1], inputs[2], inputs[3], value.rows, attr)
    # The ellipsis itself is not a new axis, even if the mask has its bit set.
    places = range(1, get_numbers(inputs[1]).size)
    taken = sum(not attr("new_axis_mask") >> place & 1 for place in places)
    if attr("ellipsis_mask") & 1 and taken >= value.rank:
        raise NotPerExample("slices the batch axis")
    return PerExample(value.rows, get_output_tail(shapes[0]))


def strided_slice_grad(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles the gradient of a slice with all of axis 0."""
    rows, tail = read_target_shape(inputs[0])
    value = require_per_example(inputs[4])
    _keeps_axis_0(inputs[1], inputs[2], inputs[3], rows, attr)
    if value.rows != rows or (attr("ellipsis_mask") & 1 and get_numbers(inputs[1]).size > 1 + len(tail)):
        raise NotPerExample("slices the batch axis")
    return PerExample(rows, tail)


def pad(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles padding along axes other than the batch axis."""
    value, widths = require_per_example(inputs[0]), integers(inputs[1])
    require_uniform(*inputs[2:])
    if widths is None or any(widths[:2]):
        raise NotPerExample("pads the batch axis")
    return PerExample(value.rows, get_output_tail(shapes[0]))


def gather(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles rows of one table for indices per example, or GatherV2 along an axis other than the batch axis."""
    params, indices, axis = inputs
    found = integers(axis)
    if found is None:
        raise NotPerExample("works along axes that are not known before it runs")
    if attr("batch_dims"):
        value = require_equal_rows([params, indices])
        if attr("batch_dims") < 0 or attr("batch_dims") >= value.rank:
            raise NotPerExample("gathers in a way that is not followed")
        require_other_axes(found, value.rank)
        return PerExample(value.rows, get_output_tail(shapes[0]))
    if isinstance(params, Uniform) and isinstance(indices, PerExample) and found == [0]:
        return PerExample(indices.rows, get_output_tail(shapes[0]))
    value = require_per_example(params)
    require_uniform(indices)
    require_other_axes(found, value.rank)
    return PerExample(value.rows, get_output_tail(shapes[0]))


def one_hot(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a new axis after the batch axis."""
    value = require_per_example(inputs[0])
    require_uniform(*inputs[1:])
    require_other_axes([attr("axis")], value.rank + 1)
    return PerExample(value.rows, get_output_tail(shapes[0]))


def select(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Select: all inputs have one shape, or the condition is a vector that selects rows, or a scalar."""
    condition, *values = inputs
    first = require_equal_rows(values)
    if isinstance(condition, PerExample):
        if condition.rows != first.rows or condition.rank not in (1, first.rank):
            raise NotPerExample("broadcasts examples against one another")
    elif not isinstance(condition, Uniform) or condition.shape != ():
        raise NotPerExample("broadcasts along the batch")
    return first


def broadcast_to(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles BroadcastTo to a shape whose axis 0 is the batch axis."""
    value, (rows, tail) = inputs[0], read_target_shape(inputs[1])
    if isinstance(value, PerExample):
        if value.rank != 1 + len(tail) or value.rows != rows:
            raise NotPerExample("broadcasts along the batch")
    elif not isinstance(value, Uniform) or value.shape is None:
        raise NotPerExample("takes a tensor whose shape is not known")
    elif len(value.shape) > len(tail) and value.shape[0] != 1:
        raise NotPerExample("broadcasts along the batch")
    return PerExample(rows, tail)


def tile(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Tile along axes other than the batch axis, or of one row for each example."""
    value, times = inputs[0], list(get_numbers(inputs[1]).flat)
    if any(isinstance(number, Extent) for number in times[1:]):
        raise NotPerExample("gives a shape in which the batch is not axis 0")
    if isinstance(value, PerExample) and times[0] == 1:
        return PerExample(value.rows, get_output_tail(shapes[0]))
    if isinstance(value, Uniform) and value.shape and value.shape[0] and isinstance(times[0], Extent):
        return PerExample(value.shape[0] * times[0].factor, get_output_tail(shapes[0]))
    raise NotPerExample("repeats the batch")


def fill(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles Fill of a shape whose axis 0 is the batch axis."""
    rows, tail = read_target_shape(inputs[0])
    require_uniform(inputs[1])
    return PerExample(rows, tail)


def reverse(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ReverseV2 along axes other than the batch axis."""
    value = require_per_example(inputs[0])
    read_axes(inputs[1], value.rank)
    return value


def ensure_shape(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles EnsureShape that leaves the batch size open."""
    value, wanted = require_per_example(inputs[0]), attr("shape")
    if wanted.rank is not None and wanted[0] is not None:
        raise NotPerExample("asks for a fixed number of rows")
    return value
