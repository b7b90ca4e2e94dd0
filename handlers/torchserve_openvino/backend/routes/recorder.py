"""What one model's calls do in the calling thread, seen from inside its graphs: for recording, and for the books."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchserve_openvino.backend.routes.frozen import GraphCall


class CallRecorder(threading.local):
    """Handed to everything that runs or counts a model's calls; each thread sees its own values.

    Attributes:
        graph_calls: Compiled graphs that the thread ran.
        lost_frames: Frames that it ran in eager because Dynamo gave them up.
        in_graph: How many compiled graphs it is inside of.
        recorded: Calls of graphs, while a call of the model is recorded; else None.
        newest: The graph that was compiled last.
    """

    graph_calls = 0
    lost_frames = 0
    in_graph = 0
    recorded: list[GraphCall] | None = None
    newest: Any = None

    @contextmanager
    def recording(self) -> Iterator[list[GraphCall]]:
        """While it lasts, calls of graphs are put down in the list that it gives."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None
