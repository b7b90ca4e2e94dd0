"""`OpenVINOHandler`: what makes a TorchServe handler run on OpenVINO."""

from typing import Any

from torchserve_openvino.generation.method_compiler import METHOD_COMPILERS
from torchserve_openvino.serving.torchserve.handler_base import HandlerBase


class OpenVINOHandler(HandlerBase):
    """A base for handlers, and a mixin for those that exist::

        class Mine(OpenVINOHandler, TheirHandler): ...

    keeps their methods, and serves their model on OpenVINO. Its own state is one private attribute; every other name on
    the object belongs to the user, but for those of BaseHandler. `describe_handle` has the report.

    Attributes:
        model: A stand-in that looks like the loaded model, but whose calls run compiled.
    """

    _openvino_method_compilers = METHOD_COMPILERS

    @classmethod
    def __subclasshook__(cls, other: Any) -> Any:
        """Counts shipped tasks and wrapped handlers in, which derive from the same base."""
        # Not by `issubclass`, which asks all subclasses of the base, this one among them.
        return True if cls is OpenVINOHandler and HandlerBase in other.__mro__ else NotImplemented
