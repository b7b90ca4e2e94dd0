"""Which precision to infer with where the user named none: the fastest whose answers pass verification."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchserve_openvino.backend.build import device_capabilities
from torchserve_openvino.config import ResolvedOptions

HINT = "config.INFERENCE_PRECISION_HINT"
# OPTIMIZATION_CAPABILITIES to INFERENCE_PRECISION_HINT; f32 comes first, since it is the one to beat.
PRECISIONS = {"FP32": "f32", "BF16": "bf16", "FP16": "f16"}
# A lower precision must pay for its rounding by more than the noise of a measurement.
MIN_GAIN = 1.05


@dataclass(frozen=True)
class Trial:
    """One precision that was compiled, verified and timed.

    Attributes:
        seconds: One call of each warm-up case.
        verify: Result of `verify.compare`.
        coverage: Share of operators on OpenVINO: eager PyTorch, where a plugin lacks a kernel, may be fast and right.
    """

    precision: str
    seconds: float
    verify: dict[str, Any]
    coverage: float = 1.0


def candidates(resolved: ResolvedOptions | None) -> list[str]:
    """Precisions to try; empty where the user stated one (or an execution mode), or the device is a virtual one."""
    if resolved is None or resolved.sources.get(HINT) != "default":
        return []
    device = resolved.options.device
    if ":" in device or device == "AUTO":
        return []
    capabilities = device_capabilities(device)
    return [precision for name, precision in PRECISIONS.items() if name in capabilities]


def with_precision(resolved: ResolvedOptions, precision: str) -> ResolvedOptions:
    """The options with a precision of our choice, and its source."""
    config = {**resolved.options.config, "INFERENCE_PRECISION_HINT": precision}
    return replace(
        resolved,
        options=replace(resolved.options, config=config),
        sources={**resolved.sources, HINT: "chosen: the fastest that passes verification"},
    )


def choose(trials: Sequence[Trial]) -> int:
    """Index of the fastest trial that passed and covers as much as the first; the first one where none did."""
    best = 0
    for index, trial in enumerate(trials):
        if trial.coverage < trials[0].coverage:
            continue
        gain = MIN_GAIN if trials[best].verify["passed"] else 0.0
        if trial.verify["passed"] and trial.seconds * gain < trials[best].seconds:
            best = index
    return best


def explain(trials: Sequence[Trial], chosen: int) -> dict[str, Any]:
    """What was tried, JSON-safe."""
    tried = {
        trial.precision: {
            "ms": round(trial.seconds * 1e3, 3),
            "passed": trial.verify["passed"],
            "coverage": trial.coverage,
            "max_abs": trial.verify["max_abs"],
            "cosine": trial.verify["cosine"],
        }
        for trial in trials
    }
    return {"chosen": trials[chosen].precision, "tried": tried}
