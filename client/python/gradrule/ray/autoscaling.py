"""Decides how many replicas there should be."""

from __future__ import annotations

from typing import Any

REQUESTS = "requests"
"""Metric of a replica: requests that run or wait on it, including those on streams."""


def autoscaling_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns the number of replicas for `target_ongoing_requests` requests on each, and no state.

    Ray Serve's own policy counts a stream as one request, whether it is idle or has 32 requests under way. Ray Serve
    applies the delays, factors and limits of `autoscaling_config` to the answer.

    Args:
        context: `AutoscalingContext` of Ray Serve.
    """
    by_replica = (context.aggregated_metrics or {}).get(REQUESTS, {})
    total = sum(by_replica.values()) + (context.total_queued_requests or 0)
    return total / context.config.get_target_ongoing_requests(), {}
