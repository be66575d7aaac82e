"""Writes graphs to files and reads them: a GraphDef in a `.pb` file, variables and aliases in an `.npz` file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.frozen_variables import frozen
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.errors import InvalidGraphError, UnsupportedError
from gradrule.optimizers import OptimizerState

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph

# Prefixes of the entries of the `.npz` file.
_VARIABLE = "variable:"
_ALIAS = "alias:"
_SLOT = "slot:"
# Entry with the rest of an optimizer's state, as JSON.
_OPTIMIZER = "optimizer"


def save(graph: Graph, path: str | os.PathLike[str], *, freeze: bool) -> None:
    """Implements `Graph.save`."""
    file = Path(path)
    if file.suffix.lower() != ".pb":
        raise InvalidGraphError(f"{file}: a graph is saved as .pb")
    data = graph.to_bytes()
    if freeze:
        data = frozen(data, graph.variables)
    entries: dict[str, Any] = {f"{_ALIAS}{alias}": np.asarray(tensor) for alias, tensor in graph.aliases.items()}
    for name, value in {} if freeze else graph.variables.items():
        array = np.asarray(value)
        if array.dtype.kind == "O":
            raise UnsupportedError(
                f"the variable {name!r} holds strings, which an .npz file cannot hold; save with freeze=True"
            )
        entries[f"{_VARIABLE}{name}"] = array
    if graph.optimizer_state is not None and not freeze:
        entries |= _state_entries(graph.optimizer_state)
    beside = file.with_suffix(".npz")
    try:
        file.write_bytes(data)
        if entries:
            with beside.open("wb") as stream:
                np.savez(stream, **entries)
        else:
            beside.unlink(missing_ok=True)
    except OSError as cause:
        raise InvalidGraphError(f"{file} cannot be written: {cause.strerror}") from cause


def read_variables_and_aliases(graph: Graph, path: Path) -> None:
    """Reads the variables and aliases that `save` wrote beside a `.pb` file, if any, into the graph."""
    beside = path.with_suffix(".npz")
    if not beside.exists():
        return
    try:
        with np.load(beside, allow_pickle=False) as entries:
            for key in entries.files:
                if key.startswith(_ALIAS):
                    graph.aliases[key.removeprefix(_ALIAS)] = str(entries[key])
                elif key.startswith(_VARIABLE):
                    name = key.removeprefix(_VARIABLE)
                    graph.variables[name] = _typed(graph, name, entries[key])
            if _OPTIMIZER in entries.files:
                graph.optimizer_state = _read_state(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as cause:
        raise InvalidGraphError(f"{beside}, which belongs to {path}, cannot be read: {cause}") from None


def _state_entries(state: OptimizerState) -> dict[str, Any]:
    slots = {name: np.asarray(value) for name, value in state.slots.items()}
    rest = {
        "name": state.name,
        "settings": dict(state.settings),
        "step": state.step,
        "variables": list(state.variables),
        "slots": {name: tensor_codec.number_of_array(value) for name, value in slots.items()},
    }
    return {_OPTIMIZER: np.asarray(json.dumps(rest)), **{f"{_SLOT}{name}": value for name, value in slots.items()}}


def _read_state(entries: Mapping[str, tensor_codec.Array]) -> OptimizerState:
    """Returns the state that `_state_entries` wrote. NumPy's files do not store types of ml_dtypes."""
    rest = json.loads(str(entries[_OPTIMIZER]))
    slots = {}
    for name, number in rest["slots"].items():
        value, dtype = entries[f"{_SLOT}{name}"], tensor_codec.numpy_dtype(number)
        slots[name] = value if value.dtype == dtype else value.view(dtype)
    return OptimizerState(rest["name"], rest["settings"], rest["step"], tuple(rest["variables"]), slots)


def _typed(graph: Graph, name: str, value: tensor_codec.Array) -> tensor_codec.Array:
    """Returns the value in the type of its variable: NumPy's files do not store types of ml_dtypes."""
    nodes = graph.find(node=name, op_type="VarHandleOp")
    if not nodes:
        raise ValueError(f"it has a value for {name!r}, which is no variable of the graph")
    dtype = tensor_codec.numpy_dtype(nodes[0].attrs["dtype"].type)
    if value.dtype == dtype:
        return value
    if value.dtype.kind == "V" and value.dtype.itemsize == dtype.itemsize:
        return value.view(dtype)
    raise ValueError(f"the value of {name!r} is {value.dtype}, the variable {dtype_name(nodes[0].attrs['dtype'].type)}")
