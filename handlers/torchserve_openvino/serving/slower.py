"""Lets eager PyTorch run the partitions that it computes faster than OpenVINO: fallbacks of the kind ``slower``.

Verification calls each case both ways, and its times show which cases are clearly faster on OpenVINO. In the others,
each partition is timed against eager PyTorch on the arguments of a call, in pairs, and then the whole call. Where eager
is faster by `MIN_GAIN` with the confidence of `precision.sure_median`, the partition or the call steps aside. The cache
keeps what was decided (`placement.py`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchserve_openvino.backend import CompiledModule
from torchserve_openvino.backend.runtime.execute import FallbackPartition
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.serving.compilation import Prepared
from torchserve_openvino.serving.placement import Placement, SlowerThere
from torchserve_openvino.serving.precision import LEAST_PAIRS, paired_seconds, seconds_of, sure_median
from torchserve_openvino.serving.shapes.warmup import Case, run_case
from torchserve_openvino.serving.stored_decision import StoredDecision
from torchserve_openvino.serving.verification.measures import CaseTimes

logger = logging.getLogger(__name__)

# Time limit for one model.
BUDGET_SECONDS = 3.0
# A partition is left on OpenVINO unless eager PyTorch is faster by this factor.
MIN_GAIN = 1.1
# A smaller loss of a call is not worth leaving OpenVINO, whose calls cost 0.1 ms whatever they compute.
MIN_SECONDS = 0.5e-3
# Time after which a few pairs are enough for one partition.
_ENOUGH = 0.2

# Name of a whole call in the report.
_MODEL = "the model"

_Call = tuple[Any, ...]
Open = Callable[[CompiledModule, Sequence[Case], bool], StoredDecision[Placement] | None]


@dataclass
class _Uses:
    """The calls of one partition.

    Attributes:
        calls: Its arguments in each case that may be slower, with the case.
        is_fast: Whether a case uses it that is fast enough, so that it stays.
        is_alone: Whether it is all that its calls run, so that the eager model does the same.
    """

    calls: list[tuple[Case, _Call]] = field(default_factory=list)
    is_fast: bool = False
    is_alone: bool = True


def fall_back_to_eager(
    prepared: Prepared, section: OpenVINOSection, times: Mapping[str, CaseTimes], stored: Open | None = None
) -> None:
    """Lets eager PyTorch run what it computes faster, as far as the policy allows it.

    Partitions of calls that run several come first, in half of the time. A case that is still slower then runs in the
    eager model as a whole: the operators of a lowered graph may be slower in eager PyTorch than those that they come
    from.

    Args:
        prepared: The model, whose cases have run.
        section: ``handler.openvino``.
        times: Times of the cases, by name; a case without is taken for slow.
        stored: Opens what other workers and earlier starts decided, which is measured only once; takes the compiled
            model, its cases, and whether partitions may leave OpenVINO. None to keep nothing.
    """
    compiled = prepared.model.compiled
    if not isinstance(compiled, CompiledModule) or not compiled.running or not prepared.cases:
        return
    decision = _Decision(prepared, compiled, section)
    placements = None
    if stored is not None:
        placements = stored(compiled, prepared.cases, not _forbidden(section))
    with placements.lock() if placements is not None else nullcontext():
        if placements is not None and (earlier := placements.load()) is not None:
            decision.apply(earlier[0])
            return
        placement = decision.measure([case for case in prepared.cases if not is_fast_enough(times.get(case.name))])
        if placements is not None and decision.is_final:
            placements.save(placement.model_dump())


class _Decision:
    """Decides for one model.

    Args:
        prepared: The model, whose cases have run.
        compiled: The same, compiled.
        section: ``handler.openvino``.
    """

    def __init__(self, prepared: Prepared, compiled: CompiledModule, section: OpenVINOSection) -> None:
        self._prepared, self._compiled, self._forbidden = prepared, compiled, _forbidden(section)
        self._tracker = prepared.report.tracker
        self._placement = Placement()
        self._disturbed: list[str] = []

    @property
    def is_final(self) -> bool:
        """Whether no measurement was disturbed, so that another one would show the same."""
        return not self._disturbed

    def measure(self, slow: Sequence[Case]) -> Placement:
        """Times the partitions of the cases that may be slower, then these cases as a whole."""
        if not slow:
            return self._placement
        start = time.perf_counter()
        uses = _uses(self._prepared, self._compiled.running, slow)
        for partition, use in uses.items():
            if not use.is_fast and not use.is_alone and partition.compiled is not None:
                self._try_partition(partition, use, start + BUDGET_SECONDS / 2)
        in_eager = {case.name for case in slow if self._try_case(case, start + BUDGET_SECONDS)}
        for partition, use in uses.items():
            if not use.is_fast and all(case.name in in_eager for case, _ in use.calls):
                self._placement.unused.append(self._compiled.running[partition].name)
        self._note_unused_and_untimed(self._placement)
        if self._disturbed:
            self._tracker.add_note(
                f"eager PyTorch seemed faster, but other processes disturbed the measurement, so that these stay on "
                f"OpenVINO until the next start: {', '.join(self._disturbed)}"
            )
        return self._placement

    def apply(self, placement: Placement) -> None:
        """Does what was decided before."""
        partitions = {running.name: partition for partition, running in self._compiled.running.items()}
        for slower in placement.partitions:
            partition = partitions.get(slower.name)
            if partition is not None:
                self._leave(partition, slower)
        cases = {case.name: case for case in self._prepared.cases}
        for slower in placement.calls:
            if slower.name in cases:
                self._leave_case(cases[slower.name], slower)
        self._note_unused_and_untimed(placement)

    def _note_unused_and_untimed(self, placement: Placement) -> None:
        for running in self._compiled.running.values():
            # A partition that no other call uses does not run on OpenVINO any more.
            if running.name in placement.unused and not self._forbidden:
                running.record.runs_on = "eager"
        if placement.untimed:
            self._tracker.add_note(
                f"not clearly faster on OpenVINO, and not timed against eager PyTorch because the {BUDGET_SECONDS:g} s "
                f"for it were over: {', '.join(placement.untimed)}"
            )

    def _leave(self, partition: FallbackPartition, slower: SlowerThere) -> None:
        """Lets a partition run in eager PyTorch from now on, if it may."""
        running = self._compiled.running[partition]
        if self._may_leave(slower.name, slower):
            partition.fall_back_to_eager()
            running.record.runs_on = "eager"
            self._count(slower.name, slower, running.graph.line)

    def _leave_case(self, case: Case, slower: SlowerThere) -> bool:
        """Lets a call run in the eager model from now on, if it may; returns whether it does."""
        args, kwargs = case.inputs
        if not self._may_leave(_MODEL, slower):
            return False
        with case.modes.on():
            leaves = self._compiled.fall_back_to_eager(*args, **kwargs)
        if leaves:
            self._count(_MODEL, slower)
        return leaves

    def _try_partition(self, partition: FallbackPartition, use: _Uses, deadline: float) -> None:
        def on_openvino() -> None:
            for case, args in use.calls:
                with case.modes.on():
                    partition.results(args)

        def in_eager() -> None:
            for case, args in use.calls:
                with case.modes.on():
                    partition.eagerly(args)

        name, cases = self._compiled.running[partition].name, ", ".join(case.name for case, _ in use.calls)
        slower = self._timed(name, name, cases, on_openvino, in_eager, deadline)
        if slower is not None:
            self._placement.partitions.append(slower)
            self._leave(partition, slower)

    def _try_case(self, case: Case, deadline: float) -> bool:
        """Returns True if the case runs in the eager model from now on."""
        if not case.compiled_shape:
            # It may be padded or split before the compiled model is called.
            return False

        def on_openvino() -> None:
            run_case(self._compiled, self._prepared.model, case)

        def in_eager() -> None:
            run_case(self._compiled.eager, self._compiled.eager, case)

        slower = self._timed(_MODEL, case.name, case.name, on_openvino, in_eager, deadline)
        if slower is None:
            return False
        self._placement.calls.append(slower)
        return self._leave_case(case, slower)

    def _timed(
        self, label: str, name: str, cases: str, on_openvino: Callable[[], None], in_eager: Callable[[], None],
        deadline: float,
    ) -> SlowerThere | None:  # fmt: skip
        """Returns both times if OpenVINO is slower for sure."""
        if time.perf_counter() >= deadline:
            self._placement.untimed.append(f"{label} ({cases})")
            return None
        # Lowered graphs of cached calls are decoded at their first call.
        in_eager()
        cost = seconds_of(on_openvino) + seconds_of(in_eager)
        left = deadline - time.perf_counter()
        contention = Contention()
        pairs = paired_seconds(on_openvino, in_eager, left, _ENOUGH) if LEAST_PAIRS * cost <= left else []
        if len(pairs) < LEAST_PAIRS:
            self._placement.untimed.append(f"{label} ({cases})")
            return None
        # The shortest times as well, which other processes disturb least.
        openvino, eager = map(min, zip(*pairs, strict=True))
        certain = sure_median([first / second for first, second in pairs]) >= MIN_GAIN and openvino >= MIN_GAIN * eager
        if not certain or openvino - eager < MIN_SECONDS:
            return None
        if (share := contention.share()) > BUSY:
            # OpenVINO's threads wait for the last of them, so that it loses more to other processes than eager PyTorch.
            self._disturbed.append(f"{label} ({cases}; threads waited {share:.1f} s for each second)")
            return None
        return SlowerThere(name=name, cases=cases, openvino=openvino, eager=eager)

    def _may_leave(self, label: str, slower: SlowerThere) -> bool:
        """Returns True if something slower may leave OpenVINO; otherwise the report notes it."""
        if self._forbidden:
            self._tracker.add_note(
                f"{label} stays on OpenVINO, although it is slower there ({_times(slower)}): {self._forbidden}"
            )
        return not self._forbidden

    def _count(self, label: str, slower: SlowerThere, where: str = "") -> None:
        if self._tracker.add_fallback("slower", label, reason=_times(slower), where=where):
            logger.warning("Fallback: %s runs in eager PyTorch (slower: %s)", label, _times(slower))


def _times(slower: SlowerThere) -> str:
    return (
        f"OpenVINO took {slower.openvino * 1e3:.3g} ms at least, and eager PyTorch {slower.eager * 1e3:.3g} ms, "
        f"at {slower.cases}"
    )


def is_fast_enough(times: CaseTimes | None) -> bool:
    """Returns True if the slowest call on OpenVINO was faster than the fastest one in eager PyTorch.

    Also where it lost less than what counts.
    """
    if times is None:
        return False
    return times.eager >= MIN_GAIN * times.compiled or times.compiled - times.eager < MIN_SECONDS


def _forbidden(section: OpenVINOSection) -> str:
    """Returns which key keeps partitions on OpenVINO; empty if none does."""
    policy = section.fallback
    if policy.allow != "all" and "slower" not in policy.allow:
        return "handler.openvino.fallback.allow has no slower"
    if policy.min_coverage:
        return f"handler.openvino.fallback.min_coverage is {policy.min_coverage:g}"
    if section.release_weights:
        return "handler.openvino.release_weights leaves no weights for eager PyTorch"
    return ""


def _uses(
    prepared: Prepared, running: Mapping[FallbackPartition, Any], slow: Sequence[Case]
) -> dict[FallbackPartition, _Uses]:
    """Runs each case once, and returns which partitions it calls."""
    uses: dict[FallbackPartition, _Uses] = {}
    is_whole = prepared.report.summary.coverage == 1.0
    for case in prepared.cases:
        with _recorded(running) as calls:
            run_case(prepared.model.compiled, prepared.model, case)
        for partition, args in calls:
            use = uses.setdefault(partition, _Uses())
            # Samples may be split into calls of other shapes.
            use.is_alone &= len(calls) == 1 and case.compiled_shape and is_whole
            if case in slow:
                use.calls.append((case, args))
            else:
                use.is_fast = True
    return uses


@contextmanager
def _recorded(partitions: Mapping[FallbackPartition, Any]) -> Iterator[list[tuple[FallbackPartition, _Call]]]:
    """Records the partitions' arguments while the context lasts; only before READY, when nobody else calls them."""
    calls: list[tuple[FallbackPartition, _Call]] = []
    for partition in partitions:
        partition.calls = calls
    try:
        yield calls
    finally:
        for partition in partitions:
            partition.calls = None


# --- whether other processes took the cores while something was timed ---------------------------------------------


# Of a process that has its cores for itself, threads wait for each other by less than this.
BUSY = 0.3
_TASKS = Path("/proc/self/task")


class Contention:
    """Measures how long this process's threads wait for a core; begins with its creation."""

    def __init__(self) -> None:
        self._start, self._waited = time.perf_counter(), _seconds_waited()

    def share(self) -> float:
        """Returns the seconds that threads have waited, all of them together, for each second; 0 if it is not known."""
        elapsed = time.perf_counter() - self._start
        return max(0.0, _seconds_waited() - self._waited) / elapsed if elapsed else 0.0


def _seconds_waited() -> float:
    """Returns the threads' time in the scheduler's queue (Linux' ``schedstat``, whose second number is in ns)."""
    total = 0
    for task in _TASKS.glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            # The thread has ended, or the kernel does not count.
            continue
    return total / 1e9
