"""The gradient that peers without TensorFlow compute, in NumPy: sign(x) with a clipped straight-through gradient."""

from __future__ import annotations

from typing import Any

import numpy as np


def vector(x: Any, dy: Any) -> Any:
    """y = sign(x); returns dx."""
    return np.where(np.abs(x) <= 1, dy, np.zeros_like(x))


def tiny(x: Any, w: Any, dy: Any) -> tuple[Any, Any, Any]:
    """y = sum(sign(x · w)); returns y, dx, dw."""
    product = x @ w
    inner = vector(product, np.broadcast_to(dy, product.shape).astype(product.dtype))
    return np.sign(product).sum(), inner @ w.T, x.T @ inner
