"""Shared memory between clients and the server on one host: equal results, refusals, and cleanup."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule._rpc import shared_memory
from gradrule.common.memory_regions import Memory
from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc, tensor_pb2
from tests.processes import count_descriptors, engines, open_descriptors
from tests.service.answers import provokes, refused_raw
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

_MEBIBYTE = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def squares() -> gr.Graph:
    """Makes y = x * x; z is its sum."""
    graph = gr.Graph()
    x = graph.placeholder("x", "float32", [None])
    y = graph.op("Mul", x, x, name="y")
    graph.op("Sum", y, graph.constant(np.int32([0])), name="z")
    return graph


def compiled(client: Any) -> Any:
    """Compiles z with the gradient of x; y is fetched."""
    return client.compile(squares(), ys=["z"], xs=["x"], fetches=["y"])


def values(size: int = _MEBIBYTE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(size, np.float32)


def check(result: Any, x: np.ndarray) -> None:
    np.testing.assert_array_equal(result.outputs["y"], x * x)
    np.testing.assert_array_equal(result.gradients["x"], 2 * x)


def descriptors(pid: int) -> list[str]:
    """Returns the open descriptors of a process for memory of clients."""
    return [name for name in open_descriptors(pid) if "memfd:gradrule-client" in name]


def mapped(pid: int) -> int:
    """Counts the client memories that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:gradrule-client")


def held(running: RunningServer) -> int:
    """Counts the descriptors and mappings of clients' memory in the front end and the engines.

    Clients of other tests of this process may still be connected, and hold some.
    """
    return sum(len(descriptors(pid)) + mapped(pid) for pid in (running.process.pid, *engines(running.process.pid)))


@pytest.fixture
def sharing(server: RunningServer) -> Iterator[gr.Client]:
    """Returns a client with its own shared memory."""
    with gr.connect(server.target) as connected:
        yield connected


def test_results_equal_those_of_inline_tensors(sharing: gr.Client, server: RunningServer) -> None:
    program = compiled(sharing)
    kept = []
    for seed in range(4):
        x = values(seed=seed)
        result = program(x=x)
        check(result, x)
        kept.append((result, x))
    # The memory of an answer is not reused while an array of it lives.
    for result, x in kept:
        check(result, x)
    assert sharing._memory.is_shared
    assert [result._answer.room is not None for result, _ in kept] == [False, True, True, True]
    with gr.connect(server.target, shared_memory=False) as plain:
        x = values(seed=9)
        check(plain.program(program.name)(x=x), x)
        assert not plain._memory.is_shared


def test_arrays_of_an_answer_are_writable_and_outlive_the_client(server: RunningServer) -> None:
    x = values()
    with gr.connect(server.target) as client:
        program = compiled(client)
        program(x=x)
        result = program(x=x)
        y, gradient = result.outputs["y"], result.gradients["x"]
        del result
        gradient += 1
        for _ in range(4):
            program(x=x + 1)
    gc.collect()
    np.testing.assert_array_equal(y, x * x)
    np.testing.assert_array_equal(gradient, 2 * x + 1)


def test_async_client_shares_memory(server: RunningServer) -> None:
    asyncio.run(_shares(server.target))


async def _shares(target: str) -> None:
    async with gr.aio.connect(target) as client:
        program = await client.compile(squares(), ys=["z"], xs=["x"], fetches=["y"])
        for seed in range(2):
            x = values(seed=seed)
            result = await program(x=x)
            check(result, x)
        assert client._memory.is_shared
        assert result._answer.room is not None


def test_every_element_type_and_inline_graphs_and_grad_ys(sharing: gr.Client) -> None:
    graph = gr.Graph()
    x = graph.placeholder("x", "float64", [None])
    i = graph.placeholder("i", "int32", [None])
    graph.op("Mul", x, graph.op("Cast", i, SrcT="int32", DstT="float64"), name="y")
    feeds: dict[Any, Any] = {"x": values(300_000).astype(np.float64), "i": np.arange(300_000, dtype=np.int32)}
    grad_y = values(300_000, 3).astype(np.float64)
    for _ in range(2):
        result = sharing.evaluate(graph, feeds, fetches=["y"], ys=["y"], xs=["x"], grad_ys=[grad_y])
        np.testing.assert_array_equal(result.outputs["y"], feeds["x"] * feeds["i"])
        np.testing.assert_array_equal(result.gradients["x"], grad_y * feeds["i"])
    assert result._answer.room is not None


