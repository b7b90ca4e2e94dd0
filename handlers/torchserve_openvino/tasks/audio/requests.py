"""What all audio tasks have in common: how a request brings a recording."""

from typing import Annotated, Any

from pydantic import Field

from torchserve_openvino.tasks.hub import HubHandler
from torchserve_openvino.tasks.request_body import RequestBody

# Most recordings in one request.
MAX_INPUTS = 16
# How a body begins that is JSON; no audio file begins like this.
_JSON = (b"{", b"[")


class RecordingHandler(HubHandler):
    """A task whose inputs are recordings: a file as body, or JSON with base64."""

    # libsndfile, soxr and NumPy release the interpreter's lock for most of their work.
    decodes_in_parallel = True
    size_key = "handler.openvino.audio.max_bytes"
    takes = Annotated[str, Field(description="A recording: base64, or a data: URL.")]

    def limits(self) -> tuple[int, int]:
        """Returns the largest JSON body in bytes, for recordings of ``max_bytes`` in base64, and the most inputs."""
        return self._openvino.config.openvino.audio.max_bytes * 4 // 3 + 4096, MAX_INPUTS

    def ask(self, value: Any, max_bytes: int, max_inputs: int) -> RequestBody:
        """Reads what one request asks: a body that is not JSON is a recording as it is, never text."""
        if isinstance(value, (bytes, bytearray)) and not value[:64].lstrip().startswith(_JSON):
            return RequestBody([bytes(value)], {}, many=False)
        return super().ask(value, max_bytes, max_inputs)
