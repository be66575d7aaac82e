"""Loads what a request refers to: rules, blobs, the graph and the values of variables.

Rules and blobs come from the front end; a program that is built again takes its rules from its snapshot.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError, Resource, error
from gradrule_server.link.messages import error_from_fault
from gradrule_server.link.operating_system import HeapTrimmer
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, check_blob_name, missing_blobs, value_fault
from gradrule_server.preparation import onnx_models
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import BUILTINS
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX

Keep = Callable[[graphs.Contents], str]
"""Keeps values in a file for the programs of a task; returns its name. Raises QUOTA_EXCEEDED."""
AskFrontEnd = Callable[[link_pb2.Question], link_pb2.Answer]
"""Sends a question to the front end and returns its answer."""

# The graphs that a compile worker keeps, and their encoded bytes without the values of large constants. A graph takes
# about four times as many bytes in memory, and 600 for each node.
_MAX_GRAPHS = 4
_MAX_GRAPH_BYTES = 16 << 20
# Bytes of kept values in one question.
_PART_BYTES = 1 << 19

# Number of names in one question to the front end.
_BATCH_SIZE = 500
# Number of unknown names with suggestions; the front end needs milliseconds for each.
_MAX_SUGGESTIONS = 20
# Number of names that one request may look up. A hostile graph can name a different gradient at every node.
_MAX_NAMES = 20_000
# Names of rules with prefixes are shorter than this; longer names count as unknown without a request.
_MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule with its content; None: the gradient that TensorFlow registers for the op type `name`.

    `embedded`: whether the rule is part of the graph; its content is then set after the graph is expanded.
    """

    name: str
    content: RuleContent | None
    embedded: bool = False


class RuleLookup(Protocol):
    """Resolves rules by name."""

    def fetch(self, names: Iterable[str]) -> None:
        """Fetches rules that are likely to be resolved, in one request."""
        ...

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule `name`. Raises UNKNOWN_RULE if no rule has this name."""
        ...


class FrontEndRuleLookup:
    """Looks up rules in the front end's registry."""

    def __init__(self, ask: AskFrontEnd) -> None:
        self._ask = ask
        self._known: dict[str, ResolvedRule | None] = {}
        self._suggestions = 0
        self.used: dict[str, None] = {}
        """Names of the resolved rules, in the order of their first use."""

    def fetch(self, names: Iterable[str]) -> None:
        """Fetches rules that are likely to be resolved, in batches."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._known and len(name) <= _MAX_NAME_CHARS]
        wanted = wanted[: max(0, _MAX_NAMES - len(self._known))]
        while wanted:
            batch = wanted[:_BATCH_SIZE]
            answer = _raise_fault(self._ask(link_pb2.Question(rules=link_pb2.Names(names=batch))))
            self._known.update(dict.fromkeys(batch))
            complete = [rule for rule in answer.rules if not _lacks_definition(rule)]
            self._known.update((rule.aliases[0], read_rule(rule)) for rule in complete)
            wanted = [rule.aliases[0] for rule in answer.rules if _lacks_definition(rule)] + wanted[_BATCH_SIZE:]

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule `name`. Raises UNKNOWN_RULE, or LIMIT_EXCEEDED if too many names were looked up before."""
        if name not in self._known:
            self.fetch([name])
        if name not in self._known and len(name) <= _MAX_NAME_CHARS:
            # Whether the rule exists is not known, so do not suggest other names.
            message = f"the request names more than {_MAX_NAMES} rules; {name!r} is beyond that number"
            raise error(errors_pb2.ERROR_REASON_LIMIT_EXCEEDED, message, field="name")
        rule = self._known.get(name)
        if rule is None:
            raise self._unknown(name)
        self.used[name] = None
        return rule

    def _unknown(self, name: str) -> GradruleError:
        self._suggestions += 1
        if self._suggestions <= _MAX_SUGGESTIONS and len(name) <= _MAX_NAME_CHARS:
            return error_from_fault(self._ask(link_pb2.Question(unknown_rule=name)).fault)
        bare = name.removeprefix("rules/")
        return error(
            errors_pb2.ERROR_REASON_UNKNOWN_RULE,
            f"there is no rule {bare!r}.",
            field="name",
            resource=Resource("gradrule.v1.Rule", f"rules/{bare}"),
        )