def test_requests_beyond_the_message_limit_need_no_chunks(sharing: gr.Client) -> None:
    program = compiled(sharing)
    x = values(20 * _MEBIBYTE)
    for _ in range(2):
        result = program(x=x)
        check(result, x)
    assert result._answer.room is not None


# Cleanup.


def test_closed_client_leaves_no_memory(server: RunningServer) -> None:
    names, before = sorted(os.listdir("/dev/shm")), held(server)
    with gr.connect(server.target) as client:
        program = compiled(client)
        for _ in range(2):
            program(x=values())
        assert held(server) > before
    wait_until(lambda: held(server) <= before or None, "end of memory")
    assert sorted(os.listdir("/dev/shm")) == names


_FOREVER = """
import sys, numpy as np, gradrule as gr
client = gr.connect(sys.argv[1])
program = client.program(sys.argv[2])
x = np.ones(1 << 22, np.float32)
program(x=x)
print("shared" if client._memory.is_shared else "inline", flush=True)
while True:
    program(x=x)
"""


def test_killed_client_leaves_no_memory(server: RunningServer, client: gr.Client) -> None:
    program = compiled(client)
    names, before = set(os.listdir("/dev/shm")), held(server)
    command = [sys.executable, "-c", _FOREVER, server.target, program.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "shared\n"
        assert held(server) > before
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: held(server) <= before or None, "end of memory")
    # Programs of others may have files there for a moment.
    wait_until(lambda: set(os.listdir("/dev/shm")) <= names or None, "end of named memory")
    x = values()
    check(program(x=x), x)


