"""What a request for pictures holds: our form, Hugging Face's, and OpenAI's."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, create_model

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.tasks.hub_handler import text_of
from torchserve_openvino.tasks.request_body import Parameters, parameters_of, parse_body

# The largest seed that torch's generators take.
MOST_SEED = 2**63 - 1
_File = Annotated[str, Field(description="A picture: base64, or a data: URL.")]
# diffusers' and Hugging Face's names of the same.
_SYNONYMS = {"num_inference_steps": "steps", "guidance_scale": "guidance", "num_images_per_prompt": "n"}


class PictureParameters(Parameters):
    """Parameters of a picture. Limits and defaults are those of ``handler.openvino.image_generation``."""

    negative_prompt: str | None = None
    """What the picture does not show; needs guidance above 1."""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    """Equal seeds give equal pictures; the next picture of the same request has the next seed. By default random."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps from noise to picture; also `num_inference_steps`."""
    guidance: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """How closely the picture follows the prompt; also `guidance_scale`."""
    size: str | None = None
    """Width x height, such as 512x512: one of those that are compiled."""
    width: Annotated[int, Field(ge=1)] | None = None
    """Width, with `height`, in place of `size`."""
    height: Annotated[int, Field(ge=1)] | None = None
    """Height, with `width`, in place of `size`."""
    n: Annotated[int, Field(ge=1)] = 1
    """How many pictures; also `num_images_per_prompt`."""
    scheduler: str | None = None
    """The scheduler, by default the folder's own: ddim, ddpm, dpm_solver, euler, euler_ancestral,
    flow_match_euler, heun, pndm, unipc; those that fit the model."""
    image: _File | None = None
    """A picture to start from."""
    mask_image: _File | None = None
    """Where to change that picture: where this one is white."""
    strength: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    """How far from that picture to go; 1 ignores it."""
    response_format: Literal["png", "b64_json"] | None = None
    """`png`, by default for one picture, or `b64_json`: JSON with base64."""
    stream: bool = False
    """Whether to tell of each step, by server-sent events; pictures then come as base64 in the last ones."""


class OpenAIParameters(PictureParameters):
    """What OpenAI's ``images/generations`` has besides; values without a meaning here are refused."""

    prompt: str
    """What the picture shows."""
    model: str | None = None
    """Not read: the path names the model."""
    user: str | None = None
    """Not read."""
    size: str | None = None
    """Width x height, or `auto`."""
    response_format: Literal["b64_json"] | None = None
    """Pictures come as base64; there are no URLs."""
    output_format: Literal["png"] | None = None
    """The format of the pictures."""
    quality: Literal["auto", "standard"] | None = None
    """Not read: `steps` sets it."""
    background: Literal["auto", "opaque"] | None = None
    """Pictures have no transparent parts."""
    moderation: Literal["auto"] | None = None
    """The folder's safety checker runs, if it has one."""


# Requests in our form and in Hugging Face's, for the JSON schema.
_STRICT = ConfigDict(extra="forbid")
PromptRequest: Any = create_model(
    "PromptRequest", __base__=PictureParameters, prompt=(str, ...), parameters=(PictureParameters | None, None)
)
InputsRequest: Any = create_model(
    "InputsRequest", __config__=_STRICT, inputs=(str, ...), parameters=(PictureParameters | None, None)
)


def read(value: Any, max_bytes: int) -> tuple[str, PictureParameters]:
    """Reads a request: a bare prompt, ``{"prompt": ..., ...}``, or ``{"inputs": ..., "parameters": {...}}``.

    Raises:
        PayloadTooLargeError: It has more than ``max_bytes``.
        InvalidInputError: It is no such request; the message names the key.
    """
    ask = parse_body(value, max_bytes=max_bytes, max_inputs=1, fields=frozenset({"prompt"}))
    if ask.many:
        raise InvalidInputError("inputs is a list; a request has one prompt, of which n: 4 makes four pictures")
    (only,) = ask.inputs
    if not isinstance(only, Mapping):
        return text_of(only, "the prompt"), parameters_of(PictureParameters, _renamed(ask.parameters))
    if "prompt" not in only:
        raise InvalidInputError("inputs is an object; send the prompt as a text, and what else under parameters")
    beside = {name: item for name, item in only.items() if name != "prompt"}
    if twice := beside.keys() & ask.parameters.keys():
        raise InvalidInputError(f"{sorted(twice)[0]!r} stands both beside the prompt and under parameters")
    prompt = text_of(only["prompt"], "prompt")
    return prompt, parameters_of(PictureParameters, _renamed({**beside, **ask.parameters}))


def read_openai(value: Any, max_bytes: int) -> tuple[str, OpenAIParameters]:
    """Reads a request in OpenAI's form.

    Raises:
        PayloadTooLargeError: It has more than ``max_bytes``.
        InvalidInputError: It is no such request; the message names the key.
    """
    ask = parse_body(value, max_bytes=max_bytes, max_inputs=1, fields=frozenset({"prompt"}))
    (only,) = ask.inputs
    if not isinstance(only, Mapping) or "prompt" not in only or ask.parameters:
        raise InvalidInputError('the body must be a JSON object with "prompt"')
    prompt = text_of(only["prompt"], "prompt")
    stated = {name: item for name, item in only.items() if item is not None}
    parameters: OpenAIParameters = parameters_of(OpenAIParameters, _renamed(stated))
    return prompt, parameters.model_copy(update={"size": None}) if parameters.size == "auto" else parameters


def _renamed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    for other, name in _SYNONYMS.items():
        if other in parameters and name in parameters:
            raise InvalidInputError(f"{other} and {name} are the same; send one")
    return {_SYNONYMS.get(name, name): value for name, value in parameters.items()}


def size_of(parameters: PictureParameters) -> str | None:
    """Returns the size that a request names.

    Raises:
        InvalidInputError: It names half a size, or two.
    """
    width, height = parameters.width, parameters.height
    if width is None and height is None:
        return parameters.size
    if width is None or height is None:
        raise InvalidInputError("width and height belong together")
    if parameters.size is not None:
        raise InvalidInputError("size and width and height exclude each other")
    return f"{width}x{height}"