class SnapshotRuleLookup:
    """Resolves rules as they were when a program was compiled, regardless of later registry changes."""

    used = ()
    """No names: rules of a snapshot are not stored again."""

    def __init__(self, snapshot: bytes) -> None:
        self._rules = {
            rule.aliases[0]: read_rule(rule) for rule in rule_pb2.ListRulesResponse.FromString(snapshot).rules
        }

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing, because the snapshot holds all rules."""

    def resolve(self, name: str) -> ResolvedRule:
        if name not in self._rules:
            message = f"the program was compiled without a rule {name!r}"
            resource = Resource("gradrule.v1.Rule", f"rules/{name}")
            raise error(errors_pb2.ERROR_REASON_UNKNOWN_RULE, message, resource=resource)
        return self._rules[name]


def read_rule(rule: rule_pb2.Rule) -> ResolvedRule:
    """Reads a rule of the front end or of a snapshot. The catalogue has the built-in rules without a definition."""
    if rule.kind == rule_pb2.RULE_KIND_OP:
        return ResolvedRule(rule.name, None)
    name = rule.name.removeprefix(BUILTIN_PREFIX)
    if rule.kind == rule_pb2.RULE_KIND_BUILTIN and not rule.HasField("definition"):
        return ResolvedRule(rule.name, BUILTINS[name].content)
    return ResolvedRule(rule.name, RuleContent.from_stored(name, rule.definition))


class Blobs(Protocol):
    """Reads the caller's blobs by SHA-256."""

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the missing blobs, each once. Raises MALFORMED_REQUEST for a name that is not a hash."""
        ...

    def size(self, name: str) -> int:
        """Returns the size of a blob in bytes. Raises BLOB_NOT_FOUND."""
        ...

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        ...


class BlobFiles(Protocol):
    """Reads files in the folder of the caller's blobs."""

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        ...

    def map_kept(self, name: str) -> memoryview:
        """Maps a file of kept values."""
        ...


class FrontEndBlobs:
    """Reads the caller's blobs; the front end gives their sizes and verifies their bytes.

    Args:
        ask: Sends a question to the front end.
        files: Reads the files that the front end has checked.
    """

    def __init__(self, ask: AskFrontEnd, files: BlobFiles) -> None:
        self._ask = ask
        self._files = files
        self._sizes: dict[str, int] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the missing blobs, each once. Raises MALFORMED_REQUEST for a name that is not a hash."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            check_blob_name(name)
        for start in range(0, len(wanted), _BATCH_SIZE):
            batch = wanted[start : start + _BATCH_SIZE]
            answer = _raise_fault(self._ask(link_pb2.Question(blob_sizes=link_pb2.Names(names=batch))))
            self._sizes.update(zip(batch, answer.sizes, strict=True))
        return [name for name in wanted if self._sizes[name] < 0]

    def size(self, name: str) -> int:
        """Returns the size of a blob in bytes. Raises BLOB_NOT_FOUND."""
        check_blob_name(name)
        if name not in self._sizes:
            self.missing([name])
        if self._sizes[name] < 0:
            raise missing_blobs([name])
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        _raise_fault(self._ask(link_pb2.Question(blob=name)))
        return self._files.read(name)

    def keep(self, contents: graphs.Contents) -> str:
        """Keeps values in a file for the programs of the task; returns its name. Raises QUOTA_EXCEEDED."""
        name = link_pb2.Content(name=contents.name, size=contents.size)
        file = _raise_fault(self._ask(link_pb2.Question(content=name))).file
        if not file:
            for part in contents.parts(_PART_BYTES):
                file = _raise_fault(self._ask(link_pb2.Question(part=part))).file
        contents.move_to(self._files.map_kept(file))
        HeapTrimmer().trim(0.0)
        return file


