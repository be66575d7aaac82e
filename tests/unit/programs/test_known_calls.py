"""Structures of calls, which are read from their bytes, and the table of known calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.common import tensor_codec
from gradrule.common.wire_format import varint
from gradrule.v1 import evaluate_pb2, rule_pb2
from gradrule_server.link.messages import CallShape, RunTemplate
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.known_calls import CallStructure, KnownCalls, read_structure
from gradrule_server.programs.loaded import Loadable
from gradrule_server.recovery.crash_history import CrashHistory

LISTS = ("feeds", "grad_ys", "tangents", "vectors")


def request_of(program: str = "programs/p", **lists: dict[str, np.ndarray]) -> evaluate_pb2.EvaluateRequest:
    """A request with inline tensors."""
    request = evaluate_pb2.EvaluateRequest(program=program)
    for field, values in lists.items():
        for name, value in values.items():
            getattr(request, field).add(name=name).value.inline_tensor.CopyFrom(tensor_codec.to_message(value))
    return request


def raw_of(program: str = "programs/p", **lists: dict[str, np.ndarray]) -> bytes:
    """Its bytes."""
    return request_of(program, **lists).SerializeToString()


@given(
    st.text(min_size=1, max_size=200),
    st.dictionaries(
        st.sampled_from(LISTS), st.dictionaries(st.text(min_size=1, max_size=150), st.integers(0, 30), max_size=4)
    ),
)
def test_structure_depends_on_names_and_not_on_values(program: str, names: dict[str, dict[str, int]]) -> None:
    """Two requests have one structure exactly if they are equal but for values."""

    def raw(offset: int, renamed: str = "") -> bytes:
        lists = {
            field: {name + renamed: np.full(size + offset, offset, np.float32) for name, size in sizes.items()}
            for field, sizes in names.items()
        }
        return raw_of(program, **lists)

    first = read_structure(raw(0))
    if any(len(name.encode()) > 0x7F for sizes in names.values() for name in sizes):
        assert first is None
        return
    assert first is not None
    assert read_structure(raw(100)) == first
    if any(names.values()):
        assert read_structure(raw(0, renamed="'")) != first


def test_structure_depends_on_params_derivative_and_stacking() -> None:
    """Params, derivative and stacking are part of the structure."""
    made = {read_structure(raw_of(feeds={"x": np.ones(3)}))}
    request = request_of(feeds={"x": np.ones(3)})
    for alpha in (1.0, 2.0):
        request.params["a"].values["alpha"].CopyFrom(rule_pb2.ParamValue(number=alpha))
        made.add(read_structure(request.SerializeToString()))
    request.derivative = evaluate_pb2.DERIVATIVE_JVP
    made.add(read_structure(request.SerializeToString()))
    request.stacked_grad_ys = True
    made.add(read_structure(request.SerializeToString()))
    made.add(read_structure(raw_of(grad_ys={"x": np.ones(3)})))
    assert len(made) == 6
    assert None not in made


SETTINGS = {
    "params": "RunTemplate.settings, from the program's param settings",
    "derivative": "part of the program's key",
    "stacked_grad_ys": "part of the program's key",
    "batching": "KnownCall.is_batched",
    "answer_packing": "the engine reads it",
    "run_timeout": "KnownCall.run_limit_s",
}
"""How a call that is not parsed applies the fields of its request that are neither its program nor tensors."""


def test_known_calls_apply_every_field_of_a_request() -> None:
    """A new field of `EvaluateRequest` needs an entry in SETTINGS: say how `KnownCalls.run` applies it."""
    assert {field.name for field in evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields} == {
        "program",
        "spec",
        "shared_memory",
        *LISTS,
        *SETTINGS,
    }


def set_field(message: Any, field: Any, seed: int) -> None:
    """Sets a field of any type; the value depends on `seed`."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_type = field.message_type.fields_by_name["value"].message_type
        assert value_type is not None
        getattr(message, field.name)[str(seed)].SetInParent()
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        set_field(inner.add() if field.is_repeated else inner, field.message_type.fields[0], seed)
    elif field.cpp_type == field.CPPTYPE_STRING:
        setattr(message, field.name, str(seed))
    else:
        setattr(message, field.name, bool(seed) if field.cpp_type == field.CPPTYPE_BOOL else seed)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_part_of_the_structure(name: str) -> None:
    """No setting keeps a call from being recognised."""
    plain = read_structure(raw_of(feeds={"x": np.ones(3)}))
    for seed in (1, 3):
        request = request_of(feeds={"x": np.ones(3)})
        set_field(request, request.DESCRIPTOR.fields_by_name[name], seed)
        assert request.ListFields()
        assert read_structure(request.SerializeToString()) not in (None, plain)


