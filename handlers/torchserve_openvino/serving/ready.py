"""A worker after READY: what it has to say of itself, and when it asks to be replaced."""

import logging
import socket
from typing import Any

from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.counters import Counters
from torchserve_openvino.serving.metrics import MetricsEmitter
from torchserve_openvino.serving.policy import PolicyWatch
from torchserve_openvino.serving.prepare import Prepared
from torchserve_openvino.serving.served import describe

logger = logging.getLogger(__name__)


class ReadyState:
    """Watches a serving worker.

    Args:
        report: Of the model.
        counters: What happened to requests.
        watch: Of the policy.
        metrics: Sends what changed.
        prepared: What serves; None in eager.
    """

    def __init__(
        self,
        report: CompileReport,
        counters: Counters,
        watch: PolicyWatch,
        metrics: MetricsEmitter,
        prepared: Prepared | None,
    ) -> None:
        self.watch = watch
        self._report = report
        self._counters = counters
        self._metrics = metrics
        self._prepared = prepared
        self._builds = report.builds
        self._seen = report.builds

    @property
    def compiles_after_ready(self) -> int:
        """Compilations that a request had to wait for."""
        return self._report.builds - self._builds

    def before_call(self, context: Any) -> None:
        """Ends this worker if the call before this one showed that it has to be replaced.

        Raises:
            SystemExit: It has to.
        """
        if self.watch.replace:
            leave(context)

    def after_call(self, context: Any) -> None:
        """Sends metrics, and logs a compilation that should not have been."""
        if self._report.builds != self._seen:
            self._seen = self._report.builds
            logger.warning("%s compiled after READY: %s", context.model_name, self._report.summary_line())
        self.emit(context)

    def emit(self, context: Any) -> None:
        """Sends the metrics that changed."""
        if getattr(context, "metrics", None) is not None:
            self._metrics.emit(context.metrics, self.compiles_after_ready, bool(self.watch.violations))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: shapes, counts, compilations after READY, whether the policy holds, and bytes of memory."""
        shapes = describe(self._prepared.model, self._prepared.signatures) if self._prepared is not None else {}
        return {
            "compiles_after_ready": self.compiles_after_ready,
            "counts": self._counters.to_dict(),
            "policy": {"holds": not self.watch.violations, "violations": list(self.watch.violations)},
            "shapes": shapes,
            "memory": self._prepared.memory if self._prepared is not None else {},
        }


def leave(context: Any) -> None:
    """Ends this worker in the middle of a call, so that TorchServe starts another.

    TorchServe has no message for it, but it replaces a worker whose connection closed. It answers the requests that
    this worker was sent (500, "Worker died."), but loses those that it is gathering for the next batch: their clients
    wait for ever. While it waits for an answer it gathers none, hence in the middle of a call and never after one.

    Raises:
        SystemExit: Always.
    """
    logger.error("%s: this worker broke its fallback policy and ends, to be replaced", context.model_name)
    connection = getattr(context, "cl_socket", None)
    if connection is not None:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.warning("The connection to the frontend is closed already: %s", error)
    raise SystemExit(1)
