"""Converts PyTorch modules to graphs by `torch.export`."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule._builder.specs import LayerCall
from gradrule._models.model_graph import ModelGraph, UnsupportedOpError, Value
from gradrule._models.torch_ops import ATEN_OPS, Converted, OpCall, array_of, dtype_of, known_shape
from gradrule.errors import Detail, GradruleError, GradruleWarning, InvalidGraphError, UnsupportedError

_SIZE_OPS: dict[Any, str] = {
    operator.add: "AddV2",
    operator.sub: "Sub",
    operator.mul: "Mul",
    operator.floordiv: "FloorDiv",
    operator.mod: "FloorMod",
    operator.neg: "Neg",
}
_TORCH_FOLDER = os.path.dirname(torch.__file__)
# Nodes that only check sizes; the graph's ops check their own.
_CHECKS = ("_assert", "sym_constrain", "_assert_scalar", "_assert_tensor_metadata")
# Sizes of axes that may be larger than this may have any size.
_MANY = 1 << 40
_COMPARISONS = frozenset({operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt})


def from_torch(module: Any, examples: Sequence[Any], dynamic_shapes: Any) -> Graph:
    """Implements `gradrule.from_torch`."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidGraphError(f"{type(module).__name__} is no torch.nn.Module")
    program = _exported(module, tuple(examples), dynamic_shapes)
    return _Conversion(module, program).run()


