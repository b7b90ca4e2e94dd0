"""A worker after READY: publishes its state, and exits when it has to be replaced."""

import dataclasses
import logging
import sys
import time
from typing import Any

from torchserve_openvino.cache.identity.versions import versions
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.memory import FreedMemory
from torchserve_openvino.serving.metrics import SECONDS_BETWEEN, MetricsEmitter, worker_name
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.policy import PolicyWatch
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.metric_sink import MetricSink
from torchserve_openvino.serving.requests.phases import RequestTimes
from torchserve_openvino.serving.siblings import Board
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.shadow import Shadow
from torchserve_openvino.serving.verification.yielding_mode import why_not

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_POSTS = 5.0


class ReadyState:
    """Monitors a serving worker.

    Args:
        name: The model's name.
        report: The model's report.
        counters: Counts of what happened to requests.
        watch: Checks calls against the fallback policy.
        metrics: Sends metrics that changed.
        models: The compiled models; None in eager PyTorch.
        board: Shares this worker's state with the model's other workers.
        shadow: Runs some requests again; None where ``verify.shadow`` is 0.
        ends: Whether a worker exits, to be replaced, after an answer that differed from eager PyTorch's.
        times: Where the time of requests went.
    """

    def __init__(
        self,
        name: str,
        report: CompileReport,
        counters: Counters,
        watch: PolicyWatch,
        metrics: MetricsEmitter,
        models: Models | None,
        board: Board,
        shadow: Shadow | None = None,
        ends: bool = False,
        times: RequestTimes | None = None,
    ) -> None:
        self._times = times if times is not None else RequestTimes()
        self.watch = watch
        self._name, self._report = name, report
        self._counters = counters
        self._metrics = metrics
        self._models, self._board = models, board
        self._next_post = 0.0
        self._freed = FreedMemory()
        self._builds = report.tracker.builds
        self._seen = report.tracker.builds
        self._shadow, self._ends = shadow, ends
        self._sink: MetricSink | None = None
        self._next_publish = 0.0
        if shadow is not None:
            shadow.on_mismatch, shadow.on_change = self._shadow_differs, self._shadow_checked
        self.publish()

    @property
    def compiles_after_ready(self) -> int:
        """Compilations that a request had to wait for."""
        return self._report.tracker.builds - self._builds

    def before_call(self) -> None:
        """Ends this worker if an earlier call showed that it has to be replaced.

        Raises:
            SystemExit: The worker has to be replaced.
        """
        self.leave_if_due()
        self.watch.begin()
        if self._shadow is not None:
            self._shadow.quiet.began()

    def after_call(self, metrics: MetricSink | None) -> None:
        """Sends metrics, and logs a warning if something was compiled after READY.

        Raises:
            SystemExit: OpenVINO failed in this call as in the one before; the worker has to be replaced.
        """
        if self._shadow is not None:
            self._shadow.quiet.ended()
            # Skipped requests are published here, as a comparison, which also publishes, may never come.
            if (now := time.monotonic()) >= self._next_publish:
                self._next_publish = now + SECONDS_BETWEEN
                self.publish()
        if self._report.tracker.builds != self._seen:
            self._seen = self._report.tracker.builds
            logger.warning("%s compiled after READY: %s", self._name, self._report.summary_line())
        if time.monotonic() >= self._next_post:
            self.post()
            self._freed.give_back()
        self.emit(metrics)
        if self.watch.end():
            self._leave()

    def leave_if_due(self) -> None:
        """Ends this worker if it has to be replaced.

        Raises:
            SystemExit: It has to be.
        """
        if self.watch.replace:
            self._leave()

    def _leave(self) -> None:
        """Ends this worker in the middle of a call, so that its host starts another.

        Raises:
            SystemExit: Always.
        """
        logger.error("%s: this worker violates its policy and exits, to be replaced", self._name)
        raise SystemExit(1)

    def emit(self, metrics: MetricSink | None) -> None:
        """Sends the metrics that changed."""
        self._sink = metrics
        if metrics is not None:
            self._metrics.emit(metrics, self.compiles_after_ready, bool(self.watch.violations))

    def post(self) -> None:
        """Publishes this worker's state, so that every worker of the model can report it."""
        self._next_post = time.monotonic() + SECONDS_BETWEEN_POSTS
        facts = self.to_dict()
        self._board.post(
            {
                "worker": worker_name(sys.argv),
                "summary": dataclasses.asdict(self._report.summary),
                "fallbacks": self._report.fallback_counts(),
                "verified": self._report.verified,
                **{name: facts[name] for name in ("compiles_after_ready", "counts", "policy")},
            }
        )

    def workers(self) -> list[dict[str, Any]]:
        """Returns the state of each worker of the model, JSON-safe: this one's is current, others' some seconds old."""
        self.post()
        return self._board.read()

    def publish(self) -> None:
        """Updates the report with the results of shadow verification."""
        if self._shadow is not None:
            self._report.tracker.verify.state_shadow(self._shadow.to_dict())

    def _shadow_differs(self, problem: str) -> None:
        if self._ends:
            self.watch.broken(f"verify.shadow: {problem}")

    def _shadow_checked(self) -> None:
        """Publishes a comparison, in the thread that made it: the next request may be a long time off."""
        self.publish()
        self.emit(self._sink)

    def to_dict(self) -> dict[str, Any]:
        """Returns, JSON-safe: shapes, counts, compilations after READY, the policy's violations, bytes of memory."""
        return {
            "compiles_after_ready": self.compiles_after_ready,
            "counts": self._counters.to_dict(),
            "times": self._times.to_dict(),
            "policy": {"holds": not self.watch.violations, "violations": list(self.watch.violations)},
            "shapes": self._models.describe() if self._models is not None else {},
            "memory": self._models.memory if self._models is not None else {},
        }


def shadow_for(
    eager: Any, section: VerifySection, models: Models | None, report: CompileReport, name: str
) -> Shadow | None:
    """Creates the shadow verification that ``verify.shadow`` configures; None where it is 0.

    Args:
        eager: The model in PyTorch.
        section: ``handler.openvino.verify``.
        models: The compiled models; None in eager PyTorch.
        report: Gets a note with the reason if the model can't be run again.
        name: The model's name, stored with each mismatch.
    """
    if not section.shadow:
        return None
    prepared = models.root if models is not None else None
    if models is None:
        reason = "the model runs in eager PyTorch itself"
    elif prepared is None:
        reason = "only calls of self.model can be repeated, and self.model is not a torch.nn.Module"
    else:
        # Without known inputs nothing has run yet: the first request shows whether the model can be run again.
        reason = why_not(eager, prepared.cases[0].inputs) if prepared.cases else ""
    if reason:
        logger.warning("verify.shadow is off: %s", reason)
        report.tracker.add_note(f"verify.shadow is off: {reason}")
    judge = prepared.judge if prepared is not None else None
    judge = judge or Judge(report.summary.precision or "f32", section)
    ran = prepared is not None and bool(prepared.cases)
    shadow = Shadow(eager, section, judge, reason_against=reason, ran=ran, facts={"model": name, **versions()})
    if prepared is not None:
        prepared.model.shadow = shadow
    return shadow
