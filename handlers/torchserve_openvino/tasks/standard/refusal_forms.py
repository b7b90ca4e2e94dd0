"""How standard clients read refusals. It needs no torch: hosts refuse requests that no task has seen."""

from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import BusyError, ItemError
from torchserve_openvino.serving.requests.refusals import RefusalForm, plain_refusal, shortened, with_error
from torchserve_openvino.tasks.openai import openai_error


def tei_error(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal as TEI's clients read it."""
    kind = "Validation" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "Backend"
    busy = isinstance(error, BusyError) or error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return {"error": shortened(str(error)), "error_type": "Overloaded" if busy else kind}


# Cohere's clients read the ``message`` of this package's own form.
_BY_PATH: dict[str, RefusalForm] = {
    "v1/rerank": plain_refusal, "v2/rerank": plain_refusal, "rerank": tei_error, "embed": tei_error,
    "embed_sparse": tei_error, "predict": tei_error,
}  # fmt: skip


def form_of_path(path: str, envelope: str | None = None) -> RefusalForm | None:
    """Returns how refusals under a path are read; None for this package's own form.

    Args:
        path: What follows the model in a URL, or the path of a standard client, without slashes around it.
        envelope: The protocol of the body.
    """
    if envelope == "kservev2":
        return with_error
    return _BY_PATH.get(path, openai_error if path.startswith("v1/") else None)
