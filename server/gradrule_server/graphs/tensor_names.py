"""Finds tensors by the names in requests (`y` means `y:0`); adds UNKNOWN_TENSOR and UNKNOWN_FEED with hints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gradrule_server.graphs.expand_request import ExpandRequest
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.ir import CONTAINERS, PLACEHOLDERS, Body, Ref
from gradrule_server.graphs.selectors import OverrideSpec

_SHOWN = 10
_TENSOR = re.compile(r"([^:^]+)(?::([0-9]{1,9}))?")


def parse_tensor_name(text: str) -> tuple[str, int] | None:
    """Returns node and output of `node` or `node:output`; None for other text."""
    match = _TENSOR.fullmatch(text)
    return (match[1], int(match[2] or 0)) if match else None


def canonical(node: str, output: int) -> str:
    """Returns `y` for output 0, else `y:1`."""
    return f"{node}:{output}" if output else node


class TensorNames:
    """Looks up tensors of a graph's top level by name."""

    def __init__(self, top: Body, findings: Findings, aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: node names by alias."""
        self._top = top
        self._findings = findings
        self.index = {node.name: position for position, node in enumerate(top.nodes)}
        for alias, name in (aliases or {}).items():
            self.index.setdefault(alias, self.index[name])

    def look_up(self, text: str) -> Ref | None:
        """Returns the tensor; None if there is none."""
        name, output = parse_tensor_name(text) or ("", 0)
        position = self.index.get(name)
        if position is None:
            return None
        outputs = self._top.nodes[position].outputs
        return None if outputs is None or output >= len(outputs) else (position, output)

    def find(self, text: str, field: str, *, is_feed: bool = False) -> Ref | None:
        """Returns the tensor; None after adding a finding. `field`: the request field with the name."""
        reason = Reason.ERROR_REASON_UNKNOWN_FEED if is_feed else Reason.ERROR_REASON_UNKNOWN_TENSOR
        parsed = parse_tensor_name(text)
        if parsed is None:
            what = "an operation, not a tensor" if text.startswith("^") else "no name of a tensor"
            self._findings.add(reason, f"{quote(text)} is {what}; write 'node' or 'node:output'.", field=field)
            return None
        name, output = parsed
        position = self.index.get(name)
        if position is None:
            hint = self._hint(name) + (self._placeholders() if is_feed else "")
            message = f"The graph has no tensor {quote(text)}: it has no node {quote(name)}.{hint}"
            self._findings.add(reason, message, field=field)
            return None
        outputs = self._top.nodes[position].outputs
        if outputs is not None and output >= len(outputs):
            many = f"it has {len(outputs)}, counted from 0" if outputs else "it has none"
            message = f"The graph has no tensor {quote(text)}: node {quote(name)} has no output {output}; {many}."
            self._findings.add(reason, message, name, field)
            return None
        return position, output

    def node(self, ref: Ref) -> str:
        """Returns the name of the node that computes a tensor."""
        return self._top.nodes[ref[0]].name

    def _placeholders(self) -> str:
        names = [node.name for node in self._top.nodes if node.op in PLACEHOLDERS]
        shown = ", ".join(quote(name) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return f" Its placeholders: {shown or 'none'}."

    def _hint(self, name: str) -> str:
        parts = name.split("/")
        for length in range(len(parts) - 1, 0, -1):
            position = self.index.get("/".join(parts[:length]))
            if position is None or not self._top.nodes[position].functions:
                continue
            node = self._top.nodes[position]
            what = "loop or branch" if node.op in CONTAINERS else "function call"
            return f" What lies inside the {what} {quote(node.name)} cannot be asked for; its outputs can."
        return self._findings.suggest_similar(name, self.index)


def find_requested(request: ExpandRequest, names: TensorNames) -> dict[str, Ref]:
    """Returns the tensors that the fields of a request name, by the name in the request; adds UNKNOWN_TENSOR."""
    groups = (
        ("fetches", request.fetches),
        (f"{request.derivative}.ys", request.ys),
        (f"{request.derivative}.xs", request.xs),
        (f"{request.derivative}.grad_ys", request.grad_y_tensors),
        (f"{request.derivative}.stop_gradients", request.stop_gradients),
    )
    requested: dict[str, Ref] = {}
    for group, texts in groups:
        for position, text in enumerate(texts):
            ref = names.find(text, f"spec.{group}[{position}]")
            if ref is not None:
                requested[text] = ref
    return requested


def find_fed(request: ExpandRequest, names: TensorNames, findings: Findings) -> dict[str, Ref]:
    """Returns the fed tensors by canonical name; adds UNKNOWN_FEED."""
    fed: dict[str, Ref] = {}
    for position, text in enumerate(request.fed):
        ref = names.find(text, f"feeds[{position}]", is_feed=True)
        if ref is None:
            continue
        name = canonical(names.node(ref), ref[1])
        if name in fed:
            message = f"The tensor {quote(name)} is fed twice."
            findings.add(Reason.ERROR_REASON_UNKNOWN_FEED, message, field=f"feeds[{position}]")
        fed[name] = ref
    return fed


def find_selected(overrides: Iterable[OverrideSpec], names: TensorNames) -> dict[str, Ref]:
    """Returns the top-level tensors that selectors name; tensors in functions are looked up in the copy later."""
    texts = {
        text
        for spec in overrides
        for text in (*spec.selector.region.inputs, *spec.selector.region.outputs, *spec.selector.depends_on)
    }
    found = ((text, names.look_up(text)) for text in texts)
    return {text: ref for text, ref in found if ref is not None}
