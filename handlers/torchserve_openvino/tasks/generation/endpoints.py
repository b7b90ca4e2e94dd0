"""Where a request was sent: what follows the model and its version in the URL."""

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.tasks.openai import RequestError, unknown_path

COMPLETIONS, CHATS, MODELS = "completions", "chat/completions", "models"
# The field that holds the prompt of a plain request whose parameters stand beside it.
PROMPT = "prompt"


def unknown_model(name: str, own: str) -> RequestError:
    """Returns the refusal of a request for another model than this endpoint's."""
    return RequestError(
        f"the model {name!r} does not exist here; this endpoint serves {own!r}", param="model",
        code="model_not_found", status=404,
    )  # fmt: skip


def endpoint_of(path: str) -> str:
    """Returns the endpoint that a URL names after model and version, without its ``v1/``.

    Raises:
        RequestError: There is no such endpoint.
    """
    # The model's own version may be called v1; then the URL names it once.
    name = path.removeprefix("v1/") if path != "v1" else ""
    if name in {"", COMPLETIONS, CHATS, MODELS} or name.startswith(f"{MODELS}/"):
        return name
    known = listed([f"v1/{each}" for each in (COMPLETIONS, CHATS, MODELS)])
    raise unknown_path(path, known)
