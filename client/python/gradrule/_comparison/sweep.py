"""Makes the calls of a sweep: one graph and one batch under many override maps, or under many values of params."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradrule._builder.array_values import may_need_conversion
from gradrule._builder.blob_values import MAX_INLINE_GRAPH, Blob, Data
from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike, graph_bytes
from gradrule._builder.handles import Node, TensorHandle
from gradrule._builder.notebook_text import short_repr
from gradrule._builder.overrides import Override, Overrides, Preset
from gradrule._builder.rules import Rule
from gradrule._messages import rpc_calls
from gradrule._messages.call_arguments import (
    CallParams,
    Feeds,
    GradYs,
    GroupedNames,
    Names,
    ProgramArguments,
    flat_list,
    name_of_tensor,
)
from gradrule._messages.feed_values import array_of
from gradrule._messages.request_messages import Source, pairs, sent_graph
from gradrule._messages.transfer_options import Transfer
from gradrule._results.call_results import Result, with_outputs
from gradrule.common import tensor_codec
from gradrule.common.tensor_codec import Array
from gradrule.errors import GradruleError, InvalidOverrideError, InvalidParamError

T = TypeVar("T")
Many: TypeAlias = "Mapping[Any, T] | Iterable[T]"

_MAPS = "a dict of label to override map, such as {'ste': {'Sign': 'ste_sign'}}, or a list of override maps"
_PARAMS = "a dict of label to params, such as {2.0: {'Sign': {'clip': 2.0}}}, or a list of params"


class SweepResult:
    """Holds the result of one override map, or of one choice of params, or the error that it failed with.

    Attributes:
        label: Its key in the dict of maps or params; its index if they were given as a list.
        error: None if there is a result.
    """

    def __init__(self, label: Any, outcome: Result | GradruleError) -> None:
        self.label = label
        self.error = outcome if isinstance(outcome, GradruleError) else None
        if self.error is not None:
            self.error.add_note(f"at {label!r} of the sweep")
        self._outcome = outcome

    @property
    def result(self) -> Result:
        """What `evaluate` returns. Raises the error if there is one."""
        if isinstance(self._outcome, GradruleError):
            raise self._outcome
        return self._outcome

    def __repr__(self) -> str:
        return short_repr(f"<SweepResult {self.label!r}: {self._outcome!r}>")


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what one call of a sweep does not share with the others."""

    label: Any
    overrides: Overrides | None
    params: CallParams | None


def runs_of(
    maps: Many[Overrides | None] | None, overrides: Overrides | None, params: Many[CallParams] | None
) -> list[Run]:
    """Returns the runs of a sweep, in order.

    Raises:
        InvalidOverrideError: There are neither maps nor params, or both, or `maps` is one override map.
        InvalidParamError: `params` are those of one call.
    """
    if params is None:
        if maps is None:
            raise InvalidOverrideError("a sweep takes several override maps as maps, or one map and several params")
        if overrides is not None:
            raise InvalidOverrideError("a sweep takes maps, or overrides with several params; write both into the maps")
        return [Run(label, chosen, None) for label, chosen in _labelled_maps(maps)]
    if maps is not None:
        raise InvalidOverrideError("a sweep of params has one override map: give it as overrides, and no maps")
    return [Run(label, overrides, values) for label, values in _labelled_params(params)]


def _labelled_maps(maps: Any) -> list[tuple[Any, Any]]:
    if isinstance(maps, str | Override | Preset) or not isinstance(maps, Iterable):
        raise InvalidOverrideError(f"maps is {_MAPS}, not {maps!r}")
    found = _labelled(maps)
    for label, chosen in found:
        if isinstance(chosen, str | tuple | Rule):
            raise InvalidOverrideError(f"maps is {_MAPS}; {label!r} has {chosen!r}, which is no override map")
    return found


def _labelled_params(params: Any) -> list[tuple[Any, Any]]:
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise InvalidParamError(f"params of a sweep are {_PARAMS}, not {params!r}")
    found = _labelled(params)
    for label, values in found:
        if not (isinstance(values, Mapping) and all(isinstance(item, Mapping) for item in values.values())):
            raise InvalidParamError(f"params of a sweep are {_PARAMS}; {label!r} has {values!r}")
    return found


def _labelled(items: Mapping[Any, Any] | Iterable[Any]) -> list[tuple[Any, Any]]:
    return list(items.items() if isinstance(items, Mapping) else enumerate(items))


