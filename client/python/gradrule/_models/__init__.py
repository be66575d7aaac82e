"""Makes graphs from PyTorch modules and ONNX models.

PyTorch and onnx are imported at the first call; no other package of the client imports them but `gradrule.torch`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from gradrule.errors import UnsupportedError

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph


def from_torch(module: Any, /, *example_inputs: Any, dynamic_shapes: Any = None) -> Graph:
    """Converts a PyTorch module to a graph.

    `torch.export` traces the module in the mode in which it is (`module.eval()` for inference). Inputs and outputs get
    the names of the arguments of `forward`, and `output`, `output_0`, … or the keys of a dict. Parameters and buffers
    become variables with their names in `module.state_dict()`. Nodes of a submodule are in the scope of its path
    (`layer1.0.conv1` becomes `layer1/0/conv1`), which also names its output, wherever a tensor's name is valid.

    Composite operations (`Gelu`, `LayerNorm`, `Attention`, …) are one node that an override can name, and a function
    of the graph with their parts. Images are computed with their channels last, as TensorFlow's kernels need it:
    tensors inside of the graph have the shape [batch, height, width, channels], inputs and outputs PyTorch's.

    Args:
        module: A `torch.nn.Module`.
        example_inputs: Tensors, or lists, tuples and dicts of tensors, as `module` takes them.
        dynamic_shapes: As for `torch.export.export`. Default: the first axis of all inputs may have any size, if the
            module allows it. An example whose first axis has size 1 is repeated for this.

    Returns:
        The graph, with aliases, variables and `layers`.

    Raises:
        UnsupportedError: PyTorch is not installed, or the module has operations that cannot be converted; the error
            lists all of them with their modules.
        InvalidGraphError: `torch.export` cannot trace the module.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "gr.from_torch needs PyTorch, which is not installed here: pip install 'gradrule[torch]'"
        )
    from gradrule._models import torch_modules

    return torch_modules.from_torch(module, example_inputs, dynamic_shapes)


def from_onnx(source: bytes | str | os.PathLike[str], /) -> Graph:
    """Converts an ONNX model of opset 11 or newer to a graph.

    Nodes have the names of ONNX's nodes, without a leading `/`, or else those of their operations, made valid and
    unique; further nodes that a node needs are in a scope of its name. Inputs and outputs of the model are valid
    wherever a tensor's name is. Floating-point initialisers with axes become variables of their names; running
    statistics of normalisations are not trained by default. Other initialisers, and values of Constant nodes, become
    constants. Functions are expanded.

    `Gemm`, `Gelu`, `LayerNormalization`, `QuantizeLinear` and the like are one node that an override can name, and a
    function of the graph with their parts. Images are computed with their channels last, as for `from_torch`.
    The reference of ONNX operations lists what each becomes.

    Args:
        source: The path of a `.onnx` file, whose external data must be in its folder; or bytes of a model.

    Returns:
        The graph, with aliases and variables.

    Raises:
        UnsupportedError: onnx is not installed, or the model has operations or arguments that cannot be converted; the
            error lists all of them with their nodes.
        InvalidGraphError: There is no such file, or it is not a valid model.
    """
    if importlib.util.find_spec("onnx") is None:
        raise UnsupportedError("gr.from_onnx needs onnx, which is not installed here: pip install 'gradrule[onnx]'")
    from gradrule._models import onnx_graph

    return onnx_graph.from_onnx(source)