def test_results_survive_a_killed_server_and_a_killed_engine(tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as running, gr.connect(running.target, timeout=60.0) as client:
        program = compiled(client)
        x = values()
        for _ in range(2):
            check(program(x=x), x)
        os.kill(running.wait_for_engine(), signal.SIGKILL)
        check(program(x=x), x)
        result = program(x=x)
        port = running.target.rpartition(":")[2]
        running.kill()
        # An answer of the killed server.
        check(result, x)
        flags = ("--port", port)
        with running_server(tmp_path / "server", flags) as again:
            assert again.target == running.target
            for _ in range(2):
                result = program(x=x)
                check(result, x)
            assert client._memory.is_shared


# Without shared memory.


def test_server_without_shared_memory_gets_inline_tensors(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like an older release, or a server with the feature off: both return this status."""
    monkeypatch.setattr(shared_memory, "METHOD", "/gradrule.v1.GradientService/NotThere")
    with gr.connect(server.target) as client:
        program = compiled(client)
        for seed in range(2):
            x = values(seed=seed)
            check(program(x=x), x)
        assert not client._memory.is_shared
        assert "UNSUPPORTED" in client._memory.refusal


@pytest.mark.parametrize("fault", ["elsewhere", "imposter"])
def test_server_with_an_unreachable_socket_gets_inline_tensors(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """As from another host or network namespace, or when another process has taken the socket's name."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.bind("\0gradrule-test-imposter")
    taken.listen()
    real = shared_memory._pass_to_server

    def pass_to_server(memory: Memory, told: evaluate_pb2.ShareMemoryResponse, seconds: float) -> Any:
        told.address = "gradrule-test-nobody" if fault == "elsewhere" else "gradrule-test-imposter"
        return real(memory, told, seconds)

    monkeypatch.setattr(shared_memory, "_pass_to_server", pass_to_server)
    monkeypatch.setattr(shared_memory, "_HANDSHAKE_S", 0.2)
    with taken, gr.connect(server.target) as client:
        program = compiled(client)
        for seed in range(2):
            x = values(seed=seed)
            check(program(x=x), x)
        assert not client._memory.is_shared
        assert client._memory.refusal
        assert client._memory._not_before > 0


# Hostile clients.


class PlainCaller:
    """Sends plain messages and hands over any memory."""

    def __init__(self, channel: grpc.Channel, metadata: Any = ()) -> None:
        self._stub = evaluate_pb2_grpc.GradientServiceStub(channel)
        self._metadata = metadata
        self.connections: list[socket.socket] = []

    def offer(self) -> evaluate_pb2.ShareMemoryResponse:
        found: evaluate_pb2.ShareMemoryResponse = self._stub.ShareMemory(
            evaluate_pb2.ShareMemoryRequest(), metadata=self._metadata
        )
        return found

    def hand_over(self, *descriptors: int, data: bytes = b"\0", client_key: bytes | None = None) -> bytes:
        """Sends descriptors and returns the server's answer; empty if it closed the connection."""
        offer = self.offer()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(b"\0" + offer.address.encode())
        self.connections.append(connection)
        connection.send(offer.client_key if client_key is None else client_key)
        if connection.recv(100) != offer.server_key:
            return b""
        socket.send_fds(connection, [data], list(descriptors))
        return connection.recv(4096)

    def memory(self, size: int = 4 * _MEBIBYTE) -> tuple[bytes, int]:
        """Returns the name of memory that the server accepted, and its descriptor."""
        fd = memfd(size)
        answer = self.hand_over(fd)
        assert answer[:1] == b"\0", answer
        return answer[1:], fd

    def memory_if_allowed(self, size: int) -> bytes | None:
        """Returns the name of accepted memory; None above the tenant's quota."""
        fd = memfd(size)
        answer = self.hand_over(fd)
        os.close(fd)
        assert answer[:1] == b"\0" or b"QUOTA_EXCEEDED" in answer, answer
        return answer[1:] if answer[:1] == b"\0" else None

    def evaluate(self, program: str, tensor: dict[str, Any], use: dict[str, Any]) -> evaluate_pb2.EvaluateResponse:
        request = evaluate_pb2.EvaluateRequest(program=program, shared_memory=evaluate_pb2.SharedMemoryUse(**use))
        place = tensor_pb2.SharedMemoryTensor(**({"dtype": tensor_pb2.DT_FLOAT} | tensor))
        request.feeds.add(name="x").value.shared_memory.CopyFrom(place)
        found: evaluate_pb2.EvaluateResponse = self._stub.Evaluate(request, timeout=30, metadata=self._metadata)
        return found

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def memfd(size: int, seals: int = _SEALS) -> int:
    fd = os.memfd_create("gradrule-hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def shape(*sizes: int) -> tensor_pb2.TensorShape:
    return tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in sizes])


@pytest.fixture
def hostile(channel: grpc.Channel) -> Iterator[PlainCaller]:
    with closing(PlainCaller(channel)) as made:
        yield made


def _fifo(folder: Path) -> int:
    os.mkfifo(folder / "fifo")
    return os.open(folder / "fifo", os.O_RDWR | os.O_NONBLOCK)


def _file(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(_MEBIBYTE))
    return os.open(folder / "file", os.O_RDWR)


def _read_only(_: Path) -> int:
    return os.open(f"/proc/self/fd/{memfd(_MEBIBYTE)}", os.O_RDONLY)


NOT_MEMORY: dict[str, tuple[Callable[[Path], int], str]] = {
    "file": (_file, "no memory made by memfd_create"),
    "fifo": (_fifo, "no memory made by memfd_create"),
    "device": (lambda _: os.open("/dev/zero", os.O_RDWR), "no memory made by memfd_create"),
    "socket": (lambda _: socket.socket().detach(), "no memory made by memfd_create"),
    "unsealed": (lambda _: memfd(_MEBIBYTE, 0), "F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL"),
    "may grow": (lambda _: memfd(_MEBIBYTE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), "F_SEAL_GROW"),
    "empty": (lambda _: memfd(0), "0 bytes"),
    "huge": (lambda _: memfd(1 << 45), f"{1 << 45} bytes"),
    "read-only": (_read_only, "reading and writing"),
}


@pytest.mark.parametrize("kind", NOT_MEMORY)
def test_descriptor_without_sealed_memory_is_refused(
    hostile: PlainCaller, sharing: gr.Client, server: RunningServer, tmp_path: Path, kind: str
) -> None:
    make, message = NOT_MEMORY[kind]
    before = count_descriptors(server.process.pid)
    answer = hostile.hand_over(make(tmp_path))
    assert answer[:1] == b"\x01"
    assert message in answer[1:].decode()
    wait_until(lambda: count_descriptors(server.process.pid) <= before or None, "end of descriptors")
    x = values()
    check(compiled(sharing)(x=x), x)


def test_invalid_handshake_closes_the_connection(hostile: PlainCaller, server: RunningServer) -> None:
    assert hostile.hand_over(client_key=b"") == b""
    assert hostile.hand_over(client_key=bytes(16)) == b""
    assert hostile.hand_over() == b""
    assert hostile.hand_over(data=b"") == b""
    # Further descriptors are closed by the kernel.
    assert hostile.hand_over(memfd(4096), memfd(8192), memfd(4096))[:1] == b"\0"
    offer = hostile.offer()
    for expected in (offer.server_key, b""):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hostile.connections.append(connection)
        connection.connect(b"\0" + offer.address.encode())
        connection.send(offer.client_key)
        assert connection.recv(100) == expected


def test_sealed_memory_cannot_be_truncated(hostile: PlainCaller, client: gr.Client) -> None:
    name, fd = hostile.memory()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    program = compiled(client).name
    # Punch a hole: its pages read as zeros.
    answer = hostile.evaluate(
        program, {"size_bytes": 4096, "shape": shape(1024)}, {"memory": name, "request_bytes": 4096}
    )
    assert answer.outputs[0].value.inline_tensor.tensor_content == bytes(4096)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "another name": ({}, {"memory": bytes(16)}, "SHARED_MEMORY_LOST", "does not have the shared memory"),
    "no name": ({}, {"memory": b""}, "SHARED_MEMORY_LOST", "does not have the shared memory"),
    "beyond the end": ({"offset": 4 * _MEBIBYTE - 4}, {}, "INVALID_TENSOR", "do not lie in a shared memory"),
    "wrapping offset": ({"offset": 2**64 - 8}, {}, "INVALID_TENSOR", "do not lie in a shared memory"),
    "huge": ({"size_bytes": 2**62, "shape": shape(2**60)}, {"request_bytes": 2**63}, "INVALID_TENSOR", "bytes"),
    "other size": ({"size_bytes": 8}, {}, "INVALID_TENSOR", "takes 4096"),
    "more than told": ({}, {"request_bytes": 4095}, "INVALID_TENSOR", "request_bytes"),
    "unknown shape": ({"shape": tensor_pb2.TensorShape(unknown_rank=True)}, {}, "INVALID_TENSOR", "shape"),
    "negative shape": ({"shape": shape(-1, -1024)}, {}, "INVALID_TENSOR", "shape"),
    "strings": ({"dtype": tensor_pb2.DT_STRING}, {}, "INVALID_TENSOR", "travel inline"),
    "no type": ({"dtype": tensor_pb2.DT_UNSPECIFIED}, {}, "INVALID_TENSOR", "x"),
    "other type": ({"dtype": tensor_pb2.DT_INT32}, {}, "FEED_DTYPE", "int32"),
    "room beyond the end": ({}, {"answer_offset": 4 * _MEBIBYTE, "answer_bytes": 1}, "INVALID_TENSOR", "memory"),
    "huge room": ({}, {"answer_offset": 1, "answer_bytes": 2**64 - 1}, "INVALID_TENSOR", "memory"),
}


