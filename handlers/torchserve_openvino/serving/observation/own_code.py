"""A handler's own code: run on samples before READY, and watched for eager computation at each request."""

import logging
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from traceback import walk_tb
from typing import Any, TypeVar

from torch import nn

from torchserve_openvino.backend.eager_watch import Eager, EagerWatch, report_open
from torchserve_openvino.errors import ItemError, ModelLoadError
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.modes import SERVING, Modes
from torchserve_openvino.serving.observation.observe import ROOT, Observer, Seen, UncopiedCallError, files_of
from torchserve_openvino.serving.observation.parts import KEY, paths_of
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.torchserve.base import BaseHandler
from torchserve_openvino.serving.torchserve.context import Headers
from torchserve_openvino.serving.worker_context import compiler_of

logger = logging.getLogger(__name__)

# The steps of TorchServe's BaseHandler; micro-batching runs them in threads.
STEPS = ("preprocess", "inference", "postprocess")
# Limit of sample batches, each of which runs in eager PyTorch; every sample is run once in any case.
_MAX_BATCHES = 16
_EXPLAINS = "explanations need gradients, so they run on the eager model"

T = TypeVar("T")
Handle = Callable[[list[Any], Any], list[Any]]


class OwnCode:
    """Runs and watches the code of one handler.

    Args:
        handler: The handler.
        worker: Has its ``eager_model``, and the compilers of methods.

    Attributes:
        is_shipped: Whether it is the code of a shipped task, which need not be watched: that costs some microseconds
            for each operator.
    """

    def __init__(self, handler: Any, worker: Any) -> None:
        self._handler, self._worker = handler, worker
        self._paths: dict[int, str] = {}
        self.report: CompileReport | None = None
        self._files = files_of(handler)
        self._explains = False
        self._outside = EagerWatch(self._files, self._count)
        self.is_shipped = not _has_own_code(type(handler))

    def watch(self, run: Callable[[], T]) -> T:
        """Returns the result of ``run``; counts what it computes outside compiled graphs, once there is a report."""
        return run() if self.report is None or self.is_shipped else self._outside.watch(run)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """While the handler explains an answer, which runs on the eager model on purpose."""
        report_open()
        self._explains = True
        try:
            yield
        finally:
            report_open()
            self._explains = False

    def watched_steps(self) -> dict[str, Callable[..., Any]]:
        """Returns the handler's steps, each of which is watched in whichever thread it runs."""
        return {name: self._watched(name) for name in STEPS}

    def _watched(self, name: str) -> Callable[..., Any]:
        step = getattr(type(self._handler), name)

        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.watch(lambda: step(self._handler, *args, **kwargs))

        return run

    # --- before READY ---------------------------------------------------------------------------------------------

    def run(self, handle: Handle, items: list[Any], context: Any) -> Any:
        """Runs a batch through the handler as requests would go, without TorchServe's metrics."""
        if getattr(handle, "__func__", None) is BaseHandler.handle:
            handler = self._handler
            return handler.postprocess(handler.inference(handler.preprocess(items)))
        with _request(context, len(items)):
            return handle(items, context)

    def learn(
        self,
        samples: Sequence[tuple[str, bytes]],
        parts: dict[str, nn.Module],
        sizes: Sequence[int],
        run: Callable[[list[Any]], Any],
    ) -> Seen:
        """Finds out which calls reach the models when the handler answers samples.

        Args:
            samples: Name and body of each.
            parts: Modules that the handler calls directly, as far as known.
            sizes: Batch sizes to run the first sample in, besides 1.
            run: Takes a batch through the handler.

        Raises:
            ModelLoadError: The handler does not answer a sample.
        """
        observer = Observer(self._handler, self._worker.eager_model, run, parts, self._has_compiler)
        for name, items in _batches(samples, [1]):
            try:
                observer.observe(name, items)
            except UncopiedCallError:
                raise
            except ItemError as error:
                message = f"the sample {name} is not a request that this handler accepts: {error}"
                raise ModelLoadError(message) from error
            except Exception as error:
                raise ModelLoadError(
                    f"this handler does not answer the sample {name}: {self._failure(error)}. A sample is the body of "
                    "one request."
                ) from error
        for name, items in _batches(samples, [size for size in sizes if size > 1]):
            try:
                observer.observe(name, items)
            except UncopiedCallError:
                raise
            except Exception as error:
                # Some handlers take one request at a time; with batchSize: 1 TorchServe does not join any for them.
                note = f"this handler does not answer {len(items)} requests at once: {self._failure(error)}"
                logger.warning("%s", note)
                observer.seen.notes.append(note)
                break
        return observer.seen

    def _has_compiler(self, part: nn.Module | None) -> bool:
        return compiler_of(part, self._worker.method_compilers) is not None

    def inputs_for(self, body: bytes, run: Callable[[list[Any]], Any]) -> Inputs:
        """Returns the inputs of ``self.model`` for one request's body, even if the handler fails after the call.

        Raises:
            ModelLoadError: The handler does not call it.
        """
        observer = Observer(self._handler, self._worker.eager_model, run, {})
        reason = "it does not call self.model"
        try:
            observer.observe("of a request", [{"body": body}])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        calls = observer.seen.calls.get(ROOT)
        if not calls:
            raise ModelLoadError(f"this handler does not show the inputs of its model for the sample: {reason}")
        return calls[0].inputs

    def modes_for(self, inputs: Inputs) -> Modes:
        """Returns the modes in which the handler calls its model, if only the model's inputs are known, not a request.

        The handler's `inference` is run on the inputs in the forms in which `preprocess` may return them, until one
        reaches the model. TorchServe's own `inference` need not be run.
        """
        handler, eager = self._handler, self._worker.eager_model
        if type(handler).inference is BaseHandler.inference or eager is None:
            return SERVING
        args, kwargs = inputs
        forms: list[Any] = [args[0]] if len(args) == 1 and not kwargs else [kwargs or args, (*args, *kwargs.values())]
        failed = ""
        for form in forms:
            observer = Observer(handler, eager, handler.inference, {})
            try:
                observer.observe("as declared", form)
            except Exception as error:
                # It does not take this form, but may have called the model before it failed.
                failed = f"{type(error).__name__}: {error}"
            if calls := observer.seen.calls.get(ROOT):
                return calls[0].modes
        logger.info("The modes in which inference calls the model are not known before the first request: %s", failed)
        return SERVING

    def rehearse(
        self, samples: Sequence[tuple[str, bytes]], sizes: Sequence[int], run: Callable[[list[Any]], Any]
    ) -> None:
        """Answers the samples once more, with everything compiled, and counts what still runs in eager PyTorch.

        Raises:
            ModelLoadError: The handler fails on a single sample.
        """
        for name, batch in _batches(samples, sorted({1, *sizes})):
            try:
                self.watch(partial(run, batch))
            except Exception as error:
                # Single samples passed in eager PyTorch before; a failure on several at once was noted then.
                if len(batch) == 1:
                    message = f"compiled, this handler fails on the sample {name}: {self._failure(error)}"
                    raise ModelLoadError(message) from error

    def _failure(self, error: Exception) -> str:
        """Returns an error with the last line of the handler that it passed, as there is no traceback to show it."""
        lines = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_code.co_filename in self._files
        ]
        return f"{type(error).__name__}: {error}" + (f" (at {lines[-1]})" if lines else "")

    # --- at each request ------------------------------------------------------------------------------------------

    def _count(self, eager: Eager) -> None:
        """Adds a computation outside every compiled graph to the report."""
        assert self.report is not None
        if eager.module is not None and id(eager.module) not in self._paths:
            self._paths = paths_of(self._handler, self._worker.eager_model)
        path = self._paths.get(id(eager.module), type(eager.module).__name__) if eager.module is not None else ""
        name = f"{path}.{eager.method}" if eager.method else path or eager.op
        called = self._paths.get(id(eager.called), "")
        reason = _EXPLAINS if self._explains else _advice(path, eager, called)
        new = self.report.tracker.add_uncompiled(
            name, eager.where, eager.ops, eager.seconds, reason, caused_by_request=self._explains
        )
        if new:
            logger.warning("Fallback: %s runs in eager PyTorch at %s, outside every compiled graph", name, eager.where)


