"""Builds the Ray Serve application."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import ControllerOptions, RequestRouterConfig, gRPCOptions

from gradrule._rpc.channels import DEFAULT_PORT
from gradrule.ray.replica import Replica
from gradrule.ray.routing import ProgramRouter

_SERVICES = "gradrule.ray.add_services"
# Proxies inherit the environment of Ray Serve's controller.
_PROXY_ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "gradrule.ray.configure_proxy"}
# `serve run` passes all arguments as texts.
_BOOLEANS: dict[Any, bool] = {"true": True, "false": False}


def app(settings: dict[str, Any]) -> serve.Application:
    """Builds the application: one deployment, `gradrule`, whose replicas run one server each.

    Starts Ray Serve with a gRPC port if this process has not connected to Ray yet, as with
    `serve run gradrule.ray:app`. A configuration file sets the port itself, see deploy/ray/serve.yaml.

    Args:
        settings: Settings of `gradrule serve`, with `_` for `-`, for example `registry` and `blobs`; `args` in a
            configuration file. `port`: the gRPC port, if this starts Ray Serve; 8470 by default. Without a registry
            that servers share, there can be only one replica.
    """
    settings = {name: _BOOLEANS.get(value, value) for name, value in settings.items()}
    port = int(settings.pop("port", DEFAULT_PORT))
    if not ray.is_initialized():
        ray.init(namespace="serve")
        serve.start(
            proxy_location="EveryNode",
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[_SERVICES]),
            controller_options=ControllerOptions(runtime_env={"env_vars": _PROXY_ENVIRONMENT}),
        )
    deployment = serve.deployment(
        Replica,
        name="gradrule",
        # The server limits streams and requests itself. Ray Serve counts a client's stream as a request even while it
        # is idle, and kills replicas that have so many requests, since their health checks wait for a free place.
        max_ongoing_requests=100_000,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=30,
        # The server has an access log of its own, which knows how calls ended.
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": 1},
        request_router_config=RequestRouterConfig(request_router_class=ProgramRouter),
    )
    return deployment.bind(settings)
