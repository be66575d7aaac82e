"""Renames arguments and nodes of a function definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradrule._builder.names import UniqueNames
from gradrule._tracing.bodies import Definition


def referenced(definition: Definition) -> set[str]:
    """Returns the names of all arguments and nodes that nodes or results use."""
    texts = [text for node in definition.node_def for text in node.input]
    return {text.removeprefix("^").partition(":")[0] for text in [*texts, *definition.ret.values()]}


def renamed(
    definition: Definition, old_names: Sequence[str], new_names: Sequence[str | None], *, nodes: bool = True
) -> None:
    """Renames arguments, and nodes whose names equal an argument's new name.

    Args:
        definition: The function to change.
        old_names: Names of the arguments.
        new_names: New names in the same order; None for unused arguments.
        nodes: False changes only references, not the names of arguments and nodes.
    """
    names = {old: new for old, new in zip(old_names, new_names, strict=True) if new is not None}
    moved: dict[str, str] = {}
    if nodes:
        taken = UniqueNames()
        for name in [*names.values(), *(node.name for node in definition.node_def)]:
            taken.reserve(name)
        wanted = set(names.values())
        for node in definition.node_def:
            if node.name in wanted:
                moved[node.name] = taken.make(node.name)
                node.name = moved[node.name]
        for argument in definition.signature.input_arg:
            argument.name = names.get(argument.name, argument.name)
    for node in definition.node_def:
        for index, text in enumerate(node.input):
            node.input[index] = _reference(text, names, moved)
    for key in list(definition.ret):
        definition.ret[key] = _reference(definition.ret[key], names, moved)
    for key in list(definition.control_ret):
        definition.control_ret[key] = moved.get(definition.control_ret[key], definition.control_ret[key])


def _reference(text: str, arguments: Mapping[str, str], nodes: Mapping[str, str]) -> str:
    if text.startswith("^"):
        return "^" + nodes.get(text[1:], text[1:])
    head, colon, rest = text.partition(":")
    if not colon:
        return arguments.get(head, head)
    return nodes.get(head, head) + colon + rest
