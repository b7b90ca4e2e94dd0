"""`Pending`: a request in the front process, from its arrival to the last piece of its response."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchserve_openvino.serving.requests.messages import HEALTH_HEADER, EnvelopeKind, Response


@dataclass(eq=False)
class Pending:
    """A request, and the response as it comes. It belongs to the event loop's thread.

    Attributes:
        body: The body, as it came.
        content_type: Its type.
        parameters: Those of the URL.
        headers: Headers by name, in lower case.
        id: The request's id.
        envelope: The protocol of the body; None for the handler's own.
        arrived: When it came, in seconds since 1970.
        is_gone: Whether the client has hung up.
        is_answered: Whether its last piece was added.
        on_gone: Called when the client hangs up.
        on_left: Called when its response was sent, or nobody waits for it any more.
    """

    body: bytes
    content_type: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    envelope: EnvelopeKind | None = None
    arrived: float = 0.0
    is_gone: bool = False
    is_answered: bool = False
    on_gone: Callable[[], None] | None = None
    on_left: Callable[[], None] | None = None
    _pieces: asyncio.Queue[Response | None] = field(default_factory=asyncio.Queue)

    @property
    def is_probe(self) -> bool:
        """Whether it asks for a worker's health."""
        return HEALTH_HEADER in self.headers

    @property
    def group(self) -> tuple[EnvelopeKind | None, bool]:
        """Requests of one group may share a call: of one protocol, and not of a probe with others."""
        return self.envelope, self.is_probe

    def head(self) -> dict[str, Any]:
        """Returns what a worker gets of it, besides the body."""
        return {
            "bytes": len(self.body), "type": self.content_type, "parameters": dict(self.parameters),
            "headers": dict(self.headers), "id": self.id, "envelope": self.envelope, "arrived": self.arrived,
        }  # fmt: skip

    def add(self, piece: Response, last: bool) -> None:
        """Adds a piece of the response; nothing once the last one was added."""
        if self.is_answered:
            return
        self._pieces.put_nowait(piece)
        if last:
            self.is_answered = True
            self._pieces.put_nowait(None)

    def hang_up(self) -> None:
        """Marks that nobody waits for the response any more."""
        if not self.is_gone and not self.is_answered:
            self.is_gone = True
            if self.on_gone is not None:
                self.on_gone()

    async def pieces(self) -> AsyncIterator[Response]:
        """Yields the pieces as they come; the first has the status and type of the response."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
