"""Looks up the nodes, tensors, element types and shapes of a graph by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from gradrule._builder.handles import Node, TensorHandle
from gradrule._builder.names import ByName, bare, did_you_mean, glob_pattern, split
from gradrule._builder.specs import LayerCall, TensorSpec
from gradrule.common import op_definitions, tensor_codec
from gradrule.common.dtypes import as_dt, dtype_name, without_ref
from gradrule.common.op_inference import InferenceError, complete
from gradrule.errors import UnknownTensorError
from gradrule.v1 import graph_pb2

GRADIENT_ATTR = "_gradient_op_type"
"""Attribute with the name of a node's rule, as in TensorFlow."""
OPTIONAL_ATTR = "_gradrule_optional"
"""Attribute of a node whose rule may have no effect."""

_VARIABLE_OPS = ("VarHandleOp", "VariableV2", "Variable")
_INPUT_OPS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")
# Outputs of a node about which nothing is known: one output of unknown type.
_UNKNOWN = (0,)


class GraphTypes:
    """Holds the nodes of a graph by name, the definitions of their ops, and the element types of their outputs."""

    def __init__(self, message: graph_pb2.Graph) -> None:
        self._message = message
        self._nodes: dict[str, graph_pb2.Node] = {}
        for node in message.node:
            self._nodes.setdefault(node.name, node)
        self._functions = {
            function.signature.name: op_definitions.from_signature(function.signature)
            for function in message.library.function
        }
        self._outputs: dict[str, tuple[int, ...]] = {}

    def node(self, name: str) -> graph_pb2.Node | None:
        """Returns the node with a name, or None."""
        return self._nodes.get(name)

    def names(self) -> Iterable[str]:
        """Returns the names of all nodes."""
        return self._nodes.keys()

    def functions(self) -> Iterable[str]:
        """Returns the names of the graph's functions."""
        return self._functions.keys()

    def definition(self, op_type: str) -> op_definitions.OpDef | None:
        """Returns the definition of an op type or of a function of the graph; None if there is none."""
        return self._functions.get(op_type) or op_definitions.find(op_type)

    def add_function(self, function: graph_pb2.Function) -> None:
        """Adds a function to the graph. Its name must be new."""
        self._message.library.function.append(function)
        self._functions[function.signature.name] = op_definitions.from_signature(function.signature)

    def add(self, node: graph_pb2.Node, outputs: tuple[int, ...]) -> None:
        """Adds a node with the element types of its outputs."""
        self._nodes[node.name] = node
        self._outputs[node.name] = outputs

    def outputs(self, name: str) -> tuple[int, ...]:
        """Returns the element types of a node's outputs; 0 if an unknown op, a wrong input or a cycle hides it."""
        pending = [name]
        visited: set[str] = set()
        while pending:
            current = pending[-1]
            if current in self._outputs:
                pending.pop()
                continue
            node = self._nodes.get(current)
            if node is None:
                self._outputs[current] = _UNKNOWN
                continue
            inputs = [split(text) for text in node.input if not text.startswith("^")]
            if current not in visited:
                # An input that was visited and has no types yet is part of a cycle.
                visited.add(current)
                missing = [source for source, _ in inputs if source not in self._outputs and source not in visited]
                if missing:
                    pending.extend(missing)
                    continue
            self._outputs[current] = self._infer(node, [self._type(source, index) for source, index in inputs])
        return self._outputs[name]

    def _type(self, node: str, index: int) -> int:
        outputs = self._outputs.get(node, _UNKNOWN)
        return outputs[index] if index < len(outputs) else 0

    def _infer(self, node: graph_pb2.Node, inputs: list[int]) -> tuple[int, ...]:
        definition = self.definition(node.op)
        if definition is None:
            return _UNKNOWN
        try:
            return complete(definition, node.attr, inputs).outputs
        except InferenceError:
            # The server reports the error of the node; here its types stay unknown.
            return _UNKNOWN


