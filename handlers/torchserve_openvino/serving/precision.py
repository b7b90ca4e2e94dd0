"""Chooses the precision of a served model: f32 unless the YAML says otherwise; ``auto`` measures once and stores it."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from torchserve_openvino.backend.runtime.build import device_capabilities
from torchserve_openvino.cache.identity.fingerprint import Fingerprint
from torchserve_openvino.cache.identity.key import RUN_PROPERTIES
from torchserve_openvino.cache.open import WORKERS_PREFIX
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.openvino.precisions import BF16X3, CAPABILITIES, no_bf16x3
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.files.json_text import with_names
from torchserve_openvino.serving.shapes.warmup import Case
from torchserve_openvino.serving.stored_decision import StoredDecision

logger = logging.getLogger(__name__)

PROPERTY = "INFERENCE_PRECISION_HINT"
HINT = f"config.{PROPERTY}"
KEY = "handler.openvino.precision"
# A candidate beside these: the quantized model of an archive that keeps both.
INT8 = "int8"
# A smaller gain is not worth the rounding errors.
MIN_GAIN = 1.1
# Confidence required that the median gain is at least `MIN_GAIN`.
CONFIDENCE = 0.95
# Fewer pairs give no bound with that confidence, whatever they show.
LEAST_PAIRS = 5
# With fewer pairs, the bound of the gain is the worst pair's; more pairs average out the machine's noise.
MIN_PAIRS, MAX_PAIRS = 8, 41
# After this time, `MIN_PAIRS` pairs are enough.
ENOUGH_SECONDS = 4.0
# Folder in the unpacked archive where a worker without a cache stores its decision for the model's other workers.
FOLDER = f"{WORKERS_PREFIX}precision"


@dataclass(frozen=True)
class TimedPrecision:
    """One precision that was compiled, verified and timed against f32.

    Attributes:
        gain: Median over the pairs of f32's time divided by this precision's; 1 for f32.
        sure_gain: Lower bound of the median gain, with `CONFIDENCE`.
        verify: Result of `verify.compare`.
        coverage: Share of operators on OpenVINO: where a plugin lacks kernels, eager PyTorch may be fast and correct.
        pairs: How many pairs of calls were timed.
    """

    precision: str
    verify: dict[str, Any]
    gain: float = 1.0
    sure_gain: float = 1.0
    coverage: float = 1.0
    pairs: int = 0


def is_open(resolved: ResolvedOptions | None) -> bool:
    """Whether ``pt2.compile.options.config`` leaves the precision open; a value there overrides our key."""
    return resolved is not None and resolved.sources.get(HINT) == "default"


def candidates(resolved: ResolvedOptions) -> list[str]:
    """Returns what ``auto`` tries: f32 and the precisions that the device computes fast; only f32 for a virtual one.

    The fastest come first, since the time for trials is limited. Where there is bf16, f16 is no candidate: it is as
    fast, and overflows at 65,504.
    """
    device = resolved.options.device
    if ":" in device or device == "AUTO":
        return ["f32"]
    capabilities = device_capabilities(device)
    narrow = [name for fast, name in CAPABILITIES.items() if fast in capabilities and name != "f32"]
    split = [BF16X3] if no_bf16x3(device) is None else []
    return ["f32", *narrow[:1], *split]


def with_precision(resolved: ResolvedOptions, precision: str, source: str) -> ResolvedOptions:
    """Returns the options with the precision set, which they leave open.

    Args:
        precision: ``f32``, ``bf16x3``, ``bf16`` or ``f16``.
        source: Where the value comes from, for the report.

    Raises:
        ConfigError: The device does not compute in this precision, and would silently use another.
    """
    device = resolved.options.device
    if precision == BF16X3:
        if why := no_bf16x3(device):
            raise ConfigError(f"is {BF16X3}, which {why}", key=KEY)
    elif precision != "f32" and ":" not in device and device != "AUTO":
        has = [name for fast, name in CAPABILITIES.items() if fast in device_capabilities(device)]
        if precision not in has:
            raise ConfigError(
                f"is {precision}, which {device} on this machine does not support; it supports {', '.join(has)}. Set "
                "one of these, or auto.",
                key=KEY,
            )
    config = {**resolved.options.config, PROPERTY: precision}
    options = replace(resolved.options, config=config)
    return replace(resolved, options=options, sources={**resolved.sources, HINT: source})


# --- auto: measured once ------------------------------------------------------------------------------------------


def timed_pairs(
    first: Callable[[], object], second: Callable[[], object], seconds: float, enough: float = ENOUGH_SECONDS
) -> list[float]:
    """Times two calls alternately; returns the first one's seconds divided by the second one's, for each pair.

    Args and limits are those of `paired_seconds`.
    """
    return [before / after for before, after in paired_seconds(first, second, seconds, enough)]


def paired_seconds(
    first: Callable[[], object], second: Callable[[], object], seconds: float, enough: float = ENOUGH_SECONDS
) -> list[tuple[float, float]]:
    """Times two calls alternately; returns the seconds of both, for each pair.

    The number of pairs depends on the time that they take and not on what they show, which would bias the result.

    Args:
        first: A call.
        second: Another call.
        seconds: Time limit; the pair that exceeds it is the last.
        enough: Time after which `MIN_PAIRS` pairs are enough.
    """
    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(pairs) < MAX_PAIRS:
        elapsed = time.perf_counter() - start
        if elapsed >= seconds or (elapsed >= enough and len(pairs) >= MIN_PAIRS):
            break
        # The order alternates, since the later call of a pair finds the CPU caches filled by the earlier one.
        if len(pairs) % 2:
            after, before = seconds_of(second), seconds_of(first)
        else:
            before, after = seconds_of(first), seconds_of(second)
        pairs.append((before, after))
    return pairs


def seconds_of(call: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sure_median(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Returns a lower confidence bound of the population's median, for any distribution.

    It is the k-th smallest value, for the largest k such that the probability that fewer than k of n values lie below
    the median, by Binomial(n, 1/2), is at most ``1 - confidence``: the bound of the one-sided sign test (Conover,
    Practical Nonparametric Statistics, 3.4). Minus infinity if there are too few values for that confidence.
    """
    n = len(values)
    chances = accumulate(math.comb(n, k) / 2**n for k in range(n))
    below = sum(chance <= 1.0 - confidence for chance in chances)
    return sorted(values)[below - 1] if below else -math.inf