class Sweep:
    """Makes the calls of a sweep. What they share is converted and copied once.

    Args:
        graph: As in `evaluate`.
        feeds: As in `evaluate`.
        runs: What `runs_of` returns.
        arguments: The arguments of every call but the overrides.
        stacked_grad_ys: As in `evaluate`.
        transfer: How tensors are transferred.

    Raises:
        GradruleError: A feed or an upstream gradient is not valid.
    """

    def __init__(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        runs: Sequence[Run],
        arguments: ProgramArguments,
        stacked_grad_ys: bool,
        transfer: Transfer,
    ) -> None:
        self._source = sent_graph(graph if isinstance(graph, Graph) else graph_bytes(graph))
        self._stacked_grad_ys = stacked_grad_ys
        self._transfer = transfer
        # Blobs are not packed, so a packed sweep would differ from packed calls.
        may_upload = len(runs) > 1 and transfer.packing is None
        self._feeds = sent_once(feeds, self._source, may_upload=may_upload)
        arguments = replace(
            arguments,
            # Each call reads them, and iterators can be read once.
            fetches=flat_list(arguments.fetches),
            ys=flat_list(arguments.ys),
            xs=_listed(arguments.xs),
            stop_gradients=flat_list(arguments.stop_gradients),
        )
        grad_ys = grad_ys_sent_once(arguments.grad_ys, arguments.ys, self._source, may_upload=may_upload)
        self._arguments = replace(arguments, grad_ys=grad_ys)
        self._uploaded: set[str] = set()
        # Maps do not change outputs. Calls that differ in params are of one program, which has the fetches or not.
        self._may_share = bool(arguments.fetches) and all(run.params is None for run in runs)
        self._outputs: Mapping[str, Array] | None = None

    @property
    def must_wait(self) -> bool:
        """Whether no call may start before the outputs of the one that runs are known."""
        return self._may_share and self._outputs is None

    def call(self, run: Run) -> rpc_calls.Call[Result]:
        """Returns the call of a run. Raises `GradruleError` for overrides or params that are not valid."""
        arguments = replace(self._arguments, overrides=run.overrides)
        if self._outputs is not None:
            arguments = replace(arguments, fetches=())
        return rpc_calls.evaluate(
            self._source, self._feeds, run.params, arguments, self._stacked_grad_ys, self._transfer
        )

    def with_outputs(self, result: Result) -> Result:
        """Returns the result of a call with outputs: those of an earlier call if this one did not fetch them."""
        if self._outputs is not None:
            return with_outputs(result, self._outputs)
        if self._may_share:
            size = sum(value.nbytes for value in result.outputs.values())
            # A program without small fetches would be another than that of `evaluate`, and save little.
            self._may_share = result.repeatable and size > MAX_INLINE_GRAPH
            self._outputs = result.outputs if self._may_share else None
        return result

    def not_uploaded(self, blobs: Mapping[str, Data]) -> dict[str, Data]:
        """Returns those blobs of a call, by SHA-256, that this did not return before."""
        found = {name: data for name, data in blobs.items() if name not in self._uploaded}
        self._uploaded.update(found)
        return found


def _listed(names: GroupedNames) -> GroupedNames:
    if isinstance(names, Mapping):
        return {group: flat_list(inner) for group, inner in names.items()}
    return flat_list(names)


def sent_once(feeds: Feeds | None, source: Source, *, may_upload: bool = True) -> Feeds | None:
    """Returns feeds that several calls can send: converted and copied, large ones as blobs.

    Args:
        feeds: As in `evaluate`.
        source: The graph.
        may_upload: Whether large ones become blobs.

    Raises:
        InvalidTensorError: `feeds` is not a dict, or a value is not a valid tensor.
        FeedDtypeError: An array does not have its tensor's dtype.
    """
    if feeds is None:
        return None
    found: dict[Any, Any] = {}
    for key, value in pairs(feeds, "feeds"):
        found[key] = _kept(value, name_of_tensor(key, source.graph), "feeds", source, may_upload=may_upload)
    return found


def grad_ys_sent_once(grad_ys: GradYs | None, ys: Names, source: Source, *, may_upload: bool = True) -> GradYs | None:
    """Returns upstream gradients as `sent_once` returns feeds."""
    names: Iterable[Any]
    if isinstance(grad_ys, Mapping):
        names, values = grad_ys, list(grad_ys.values())
    elif isinstance(grad_ys, list | tuple):
        names, values = flat_list(ys), list(grad_ys)
    else:
        # The request refuses it unless it is None.
        return grad_ys
    kept = [
        _kept(value, name_of_tensor(name, source.graph), "grad_ys", source, may_upload=may_upload)
        for name, value in zip(names, values, strict=False)
    ]
    if isinstance(grad_ys, Mapping):
        return dict(zip(grad_ys, kept, strict=True))
    # The request refuses a list of another length than the ys.
    return kept if len(kept) == len(values) else grad_ys


def _kept(value: Any, name: str, what: str, source: Source, *, may_upload: bool) -> Any:
    """Returns a copy of a value with its tensor's type: a blob if it is large; names of tensors remain."""
    if value is None or isinstance(value, str | bytes | Blob | TensorHandle | Node):
        return value
    array = array_of(value, source.type_of(name, may_need_conversion(value)), f"{what}[{name!r}]")
    if may_upload and array.nbytes > MAX_INLINE_GRAPH and tensor_codec.has_plain_bytes(array):
        return Blob(array)
    return np.array(array)
