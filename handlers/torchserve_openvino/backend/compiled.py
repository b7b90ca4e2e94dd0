"""The compiled model that users call."""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchserve_openvino.backend import eager_watch
from torchserve_openvino.backend.capture.model_proxy import ModelProxy
from torchserve_openvino.backend.runners.guarded import Runner
from torchserve_openvino.backend.upstream._torch_modes import has_hooks

if TYPE_CHECKING:
    from torchserve_openvino.backend.backend_settings import RunningPartition
    from torchserve_openvino.backend.runtime.execute import FallbackPartition

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).resolve().parents[1])


class CompiledModule(ModelProxy):
    """A compiled model: call it like the model itself; other attributes are those of the model.

    Args:
        runner: Runs the calls.
        remake: Compiles another model in the same way, for copies.
        methods: Methods that are compiled as the model is, by name.

    Attributes:
        report: What ran where, and why; always up to date.
        eager: The model that was compiled, unchanged.
    """

    def __init__(
        self,
        runner: Runner,
        remake: Callable[[Any], "CompiledModule"] | None = None,
        methods: Mapping[str, "CompiledModule"] | None = None,
    ) -> None:
        # Bypasses `__setattr__`, which writes to the model.
        vars(self).update(eager=runner.model, report=runner.report)
        self._remake = remake
        self._methods = dict(methods or {})
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; compiles at the first call, and for each new shape, dtype or code path.

        While a model that contains this one is captured, the original module runs and becomes part of that graph.
        """
        if eager_watch.is_watched():
            with eager_watch.compiled():
                return self._runner(args, kwargs)
        return self._runner(args, kwargs)

    def _run_method(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method of the model: compiled if it was named, else in eager PyTorch, which is counted."""
        if name == "forward" and not has_hooks(self.eager):
            return self(*args, **kwargs)
        if name in self._methods:
            return self._methods[name](*args, **kwargs)
        where = _caller()

        def count(eager: eager_watch.Eager) -> None:
            op = f"{type(self.eager).__name__}.{name}"
            if self.report.tracker.add_uncompiled(op, where, eager.ops, eager.seconds, _advice(name)):
                logger.warning("Fallback: %s runs in eager PyTorch at %s, outside every compiled graph", op, where)

        return eager_watch.EagerWatch((), count).watch(lambda: method(*args, **kwargs))

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call inside another model that is being captured."""
        return self._runner.inside(args, kwargs)

    # Dynamo looks up this attribute for the function to trace instead (tests/contract/test_dynamo.py).
    __call__._torchdynamo_inline = _inside  # type: ignore[attr-defined]

    def freeze(self) -> "CompiledModule":
        """Declares that the model will not change any more, so that later calls run without guards.

        Later changes to the model's weights, buffers, mode, attributes or globals are not noticed: results stay those
        of the frozen state. Inputs are checked as before: a new shape or dtype is compiled. Calls that can't be
        repeated without Dynamo (a graph break, an output that is a view, a buffer that changes) stay guarded.
        """
        self._runner.freeze()
        for method in self._methods.values():
            method.freeze()
        return self

    @property
    def frozen(self) -> int:
        """Number of input signatures that run without guards; 0 before `freeze`."""
        return self._runner.frozen

    @property
    def guarded_reasons(self) -> dict[str, int]:
        """Maps each reason why calls stay guarded after `freeze` to the number of signatures."""
        return self._runner.guarded_reasons

    def poisoned(self) -> AbstractContextManager[None]:
        """Fills the memory of results with NaN while the context lasts, so that comparisons reveal unwritten memory."""
        return self._runner.poisoned()

    def reject_cached(self) -> bool:
        """Discards the cache entries that calls of this model use, because a result is wrong.

        Returns:
            Whether there were any; if so, compile the model again.
        """
        return self._runner.reject_cached()

    def confirm_cached(self) -> None:
        """Records that the results of all calls so far were compared with eager PyTorch's.

        Later calls from the cache are compared before their results are used.
        """
        self._runner.confirm_cached()

    def release_weights(self) -> "CompiledModule":
        """Frees the module's parameters and buffers, which the frozen calls do not need.

        Afterwards the module is empty, only the signatures recorded since `freeze` can be called, and nothing can fall
        back to eager PyTorch. The model must have been compiled with `CompileSpec.own_weights`.

        Raises:
            WeightsReleasedError: The weights are still needed, as the message explains; nothing was freed.
        """
        self._runner.release_weights()
        return self

    @property
    def released(self) -> bool:
        """Whether `release_weights` freed the module's weights."""
        return self._runner.released

    def give_memory_back(self) -> int:
        """Releases the memory of mapped cache files; call it once each shape has run and the weights are packed.

        Returns:
            Number of bytes released.
        """
        return self._runner.give_memory_back()

    @property
    def running(self) -> "Mapping[FallbackPartition, RunningPartition]":
        """The partitions that are in use, with what the report has of them."""
        return self._runner.running

    def fall_back_to_eager(self, *args: Any, **kwargs: Any) -> bool:
        """Lets the eager model answer all later calls of the shapes, types and modes of this one, which is not run.

        Returns:
            False where such calls cannot be told from others, and nothing changes.
        """
        return self._runner.fall_back_to_eager(args, kwargs)

    def drop(self) -> None:
        """Frees what was compiled and discards the calls that it stored, because another backend was preferred."""
        self._runner.drop()

    @property
    def _freezes_copies(self) -> bool:
        return self._runner.freezes

    def __repr__(self) -> str:
        return f"CompiledModule({self.eager!r})"


def _advice(name: str) -> str:
    if name == "generate":
        how = "the handler text_generator, or `handler.openvino.compile: [model.generate]`, compiles what it calls"
    else:
        how = f"`torchserve_openvino.compile(..., methods=[{name!r}])` compiles it"
    return f"no compiled graph contains it: {how}"


def _caller() -> str:
    """Returns ``file:line`` of the user's code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
