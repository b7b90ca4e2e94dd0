"""Where a request was sent: what follows the model and its version in the URL."""

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.tasks.openai import MODELS, unknown_path

COMPLETIONS, CHATS = "completions", "chat/completions"
# The field that holds the prompt of a plain request whose parameters stand beside it.
PROMPT = "prompt"


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
