"""The state of one model's calls in the calling thread: for recording calls, and for the report."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.backend.routes.frozen import GraphCall


@dataclass
class Unverified:
    """A graph for one set of weights, whose results are yet to be compared with eager PyTorch (``verify: first``).

    Attributes:
        verified: Whether they were compared, and match.
        failed: Whether OpenVINO failed in the call that runs, which shows nothing about the graph then.
    """

    verified: bool = False
    failed: bool = False


class CallRecorder(threading.local):
    """Shared by everything that runs or counts a model's calls; each thread has its own values.

    Attributes:
        graph_calls: Number of compiled graphs that the thread ran.
        lost_frames: Number of frames that it ran in eager because Dynamo gave up on them.
        in_graph: Number of compiled graphs that it is currently inside of.
        recorded: Calls of graphs, while a call of the model is recorded; else None.
        newest: The graph that was compiled last.
        unverified: The graphs that ran in the current call and were never compared with eager PyTorch, if the call's
            result is compared; else None.
    """

    graph_calls = 0
    lost_frames = 0
    in_graph = 0
    recorded: list[GraphCall] | None = None
    newest: Any = None
    unverified: list[Unverified] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[GraphCall]]:
        """Records calls of graphs in the list that it yields, while the context lasts."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None
