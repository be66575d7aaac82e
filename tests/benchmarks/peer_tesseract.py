"""The bench's work as a Tesseract; `tesseract-runtime serve` loads this file.

BENCH_SIZE: numbers of the vector; 0 is the tiny work.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from pydantic import BaseModel
from tesseract_core.runtime import Array, Differentiable, Float32

from tests.benchmarks import peer_gradient


class Vector(BaseModel):
    """Input or output of the large work."""

    x: Differentiable[Array[(None,), Float32]]


class Matrices(BaseModel):
    """Inputs of the tiny work."""

    x: Differentiable[Array[(2, 4), Float32]]
    w: Differentiable[Array[(4, 3), Float32]]


class Signs(BaseModel):
    """Output of the large work."""

    y: Differentiable[Array[(None,), Float32]]


class Sum(BaseModel):
    """Output of the tiny work."""

    y: Differentiable[Float32]


_IS_TINY = int(os.environ["BENCH_SIZE"]) == 0
InputSchema, OutputSchema = (Matrices, Sum) if _IS_TINY else (Vector, Signs)


def apply(inputs: Any) -> Any:
    if _IS_TINY:
        return Sum(y=np.sign(inputs.x @ inputs.w).sum())
    return Signs(y=np.sign(inputs.x))


def vector_jacobian_product(
    inputs: Any, vjp_inputs: set[str], vjp_outputs: set[str], cotangent_vector: dict[str, Any]
) -> dict[str, Any]:
    if _IS_TINY:
        _, dx, dw = peer_gradient.tiny(inputs.x, inputs.w, cotangent_vector["y"])
        return {"x": dx, "w": dw}
    return {"x": peer_gradient.vector(inputs.x, cotangent_vector["y"])}


# tesseract-core reads the annotations of these two.
apply.__annotations__ = {"inputs": InputSchema, "return": OutputSchema}
vector_jacobian_product.__annotations__["inputs"] = InputSchema
