"""One small exception per failure that a user can cause, each with the HTTP status of the response."""

from collections.abc import Callable
from typing import Any


class TorchServeOpenVINOError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        status: HTTP status code of the response when the error ends a request.
    """

    status: int = 500


def first_line(error: BaseException) -> str:
    """Returns the line of an error's text that says what happened, or its class where there is none.

    OpenVINO's errors begin with the place in its own source; TorchScript's end with what happened.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    if lines and lines[0].startswith("The following operation failed in the TorchScript interpreter"):
        lines = [line.removeprefix("RuntimeError: ") for line in reversed(lines)]
    return next((line for line in lines if line and not line.startswith("Exception from")), type(error).__name__)


def class_and_line(error: BaseException) -> str:
    """Returns an error's class and what `first_line` returns."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, for which torch raises RuntimeError instead of MemoryError."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


class ConfigError(TorchServeOpenVINOError, ValueError):
    """A configuration that can't be used: an unknown key, a value out of range, two settings that exclude each other.

    Args:
        message: What is wrong, and how to fix it.
        key: Dotted path of the offending key, e.g. ``pt2.compile.options.device``.
        location: Where the key was set, e.g. ``model-config.yaml:7`` or ``options``.
        suggestion: Closest valid name, if there is a close one.
    """

    status = 400

    def __init__(self, message: str, *, key: str = "", location: str = "", suggestion: str | None = None) -> None:
        self.message = message
        self.key = key
        self.location = location
        self.suggestion = suggestion
        where = " ".join(part for part in (f"{location}:" if location else "", f"{key}:" if key else "") if part)
        hint = f" Did you mean {suggestion!r}?" if suggestion else ""
        super().__init__(f"{where} {message}{hint}".strip())


class DeviceNotFoundError(ConfigError):
    """A device that OpenVINO does not see on this machine."""


class UnknownOperatorError(ConfigError):
    """An operator name that torch does not know."""


class OpMappingError(ConfigError):
    """A file of operator mappings that can't be loaded, or a mapping that does not produce what torch does."""


class CacheDirectoryError(ConfigError):
    """A path that must not hold the cache: other users may write to it, or it is not a folder."""


class DamagedEntryError(TorchServeOpenVINOError, RuntimeError):
    """A cache entry, or a file in it, that differs from what was stored; its content must be made again."""


class ModelLoadError(TorchServeOpenVINOError, RuntimeError):
    """Model or weights that can't be loaded as they are packaged."""


class TorchScriptModelError(ModelLoadError):
    """A TorchScript archive, which torch.compile can't trace."""


class PolicyViolationError(TorchServeOpenVINOError, RuntimeError):
    """The compiled model violates ``handler.openvino.fallback``, and ``on_violation`` is ``refuse``."""

    status = 503


class VerificationError(TorchServeOpenVINOError, RuntimeError):
    """The compiled model's outputs differ from those of eager PyTorch by more than the tolerance."""

    status = 503


class InexactValueError(TorchServeOpenVINOError, RuntimeError):
    """A value that OpenVINO would not compute with as PyTorch does, such as an integer above 32 bits."""


class WeightsReleasedError(TorchServeOpenVINOError, RuntimeError):
    """A call that needs PyTorch's copy of the weights, which was freed."""


class CompileDiedError(TorchServeOpenVINOError, RuntimeError):
    """A partition that is not compiled, because OpenVINO's compiler ended a process that compiled it."""


class UntestedVersionError(TorchServeOpenVINOError, RuntimeError):
    """A version of torch or another package with which something that this package relies on does not hold."""


class PackagingError(TorchServeOpenVINOError):
    """A model archive that can't be made, read, or precompiled."""


class FrontendError(TorchServeOpenVINOError):
    """TorchServe's Java frontend can't be read, or not be patched."""


class ItemError(TorchServeOpenVINOError, ValueError):
    """The response to one request item instead of a result; the rest of its batch is not affected.

    Attributes:
        form: Makes its body, in the form that the sender's client reads; None for this package's own.
    """

    form: Callable[["ItemError"], dict[str, Any]] | None = None


class InvalidInputError(ItemError):
    """A request item that can't be turned into the model's input."""

    status = 400


class PayloadTooLargeError(InvalidInputError):
    """A request item above the configured size limit."""

    status = 413


class OutOfMemoryError(ItemError):
    """A request item that this worker has not enough memory for now; the status is TorchServe's own for that."""

    status = 507


class UnsupportedMediaTypeError(InvalidInputError):
    """A request item in a format that the handler does not read."""

    status = 415


class OutsideDeclaredError(InvalidInputError):
    """A request item that fits none of the shapes that the model was compiled for.

    Args:
        message: What was received, and what is accepted.
        values: Whether the shapes fit, and only values lie outside their declared range.
    """

    def __init__(self, message: str, *, values: bool = False) -> None:
        self.values = values
        super().__init__(message)


class UndeclaredInputError(OutsideDeclaredError):
    """A request item with an input that the model takes but the configuration lacks: not the sender's fault."""

    status = 500


class NonFiniteOutputError(ItemError):
    """An item whose result holds NaN or infinity, where ``handler.openvino.outputs.non_finite`` is ``refuse``."""

    status = 422


class ModelCallError(ItemError):
    """A well-formed item on which the model itself failed; the cause lies on the server's side."""

    status = 500


class BusyError(ItemError):
    """A prompt that would wait behind too many others; the sender may try again."""

    status = 503


class GenerationError(ItemError):
    """A prompt whose generation failed on the server's side; other prompts go on."""

    status = 500


class NotExplainedError(ItemError):
    """A request to /explanations/ that this task or this model has no answer to."""

    status = 501


class ModelMissingError(ItemError):
    """A request to a model that is not served."""

    status = 404


class ForbiddenFallbackError(ItemError):
    """A call that ran outside OpenVINO though ``handler.openvino.fallback`` does not allow it.

    Args:
        message: What ran where, and why.
        by_request: Whether the request's own values caused it, so that other requests are not affected.
    """

    def __init__(self, message: str, *, by_request: bool) -> None:
        self.by_request = by_request
        self.status = 422 if by_request else 503
        super().__init__(f"handler.openvino.fallback does not allow it: {message}")


class BlankPictureError(ItemError):
    """A generated picture that is no picture: it holds NaN, or is black all over."""

    status = 500


class WithheldPictureError(ItemError):
    """A generated picture that the model's own safety checker does not let out."""

    status = 422
