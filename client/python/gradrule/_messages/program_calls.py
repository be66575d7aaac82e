"""Describes compiled programs and writes the requests that run them, for both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradrule._builder.notebook_text import html_block, html_line, short_digest, short_repr
from gradrule._builder.specs import TensorSpec
from gradrule._messages import request_messages, rpc_calls
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs, Name
from gradrule._messages.request_encoding import RequestEncoder
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._results import call_results, tables
from gradrule._results.answers import Answer, AnswerReader, labeller
from gradrule.errors import UnknownFeedError
from gradrule.v1 import program_pb2


class ProgramBase:
    """Describes a compiled program and builds the requests of its calls; base class of `Program` and `AsyncProgram`."""

    def __init__(self, message: program_pb2.Program, groups: call_results.Groups = None) -> None:
        self._message = message
        self._groups = groups
        self._overrides = call_results.resolutions(message.overrides)
        # Answers of a compiled program omit the facts that the program's message contains.
        self._details = call_results.ProgramDetails(
            dict(message.aliases),
            self._overrides,
            self.default_gradient_nodes,
            self.rewritten,
            message.draws_random,
        )
        # Calls may name tensors of all these; they are the only ones whose types are known.
        type_of = request_messages.types_of_specs([*message.inputs, *message.xs, *message.ys])
        self._encoder = RequestEncoder(message, type_of)
        # Whether the user must still be warned of the notes.
        self._must_warn = bool(message.notes)
        self._reader = AnswerReader(labeller(message.aliases))
        self._bfloat16_reader = AnswerReader(labeller(message.aliases), keep_bfloat16=True)

    @property
    def message(self) -> program_pb2.Program:
        """The server's description of the program."""
        return self._message

    @property
    def groups(self) -> call_results.Groups:
        """Groups of the xs; None if the xs were given as a list."""
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
        """Dtypes and shapes of the fetches, by the names in the request."""
        return call_results.specs(self._message.outputs, self._message.aliases)

    @property
    def ys(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the ys, by the names in the request."""
        return call_results.specs(self._message.ys, self._message.aliases)

    @property
    def xs(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the xs, by the names in the request."""
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
        """Names of the nodes on the path without an override; they keep TensorFlow's gradient."""
        return list(self._message.default_gradient_nodes)

    @property
    def sparse_gradients(self) -> list[str]:
        """Names of the xs whose gradients are `gr.Sparse` in results of calls; with a stack of grad_ys, none is."""
        return list(self._message.sparse_gradients)

    @property
    def rewritten(self) -> list[str]:
        """Nodes that rewrites replaced."""
        return list(self._message.rewritten)

    @property
    def notes(self) -> list[str]:
        """Hints that the program may not compute what is wanted, such as gradients of a sum that is constant."""
        return list(self._message.notes)

    @property
    def repeatable(self) -> bool:
        """Whether calls with equal feeds give equal outputs. False if the program draws random numbers."""
        return not self._message.draws_random

    @property
    def digests(self) -> call_results.Digests:
        """SHA-256 of the graph's bytes and of the program."""
        return call_results.Digests(self._message.digests.graph, self._message.digests.program)

    @property
    def device(self) -> str:
        """Device that runs the program, for example `CPU:0`."""
        return self._message.device

    @property
    def create_time(self) -> float:
        """Time of the first compilation, in seconds since 1970."""
        return self._message.create_time.ToNanoseconds() / 1e9

    def __repr__(self) -> str:
        return short_repr(f"<{type(self).__name__} {self.name!r}>")

    def _repr_html_(self) -> str:
        kinds = {"input": self.inputs, "output": self.outputs, "y": self.ys, "x": self.xs}
        digests = self.digests
        return html_block(
            tables.specs_table(f"Program {self.name.removeprefix('programs/')}", kinds),
            html_line(
                self.device,
                digests.program and f"program {short_digest(digests.program)}",
                digests.graph and f"graph {short_digest(digests.graph)}",
                "" if self.repeatable else "draws random numbers",
            ),
            *(html_line(f"Note: {note}", kind="bad") for note in self.notes),
            tables.resolutions_table(self.overrides),
            tables.default_nodes_line(self.default_gradient_nodes),
        )

    def _call(
        self,
        feeds: Feeds | None,
        params: CallParams | None,
        grad_ys: GradYs | None,
        stacked_grad_ys: bool = False,
        transfer: Transfer = PLAIN,
    ) -> rpc_calls.Call[call_results.Result]:
        if self._must_warn and grad_ys is None:
            # The notes concern calls without grad_ys only.
            self._must_warn = False
            rpc_calls.warn_of(self._message.notes)
        reader = self._answer_reader(transfer)
        request = self._encoder.encode(
            {"feeds": feeds, "grad_ys": request_messages.program_grad_ys(grad_ys, self._message)},
            params,
            stacked_grad_ys=stacked_grad_ys,
            packing=transfer.packing,
        )
        return rpc_calls.Call(
            rpc_calls.EVALUATE,
            request,
            reader.read,
            self._decode,
            request.blobs,
            reader=reader,
            may_share=transfer.packing is None,
            # The server compiles a program again after it removed it from memory, and for calls with upstream
            # gradients or values of variables.
            may_compile=True,
        )

    def _answer_reader(self, transfer: Transfer) -> AnswerReader:
        return self._bfloat16_reader if transfer.keep_wire_dtype else self._reader

    def _decode(self, answer: Answer) -> call_results.Result:
        return call_results.Result(answer, self._details, self._groups)


def merged(feeds: Feeds | None, named: Mapping[str, Any]) -> Feeds:
    """Returns the feeds of a call, which may be a dict, keywords or both.

    Raises:
        InvalidTensorError: `feeds` is not a dict.
        UnknownFeedError: A tensor is fed twice.
    """
    together: dict[Name, Any] = dict(request_messages.pairs(feeds or {}, "feeds"))
    for name, value in named.items():
        if name in together:
            raise UnknownFeedError(f"{name!r} is fed twice, in the dict and by keyword")
        together[name] = value
    return together
