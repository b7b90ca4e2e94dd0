"""Targets for autoscalers, from what the tuner measured of one server."""

from typing import Any

from torchserve_openvino.tune.candidates import Candidate

# Of the highest rate that held: a new replica takes half a minute or more to be READY, and load grows meanwhile.
_SHARE = 0.7


def autoscaling(candidate: Candidate, rate: float, p50_ms: float, ready_seconds: float) -> dict[str, Any]:
    """Returns targets for KEDA and Ray Serve, JSON-safe.

    KEDA counts requests/s of a pod that is one TorchServe with this configuration. Ray counts the requests that a
    replica, which is one worker, holds at the same time: by Little's law, their rate times the time that each takes.

    Args:
        candidate: The configuration.
        rate: Highest rate in requests/s at which its limits held, of all its workers together.
        p50_ms: Median latency at that rate, in milliseconds.
        ready_seconds: From the start of a server until the model was READY.
    """
    target = _SHARE * rate
    ongoing = max(1.0, target * p50_ms / 1e3 / candidate.workers)
    return {
        "share_of_highest_rate": _SHARE,
        "ready_seconds": round(ready_seconds, 1),
        "keda": {
            "type": "prometheus",
            "metadata": {"query": "sum(rate(ts_inference_requests_total[1m]))", "threshold": f"{target:.3g}"},
        },
        "ray": {
            "autoscaling_config": {"target_ongoing_requests": round(ongoing, 1)},
            "max_ongoing_requests": max(2, round(2 * ongoing), candidate.batch_size),
        },
    }