def ranking(trials: Sequence[TimedPrecision]) -> list[str]:
    """Returns the precisions that may be served, best first; the last one is f32.

    Another one is served only if it passed verification, has at least f32's coverage, and is faster by `MIN_GAIN` with
    `CONFIDENCE`. If f32 failed verification, it is chosen all the same, and refused or reported later: another
    precision's wider tolerance would only hide the failure.
    """
    base, *others = trials
    if not base.verify["passed"]:
        return [base.precision]
    right = [
        trial
        for trial in others
        if trial.verify["passed"] and trial.coverage >= base.coverage and trial.sure_gain >= MIN_GAIN
    ]
    return [trial.precision for trial in sorted(right, key=lambda trial: -trial.gain)] + [base.precision]


def explain(
    trials: Sequence[TimedPrecision], *, not_tried: Mapping[str, str] | None = None, cases: Sequence[str] = (),
    seconds: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the choice and the results of all trials, JSON-safe.

    Args:
        trials: Of f32 first.
        not_tried: Why each of the other candidates was not tried.
        cases: Names of the shapes that were timed.
        seconds: How long the trials took.
    """
    tried = {
        trial.precision: {
            "gain": round(trial.gain, 3),
            "at_least": round(trial.sure_gain, 3),
            "pairs": trial.pairs,
            "passed": trial.verify["passed"],
            "coverage": trial.coverage,
            "max_abs": with_names(trial.verify["max_abs"]),
            "cosine": with_names(trial.verify["cosine"]),
            # Why a precision lost although it is faster.
            "problem": next(iter(trial.verify.get("problems", ())), ""),
            "measure": with_names(trial.verify.get("measure")),
        }
        for trial in trials
    }
    order = ranking(trials)
    return {
        "chosen": order[0],
        "order": order,
        "needs_gain": MIN_GAIN,
        "tried": tried,
        "not_tried": dict(not_tried or {}),
        "rejected": {},
        "cases": list(cases),
        "seconds": round(seconds, 1),
    }


def without(facts: Mapping[str, Any], name: str, problem: str) -> dict[str, Any]:
    """Returns a decision for the next best precision.

    Args:
        facts: What `explain` returned.
        name: The precision that is not served.
        problem: Why it is not.
    """
    order = [precision for precision in facts["order"] if precision != name]
    rest = {key: value for key, value in facts.items() if key != "decided"}
    return {**rest, "chosen": order[0], "order": order, "rejected": {**facts["rejected"], name: problem}}


_Name = Literal["f32", "bf16x3", "bf16", "f16", "int8"]


class _Trial(BaseModel):
    model_config = ConfigDict(extra="forbid")

    gain: float
    at_least: float
    pairs: int
    passed: bool
    coverage: float
    max_abs: float | str | None
    cosine: float | str | None
    problem: str
    measure: dict[str, str | float] | None


class StoredChoice(BaseModel):
    """The types in the result of `explain`."""

    model_config = ConfigDict(extra="forbid")

    chosen: _Name
    order: list[_Name]
    needs_gain: float
    tried: dict[str, _Trial]
    not_tried: dict[str, str]
    rejected: dict[str, str]
    cases: list[str]
    seconds: float


def stored_choice(
    store: Store | None,
    model_dir: Path,
    model: Fingerprint,
    resolved: ResolvedOptions,
    arguments: Mapping[str, Any],
    cases: Sequence[Case],
    quantized: str = "",
    judged_by: Mapping[str, Any] | None = None,
) -> StoredDecision[StoredChoice]:
    """Opens what ``auto`` decided: all workers and restarts of a model on this machine use the same precision.

    Args:
        store: The model's cache, which an archive may include; None if there is none.
        model_dir: The unpacked archive, which the model's workers share; used if there is no writable cache.
        model: The fingerprint of the eager model.
        resolved: The backend's options.
        arguments: See `StoredDecision`.
        cases: The calls that are compiled.
        quantized: Digest of the weights of the quantized model beside it; empty if there is none.
        judged_by: The bounds that candidates had to meet: with others, another one may pass.
    """
    behind: Store | None = None
    if store is None or not store.writable:
        behind, store = store, Store(model_dir / FOLDER)
    fields = {"quantized": quantized, "judged_by": dict(judged_by or {})}
    without = {*RUN_PROPERTIES, PROPERTY}
    return StoredDecision("precision", StoredChoice, store, model, resolved, arguments, cases, without, fields, behind)