def _exported(module: torch.nn.Module, examples: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            # PyTorch warns of its own deprecated classes, and of weights that LSTM holds twice.
            warnings.simplefilter("ignore")
            with _recorded_functions() as functions:
                if dynamic_shapes is None:
                    program = _with_any_batch(module, examples)
                else:
                    program = torch.export.export(module, examples, dynamic_shapes=dynamic_shapes)
            _detach_regions_without_gradients(program)
            program = program.run_decompositions(_decompositions())
    except UnsupportedOpError as cause:
        raise UnsupportedError(f"{type(module).__name__}: {cause}") from None
    except Exception as cause:
        # Everything that a module's Python code raises passes here.
        raise InvalidGraphError(
            f"torch.export cannot trace {type(module).__name__}: {_first_lines(cause)}. See the error above, and "
            "torch.export's documentation on what a module may do"
        ) from cause
    if functions:
        warnings.warn(
            f"the graph has not the backward functions of {', '.join(sorted(functions))}: torch.export records what "
            "forward computes. Give its operation a rule, such as fast_sigmoid for Heaviside",
            GradruleWarning,
            stacklevel=4,
        )
    return program


@contextlib.contextmanager
def _recorded_functions() -> Iterator[set[str]]:
    """Returns a set to which the names of the `autograd.Function` that are called inside the context are added."""
    found: set[str] = set()
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            found.add(cls.__name__)
        return own.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield found


def _detach_regions_without_gradients(program: ExportedProgram) -> None:
    """Detaches the results of regions in `torch.no_grad()`, of which decompositions leave nothing else."""
    graph = program.graph
    for node in list(graph.nodes):
        # Export detaches constants in this way.
        if node.target is torch.ops.aten.detach_.default and "lift_fresh" not in str(node.args[0].target):
            raise UnsupportedOpError("Tensor.detach_() is not supported; use the result of Tensor.detach()")
        if "wrap_with_set_grad_enabled" in str(node.target) and node.args[0] is False:
            for result in list(node.users):
                if isinstance(result.meta.get("val"), torch.Tensor):
                    users = list(result.users)
                    with graph.inserting_after(result):
                        detached = graph.call_function(torch.ops.aten.detach.default, (result,))
                    detached.meta = dict(result.meta)
                    for user in users:
                        user.replace_input_with(result, detached)
    program.graph_module.recompile()


def _with_any_batch(module: torch.nn.Module, examples: tuple[Any, ...]) -> ExportedProgram:
    """Exports a module with any size of the first axis of all inputs, or with the sizes of the examples."""
    tensors = [leaf for leaf in pytree.tree_leaves(examples) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        return torch.export.export(module, examples)

    # A size of 1 would be taken for a constant.
    def repeated(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.shape[0] == 1:
            return leaf.expand(2, *leaf.shape[1:]).clone()
        return leaf

    def axes(leaf: Any) -> Any:
        return {0: Dim.AUTO} if isinstance(leaf, torch.Tensor) else None

    def first(leaf: Any) -> Any:
        return leaf[:1].clone() if isinstance(leaf, torch.Tensor) else leaf

    shapes = pytree.tree_map(axes, examples)
    try:
        program = torch.export.export(module, pytree.tree_map(repeated, examples), dynamic_shapes=shapes)
        single = torch.export.export(module, pytree.tree_map(first, examples))
    except Exception:
        # The module needs these very sizes; an error of the module itself comes again.
        return torch.export.export(module, examples)
    return program if _takes_any_batch(program, single) else torch.export.export(module, examples)


def _takes_any_batch(program: ExportedProgram, single: ExportedProgram) -> bool:
    """Returns whether a program, exported for sizes of 2 and more, computes what the module does for all sizes.

    `single`: The program for a size of 1. It has the same operations, unless what the module does depends on the size.
    """
    if any(limits.lower > 2 or limits.upper < _MANY for limits in program.range_constraints.values()):
        return False
    any_size, one = (
        [node for node in each.graph.nodes if node.op == "output" or _is_of_tensors(node)] for each in (program, single)
    )
    return len(any_size) == len(one) and all(map(_are_alike, any_size, one))


def _is_of_tensors(node: torch.fx.Node) -> bool:
    """Returns whether a node computes tensors. Slices of whole axes do not: export leaves them out for known sizes."""
    found = node.meta.get("val")
    if node.target is torch.ops.aten.slice.Tensor and tuple(node.args[2:]) == (0, sys.maxsize):
        return False
    return isinstance(found, torch.Tensor) or (isinstance(found, (tuple, list)) and len(found) > 0)


def _are_alike(node: torch.fx.Node, single: torch.fx.Node) -> bool:
    """Returns whether two nodes differ in sizes that are not known only."""
    if node.target != single.target:
        return False
    results, known = (pytree.tree_leaves(each.meta.get("val")) for each in (node, single))
    for found, other in zip(results, known, strict=False):
        if isinstance(found, torch.Tensor) and isinstance(other, torch.Tensor):
            if found.dim() != other.dim():
                return False
            if any(isinstance(size, int) and size != one for size, one in zip(found.shape, other.shape, strict=True)):
                return False
    leaves, others = (pytree.tree_leaves((each.args, each.kwargs)) for each in (node, single))
    return len(leaves) == len(others) and all(
        isinstance(leaf, torch.fx.Node) or leaf == other for leaf, other in zip(leaves, others, strict=True)
    )


def _decompositions() -> Any:
    """Returns PyTorch's decompositions of all operations that cannot be converted as they are."""
    table = torch.export.default_decompositions()
    for target in list(table):
        if _converter_of(target) is not None:
            table.pop(target)
    return table


def _converter_of(target: Any) -> Any:
    """Returns the function that converts an operation, by its name with or without the overload, or None."""
    return ATEN_OPS.get(str(target).removeprefix("aten.")) or ATEN_OPS.get(_name(target))


def _name(target: Any) -> str:
    """Returns `linear` for `aten.linear.default`."""
    text = str(target)
    return text.split(".")[1] if text.startswith("aten.") else getattr(target, "__name__", text)


def _first_lines(cause: BaseException) -> str:
    return " ".join(str(cause).split())[:300]


class _Conversion:
    """One conversion of an exported program."""

    def __init__(self, module: torch.nn.Module, program: ExportedProgram) -> None:
        self._module = module
        self._program = program
        self._model = ModelGraph()
        self._values: dict[torch.fx.Node, Converted] = {}
        self._refused: list[Detail] = []
        self._modules = dict(module.named_modules())
        self._state = module.state_dict(keep_vars=True)
        # Weights that several modules share are one variable, with their first name.
        self._first_names: dict[int, str] = {}
        for name, tensor in self._state.items():
            self._first_names.setdefault(id(tensor), name)
        self._variables: dict[str, Value] = {}

    def run(self) -> Graph:
        """Returns the graph. Raises `UnsupportedError` with everything that cannot be converted."""
        self._add_inputs()
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                self._convert(node)
            elif node.op not in ("placeholder", "output"):
                self._refuse(node, f"{node.op} nodes")
        self._check_outputs()
        self._add_outputs()
        if self._refused:
            names = ", ".join(dict.fromkeys(detail.message.partition(" ")[0] for detail in self._refused))
            raise UnsupportedError(
                f"{type(self._module).__name__} has operations that gr.from_torch cannot convert: {names}",
                details=self._refused,
            )
        self._add_layers()
        return self._model.graph

    # Inputs.

    def _add_inputs(self) -> None:
        graph, state = self._model.graph, self._program.state_dict
        nodes = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        for spec in self._program.graph_signature.input_specs:
            name = getattr(spec.arg, "name", "")
            node = nodes[name]
            if spec.kind is InputKind.USER_INPUT:
                example = node.meta.get("val")
                if not isinstance(example, torch.Tensor):
                    self._values[node] = example
                    continue
                shape = [size if isinstance(size, int) else None for size in known_shape(example)]
                self._values[node] = Value(graph.placeholder(name, dtype_of(example), shape), example.dim())
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                target = str(spec.target)
                tensor = state[target] if target in state else self._program.constants[target]
                self._values[node] = self._weight(spec.kind, target, tensor)
            else:
                self._refuse(node, f"inputs of kind {spec.kind.name}")

    def _weight(self, kind: InputKind, name: str, tensor: torch.Tensor) -> Value:
        array = array_of(tensor)
        if kind is InputKind.CONSTANT_TENSOR or name not in self._state:
            return Value(self._model.graph.constant(array, name="constants/" + name.replace(".", "/")), array.ndim)
        name = self._first_names[id(self._state[name])]
        if name not in self._variables:
            self._variables[name] = Value(self._model.graph.variable(name, array), array.ndim)
            if not self._state[name].requires_grad:
                self._model.graph.non_trainable.add(name)
        return self._variables[name]

    # Nodes.

    def _convert(self, node: torch.fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            values = self._values.get(source)
            self._values[node] = values[index] if isinstance(values, (tuple, list)) else None
            return
        name = _name(target)
        if any(check in name for check in _CHECKS) or target in _COMPARISONS:
            return
        with self._model.scope(self._path(node)):
            try:
                if target in _SIZE_OPS:
                    self._values[node] = self._size_op(node)
                elif name == "sym_size":
                    self._values[node] = self._model.size_of(self._value_of(node.args[0]), node.args[1])
                elif (convert := _converter_of(target)) is not None:
                    call = OpCall(self._model, node, self._value_of)
                    self._values[node] = convert(call)
                    call.check_all_read()
                else:
                    raise UnsupportedOpError("")
            except UnsupportedOpError as cause:
                self._refuse(node, f"{name} {cause}".strip())
            except GradruleError as cause:
                self._refuse(node, f"{name}: {cause.message}")
            except (ArithmeticError, LookupError, TypeError, ValueError) as cause:
                # Some combinations of arguments have no counterpart: axes that a converter expects, other overloads.
                self._refuse(node, f"{name} with these arguments: {cause}")
            except _MissingInputError:
                # It takes the result of a node that is refused already.
                return

    def _size_op(self, node: torch.fx.Node) -> TensorHandle:
        operands = [self._value_of(arg) for arg in node.args]
        return self._model.op(
            _SIZE_OPS[node.target],
            *(self._model.constant(arg, "int32") if isinstance(arg, int) else arg for arg in operands),
        )

    def _value_of(self, arg: Any) -> Any:
        """Returns an argument with values in place of the exported program's nodes."""
        if isinstance(arg, torch.fx.Node):
            if arg not in self._values:
                raise _MissingInputError
            if self._values[arg] is None:
                raise UnsupportedOpError(f"of the result {arg.name!r}, which cannot be converted")
            return self._values[arg]
        if isinstance(arg, (list, tuple)):
            return [self._value_of(item) for item in arg]
        return arg

    def _path(self, node: torch.fx.Node) -> str:
        paths = self._paths(node)
        return _node_path(paths[-1]) if paths else ""

    def _paths(self, node: torch.fx.Node) -> list[str]:
        """Returns the paths of the modules that a node belongs to, the innermost one last."""
        stack = (path for path, _ in (node.meta.get("nn_module_stack") or {}).values())
        return [path for path in stack if path.partition("@")[0] in self._modules and path]

    def _refuse(self, node: torch.fx.Node, what: str) -> None:
        path = self._path(node).replace("/", ".")
        where = f"in module {path!r}" if path else "in the module itself"
        trace = node.meta.get("stack_trace") or ""
        lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        own = [line for line in lines if _TORCH_FOLDER not in line]
        if lines:
            where += f", {(own or lines)[-1]}"
        self._refused.append(Detail(UnsupportedError.REASON, f"{what} ({where})", node=node.name))

    # Outputs.

    def _check_outputs(self) -> None:
        """Refuses modules that change their own buffers or their inputs."""
        for spec in self._program.graph_signature.output_specs:
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
                message = (
                    f"{spec.kind.name} of {spec.target!r}: forward must not change it; return the new value instead"
                )
                self._refused.append(Detail(UnsupportedError.REASON, message, node=str(spec.target)))

    def _add_outputs(self) -> None:
        graph = self._model.graph
        output = next(node for node in self._program.graph.nodes if node.op == "output")
        kept = [
            arg
            for arg, spec in zip(output.args[0], self._program.graph_signature.output_specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        names = _output_names(self._program.call_spec.out_spec, len(kept))
        for name, node in zip(names, kept, strict=True):
            value = self._values.get(node) if isinstance(node, torch.fx.Node) else None
            if not isinstance(value, Value):
                if not (isinstance(node, torch.fx.Node) and node not in self._values and self._refused):
                    message = f"the result {name!r} is no tensor that can be converted ({node}); return tensors only"
                    self._refused.append(Detail(UnsupportedError.REASON, message))
                continue
            tensor = self._model.natural(value).name
            if name in graph.inputs and tensor.partition(":")[0] != name:
                message = f"the result {name!r} has the name of an input; give one of them another name"
                self._refused.append(Detail(UnsupportedError.REASON, message))
            graph.aliases[name] = tensor

    def _add_layers(self) -> None:
        """Adds the calls of submodules, so that the path of a module names its output."""
        calls: dict[str, list[torch.fx.Node]] = {}
        for node in self._program.graph.nodes:
            for path in self._paths(node):
                calls.setdefault(path, []).append(node)
        for path, nodes in calls.items():
            own = set(nodes)
            inputs = [
                source
                for node in nodes
                for source in node.all_input_nodes
                if source not in own and not self._is_weight(source)
            ]
            outputs = [node for node in nodes if any(user not in own for user in node.users)]
            module = self._modules[path.partition("@")[0]]
            self._model.graph.layers.append(
                LayerCall(_node_path(path), type(module), self._names(inputs), self._names(outputs), id(module))
            )

    def _is_weight(self, node: torch.fx.Node) -> bool:
        return node.op == "placeholder" and node.name not in self._program.graph_signature.user_inputs

    def _names(self, nodes: Sequence[torch.fx.Node]) -> tuple[str, ...]:
        values = (self._values.get(node) for node in nodes)
        return tuple(dict.fromkeys(value.handle.name for value in values if isinstance(value, Value)))


class _MissingInputError(Exception):
    """Reports that a node takes the result of a node that cannot be converted."""


def _node_path(path: str) -> str:
    """Converts a module's path to a scope. A module that is called again has the path `path@1`."""
    return path.replace("@", "_").replace(".", "/")


def _output_names(spec: Any, count: int) -> list[str]:
    """Returns `output`, `output_0`, …, or the keys of a dict."""
    tree = pytree.tree_unflatten(list(range(count)), spec)
    if isinstance(tree, int):
        return ["output"]
    if isinstance(tree, dict) and all(isinstance(value, int) for value in tree.values()):
        by_index = {index: str(key) for key, index in tree.items()}
        return [by_index[index] for index in range(count)]
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
