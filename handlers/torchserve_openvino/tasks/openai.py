"""What tasks with endpoints in OpenAI's form share: paths below the model's, and errors as its clients read them."""

from http import HTTPStatus
from typing import Any

from torchserve_openvino.errors import BusyError, InvalidInputError, ItemError
from torchserve_openvino.serving.requests.batch_answer import shortened

# A header that TorchServe adds: what follows model and version in the URL.
_PATH = "url_path"
LAST_EVENT = "data: [DONE]\n\n"


class RequestError(InvalidInputError):
    """A request that asks for what can't be had.

    Args:
        message: What is wrong, and what to do.
        param: The field that is wrong, as in ``messages[0].content``; empty if it is none.
        code: OpenAI's word for the kind of error; empty for none.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, param: str = "", code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def path_of(context: Any, place: int) -> str:
    """Returns what follows model and version in a request's URL, without slashes around it; empty for nothing."""
    return str(context.get_request_header(place, _PATH) or "").strip("/")


def unknown_path(path: str, known: str) -> RequestError:
    """Returns the refusal of a request to a path under which nothing is served."""
    return RequestError(f"there is no endpoint {path!r}; there are {known}", code="unknown_url", status=404)


def openai_error(error: ItemError) -> dict[str, Any]:
    """Returns the body of a refusal as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    about = error if isinstance(error, RequestError) else None
    code = about.code if about is not None else "overloaded" if isinstance(error, BusyError) else ""
    param = about.param if about is not None else ""
    return {"error": {"message": shortened(str(error)), "type": kind, "param": param or None, "code": code or None}}
