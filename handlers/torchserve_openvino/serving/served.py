"""Serves calls of a compiled model: fits a call to a compiled shape, runs it, and removes the answer's padding."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend import eager_watch
from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.backend.spec import plain_leaves
from torchserve_openvino.errors import ItemError, OutsideDeclaredError, first_line, is_out_of_memory
from torchserve_openvino.serving.modes import Modes
from torchserve_openvino.serving.requests.batching import UNKNOWN_OVERHEAD, RowRunner
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.parallel_calls import ParallelCalls
from torchserve_openvino.serving.requests.phases import MeasuredInference
from torchserve_openvino.serving.shapes.input_spec import Inputs, Signature
from torchserve_openvino.serving.shapes.inputs import Convert, DeclaredInputs, Fitted, ordinary
from torchserve_openvino.serving.shapes.plan import probe_first_rows, rows_of
from torchserve_openvino.serving.shapes.probe import Axes, RowFacts, cut_axes, refusal

if TYPE_CHECKING:
    from torchserve_openvino.serving.verification.shadow import Shadow

logger = logging.getLogger(__name__)


# Attribute of the error of a call that eager PyTorch rejects as well: with which message.
_REJECTION = "_openvino_rejection"


class ServedModel:
    """A compiled model that is called like the original.

    Args:
        compiled: The compiled model.
        eager: The same model in PyTorch, probed where no inputs are declared.
        inputs: The declared inputs; None takes every call as it comes.
        compiles_outside: Whether a call outside the declared inputs is compiled; else it is refused.
        sizes: Compiled batch sizes that a batch is padded or split to; None runs each batch at its own size.
        only_sizes: The only batch sizes accepted, where batches are not padded; None accepts any.
        facts: Whether items may be joined; None finds out at the first call.
        axes: Which axes of each output follow a named dimension.
        streams: Runs the parts of a batch.
        counters: Counts what happens to requests.
        beyond: Runs calls whose shape was not declared, instead of ``compiled``.

    Attributes:
        sizes: As above; empty where each batch runs at its own size.
        overhead: What a call costs beside its rows, in the units of the named dimensions, such as tokens.
        shadow: Picks answered calls to run again later; set once the worker is READY.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        *,
        inputs: DeclaredInputs | None = None,
        compiles_outside: bool = True,
        sizes: Sequence[int] | None = None,
        only_sizes: Sequence[int] | None = None,
        facts: RowFacts | None = None,
        axes: Axes | None = None,
        streams: ParallelCalls | None = None,
        counters: Counters | None = None,
        beyond: Callable[..., Any] | None = None,
    ) -> None:
        self.compiled = compiled
        self.inputs = inputs
        self.sizes = tuple(sizes or ())
        self.overhead = UNKNOWN_OVERHEAD
        self.facts = facts
        self.counters = counters or Counters()
        self.shadow: Shadow | None = None
        self._eager = eager
        self._compiles_outside = compiles_outside
        self._only_sizes = frozenset(only_sizes) if only_sizes else None
        self._axes = axes or {}
        self._any_shape = beyond or compiled
        self._rows = RowRunner(
            self._any_shape if inputs is None else compiled, sizes, streams or ParallelCalls(), self.counters
        )

    @property
    def joins(self) -> bool:
        """Whether requests may share a call: their answers do not depend on each other."""
        return self.facts is not None and self.facts.joins

    def run_exactly(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of a compiled shape as it is, before READY: later batches may be padded to it, or split to it."""
        output = (self.compiled if self.inputs is not None else self._any_shape)(*args, **kwargs)
        self._rows.has_run(args, kwargs)
        return output

    def poisoned(self) -> AbstractContextManager[None]:
        """See `CompiledModule.poisoned`."""
        return self.compiled.poisoned() if isinstance(self.compiled, CompiledModule) else nullcontext()

    @property
    def released(self) -> bool:
        """Whether the eager model's weights were freed."""
        return bool(getattr(self.compiled, "released", False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one call.

        Raises:
            OutsideDeclaredError: The call fits no compiled shape, and such calls are refused.
        """
        try:
            return self._called(args, kwargs)
        except Exception as error:
            self._compare_with_eager(error, args, kwargs)
            raise

    def _compare_with_eager(self, error: Exception, args: Any, kwargs: dict[str, Any]) -> None:
        """Notes on an error whether eager PyTorch rejects the call as well; then the caller is at fault."""
        if self.released or isinstance(error, ItemError) or is_out_of_memory(error):
            return
        try:
            # This run is no answer, so that it is not counted as work outside the compiled graphs.
            with eager_watch.compiled():
                self._eager(*args, **kwargs)
        except Exception as refusal:
            text = first_line(refusal)
            vars(error)[_REJECTION] = text

    def _called(self, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = plain_leaves(args, kwargs)
        if any(tensor.is_inference() for tensor in (output_tensors((args, kwargs)) if leaves is None else leaves)):
            args, kwargs = pytree.tree_map_only(torch.Tensor, ordinary, (args, kwargs))
        with torch.inference_mode(False), eager_watch.compiled():
            fitted = self.fit(args, kwargs)
        if fitted is None:
            return self.run_once(*args, **kwargs)
        return self._shadowed(lambda: (args, kwargs), lambda: self.cut(self.run_rows(fitted), fitted))

    def fit(self, args: Sequence[Any], kwargs: dict[str, Any], convert: Convert | None = None) -> Fitted | None:
        """Brings a call into the form in which it is compiled; returns None if it must run as it is.

        Args:
            convert: Converts a tensor of a guessed dtype to the declared one.

        Raises:
            OutsideDeclaredError: The call fits no compiled shape, and such calls are refused.
        """
        if self.inputs is None:
            return self._fit_undeclared(args, kwargs)
        try:
            fitted = self.inputs.fit(args, kwargs, convert)
            if not self._takes(fitted.rows):
                assert self._only_sizes is not None
                raise OutsideDeclaredError(
                    f"{fitted.rows} rows in one request; this model takes {sorted(self._only_sizes)} "
                    "(handler.openvino.warmup.batch_sizes)"
                )
        except OutsideDeclaredError as error:
            if error.values or not self._compiles_outside:
                raise
            self.counters.add("outside_compiled")
            logger.warning("Compiling for a request outside the declared shapes: %s", error)
            return None
        if fitted.padded:
            self.counters.add("padded_dims")
        return fitted

    def run(self, fitted: Fitted) -> Any:
        """Runs a fitted call and cuts its answer to the real lengths."""
        if self.shadow is None:
            return self.cut(self.run_rows(fitted), fitted)
        return self._shadowed(lambda: self.unpadded(fitted), lambda: self.cut(self.run_rows(fitted), fitted))

    def run_once(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call as it is, without fitting it to a compiled shape."""
        return self._shadowed(lambda: (args, kwargs), lambda: self._alone(args, kwargs))

    def _alone(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with MeasuredInference(), eager_watch.compiled(), Modes.of_call(args, kwargs).on():
            return self._any_shape(*args, **kwargs)

    def run_joined(self, calls: Sequence[Fitted]) -> list[Any]:
        """Runs fitted calls of the same shapes, as many together as are compiled; returns an answer for each."""
        answers: list[Any] = []
        while len(answers) < len(calls):
            left = calls[len(answers) :]
            sums = accumulate(call.rows for call in left)
            # Each was fitted, so that it is compiled alone.
            count = max((n for n, rows in enumerate(sums, 1) if self._takes(rows)), default=1)
            answers += self._run_together(left[:count]) if count > 1 else [self.run(left[0])]
        return answers

    def _takes(self, rows: int) -> bool:
        """Whether a call of so many rows is compiled, or is padded to one that is, or split."""
        return self._only_sizes is None or rows in self._only_sizes

    def _run_together(self, calls: Sequence[Fitted]) -> list[Any]:
        first, rows = calls[0], [call.rows for call in calls]
        # Dynamo's guards would distinguish tensors made in inference mode (`inputs.ordinary`).
        with torch.inference_mode(False):
            joined = Fitted(
                tuple(torch.cat(column) for column in zip(*(call.args for call in calls), strict=True)),
                {name: torch.cat([call.kwargs[name] for call in calls]) for name in first.kwargs},
                sum(rows),
            )
        leaves, spec = pytree.tree_flatten(self.run_rows(joined))
        columns = [v.split(rows) if isinstance(v, torch.Tensor) else [v] * len(rows) for v in leaves]
        outputs = [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]
        return [
            self._shadowed(partial(self.unpadded, call), partial(self.cut, output, call))
            for output, call in zip(outputs, calls, strict=True)
        ]

    def unpadded(self, fitted: Fitted) -> Inputs:
        """Returns the call's inputs without the padding of named dimensions."""
        return self.inputs.unpad(fitted) if self.inputs is not None else (fitted.args, fitted.kwargs)

    def _shadowed(self, inputs: Callable[[], Inputs], answer: Callable[[], Any]) -> Any:
        """Returns the result of ``answer``; with ``verify.shadow`` some calls are copied, to be run again later."""
        sample = self.shadow.take(inputs) if self.shadow is not None else None
        if sample is None:
            return answer()
        assert self.shadow is not None
        try:
            output = answer()
        except BaseException:
            self.shadow.skip("no answer was sent")
            raise
        self.shadow.put(sample, output)
        return output

    def run_rows(self, fitted: Fitted) -> Any:
        """Runs a fitted call; named dimensions of the answer still have their padding."""
        with MeasuredInference(), eager_watch.compiled(), Modes.of_call(fitted.args, fitted.kwargs).on():
            return self._rows(fitted.args, fitted.kwargs, fitted.rows)

    def cut(self, output: Any, fitted: Fitted) -> Any:
        """Returns an answer without the padding of named dimensions."""
        for name, length in fitted.lengths.items():
            if fitted.sizes[name] != length and name in self._axes:
                leaves, spec = pytree.tree_flatten(output)
                cut = iter(cut_axes(output_tensors(output), self._axes[name], length))
                output = pytree.tree_unflatten([next(cut) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
        return output

    def _fit_undeclared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Fitted | None:
        rows = rows_of((tuple(args), kwargs))
        if not rows:
            return None
        if self.facts is None:
            facts = probe_first_rows(self._eager, (tuple(args), kwargs))
            if not facts.joins:
                if facts.raised and refusal(self._eager, (tuple(args), kwargs)):
                    # A call that eager PyTorch rejects says nothing of others.
                    return None
                logger.info("Batches run at their own size: %s", facts.reason)
            self.facts = facts
        return Fitted(tuple(args), kwargs, rows) if self.facts.joins else None


def rejection_in(error: BaseException | None) -> str | None:
    """Returns with which message eager PyTorch rejects the call that led to an error; None if it does not."""
    while error is not None:
        if (message := vars(error).get(_REJECTION)) is not None:
            return str(message)
        error = error.__cause__ or error.__context__
    return None


def describe(model: ServedModel, signatures: Sequence[Signature]) -> dict[str, object]:
    """Returns how requests are fitted to compiled shapes, JSON-safe."""
    facts, compiled = model.facts, model.compiled
    return {
        "declared": str(model.inputs) if model.inputs is not None else "nothing",
        "signatures": [str(signature) for signature in signatures],
        "joins_requests": None if facts is None else facts.joins,
        "why_not": facts.reason if facts is not None else "",
        # Signatures that run without Dynamo's guards, and why others do not.
        "frozen": getattr(compiled, "frozen", 0),
        "guarded": dict(getattr(compiled, "guarded_reasons", {})),
    }
