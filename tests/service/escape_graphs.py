"""Lists graphs that try to leave the engine's sandbox, by category, each with its target."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from gradrule_server.link.v1 import link_pb2
from tests.service.graph_defs import build_graph_def

SECRET = b"the canary sings at dawn"


@dataclass
class Canaries:
    """Holds what no graph may reach: files outside and inside the data folder, a listening socket, other processes."""

    folder: Path
    listener: socket.socket
    process: int
    places: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {"outside": self.folder / "outside", "data": self.folder / "data"}
        (self.places["data"] / "blobs").mkdir(parents=True)
        self.places["outside"].mkdir()
        for name in self.places:
            self.restore(name)
        for place in self.places.values():
            (place / "canary.txt").write_bytes(SECRET)
            tf.raw_ops.SaveV2(
                prefix=str(place / "checkpoint"),
                tensor_names=["canary"],
                shape_and_slices=[""],
                tensors=[tf.constant(SECRET)],
            )

    def restore(self, place: str) -> None:
        """Restores a place to its state before any graph wrote to it."""
        folder = self.places[place]
        for path in folder.glob("written*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / "precious").write_bytes(SECRET)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"


@dataclass(frozen=True)
class Escape:
    """Describes a graph: `build` makes one whose tensor `y` reaches a canary at a place."""

    name: str
    reach: str
    build: Callable[[Canaries, str], None]
    places: tuple[str, ...] = ("outside", "data")


def request(draw: Callable[[Canaries, str], None], canaries: Canaries, place: str, key: str) -> link_pb2.CompileRequest:
    """Returns what the front end would send to the engine without its checks."""
    graph = build_graph_def(lambda: draw(canaries, place))
    return link_pb2.CompileRequest(
        trusted=True, key=key, graph=graph.SerializeToString(), fetches=[link_pb2.Endpoint(name="y", tensor="y:0")]
    )


def _canary(canaries: Canaries, place: str) -> str:
    return str(canaries.places[place] / "canary.txt")


def _target(canaries: Canaries, place: str) -> str:
    return str(canaries.places[place] / "written")


def _y(value: Any) -> None:
    tf.identity(value, name="y")


def _after(operation: Any) -> None:
    with tf.control_dependencies([operation]):
        _y(tf.constant(1.0))


def _read_file(canaries: Canaries, place: str) -> None:
    _y(tf.raw_ops.ReadFile(filename=_canary(canaries, place)))


def _matching_files(canaries: Canaries, place: str) -> None:
    _y(tf.raw_ops.MatchingFiles(pattern=str(canaries.places[place] / "*.txt")))


def _immutable_const(canaries: Canaries, place: str) -> None:
    _y(tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[len(SECRET)], memory_region_name=_canary(canaries, place)))


def _restore(canaries: Canaries, place: str) -> None:
    prefix = str(canaries.places[place] / "checkpoint")
    (value,) = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=["canary"], shape_and_slices=[""], dtypes=[tf.string])
    _y(value)


def _text_dataset(canaries: Canaries, place: str) -> None:
    dataset = tf.raw_ops.TextLineDataset(filenames=_canary(canaries, place), compression_type="", buffer_size=0)
    (line,) = tf.raw_ops.DatasetToSingleElement(dataset=dataset, output_types=[tf.string], output_shapes=[[]])
    _y(line)


def _reader(canaries: Canaries, place: str) -> None:
    queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.string], shapes=[[]])
    fill = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[tf.constant(_canary(canaries, place))])
    with tf.control_dependencies([fill]):
        _y(tf.raw_ops.ReaderReadV2(reader_handle=tf.raw_ops.WholeFileReaderV2(), queue_handle=queue)[1])


def _lookup_table(canaries: Canaries, place: str) -> None:
    table = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string)
    fill = tf.raw_ops.InitializeTableFromTextFileV2(
        table_handle=table, filename=_canary(canaries, place), key_index=-1, value_index=-2
    )
    with tf.control_dependencies([fill]):
        _y(
            tf.raw_ops.LookupTableFindV2(
                table_handle=table, keys=tf.constant(0, tf.int64), default_value=tf.constant("nothing")
            )
        )


def _write_file(canaries: Canaries, place: str) -> None:
    _after(tf.raw_ops.WriteFile(filename=_target(canaries, place), contents=tf.constant("x")))


def _write_over(canaries: Canaries, place: str) -> None:
    _after(tf.raw_ops.WriteFile(filename=str(canaries.places[place] / "precious"), contents=tf.constant("x")))


def _print(canaries: Canaries, place: str) -> None:
    _after(tf.raw_ops.PrintV2(input=tf.constant("x"), output_stream=f"file://{_target(canaries, place)}"))


def _save(canaries: Canaries, place: str) -> None:
    _after(
        tf.raw_ops.SaveV2(
            prefix=_target(canaries, place),
            tensor_names=["x"],
            shape_and_slices=[""],
            tensors=[tf.constant(1.0)],
        )
    )


def _debug_file(canaries: Canaries, place: str) -> None:
    _y(_debug_identity(f"file://{_target(canaries, place)}"))


def _debug_identity(url: str) -> Any:
    return tf.raw_ops.DebugIdentity(input=tf.constant(1.0), tensor_name="x:0", debug_urls=[url])


def _cache_dataset(canaries: Canaries, place: str) -> None:
    dataset = tf.raw_ops.TensorDataset(components=[tf.constant(1.0)], output_shapes=[[]])
    cached = tf.raw_ops.CacheDataset(
        input_dataset=dataset, filename=_target(canaries, place), output_types=[tf.float32], output_shapes=[[]]
    )
    (value,) = tf.raw_ops.DatasetToSingleElement(dataset=cached, output_types=[tf.float32], output_shapes=[[]])
    _y(value)


def _summary(canaries: Canaries, place: str) -> None:
    # A resource with an existing name replaces that resource's file.
    writer = tf.raw_ops.SummaryWriter(shared_name=place)
    made = tf.raw_ops.CreateSummaryFileWriter(
        writer=writer,
        logdir=_target(canaries, place),
        max_queue=tf.constant(1),
        flush_millis=tf.constant(1),
        filename_suffix=tf.constant(""),
    )
    _after(made)


def _register_dataset(canaries: Canaries, place: str) -> None:
    dataset = tf.raw_ops.TensorDataset(components=[tf.constant(1.0)], output_shapes=[[]])
    _y(
        tf.raw_ops.RegisterDataset(
            dataset=dataset,
            address=tf.constant(canaries.address),
            protocol=tf.constant("grpc"),
            external_state_policy=1,
        )
    )


def _debug_grpc(canaries: Canaries, place: str) -> None:
    _y(_debug_identity(f"grpc://{canaries.address}"))


def _environment_of_another(canaries: Canaries, place: str) -> None:
    _y(tf.raw_ops.ReadFile(filename=f"/proc/{canaries.process}/environ"))


def _generator(canaries: Canaries, place: str) -> None:
    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def start(state: Any) -> Any:
        return state

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def step(state: Any) -> Any:
        return tf.raw_ops.ReadFile(filename=_canary(canaries, place))

    functions = [function.get_concrete_function() for function in (start, step, start)]
    for function in functions:
        function.add_to_graph()
    dataset = tf.raw_ops.GeneratorDataset(
        init_func_other_args=[tf.constant(0.0)],
        next_func_other_args=[],
        finalize_func_other_args=[],
        init_func=functions[0],
        next_func=functions[1],
        finalize_func=functions[2],
        output_types=[tf.string],
        output_shapes=[[]],
    )
    # It never ends, so only its first step counts.
    first = tf.raw_ops.TakeDataset(
        input_dataset=dataset, count=tf.constant(1, tf.int64), output_types=[tf.string], output_shapes=[[]]
    )
    (value,) = tf.raw_ops.DatasetToSingleElement(dataset=first, output_types=[tf.string], output_shapes=[[]])
    _y(value)


def _remote_call(canaries: Canaries, place: str) -> None:
    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def read(name: Any) -> Any:
        return tf.raw_ops.ReadFile(filename=name)

    function = read.get_concrete_function()
    function.add_to_graph()
    (value,) = tf.raw_ops.RemoteCall(
        target=tf.constant("/job:localhost/replica:0/task:0/device:CPU:0"),
        args=[tf.constant(_canary(canaries, place))],
        Tout=[tf.string],
        f=function,
    )
    _y(value)


def _shared_stage(canaries: Canaries, place: str) -> None:
    """Reads a stage of the same program; another program of the engine has its own session and container."""
    put = tf.raw_ops.Stage(
        values=[tf.raw_ops.ReadFile(filename=_canary(canaries, place))], container=place, shared_name="canary"
    )
    with tf.control_dependencies([put]):
        (value,) = tf.raw_ops.Unstage(dtypes=[tf.string], container=place, shared_name="canary")
    _y(value)


ESCAPES = [
    Escape("ReadFile", "read", _read_file),
    Escape("MatchingFiles", "listed", _matching_files),
    Escape("ImmutableConst", "read", _immutable_const),
    Escape("RestoreV2", "read", _restore),
    Escape("TextLineDataset", "read", _text_dataset),
    Escape("WholeFileReaderV2", "read", _reader),
    Escape("InitializeTableFromTextFileV2", "read", _lookup_table),
    Escape("WriteFile", "written", _write_file),
    Escape("WriteFile over another", "overwritten", _write_over),
    Escape("PrintV2", "written", _print),
    Escape("SaveV2", "written", _save),
    Escape("DebugIdentity to a file", "written", _debug_file),
    Escape("CacheDataset", "written", _cache_dataset),
    Escape("CreateSummaryFileWriter", "written", _summary),
    Escape("environment of another process", "environment", _environment_of_another, places=("outside",)),
    Escape("GeneratorDataset", "read", _generator),
    Escape("RemoteCall", "read", _remote_call),
    Escape("Stage", "read", _shared_stage),
    # These may never end.
    Escape("RegisterDataset", "connected", _register_dataset, places=("outside",)),
    Escape("DebugIdentity to a server", "connected", _debug_grpc, places=("outside",)),
]
