"""Checks that a route from the cache still gives eager PyTorch's result, before its result is used."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import _pytree as pytree

from torchserve_openvino.backend.routes.frozen import Route
from torchserve_openvino.backend.runtime.compare import difference, reordered
from torchserve_openvino.report import Tracker

logger = logging.getLogger(__name__)


class RouteProof:
    """Compares a route with eager PyTorch on the caller's values, and on the same in another order, in poisoned memory.

    Args:
        eager: The model.
        tracker: Holds the precision, and the failures of OpenVINO.
        poisoned: Poisons the memory of results.

    Attributes:
        is_proof: Whether OpenVINO computed all of the last run's results: where it refused the caller's values, eager
            PyTorch was compared with itself.
    """

    def __init__(
        self, eager: Callable[..., Any], tracker: Tracker, poisoned: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._eager = eager
        self._tracker = tracker
        self._poisoned = poisoned
        self._precision = str(tracker.config.get("effective_precision", ""))
        self.is_proof = False

    def run(self, route: Route, leaves: list[Any], call: Any, *, compares: bool) -> tuple[Any, str]:
        """Runs a route, and compares its result.

        Args:
            route: The route.
            leaves: The caller's leaves.
            call: The same as arguments and keyword arguments.
            compares: Whether to compare with eager PyTorch; if the route fails, eager runs in any case.

        Returns:
            The result for the caller's values, and what is wrong with the route; empty if nothing is.
        """
        failures, refusals = _failures(self._tracker), _failures(self._tracker, by_request=True)
        result, problem = self._tried(route, leaves)
        if compares or problem:
            # If eager raises as well, the caller's input is at fault, not the entry.
            expected = self._eager(*call[0], **call[1])
            problem = problem or difference(result, expected, self._precision)
        if compares and not problem:
            problem = self._on_others(route, call)
        if _failures(self._tracker) != failures:
            problem = problem or "OpenVINO failed on it"
        self.is_proof = _failures(self._tracker, by_request=True) == refusals
        return result, problem

    def _tried(self, route: Route, leaves: list[Any]) -> tuple[Any, str]:
        try:
            with self._poisoned():
                return route(leaves), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _on_others(self, route: Route, call: Any) -> str:
        """Returns what is wrong for other values than the caller's; empty if nothing is."""
        other = reordered(call)
        if other is None:
            return ""
        try:
            expected = self._eager(*other[0], **other[1])
        except Exception as error:
            # The order of the values matters to this model.
            logger.info("A cached model is compared on the caller's values alone; eager refuses others: %s", error)
            return ""
        result, problem = self._tried(route, pytree.tree_leaves(other))
        return problem or difference(result, expected, self._precision)


def _failures(tracker: Tracker, *, by_request: bool = False) -> int:
    """Counts calls of partitions on which OpenVINO failed, those caused by the request or the others."""
    failures = [f for f in list(tracker.fallbacks) if f.kind == "runtime_failed"]
    return sum(f.count for f in failures if f.caused_by_request == by_request)
