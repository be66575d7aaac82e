"""Infers a node's missing attributes and output types from its op definition, attributes and input types.

Values that depend only on the op's definition are computed once per definition, so that graphs of 100,000 nodes are
fast. Type 0 means "unknown": it fits every argument and nothing is inferred from it, so that a checker can continue
after an error.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

from gradrule.common.attribute_checks import AttributeCheck, InferenceError
from gradrule.common.dtypes import REF_OFFSET, as_dt, dtype_name, without_ref
from gradrule.common.op_definitions import ArgDef, OpDef
from gradrule.v1.graph_pb2 import AttrValue

__all__ = ["Completed", "InferenceError", "complete", "input_slices", "output_slices", "type_attr"]

Slices = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Completed:
    """Holds the result of `complete`.

    Attributes:
        attrs: All attributes of the node.
        added: The attributes that the node lacked.
        outputs: Element types of the outputs; 0: unknown.
    """

    attrs: dict[str, AttrValue]
    added: dict[str, AttrValue]
    outputs: tuple[int, ...]


def complete(op: OpDef, attrs: Mapping[str, AttrValue], inputs: Sequence[int]) -> Completed:
    """Adds the attributes that a node lacks and returns the types of its outputs.

    Args:
        op: definition of the node's op.
        attrs: attributes of the node; names that start with `_` are kept unchecked.
        inputs: element type of each data input, as a flat list; 0: unknown.

    Returns:
        The attributes and the output types.

    Raises:
        InferenceError: `TYPE_MISMATCH` if number or types of the inputs do not fit; `INVALID_ATTR` if an attribute is
            unknown, has a wrong kind or value, or is missing and cannot be inferred.
    """
    plan = _plan(op)
    plan.check_given(attrs)
    inference = _Inference(plan, attrs)
    inference.match_inputs(inputs)
    added = inference.missing()
    return Completed({**attrs, **added} if added else dict(attrs), added, inference.outputs())


def input_slices(op: OpDef, attrs: Mapping[str, AttrValue]) -> Slices:
    """Returns the (start, length) of each input argument in the flat list, by name. `attrs` must be complete."""
    return _slices(op, op.inputs, attrs, _plan(op).fixed_inputs)


def output_slices(op: OpDef, attrs: Mapping[str, AttrValue]) -> Slices:
    """Returns the (start, length) of each output argument in the flat list, by name. `attrs` must be complete.

    `node:arg:i` in a function body is flat output `start + i`.
    """
    return _slices(op, op.outputs, attrs, _plan(op).fixed_outputs)


class _Plan:
    """Holds values that depend only on the definition of an op."""

    def __init__(self, op: OpDef) -> None:
        self.op = op
        self.attrs = {attr.name: AttributeCheck(attr) for attr in op.attrs}
        self.fixed_inputs = _fixed_slices(op.inputs)
        self.fixed_outputs = _fixed_slices(op.outputs)
        # Number of input arguments whose length each length attribute sets.
        self.lengths: dict[str, int] = {}
        for arg in op.inputs:
            if length_attr := arg.number_attr or arg.type_list_attr:
                self.lengths[length_attr] = self.lengths.get(length_attr, 0) + 1
        self.fixed_count = sum(1 for arg in op.inputs if not (arg.number_attr or arg.type_list_attr))

    def check_given(self, attrs: Mapping[str, AttrValue]) -> None:
        """Raises `InferenceError` for an attribute that is unknown or has a wrong value."""
        for name, value in attrs.items():
            plan = self.attrs.get(name)
            if plan is not None:
                plan.check(value)
            elif not name.startswith("_"):
                near = difflib.get_close_matches(name, self.attrs, n=1, cutoff=0.5)
                has = ", ".join(self.attrs) or "none"
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise InferenceError("INVALID_ATTR", f"{self.op.name} has no attribute {name!r}; it has: {has}.{hint}")


_plans: WeakKeyDictionary[OpDef, _Plan] = WeakKeyDictionary()


def _plan(op: OpDef) -> _Plan:
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _Plan(op)
    return plan


class _Inference:
    """Infers the types and lengths of one node's attributes, as ints and tuples of ints."""

    __slots__ = ("attrs", "inferred", "lengths", "lists", "plan", "types", "uninferable")

    def __init__(self, plan: _Plan, attrs: Mapping[str, AttrValue]) -> None:
        self.plan = plan
        self.attrs = attrs
        self.types: dict[str, int] = {}
        self.lists: dict[str, tuple[int, ...]] = {}
        self.lengths: dict[str, int] = {}
        # Attributes that cannot be inferred because an input's type is unknown; they are not reported as missing.
        self.uninferable: set[str] = set()
        self.inferred: set[str] = set()
        for name, attr in plan.attrs.items():
            value = attrs.get(name)
            if value is not None:
                self._read(attr, value)

    def _read(self, attr: AttributeCheck, value: AttrValue) -> None:
        if value.HasField("placeholder"):
            self.uninferable.add(attr.name)
        elif attr.field == "type":
            if attr.is_list:
                self.lists[attr.name] = tuple(value.list.type)
            else:
                self.types[attr.name] = value.type
        elif attr.field == "i" and not attr.is_list:
            self.lengths[attr.name] = value.i

    def match_inputs(self, inputs: Sequence[int]) -> None:
        """Matches the inputs with the arguments and infers lengths, types and type lists."""
        lengths = self._lengths(len(inputs))
        start = 0
        for arg in self.plan.op.inputs:
            length_attr = arg.number_attr or arg.type_list_attr
            stop = start + (lengths[length_attr] if length_attr else 1)
            self._match(arg, inputs[start:stop], start)
            start = stop

    def _lengths(self, count: int) -> dict[str, int]:
        plan, lengths = self.plan, {}
        rest, unknown = count - plan.fixed_count, []
        for name, times in plan.lengths.items():
            length = self._length(name)
            if length is None:
                unknown.append(name)
            else:
                lengths[name] = length
                rest -= times * length
        if len(unknown) > 1:
            unknown = self._default_lengths(unknown, lengths)
            rest = count - plan.fixed_count - sum(plan.lengths[name] * length for name, length in lengths.items())
        if len(unknown) > 1:
            raise InferenceError(
                "INVALID_ATTR", f"attributes {_listed(unknown)} do not follow from the inputs; give them"
            )
        if unknown:
            times = plan.lengths[unknown[0]]
            if rest < 0 or rest % times:
                raise self._wrong_count(count, lengths)
            lengths[unknown[0]] = rest // times
        elif rest:
            raise self._wrong_count(count, lengths)
        return lengths

    def _length(self, name: str) -> int | None:
        if name in self.lists:
            return len(self.lists[name])
        return self.lengths.get(name)

    def _default_lengths(self, unknown: list[str], lengths: dict[str, int]) -> list[str]:
        """Sets unknown lengths that have a default; returns the lengths that stay unknown."""
        remaining = []
        for name in unknown:
            default = self.plan.attrs[name].attr.default
            if default is None:
                remaining.append(name)
                continue
            self._read(self.plan.attrs[name], default)
            length = self._length(name)
            assert length is not None
            lengths[name] = length
        return remaining

    def _wrong_count(self, count: int, lengths: Mapping[str, int]) -> InferenceError:
        op = self.plan.op
        args = ", ".join(arg.name + ("…" if arg.number_attr or arg.type_list_attr else "") for arg in op.inputs)
        given = ", ".join(f"{name} says {length}" for name, length in lengths.items())
        wants = f"{op.name} takes {f'inputs ({args})' if args else 'no inputs'}{f', {given}' if given else ''}"
        return InferenceError("TYPE_MISMATCH", f"{wants}; {count} {'is' if count == 1 else 'are'} given")

    def _match(self, arg: ArgDef, types: Sequence[int], start: int) -> None:
        if arg.is_ref:
            for offset, number in enumerate(types):
                if 0 < number <= REF_OFFSET:
                    raise self._mismatch(arg, start + offset, dtype_name(number), "a reference to a variable")
        if arg.number_attr:
            self._set_length(arg.number_attr, len(types))
        if arg.type_list_attr:
            self._match_list(arg, types, start)
        elif arg.type_attr:
            for offset, number in enumerate(types):
                self._match_type(arg, without_ref(number), start + offset)
        else:
            for offset, number in enumerate(types):
                if number and without_ref(number) != arg.type:
                    raise self._mismatch(arg, start + offset, dtype_name(number), dtype_name(arg.type))

    def _set_length(self, name: str, length: int) -> None:
        if name not in self.lengths:
            self.lengths[name] = length
            if name not in self.attrs:
                minimum = self.plan.attrs[name].attr.minimum
                if minimum is not None and length < minimum:
                    raise InferenceError(
                        "TYPE_MISMATCH", f"{self.plan.op.name} takes at least {minimum} inputs; {length} are given"
                    )
                self.inferred.add(name)

    def _match_type(self, arg: ArgDef, number: int, index: int) -> None:
        name = arg.type_attr
        if not number:
            if name not in self.types:
                self.uninferable.add(name)
            return
        known = self.types.get(name)
        if known is None:
            allowed = self.plan.attrs[name].allowed
            if allowed is not None and number not in allowed:
                choices = self.plan.attrs[name].choices()
                raise InferenceError(
                    "TYPE_MISMATCH",
                    f"input {index} ({arg.name}) of {self.plan.op.name} cannot be {dtype_name(number)}; {choices}",
                )
            self.types[name] = number
            if name not in self.attrs:
                self.inferred.add(name)
        elif known != number:
            raise self._mismatch(arg, index, dtype_name(number), f"{dtype_name(known)}, as {name} is elsewhere")

    def _match_list(self, arg: ArgDef, types: Sequence[int], start: int) -> None:
        name = arg.type_list_attr
        known = self.lists.get(name)
        if known is None:
            numbers = tuple(map(without_ref, types))
            if 0 in numbers:
                self.uninferable.add(name)
                return
            plan = self.plan.attrs[name]
            if name not in self.attrs:
                plan.check(_types(numbers))
                self.inferred.add(name)
            self.lists[name] = numbers
            return
        for offset, (number, wanted) in enumerate(zip(types, known, strict=True)):
            if number and without_ref(number) != wanted:
                raise self._mismatch(arg, start + offset, dtype_name(number), f"{dtype_name(wanted)}, as {name} says")

    def _mismatch(self, arg: ArgDef, index: int, got: str, wanted: str) -> InferenceError:
        return InferenceError(
            "TYPE_MISMATCH", f"input {index} ({arg.name}) of {self.plan.op.name} is {got}, not {wanted}"
        )

    def missing(self) -> dict[str, AttrValue]:
        """Returns the attributes to add: those inferred from the inputs, and defaults."""
        added: dict[str, AttrValue] = {}
        if len(self.attrs) >= len(self.plan.attrs) and all(name in self.attrs for name in self.plan.attrs):
            return added
        absent = []
        for name, attr in self.plan.attrs.items():
            if name in self.attrs:
                continue
            if name in self.inferred:
                added[name] = self._inferred_value(attr)
            elif attr.attr.default is not None:
                added[name] = attr.attr.default
                self._read(attr, attr.attr.default)
            elif name not in self.uninferable:
                absent.append(name)
        if absent:
            plural = "s" if len(absent) > 1 else ""
            verb = "do not follow" if plural else "does not follow"
            raise InferenceError(
                "INVALID_ATTR",
                f"{self.plan.op.name} needs attribute{plural} {_listed(absent)}, which {verb} from its inputs",
            )
        return added

    def _inferred_value(self, attr: AttributeCheck) -> AttrValue:
        if attr.is_list:
            return _types(self.lists[attr.name])
        if attr.field == "type":
            return type_attr(self.types[attr.name])
        return AttrValue(i=self.lengths[attr.name])

    def outputs(self) -> tuple[int, ...]:
        """Returns the outputs' element types, flat. An argument of unknown length counts as one output."""
        flat: list[int] = []
        for arg in self.plan.op.outputs:
            if arg.type_list_attr:
                flat.extend(self.lists.get(arg.type_list_attr, (0,)))
                continue
            number = self.types.get(arg.type_attr, 0) if arg.type_attr else arg.type
            if arg.is_ref and number:
                number += REF_OFFSET
            flat.extend([number] * (self.lengths.get(arg.number_attr, 1) if arg.number_attr else 1))
        return _single_output(flat[0]) if len(flat) == 1 else tuple(flat)


