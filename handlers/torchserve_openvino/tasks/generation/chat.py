"""Messages as the text that a model was trained on."""

from collections.abc import Sequence
from typing import Any

from torchserve_openvino.tasks.generation.fields import Message
from torchserve_openvino.tasks.openai import RequestError


def chat_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Writes messages as the text that the model was trained on, by the tokenizer's own template.

    Raises:
        RequestError: The tokenizer has no template, or its template refuses the messages.
    """
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), so it "
            "is none for chats: send a prompt to v1/completions", param="messages", code="no_chat_template",
        )  # fmt: skip
    plain = [message.model_dump(exclude_none=True) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
