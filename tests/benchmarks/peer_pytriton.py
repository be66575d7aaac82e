"""The bench's work behind Triton: `python -m tests.benchmarks.peer_pytriton HTTP GRPC METRICS SIZE FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from tests.benchmarks import peer_gradient


def main(http: int, grpc: int, metrics: int, size: int, folder: str) -> None:
    def gradient(requests: Any) -> list[dict[str, Any]]:
        (request,) = requests
        if size:
            return [{"dx": peer_gradient.vector(request["x"], np.ones_like(request["x"]))}]
        _, dx, dw = peer_gradient.tiny(request["x"], request["w"], np.float32(1))
        return [{"dx": dx, "dw": dw}]

    shapes = {"x": (size,)} if size else {"x": (2, 4), "w": (4, 3)}
    config = TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics, http_address="127.0.0.1")
    # Triton insists on making the folder, and a run of the bench starts it once for each size.
    with Triton(config=config, workspace=f"{folder}/pytriton-{size}") as triton:
        triton.bind(
            "gradient",
            gradient,
            inputs=[Tensor(name=name, dtype=np.float32, shape=shape) for name, shape in shapes.items()],
            outputs=[Tensor(name=f"d{name}", dtype=np.float32, shape=shape) for name, shape in shapes.items()],
            config=ModelConfig(batching=False),
        )
        triton.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