@pytest.mark.parametrize("number", [15, 16, 5000])
@pytest.mark.parametrize("value", [b"\x01", b"\x80\x01"], ids=["short", "long"])
@pytest.mark.parametrize("wire_type", [0, 2], ids=["number", "bytes"])
def test_fields_of_newer_clients_are_part_of_the_structure(number: int, value: bytes, wire_type: int) -> None:
    """They do not keep a call from being recognised either."""
    field = varint(number << 3 | wire_type) + value + (bytes(128 if len(value) == 2 else 1) if wire_type == 2 else b"")
    raw = raw_of(feeds={"x": np.ones(3)})
    plain = read_structure(raw)
    assert plain is not None
    for request in (raw + field, field + raw):
        # Parsing must agree that these are valid bytes of a field that it does not know.
        assert evaluate_pb2.EvaluateRequest.FromString(request).feeds[0].name == "x"
        assert sorted(read_structure(request) or ()) == sorted((*plain, field))
    assert read_structure(raw + field[:-1]) is None


def blob() -> bytes:
    request = request_of()
    request.feeds.add(name="x").value.blob.sha256 = "00" * 32
    return request.SerializeToString()


def both() -> bytes:
    """Inline, and then a blob in its place."""
    request = request_of(feeds={"x": np.ones(2)})
    again = evaluate_pb2.EvaluateRequest()
    again.feeds.add().value.blob.sha256 = "00" * 32
    value = request.feeds[0].value.SerializeToString() + again.feeds[0].value.SerializeToString()
    feed = b"\x0a\x01x\x12" + bytes([len(value)]) + value
    return request_of().SerializeToString() + b"\x1a" + bytes([len(feed)]) + feed


def numbers_one_by_one() -> bytes:
    """A tensor whose numbers take more memory once they are parsed."""
    request = request_of()
    tensor = request.feeds.add(name="x").value.inline_tensor
    tensor.int64_val.extend([1] * 100_000)
    return request.SerializeToString()


def many_parts() -> bytes:
    """Small tensors that are nothing but parts: parsed, all together take many times their bytes."""
    request = request_of()
    for index in range(200):
        tensor = request.feeds.add(name=f"x{index}").value.inline_tensor
        for _ in range(10_000):
            tensor.tensor_shape.dim.add()
    return request.SerializeToString()


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        lambda: raw_of(feeds={"x": np.ones(2)}).replace(b"\x0a\x0aprograms/p", b""),
        lambda: raw_of() + raw_of("programs/q"),
        lambda: evaluate_pb2.EvaluateRequest(spec={}).SerializeToString(),
        blob,
        both,
        numbers_one_by_one,
        many_parts,
        lambda: raw_of(feeds={f"x{index}": np.ones(1) for index in range(300)}),
        lambda: raw_of("p" * 20_000),
        lambda: raw_of() + b"\xff",
    ],
    ids=[
        "nothing",
        "no program",
        "two programs",
        "inline",
        "a blob",
        "two values",
        "numbers",
        "parts",
        "many",
        "long",
        "junk",
    ],
)
def test_requests_without_a_structure(make: Callable[[], bytes]) -> None:
    """Where bytes alone do not tell, there is no structure."""
    assert read_structure(make()) is None


