"""Deploys gradrule on a Ray cluster: each replica of a Ray Serve application runs one whole server.

    serve run gradrule.ray:app registry=postgresql://user@host/gradrule

`app` builds the application. In the gRPC proxies of Ray Serve, `add_services` adds the RPCs, and `configure_proxy` sets
the keepalive. docs/guide/ray.md describes a deployment with `deploy/ray/serve.yaml`. It needs Ray:
`pip install 'gradrule[ray,server]'`.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("gradrule.ray needs Ray Serve: pip install 'gradrule[ray]'") from missing

from gradrule.ray.application import app
from gradrule.ray.autoscaling import autoscaling_policy
from gradrule.ray.proxy import add_services, configure_proxy
from gradrule.ray.routing import ProgramRouter

__all__ = ["ProgramRouter", "add_services", "app", "autoscaling_policy", "configure_proxy"]