@pytest.mark.parametrize("is_tensor", [False, True])
def test_strings_in_shared_memory_are_refused_with_a_header(
    hostile: PlainCaller, client: gr.Client, is_tensor: bool
) -> None:
    g = gr.Graph()
    s = g.placeholder("s", "string", [None])
    program = client.compile(g, fetches=g.op_output("StringLength", s, name="n"))
    feed = evaluate_pb2.TensorHeader(
        name="s", dtype=tensor_pb2.DT_STRING, shape=[4], in_shared_memory=True, content_is_tensor=is_tensor
    )
    header = evaluate_pb2.EvaluateHeader(program=program.name, feeds=[feed])
    use = evaluate_pb2.SharedMemoryUse(memory=hostile.memory()[0], request_bytes=4096, offsets=[0])
    request = evaluate_pb2.EvaluateRequest(header=header.SerializeToString(), shared_memory=use)
    with pytest.raises(grpc.RpcError) as caught:
        hostile._stub.Evaluate(request, timeout=30)
    failure = _error_of(caught.value)
    assert failure.reason == "INVALID_TENSOR"
    assert "travel inline" in str(failure)


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_references_to_shared_memory_get_typed_errors(
    hostile: PlainCaller, client: gr.Client, kind: str
) -> None:
    tensor, use, reason, message = WRONG[kind]
    program = compiled(client)
    name, _ = hostile.memory()
    right: tuple[dict[str, Any], dict[str, Any]] = (
        {"size_bytes": 4096, "shape": shape(1024)},
        {"memory": name, "request_bytes": 4096},
    )
    with pytest.raises(grpc.RpcError) as caught:
        hostile.evaluate(program.name, right[0] | tensor, right[1] | use)
    failure = _error_of(caught.value)
    assert failure.reason == reason
    assert message in str(failure)
    answer = hostile.evaluate(program.name, *right)
    assert answer.outputs[0].value.inline_tensor.tensor_content == bytes(4096)


