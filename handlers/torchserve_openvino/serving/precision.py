"""Which precision a model is served in: f32 unless the YAML says otherwise; ``auto`` measures once and remembers."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchserve_openvino.backend.runtime.build import device_capabilities, device_facts
from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.key import RUN_PROPERTIES, make_key
from torchserve_openvino.cache.identity.versions import versions
from torchserve_openvino.cache.open import WORKERS_PREFIX
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.errors import ConfigError

logger = logging.getLogger(__name__)

PROPERTY = "INFERENCE_PRECISION_HINT"
HINT = f"config.{PROPERTY}"
KEY = "handler.openvino.precision"
# OPTIMIZATION_CAPABILITIES to INFERENCE_PRECISION_HINT; f32 comes first, since it is the one to beat.
PRECISIONS = {"FP32": "f32", "BF16": "bf16", "FP16": "f16"}
# Less is not worth the rounding.
MIN_GAIN = 1.1
# How sure it has to be that the median gain is at least `MIN_GAIN`.
CONFIDENCE = 0.95
# With fewer pairs the bound is that of the worst one; with more, the machine's noise decides less.
MIN_PAIRS, MAX_PAIRS = 8, 41
# Of timing, for each pair of precisions; the least number of pairs is timed in any case.
MAX_SECONDS = 20.0
# Where a worker without a cache keeps its decision for the model's other workers: in the unpacked archive.
FOLDER = f"{WORKERS_PREFIX}precision"


@dataclass(frozen=True)
class TimedPrecision:
    """One precision that was compiled, verified and timed against f32.

    Attributes:
        gain: Median of f32's time by this one's, pair by pair; 1 for f32.
        sure_gain: What the median gain is at least, with `CONFIDENCE`.
        verify: Result of `verify.compare`.
        coverage: Share of operators on OpenVINO: eager PyTorch, where a plugin lacks a kernel, may be fast and right.
        pairs: How many pairs of calls were timed.
    """

    precision: str
    verify: dict[str, Any]
    gain: float = 1.0
    sure_gain: float = 1.0
    coverage: float = 1.0
    pairs: int = 0


def is_open(resolved: ResolvedOptions | None) -> bool:
    """Whether ``pt2.compile.options.config`` leaves the precision open: what it states comes before our key."""
    return resolved is not None and resolved.sources.get(HINT) == "default"


def candidates(resolved: ResolvedOptions) -> list[str]:
    """Precisions that ``auto`` tries: those that the device computes fast; only f32 for a virtual device."""
    device = resolved.options.device
    if ":" in device or device == "AUTO":
        return ["f32"]
    capabilities = device_capabilities(device)
    return ["f32"] + [name for fast, name in PRECISIONS.items() if fast in capabilities and name != "f32"]


def with_precision(resolved: ResolvedOptions, precision: str, source: str) -> ResolvedOptions:
    """The options with a precision that they leave open.

    Args:
        precision: ``f32``, ``bf16`` or ``f16``.
        source: Who says so, for the report.

    Raises:
        ConfigError: The device does not compute in it, and would take another without a word.
    """
    device = resolved.options.device
    if precision != "f32" and ":" not in device and device != "AUTO":
        has = [name for fast, name in PRECISIONS.items() if fast in device_capabilities(device)]
        if precision not in has:
            raise ConfigError(
                f"is {precision}, which {device} of this machine does not compute in; it has {', '.join(has)}. Set one "
                "of these, or auto, which takes what the machine has.",
                key=KEY,
            )
    config = {**resolved.options.config, PROPERTY: precision}
    options = replace(resolved.options, config=config)
    return replace(resolved, options=options, sources={**resolved.sources, HINT: source})


# --- auto: measured once ------------------------------------------------------------------------------------------


def timed_pairs(first: Callable[[], object], second: Callable[[], object]) -> list[float]:
    """Times two calls in turns; the first one's seconds by the second one's, pair by pair."""
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < MIN_PAIRS or (len(ratios) < MAX_PAIRS and time.perf_counter() - start < MAX_SECONDS):
        # Who comes first changes, for the second one finds the caches of the CPU full of the first.
        if len(ratios) % 2:
            after, before = _seconds(second), _seconds(first)
        else:
            before, after = _seconds(first), _seconds(second)
        ratios.append(before / after)
    return ratios


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sure_median(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """What the median of the values' population is at least, whatever its distribution.

    It is the k-th smallest value, where the chance that fewer than k of n lie below the median, Binomial(n, 1/2), is
    at most ``1 - confidence``: the bound of the one-sided sign test (Conover, Practical Nonparametric Statistics, 3.4).
    Minus infinity where there are too few values to be as sure as that.
    """
    n = len(values)
    chances = accumulate(math.comb(n, k) / 2**n for k in range(n))
    below = sum(chance <= 1.0 - confidence for chance in chances)
    return sorted(values)[below - 1] if below else -math.inf


def choose(trials: Sequence[TimedPrecision]) -> int:
    """Index of the trial that is served.

    It is the first, f32, unless another passed verification, covers as much, and is faster by `MIN_GAIN` for sure.
    Where f32 failed it is judged as well: a wider tolerance of another precision would only hide that.
    """
    best = 0
    others = trials[1:] if trials[0].verify["passed"] else ()
    for index, trial in enumerate(others, 1):
        right = trial.verify["passed"] and trial.coverage >= trials[0].coverage
        if right and trial.sure_gain >= MIN_GAIN and (not best or trial.gain > trials[best].gain):
            best = index
    return best


def explain(trials: Sequence[TimedPrecision], chosen: int) -> dict[str, Any]:
    """What was tried, JSON-safe."""
    tried = {
        trial.precision: {
            "gain": round(trial.gain, 3),
            "at_least": round(trial.sure_gain, 3),
            "pairs": trial.pairs,
            "passed": trial.verify["passed"],
            "coverage": trial.coverage,
            "max_abs": trial.verify["max_abs"],
            "cosine": trial.verify["cosine"],
        }
        for trial in trials
    }
    return {"chosen": trials[chosen].precision, "needs_gain": MIN_GAIN, "tried": tried}


class Decisions:
    """Where ``auto`` keeps what it decided, so that all workers and restarts of a model on this machine follow.

    Args:
        store: The model's cache, which an archive may carry; None without.
        model_dir: The unpacked archive, which the model's workers share; used where no cache can be written to.
        model: The eager model.
        resolved: Its options.
        cases: Names of the shapes that are timed.
    """

    def __init__(
        self, store: Store | None, model_dir: Path, model: Any, resolved: ResolvedOptions, cases: Sequence[str]
    ) -> None:
        if store is None or store.read_only:
            store = Store(model_dir / FOLDER, packaged=store.root if store is not None else None)
        self._store = store
        found = fingerprint(model)
        ov_config = {
            name: value for name, value in resolved.options.config.items() if name not in {*RUN_PROPERTIES, PROPERTY}
        }
        device = resolved.options.device
        facts = device_facts(device)
        self._fields = {
            **versions(),
            "code": found.code,
            "weights": found.weights,
            "cases": list(cases),
            "device": device,
            "device_name": facts["names"],
            "capabilities": {"fast": facts["fast"], "cpu": facts["cpu"], "limit": facts["limit"]},
            "ov_config": ov_config,
        }
        self._key = make_key("precision", self._fields)

    def lock(self) -> AbstractContextManager[bool]:
        """Held while one worker measures; the others wait, then follow."""
        return self._store.lock("precision", self._key)

    def load(self) -> dict[str, Any] | None:
        """What was decided before, as `explain` made it; None where nothing was."""
        entry = self._store.get("precision", self._key)
        if entry is None:
            return None
        if entry.body.get("chosen") not in PRECISIONS.values():
            logger.warning("A stored choice of precision cannot be used and is rebuilt: %s", entry.body)
            return None
        return {**entry.body, "decided": entry.created}

    def save(self, facts: dict[str, Any]) -> bool:
        """Keeps a decision; False where there is no place that can be written to, so that nobody could follow it."""
        return self._store.put("precision", self._key, fields=self._fields, body=facts) is not None
