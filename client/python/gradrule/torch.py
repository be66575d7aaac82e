"""Makes programs differentiable functions of PyTorch tensors, and applies rules to PyTorch without a server.

    import gradrule as gr
    import gradrule.torch

    program = client.compile(graph, fetches=["loss"], ys=["loss"], xs=["x", "w"], overrides={"Sign": "ste_sign"})
    loss = gradrule.torch.remote(program)
    loss(x=x, w=w).backward()

    spike = gradrule.torch.surrogate("fast_sigmoid", slope=25.0)
    with gradrule.torch.override(model, {nn.ReLU: "guided_relu"}):
        model(image)[0, label].backward()

It needs PyTorch: `pip install 'gradrule[torch]'`.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("gradrule.torch needs PyTorch: pip install 'gradrule[torch]'") from missing

from gradrule._bridges.torch_overrides import override
from gradrule._bridges.torch_remote import RemoteFunction, RemoteModule, remote, remote_module
from gradrule._bridges.torch_rules import Surrogate, surrogate

__all__ = ["RemoteFunction", "RemoteModule", "Surrogate", "override", "remote", "remote_module", "surrogate"]
