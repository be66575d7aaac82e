"""Converts between NumPy and PyTorch, and runs the graphs of rules with PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from gradrule._bridges.rule_graphs import Compute, lowest_or_highest
from gradrule.common.tensor_codec import Array
from gradrule.errors import UnsupportedError

# Types that NumPy has from ml_dtypes, with the integer type of the same size.
_OTHER_TYPES = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}
_TORCH_TYPE_OF = {numpy_type: torch_type for torch_type, (_, numpy_type) in _OTHER_TYPES.items()}


def array_of(tensor: torch.Tensor) -> Array:
    """Returns a tensor as an array, which shares its memory if that is the CPU's.

    Raises:
        UnsupportedError: The tensor is sparse, has no data, or is one of those of `is_grads_batched=True`.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"the tensor is sparse ({tensor.layout}): give tensor.to_dense()")
    if tensor.is_meta:
        raise UnsupportedError("the tensor is on the device 'meta', without data: move the model with to_empty")
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise UnsupportedError(
            "is_grads_batched=True and vectorize=True are not supported: use torch.func.vmap and torch.func.jacrev"
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor._is_zerotensor():
        # PyTorch's derivatives that are 0 may be tensors without memory.
        tensor = tensor.clone()
    if tensor.dtype in _OTHER_TYPES:
        integer, numpy_type = _OTHER_TYPES[tensor.dtype]
        found: Array = tensor.contiguous().view(integer).numpy().view(numpy_type)
        return found
    array: Array = tensor.numpy()
    return array


def tensor_of(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns an array as a tensor on the device of another tensor."""
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype in _TORCH_TYPE_OF:
        torch_type = _TORCH_TYPE_OF[array.dtype]
        integer, _ = _OTHER_TYPES[torch_type]
        found = torch.from_numpy(array.view(f"i{array.itemsize}" if integer is torch.int16 else "u1")).view(torch_type)
    else:
        found = torch.from_numpy(array)
    return found.to(like.device)


class TorchLibrary:
    """PyTorch, for `rule_graphs.run_rule_graph`."""

    index = 1

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def function(self, name: str) -> Compute:
        if name == "real":
            return lambda value: torch.real(value) if value.is_complex() else value
        found: Compute = getattr(torch, name)
        return found

    def array(self, value: Any, like: Any) -> Any:
        return tensor_of(value, like)

    def cast(self, value: Any, dtype: str) -> Any:
        return value.to(getattr(torch, dtype))

    def reduce(self, op: str, value: Any, axes: tuple[int, ...], keep: bool) -> Any:
        if op in ("Max", "Min"):
            if value.numel() == 0:
                shape = [1 if axis in axes else size for axis, size in enumerate(value.shape)] if keep else []
                return torch.full(
                    shape, lowest_or_highest(op, array_of(value).dtype), dtype=value.dtype, device=value.device
                )
            return (torch.amax if op == "Max" else torch.amin)(value, dim=axes, keepdim=keep) if axes else value
        if not axes:
            return value
        if op in ("Prod", "Any", "All"):
            for axis in sorted((axis % value.dim() for axis in axes), reverse=True):
                value = getattr(torch, op.lower())(value, dim=axis, keepdim=keep)
            return value
        return getattr(torch, op.lower())(value, dim=axes, keepdim=keep)

    def sigmoid(self, value: Any) -> Any:
        return torch.sigmoid(value)

    def softplus(self, value: Any) -> Any:
        # Above the default threshold of 20, float64 would lose digits.
        return torch.nn.functional.softplus(value, threshold=40)

    def softmax(self, value: Any, log: bool) -> Any:
        return (torch.log_softmax if log else torch.softmax)(value, dim=-1)

    def where(self, condition: Any, first: Any, second: Any) -> Any:
        return torch.where(condition, first, second)

    def constant(self, value: Any) -> Any:
        return value.detach()


TORCH = TorchLibrary()