# The cache is bounded because callers pass numbers that need not be types.
@functools.lru_cache(1024)
def type_attr(number: int) -> AttrValue:
    """Returns a type as an attribute; all nodes share one message per type."""
    return AttrValue(type=as_dt(number))


@functools.lru_cache(1024)
def _single_output(number: int) -> tuple[int]:
    return (number,)


def _fixed_slices(args: Sequence[ArgDef]) -> Slices | None:
    if any(arg.number_attr or arg.type_list_attr for arg in args):
        return None
    return MappingProxyType({arg.name: (index, 1) for index, arg in enumerate(args)})


def _slices(op: OpDef, args: Sequence[ArgDef], attrs: Mapping[str, AttrValue], fixed: Slices | None) -> Slices:
    if fixed is not None:
        return fixed
    slices: dict[str, tuple[int, int]] = {}
    start = 0
    for arg in args:
        length = 1
        if length_attr := arg.number_attr or arg.type_list_attr:
            value = attrs.get(length_attr)
            if value is None:
                raise InferenceError("INVALID_ATTR", f"{op.name} needs attribute {length_attr!r}")
            length = value.i if arg.number_attr else len(value.list.type)
        slices[arg.name] = (start, length)
        start += length
    return slices


def _types(numbers: Sequence[int]) -> AttrValue:
    return AttrValue(list=AttrValue.ListValue(type=map(as_dt, numbers)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
