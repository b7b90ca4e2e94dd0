"""`GenerateCompiler`: compiles the `generate` of transformers' models, for handlers that call it."""

from collections.abc import Sequence

from torchserve_openvino.serving.observation.methods import MethodGraph
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.worker_context import MethodCompiler, PreparedMethod, WorkerContext

# By name, since transformers need not be installed.
_GENERATES = ("transformers.generation.utils", "GenerationMixin")


class GenerateCompiler:
    """Runs `generate` by graphs of a model's steps."""

    def matches(self, method: MethodGraph) -> bool:
        """Returns True if the method is the `generate` of a model of transformers."""
        kinds = {(kind.__module__, kind.__name__) for kind in type(method.owner).__mro__}
        return method.name == "generate" and _GENERATES in kinds

    def prepare(
        self, method: MethodGraph, calls: Sequence[Inputs], path: str, context: WorkerContext
    ) -> PreparedMethod:
        """Compiles the graphs of the model, and compares what they generate with eager PyTorch.

        Raises:
            ConfigError: A setting does not fit.
            ModelLoadError: The model, or one of the calls, is not one that compiled graphs serve.
            VerificationError: They generate something else than eager PyTorch, and `verify.on_violation` is ``refuse``.
        """
        # Imported here: it imports transformers, which takes seconds.
        from torchserve_openvino.generation.compiled.method import prepare_generate

        return prepare_generate(method.owner, method.function, calls, path, context)


METHOD_COMPILERS: tuple[MethodCompiler, ...] = (GenerateCompiler(),)