def _error_of(failure: grpc.RpcError) -> gr.errors.GradruleError:
    from gradrule._messages.error_status import error_of

    return error_of(failure, "localhost:1")


@provokes("SHARED_MEMORY_LOST")
def test_memory_of_another_tenant_or_of_a_closed_client_is_unknown(guarded: Guarded) -> None:
    x = values()
    with guarded.connect("memory-owner") as owner:
        program = compiled(owner)
        for _ in range(2):
            check(program(x=x), x)
        attached = owner._memory._attached
        assert attached is not None
        with guarded.connect("memory-thief") as thief:
            stolen = PlainCaller(thief._channel._channel, thief._metadata)
            theirs = compiled(thief).name
            use = {"memory": attached.name, "request_bytes": 4096}
            with refused_raw("SHARED_MEMORY_LOST"):
                stolen.evaluate(theirs, {"size_bytes": 4096, "shape": shape(1024)}, use)
            stolen.close()
        check(program(x=x), x)
        owner._memory._attached = None
        attached.close()
        check(program(x=x), x)


def test_shared_memory_outside_feeds_is_refused(hostile: PlainCaller, client: gr.Client) -> None:
    program = compiled(client)
    request = evaluate_pb2.EvaluateRequest(program=program.name)
    request.feeds.add(name="x").value.shared_memory.CopyFrom(
        tensor_pb2.SharedMemoryTensor(size_bytes=4096, shape=shape(1024), dtype=tensor_pb2.DT_FLOAT)
    )
    with pytest.raises(grpc.RpcError) as caught:
        hostile._stub.Evaluate(request, timeout=30)
    assert _error_of(caught.value).reason == "INVALID_TENSOR"


def test_quotas_count_shared_memory(tmp_path: Path) -> None:
    flags = ("--tenant-shared-bytes", "300MiB", "--tenant-bytes-in-flight", "20MiB")
    with running_server(tmp_path / "server", flags) as running, gr.connect(running.target) as client:
        program = compiled(client)
        x = values()
        for _ in range(2):
            check(program(x=x), x)
        with gr.connect(running.target) as second:
            check(second.program(program.name)(x=x), x)
            assert "QUOTA_EXCEEDED" in second._memory.refusal
            assert "--tenant-shared-bytes" in second._memory.refusal
        client._memory.forget()
        with grpc.insecure_channel(running.target) as channel, closing(PlainCaller(channel)) as other:
            # The server counts memory until it sees the end of its connection.
            name = wait_until(lambda: other.memory_if_allowed(200 * _MEBIBYTE), "end of the first client's memory")
            use = {"memory": name, "request_bytes": 4096, "answer_bytes": 100 * _MEBIBYTE}
            # Tensors in shared memory are no bytes in flight.
            other.evaluate(program.name, {"size_bytes": 4096, "shape": shape(1024)}, use)