def _lacks_definition(rule: rule_pb2.Rule) -> bool:
    """Returns whether a rule must be requested again, because its definition did not fit into the answer."""
    return rule.kind == rule_pb2.RULE_KIND_USER and not rule.HasField("definition")


def _raise_fault(answer: link_pb2.Answer) -> link_pb2.Answer:
    """Returns the answer, or raises the error in it."""
    if answer.HasField("fault"):
        raise error_from_fault(answer.fault)
    return answer


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph of a request.

    Attributes:
        graph: The graph without the values of large constants.
        digest: SHA-256 of its bytes, hex.
        likeness: A digest that does not depend on the order of its serialized fields.
        size: Bytes of the encoded graph without these values.
    """

    graph: graphs.ReadGraph
    digest: str
    likeness: str
    size: int


class GraphReader:
    """Reads graphs; keeps those that were read last, without the values of their large constants.

    Args:
        moves_constants: Whether the values of large constants are moved out of graphs.
    """

    def __init__(self, *, moves_constants: bool = True) -> None:
        self._moves_constants = moves_constants
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, bool, Limits], LoadedGraph] = OrderedDict()

    def load(self, spec: program_pb2.ProgramSpec, limits: Limits, store: Blobs) -> LoadedGraph:
        """Returns the graph of a spec. Raises BLOB_NOT_FOUND, LIMIT_EXCEEDED, INVALID_GRAPH, UNSUPPORTED."""
        source, is_onnx = spec.graph.WhichOneof("source"), onnx_models.is_onnx(spec.graph)
        data = b""
        if source == "blob_sha256":
            digest = spec.graph.blob_sha256
            size = store.size(digest)
            if size > limits.graph_bytes:
                raise error(
                    errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                    f"the graph has {size} bytes; {limits.graph_bytes} is the most, unless the server is started with "
                    "a larger --max-graph-bytes",
                    field="spec.graph",
                )
        elif source == "serialized":
            data = spec.graph.serialized
        elif source == "inline_graph":
            data = spec.graph.inline_graph.SerializeToString(deterministic=True)
        else:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the program has no graph", field="spec.graph")
        if source != "blob_sha256":
            digest = hashlib.sha256(data).hexdigest()
        key = digest, is_onnx, limits
        with self._lock:
            found = self._known.pop(key, None)
        if found is None:
            # A blob is passed on without a reference here, so that its bytes are freed once they are parsed.
            found = self._read(store.read(digest) if source == "blob_sha256" else data, digest, is_onnx, limits)
        with self._lock:
            self._known[key] = found
            self._drop_surplus()
        return found

    def _read(self, data: bytes, digest: str, is_onnx: bool, limits: Limits) -> LoadedGraph:
        graph, tensors = onnx_models.to_graph(data, limits) if is_onnx else (graphs.parse(data, limits), {})
        contents = graphs.Contents()
        del data
        likeness = hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()
        if self._moves_constants:
            graph = graphs.move_constants(graph, limits, contents)
            # A worker that has grown is replaced, and would forget its graphs.
            HeapTrimmer().trim(0.0)
        return LoadedGraph(graphs.ReadGraph(graph, contents, tensors), digest, likeness, graph.ByteSize())

    def _drop_surplus(self) -> None:
        """Drops the graphs that were used least recently; the last one stays."""
        while len(self._known) > _MAX_GRAPHS or (
            len(self._known) > 1 and sum(item.size for item in self._known.values()) > _MAX_GRAPH_BYTES
        ):
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class VariableValues:
    """The values of the variables that a program needs.

    `content`: name, type, shape and hash of each value, for the program's digest. It is equal for a value in a blob and
    the same value inline.
    """

    bound: list[link_pb2.BoundVariable] = field(default_factory=list)
    content: list[list[object]] = field(default_factory=list)
    blobs: tuple[str, ...] = ()


def bind_constants(graph: LoadedGraph, expanded: graphs.Expanded, keep: Keep | None) -> list[link_pb2.BoundVariable]:
    """Keeps the values of the constants that are inputs of the expanded graph, and returns their places."""
    if keep is None or not expanded.constants:
        return []
    file = keep(graph.graph.contents)
    for item in expanded.constants:
        item.kept.file = file
    return expanded.constants


def bind_variables(
    spec: program_pb2.ProgramSpec,
    expanded: graphs.Expanded,
    store: Blobs,
    limits: Limits,
    keep: Keep | None = None,
) -> VariableValues:
    """Checks all given values and returns those that the program needs.

    `keep`: Keeps large values that are in messages; None: they stay there.

    Raises FEED_DTYPE, FEED_SHAPE, INVALID_TENSOR, LIMIT_EXCEEDED, BLOB_NOT_FOUND.
    """
    findings: list[Finding] = []
    needed = {item.name for item in expanded.inputs}
    missing = store.missing(_blob_names(spec.variables))
    if missing:
        raise missing_blobs(missing)
    bound: list[link_pb2.BoundVariable] = []
    content: list[list[object]] = []
    kept = graphs.Contents()
    for number, item in enumerate(spec.variables):
        variable = expanded.variables[item.name]
        field_name = f"spec.variables[{number}]"
        fault = value_fault(item.value, variable, store.size, limits)
        if fault is not None:
            reason, text = fault
            findings.append(Finding(reason, f"The value of variable {item.name!r} {text}.", item.name, field_name))
        elif variable.name in needed:
            digest = _digest_content(item.value)
            content.append([variable.name, *digest])
            values = _large_values(item.value) if keep is not None else None
            if values is not None and kept.has_room(values, limits):
                sha256 = kept.add(values)
                place = link_pb2.KeptValue(offset=kept.offset(sha256), sha256=sha256)
                bound.append(link_pb2.BoundVariable(spec=variable, kept=place))
            else:
                bound.append(link_pb2.BoundVariable(spec=variable, value=item.value))
    if findings:
        raise GradruleError(findings)
    if keep is not None and kept.size:
        file = keep(kept)
        for variable_value in bound:
            if variable_value.HasField("kept"):
                variable_value.kept.file = file
    return VariableValues(bound, sorted(content, key=lambda entry: str(entry[0])), tuple(_blob_names(bound)))


def _large_values(value: tensor_pb2.TensorSource) -> memoryview | None:
    """Returns the values of a large tensor in a message; None for other values."""
    is_large = value.HasField("inline_tensor") and graphs.is_large(value.inline_tensor)
    return graphs.little_endian(value.inline_tensor) if is_large else None


def _blob_names(values: Iterable[tensor_pb2.NamedTensor | link_pb2.BoundVariable]) -> list[str]:
    return list(dict.fromkeys(item.value.blob.sha256 for item in values if item.value.HasField("blob")))


def _digest_content(value: tensor_pb2.TensorSource) -> list[object]:
    if value.HasField("blob"):
        dtype, shape, digest = value.blob.dtype, value.blob.shape, value.blob.sha256
        check_blob_name(digest)
    else:
        dtype, shape = value.inline_tensor.dtype, value.inline_tensor.tensor_shape
        array = tensor_codec.to_numpy(value.inline_tensor)
        # Hash the message of a string array, because its memory holds pointers.
        data = value.inline_tensor.SerializeToString(deterministic=True) if array.dtype.hasobject else array.tobytes()
        digest = hashlib.sha256(data).hexdigest()
    return [dtype, [dim.size for dim in shape.dim], digest]
