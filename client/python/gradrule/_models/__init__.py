"""Makes graphs from PyTorch modules.

PyTorch is imported at the first call; no other package of the client imports it but `gradrule.torch`.
"""

from __future__ import annotations

import importlib.util
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
