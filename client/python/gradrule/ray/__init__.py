"""Deploys gradrule on a Ray cluster: each replica of a Ray Serve application runs one whole server.

    serve run gradrule.ray:app registry=postgresql://user@host/gradrule

`app` builds the application, `add_services` tells the gRPC proxies of Ray Serve which RPCs there are. docs/guide/ray.md
describes a deployment with `deploy/ray/serve.yaml`. It needs Ray: `pip install 'gradrule[ray,server]'`.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("gradrule.ray needs Ray Serve: pip install 'gradrule[ray]'") from missing

from gradrule.ray.application import app
from gradrule.ray.autoscaling import autoscaling_policy
from gradrule.ray.proxy import add_services
from gradrule.ray.routing import ProgramRouter

__all__ = ["ProgramRouter", "add_services", "app", "autoscaling_policy"]
