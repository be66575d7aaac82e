"""Builds small ONNX models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.inliner import inline_local_functions

Array = np.ndarray[Any, Any]
Shape = Sequence["int | str"]


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, Shape]],
    outputs: Sequence[str],
    values: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """Returns a model.

    Args:
        nodes: Its nodes.
        inputs: NumPy types and shapes by name.
        outputs: Names; ONNX infers their types.
        values: Initialisers.
        opset: Version of the operations.
        functions: Functions of the domain `own`.
    """
    kinds = {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, (dtype, _) in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kinds[name], shape) for name, (_, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (values or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid("own", 1)] if functions else [])]
    model = helper.make_model(graph, opset_imports=imports, functions=functions)
    inferred = onnx.shape_inference.infer_shapes(inline_local_functions(model))
    for item, found in zip(model.graph.output, inferred.graph.output, strict=True):
        item.CopyFrom(found)
        if not item.type.WhichOneof("value"):
            # ONNX infers some results only once it expands functions; these have the axes of the first input.
            item.type.tensor_type.elem_type = next(iter(kinds.values()))
            for _ in next(iter(inputs.values()))[1]:
                item.type.tensor_type.shape.dim.add()
    return model


def node(op_type: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    """Returns a node; names of inputs and outputs are separated by spaces, `_` is an input that is not given."""
    given = ["" if text == "_" else text for text in inputs.split()]
    return helper.make_node(op_type, given, outputs.split(), name=name, **attributes)
