"""One request of a call to a handler: what is generated for it, and what is sent."""

from typing import Any

from torchserve_openvino.errors import ItemError
from torchserve_openvino.serving.requests.isolation import server_fault
from torchserve_openvino.tasks.generation.active_request import ActiveRequest
from torchserve_openvino.tasks.generation.answers import Plain, event
from torchserve_openvino.tasks.openai import LAST_EVENT


class Call:
    """One request of a call to `handle`.

    Attributes:
        openai: Whether it was sent to one of OpenAI's endpoints, and so gets errors in their form.
        exchange: What is generated; None if the answer is known already.
        bodies: Writes its answer.
        answer: The answer that is known already, or the refusal.
        begun: Whether a piece of the answer was sent.
        ended: Whether its end was sent.
    """

    def __init__(self) -> None:
        self.openai = False
        self.exchange: ActiveRequest | None = None
        self.bodies: Plain | None = None
        self.answer: Any = None
        self.begun = self.ended = False

    @property
    def streams(self) -> bool:
        """Whether its answer is sent piece by piece; one that fails before its first piece is refused instead."""
        exchange = self.exchange
        return exchange is not None and exchange.request.stream and (self.begun or exchange.error is None)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.exchange is None or self.exchange.done

    def fail(self, error: ItemError) -> None:
        """Refuses the request, or ends its stream with the error."""
        if self.exchange is None:
            self.answer = error
        else:
            self.exchange.cancel()
            self.exchange.error = error

    def pieces(self) -> str:
        """Returns the events of a stream that are new, with its end once it is done."""
        exchange, bodies = self.exchange, self.bodies
        assert exchange is not None and bodies is not None
        if self.ended:
            return ""
        try:
            events = [bodies.piece(exchange, choice, delta) for choice, delta in exchange.deltas()]
        except Exception as error:
            self.fail(server_fault(error))
            events = []
        if (events or exchange.done) and not self.begun:
            self.begun = True
            events = [*bodies.begin(exchange), *events]
        if not exchange.done:
            return "".join(map(event, events))
        self.ended = True
        events += bodies.end(exchange) if exchange.error is None else [bodies.error(exchange.error)]
        return "".join(map(event, events)) + LAST_EVENT

    def whole(self) -> Any:
        """Returns the answer, or its refusal, once it is done."""
        exchange, bodies = self.exchange, self.bodies
        if exchange is None or bodies is None:
            return self.answer
        if exchange.error is not None:
            return exchange.error
        try:
            for _ in exchange.deltas():
                pass
            return bodies.whole(exchange)
        except Exception as error:
            # Other requests go on, whatever is wrong with this one.
            return server_fault(error)