def test_truncated_requests_have_no_structure() -> None:
    """No beginning of a request has a structure, other than where it ends between two fields."""
    raw = raw_of(feeds={"x": np.ones(20_000), "y": np.ones(2)}, grad_ys={"z": np.ones(1)})
    ends = {len(raw_of()), len(raw)}
    ends |= {len(raw_of(feeds={"x": np.ones(20_000)})), len(raw_of(feeds={"x": np.ones(20_000), "y": np.ones(2)}))}
    lengths = [*range(200), *range(len(raw) - 200, len(raw) + 1)]
    assert {length for length in lengths if read_structure(raw[:length]) is not None} == {
        length for length in ends if length in lengths
    }


def packed_raw(content: bytes, compression: int = 0) -> bytes:
    """A request whose only feed is packed."""
    request = evaluate_pb2.EvaluateRequest(program="programs/p")
    packed = request.feeds.add(name="x").value.inline_tensor.packed
    packed.content = content
    packed.compression = compression  # type: ignore[assignment]
    return request.SerializeToString()


def test_packed_tensors_count_as_values() -> None:
    """Requests that differ in how a tensor is packed are run in one way."""
    plain = read_structure(raw_of(feeds={"x": np.ones(100_000, np.float32)}))
    assert plain is not None
    for size in (0, 10, 5_000, 100_000):
        for compression in (0, 1):
            assert read_structure(packed_raw(bytes(size), compression)) == plain
    assert read_structure(packed_raw(bytes(100_000))[:-1]) is None


def test_packing_of_the_answer_is_part_of_the_structure() -> None:
    request = request_of(feeds={"x": np.ones(3)})
    plain = read_structure(request.SerializeToString())
    request.answer_packing.float32_as_bfloat16 = True
    assert read_structure(request.SerializeToString()) not in (None, plain)


def test_long_reference_to_shared_memory_has_no_structure() -> None:
    """Its shape is no content."""
    request = evaluate_pb2.EvaluateRequest(program="programs/p")
    shared = request.feeds.add(name="x").value.shared_memory
    shared.shape.dim.add(size=3)
    assert read_structure(request.SerializeToString()) is not None
    for _ in range(100_000):
        shared.shape.dim.add(size=1)
    assert read_structure(request.SerializeToString()) is None


def runnable() -> RunnableProgram:
    compiled: Any = SimpleNamespace(program=b"", tail=b"")
    return RunnableProgram(compiled, Loadable("key", b"g" * 100))


def known_calls(cache: ProgramCache) -> KnownCalls:
    loaded: Any = SimpleNamespace(crash_history=CrashHistory())
    return KnownCalls(cache, loaded)


def mark_used(calls: KnownCalls, structure: CallStructure) -> None:
    """Marks a call as used, whose engine has unloaded the program since."""
    unloaded: Any = SimpleNamespace(is_available=False)
    calls._mark_used(structure, calls._calls[structure], unloaded, 0.0)


def test_dropping_a_program_drops_only_its_known_calls() -> None:
    cache = ProgramCache(2, 10**6)
    calls = known_calls(cache)
    keys = {name: StoredKey(name, CallShape()) for name in "abc"}
    for name in "ab":
        program = runnable()
        cache.put(keys[name], program)
        for number in range(2):
            calls.add(
                (name.encode(), bytes([number])), keys[name], program, RunTemplate(b""), link_pb2.RawEvaluateRequest()
            )
    # A call that is used keeps its program: the other one goes.
    mark_used(calls, (b"a", b"\0"))
    cache.put(keys["c"], runnable())
    assert [(name, b"\1") in calls._calls for name in (b"a", b"b")] == [True, False]
    cache.remove_stored("a")
    assert (b"a", b"\0") not in calls._calls
    assert not calls._structures


def test_least_recently_used_calls_are_dropped() -> None:
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", CallShape()), runnable()
    calls = known_calls(cache)
    cache.put(key, program)
    for number in range(2000):
        calls.add((b"%d" % number,), key, program, RunTemplate(b""), link_pb2.RawEvaluateRequest())
        mark_used(calls, (b"0",))
    assert len(calls._calls) == len(calls._structures[key]) < 2000
    assert (b"1",) not in calls._calls
