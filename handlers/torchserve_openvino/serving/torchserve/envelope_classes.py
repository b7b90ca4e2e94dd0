"""Lets the workers of handlers answer requests in TorchServe's envelopes (`service_envelope` in config.properties).

TorchServe 0.12's own `json` fails a whole batch for one bad request; its `kserve` and `kservev2` read only the first
request of a batch, and TorchServe answers 503 to all when the number of answers differs. The frontend chooses the
envelope, which wraps a handler before the handler is initialized. So `take_over` replaces the `handle` of those three
classes, for this package's handlers; any other handler keeps upstream's. tests/contract pins what this relies on.
"""

from typing import Any

from torchserve_openvino.serving.requests.messages import EnvelopeKind
from torchserve_openvino.serving.torchserve.base import HAS_TORCHSERVE, worker_of
from torchserve_openvino.serving.torchserve.calls import answered_call


def take_over() -> None:
    """Lets the workers of handlers answer enveloped requests; safe to call more than once."""
    if not HAS_TORCHSERVE:
        return
    from ts.torch_handler.request_envelope.base import BaseEnvelope
    from ts.torch_handler.request_envelope.json import JSONEnvelope
    from ts.torch_handler.request_envelope.kserve import KServeEnvelope
    from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope

    kinds: tuple[tuple[Any, EnvelopeKind], ...] = (
        (JSONEnvelope, "json"), (KServeEnvelope, "kserve"), (KServev2Envelope, "kservev2"),
    )  # fmt: skip
    for cls, kind in kinds:
        cls.handle = _handle_for(kind, BaseEnvelope.handle)


def _handle_for(kind: EnvelopeKind, upstream: Any) -> Any:
    def handle(self: Any, data: list[dict[str, Any]], context: Any) -> Any:
        worker = worker_of(getattr(self._handle_fn, "__self__", None))
        return upstream(self, data, context) if worker is None else answered_call(worker, data, context, kind)

    return handle