class GraphLookup(ABC):
    """Finds nodes and tensors of a graph by name; base class of `Graph`."""

    aliases: dict[str, str]
    layers: list[LayerCall]
    _message: graph_pb2.Graph
    _types: GraphTypes

    @abstractmethod
    def _node_handle(self, message: graph_pb2.Node) -> Node:
        """Returns the handle of a node."""

    @abstractmethod
    def _tensor_handle(self, node: str, index: int, number: int) -> TensorHandle:
        """Returns the handle of an output of a node."""

    def node(self, name: str) -> Node:
        """Finds a node by name.

        Args:
            name: Full name of the node, with scopes.

        Returns:
            The handle of the node.

        Raises:
            UnknownTensorError: The graph has no such node.
        """
        message = self._types.node(name)
        if message is None:
            raise UnknownTensorError(f"the graph has no node {name!r}.{did_you_mean(name, self._types.names())}")
        return self._node_handle(message)

    def tensor(self, name: str) -> TensorHandle:
        """Finds a tensor by name.

        Args:
            name: `node` (its first output), `node:output`, an alias, or the path of a Keras layer or a PyTorch module
                with one output.

        Returns:
            The handle of the tensor.

        Raises:
            UnknownTensorError: The graph has no such node, or the node has no such output.
        """
        node, index = split(self.resolved(name))
        if self._types.node(node) is None:
            known = f" Aliases: {', '.join(map(repr, self.aliases))}." if self.aliases else ""
            hint = did_you_mean(node, [*self._types.names(), *self.aliases, *(call.path for call in self.layers)])
            raise UnknownTensorError(f"the graph has no tensor {name!r}.{hint}{known}")
        handles = self.outputs_of(node)
        if index >= len(handles):
            raise UnknownTensorError(f"the graph has no tensor {name!r}: node {node!r} has {len(handles)} outputs")
        return handles[index]

    def resolved(self, name: str) -> str:
        """Returns the name of the tensor that an alias, or the path of a layer or module, stands for.

        Args:
            name: an alias, a path, or any other name, which is returned unchanged.

        Raises:
            UnknownTensorError: A layer has several outputs, or is called several times.
        """
        tensor = self.aliases.get(name)
        if tensor is not None or not self.layers or self._types.node(split(name)[0]) is not None:
            return name if tensor is None else tensor
        # A module of PyTorch is also found by its own path, `layer1.0.conv1`.
        paths = (name, name.replace(".", "/"))
        outputs = list(dict.fromkeys(output for call in self.layers if call.path in paths for output in call.outputs))
        if len(outputs) > 1:
            raise UnknownTensorError(
                f"the layer {name!r} has several outputs, or is called several times; name one of its tensors: "
                f"{', '.join(map(repr, outputs))}"
            )
        return outputs[0] if outputs else name

    def value_of(self, name: str) -> TensorHandle:
        """Returns the handle of a tensor or of a variable's value.

        Args:
            name: Name of a tensor; or a variable's name or shared name: the handle then has the variable's type.

        Returns:
            The handle.

        Raises:
            UnknownTensorError: The graph has neither a tensor nor a variable of this name.
        """
        node, index = split(name)
        message = self._types.node(node)
        if message is None:
            message = next((item for item in self._message.node if _is_shared(item, node)), None)
        if message is not None and index == 0 and message.op in _VARIABLE_OPS and "dtype" in message.attr:
            return self._tensor_handle(message.name, 0, message.attr["dtype"].type)
        return self.tensor(name)

    def _variable_type(self, name: str) -> int:
        try:
            return without_ref(self.value_of(name).number)
        except UnknownTensorError:
            return 0

    def find(self, op_type: str | None = None, *, node: str | None = None, scope: str | None = None) -> list[Node]:
        """Returns the nodes that match all selectors, in the order of the graph.

        Args:
            op_type: op type of the nodes.
            node: name or glob; `*` and `?` match within a part between slashes, `**` matches across slashes.
            scope: matches the nodes whose names start with `scope/`.

        Returns:
            The nodes; empty if none matches.
        """
        pattern = None if node is None else glob_pattern(node)
        return [
            self._node_handle(message)
            for message in self._message.node
            if (op_type is None or message.op == op_type)
            and (pattern is None or pattern.fullmatch(message.name))
            and (scope is None or message.name.startswith(scope.rstrip("/") + "/"))
        ]

    def outputs_of(self, node: str) -> tuple[TensorHandle, ...]:
        """Returns the handles of a node's outputs.

        Args:
            node: Name of the node.
        """
        types = enumerate(self._types.outputs(node))
        return tuple(self._tensor_handle(node, index, number) for index, number in types)

    def stated_shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Returns a tensor's shape if its node holds it (placeholder, constant, `_output_shapes`), else None.

        Args:
            tensor: Name of the tensor.

        Returns:
            The sizes, None for an unknown size; None if the node holds no shape.
        """
        node, index = split(tensor)
        message = self._types.node(node)
        assert message is not None
        if message.op in _INPUT_OPS and "shape" in message.attr:
            return tensor_codec.shape_tuple(message.attr["shape"].shape)
        if message.op == "Const":
            return tensor_codec.shape_tuple(message.attr["value"].tensor.tensor_shape)
        if "_output_shapes" in message.attr:
            shapes = message.attr["_output_shapes"].list.shape
            return tensor_codec.shape_tuple(shapes[index]) if index < len(shapes) else None
        return None

    def op_types_with_rule_names(self) -> set[str]:
        """Returns the op types of the nodes that name a rule in an attribute, including nodes in functions.

        The params of a call refer to such rules by op type.
        """
        bodies = [self._message.node, *(function.node_def for function in self._message.library.function)]
        return {node.op for body in bodies for node in body if GRADIENT_ATTR in node.attr}

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Specs of the placeholders (name, dtype, shape), by alias or name."""
        return self._by_alias(
            [
                self._spec(node.name, optional=node.op == "PlaceholderWithDefault")
                for node in self._message.node
                if node.op in _INPUT_OPS
            ]
        )

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Specs of the outputs (name, dtype, shape), by alias or name.

        Outputs are the tensors with an alias, placeholders excluded. Without aliases, they are the outputs of nodes
        that no other node uses, placeholders and constants excluded.
        """
        named = {
            alias: self._spec(tensor)
            for alias, tensor in self.aliases.items()
            if (node := self._types.node(split(tensor)[0])) is not None and node.op not in _INPUT_OPS
        }
        if named:
            return ByName(named, self.aliases)
        used = {split(name.removeprefix("^"))[0] for node in self._message.node for name in node.input}
        return self._by_alias(
            [
                self._spec(handle.name)
                for node in self._message.node
                if node.name not in used and node.op != "Const" and node.op not in _INPUT_OPS
                for handle in self.outputs_of(node.name)
            ]
        )

    def _by_alias(self, specs: list[TensorSpec]) -> Mapping[str, TensorSpec]:
        aliases = {bare(tensor): alias for alias, tensor in self.aliases.items()}
        return ByName({aliases.get(bare(spec.name), bare(spec.name)): spec for spec in specs}, self.aliases)

    def _spec(self, tensor: str, *, optional: bool = False) -> TensorSpec:
        node, index = split(tensor)
        types = self._types.outputs(node)
        dtype = dtype_name(types[index]) if index < len(types) else dtype_name(as_dt(0))
        return TensorSpec(tensor, dtype, self.stated_shape(tensor), optional)


def _is_shared(node: graph_pb2.Node, name: str) -> bool:
    if node.op not in _VARIABLE_OPS or "shared_name" not in node.attr:
        return False
    return node.attr["shared_name"].s.decode(errors="replace") == name