def _has_own_code(kind: type) -> bool:
    """Whether a handler's class has methods besides those of this package and of TorchServe's base.

    The handler file in the archive of a shipped task is a copy, which defines an empty class.
    """
    others = [
        cls
        for cls in kind.__mro__
        if cls not in {BaseHandler, ABC, object} and not cls.__module__.startswith("torchserve_openvino.")
    ]
    return any(callable(value) or isinstance(value, property) for cls in others for value in vars(cls).values())


def _advice(path: str, eager: Eager, called: str) -> str:
    what = "no compiled graph contains it"
    if not path:
        return f"{what}: the handler computes with weights itself; move that into the model's forward"
    if eager.method:
        whole = f"{what}; {KEY}: [{path}.{eager.method}] compiles the method"
        return f"{whole}, {KEY}: [{called}] the calls of {called} that it makes" if called else whole
    return f"{what}; {KEY}: [{path}] compiles it"


def _batches(samples: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> list[tuple[str, list[Any]]]:
    """Returns batches of each sample in each size, with a name for messages, in the order of `sizes`."""
    batches = [
        (name if size == 1 else f"{name}, {size} times", [{"body": body} for _ in range(size)])
        for size in sizes
        for name, body in samples
    ]
    return batches[: max(_MAX_BATCHES, len(samples))]


@contextmanager
def _request(context: Any, count: int) -> Iterator[None]:
    """Sets up the context as a handler finds it in a request over HTTP."""
    before = getattr(context, "request_processor", None), getattr(context, "request_ids", None)
    context.request_processor = [Headers({"explain": "False"}) for _ in range(count)]
    context.request_ids = {index: f"sample-{index}" for index in range(count)}
    try:
        yield
    finally:
        context.request_processor, context.request_ids = before
