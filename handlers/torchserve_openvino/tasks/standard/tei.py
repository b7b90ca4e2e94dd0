"""What the endpoints of TEI (Hugging Face's text-embeddings-inference) share: fields, and errors."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import BusyError, ItemError
from torchserve_openvino.serving.requests.refusals import shortened
from torchserve_openvino.tasks.standard.form import Form

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"truncation_direction": ("right", "Right")}


class TeiForm(Form):
    """A request to an endpoint of TEI."""

    @staticmethod
    def refusal(error: ItemError) -> dict[str, Any]:
        """Returns the body of a refusal as TEI has it."""
        return tei_error(error)


def tei_error(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal as TEI's clients read it."""
    kind = "Validation" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "Backend"
    return {"error": shortened(str(error)), "error_type": "Overloaded" if isinstance(error, BusyError) else kind}
