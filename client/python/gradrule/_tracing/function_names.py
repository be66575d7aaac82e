"""Names functions, their arguments and results so that tracing the same code again gives the same graph.

TensorFlow adds the number of functions that the process has made to their names. A graph with other bytes is another
program, which the server compiles again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tensorflow.core.framework import graph_pb2, node_def_pb2

from gradrule._builder.frozen_variables import functions_of
from gradrule._builder.names import UniqueNames
from gradrule._tracing import tf_private
from gradrule._tracing.bodies import Definition, renamed

_NUMBERS = re.compile(r"_\d+(?![a-zA-Z0-9])")
_PREFIX = re.compile(r"^__(inference|forward)_")
_ARGUMENT_NAME_ATTR = "_user_specified_name"


def name_functions_by_use(graph: graph_pb2.GraphDef, gradients: Iterable[str]) -> None:
    """Renames the functions of a graph, their arguments and results, in the order in which nodes use the functions.

    Args:
        graph: The graph to change.
        gradients: Functions that keep their names: gradient functions, whose arguments are the variables of rules.
    """
    kept = set(gradients)
    functions = {function.signature.name: function for function in graph.library.function}
    taken = UniqueNames()
    for name in kept:
        taken.reserve(name)
    names: dict[str, str] = {}
    pending = [*_used(graph.node, functions), *sorted(kept & functions.keys())]
    pending.reverse()
    while pending:
        old = pending.pop()
        if old in names:
            continue
        names[old] = old if old in kept else _unused(_NUMBERS.sub("", _PREFIX.sub("", old)), taken)
        pending += reversed(_used(functions[old].node_def, functions))
    called_directly: set[str] = set()
    for nodes in [graph.node, *(function.node_def for function in functions.values())]:
        for node in nodes:
            called_directly.add(node.op)
            node.op = names.get(node.op, node.op)
            for function in functions_of(node):
                function.name = names[function.name]
    for old, function in functions.items():
        function.signature.name = names[old]
        for attributes in function.arg_attr.values():
            attributes.attr.pop(_ARGUMENT_NAME_ATTR, None)
        if old not in kept:
            _name_arguments(function)
            if old not in called_directly:
                _name_results(function)
    ordered = sorted(functions.values(), key=lambda function: str(function.signature.name))
    copies = [Definition.FromString(function.SerializeToString()) for function in ordered]
    del graph.library.function[:]
    graph.library.function.extend(copies)


def _used(nodes: Iterable[node_def_pb2.NodeDef], functions: dict[str, Definition]) -> list[str]:
    """Returns the functions that nodes use, in the order of the nodes."""
    found = [name for node in nodes for name in (node.op, *(function.name for function in functions_of(node)))]
    return [name for name in dict.fromkeys(found) if name in functions]


def _unused(requested: str, taken: UniqueNames) -> str:
    """Returns a name that no other function and no op type has."""
    name = taken.make(requested)
    while tf_private.op_definition(name) is not None:
        name = taken.make(requested)
    return name


def _name_arguments(function: Definition) -> None:
    """Removes numbers from the names of a function's arguments."""
    taken = UniqueNames()
    for node in function.node_def:
        taken.reserve(node.name)
    old_names = [argument.name for argument in function.signature.input_arg]
    renamed(function, old_names, [taken.make(_NUMBERS.sub("", name)) for name in old_names])


def _name_results(function: Definition) -> None:
    """Removes numbers from the names of a function's results."""
    taken = UniqueNames()
    tensors = {}
    for result in function.signature.output_arg:
        tensor = function.ret.pop(result.name)
        result.name = taken.make(_NUMBERS.sub("", result.name))
        tensors[result.name] = tensor
    function.ret.update(tensors)
