"""The properties of compiled programs and the requests that run them, for both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradrule._builder.notebook_text import html_table, short_repr
from gradrule._builder.tensor_specs import TensorSpec
from gradrule._messages import rpc_calls
from gradrule._messages.program_encoding import ProgramEncoder
from gradrule._messages.request_messages import CallParams, Feeds, GradYs, Name
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._results import call_results
from gradrule._results.answers import Answer, AnswerReader, labeller
from gradrule.errors import UnknownFeedError
from gradrule.v1 import evaluate_pb2, program_pb2


class ProgramBase:
    """A compiled program as the server described it; the base of `Program` and `AsyncProgram`."""

    def __init__(self, message: program_pb2.Program, groups: call_results.Groups = None) -> None:
        self._message = message
        self._groups = groups
        self._overrides = call_results.resolutions(message.overrides)
        # Answers of a compiled program leave out what the program's own message says.
        self._details = call_results.ProgramDetails(
            dict(message.aliases), self._overrides, self.default_gradient_nodes, self.rewritten
        )
        self._target = evaluate_pb2.EvaluateRequest(program=message.name)
        self._encoder = ProgramEncoder(message)
        self._reader = AnswerReader(labeller(message.aliases))
        self._bfloat16_reader = AnswerReader(labeller(message.aliases), keep_bfloat16=True)

    @property
    def message(self) -> program_pb2.Program:
        """The server's description of the program."""
        return self._message

    @property
    def groups(self) -> call_results.Groups:
        """The groups that xs were given in; None if they were a plain list."""
        return self._groups

    @property
    def name(self) -> str:
        """`programs/{id}`."""
        return self._message.name

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the placeholders that a call feeds, by alias or name."""
        return call_results.specs(self._message.inputs, self._message.aliases)

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the fetches, by the names given."""
        return call_results.specs(self._message.outputs, self._message.aliases)

    @property
    def ys(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the tensors that are differentiated, by the names given."""
        return call_results.specs(self._message.ys, self._message.aliases)

    @property
    def xs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the tensors with respect to which they are, by the names given."""
        return call_results.specs(self._message.xs, self._message.aliases)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tensors by alias; an alias is valid wherever a name is."""
        return dict(self._message.aliases)

    @property
    def overrides(self) -> list[call_results.Resolution]:
        """The rule that each node got."""
        return list(self._overrides)

    @property
    def default_gradient_nodes(self) -> list[str]:
        """Names of the nodes on the path that no override took; they keep TensorFlow's gradient."""
        return list(self._message.default_gradient_nodes)

    @property
    def rewritten(self) -> list[str]:
        """Nodes that rewrites replaced."""
        return list(self._message.rewritten)

    @property
    def digests(self) -> call_results.Digests:
        """SHA-256 of the graph's bytes and of the program."""
        return call_results.Digests(self._message.digests.graph, self._message.digests.program)

    @property
    def device(self) -> str:
        """The device that it runs on, for example `CPU:0`."""
        return self._message.device

    @property
    def create_time(self) -> float:
        """When it was first compiled, in seconds since 1970."""
        return self._message.create_time.ToNanoseconds() / 1e9

    def __repr__(self) -> str:
        return short_repr(f"<{type(self).__name__} {self.name!r}>")

    def _repr_html_(self) -> str:
        kinds = (("input", self.inputs), ("output", self.outputs), ("y", self.ys), ("x", self.xs))
        rows = [(kind, name, spec.dtype, spec.shape) for kind, specs in kinds for name, spec in specs.items()]
        tensors = html_table(self.name, ("kind", "tensor", "dtype", "shape"), rows)
        return tensors + call_results.resolutions_table(self.overrides)

    def _call(
        self,
        feeds: Feeds | None,
        params: CallParams | None,
        grad_ys: GradYs | None,
        stacked_grad_ys: bool = False,
        transfer: Transfer = PLAIN,
    ) -> rpc_calls.Call[call_results.Result]:
        reader = self._bfloat16_reader if transfer.keep_wire_dtype else self._reader
        parts, blobs = self._encoder.encode(feeds, params, grad_ys, stacked_grad_ys, transfer.packing)
        return rpc_calls.Call(
            rpc_calls.EVALUATE,
            self._target,
            reader.read,
            self._decode,
            blobs,
            large=(parts,),
            reader=reader,
            may_share=transfer.packing is None,
        )

    def _decode(self, answer: Answer) -> call_results.Result:
        return call_results.Result(answer, self._details, self._groups)


def merged(feeds: Feeds | None, named: Mapping[str, Any]) -> Feeds:
    """Returns the feeds of a call that were given as a dict, by keywords, or both. Raises `UnknownFeedError`."""
    together: dict[Name, Any] = dict(feeds or {})
    for name, value in named.items():
        if name in together:
            raise UnknownFeedError(f"{name!r} is fed twice, in the dict and by keyword")
        together[name] = value
    return together
