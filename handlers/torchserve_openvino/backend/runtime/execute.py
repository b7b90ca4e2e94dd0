"""Fifth stage: tensors in, tensors out.

A call borrows an infer request from a pool, so that threads never share one, and gives OpenVINO freshly allocated torch
memory to write its outputs to: nothing is copied, and no later call overwrites an answer. Where OpenVINO might not
write to it, the answer is copied out of OpenVINO's own memory instead.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.runtime.memory import OutputMemory, computed_outputs, poison_array
from torchserve_openvino.backend.spec import Bounds, Interface, Sizes, ValueSpec, checked_spec
from torchserve_openvino.errors import InexactValueError, WeightsReleasedError
from torchserve_openvino.ops.memory_order import in_order, relaid
from torchserve_openvino.report.tracker import Tracker

logger = logging.getLogger(__name__)


def _contiguous(value: Any, spec: ValueSpec) -> torch.Tensor:
    """The argument as a plain contiguous tensor, the same memory where it is one already."""
    if spec.is_scalar_int:
        return torch.tensor(int(value))
    return value.detach().resolve_neg().contiguous()


def wrap(tensor: torch.Tensor, spec: ValueSpec) -> ov.Tensor:
    """An ov.Tensor on the memory of a contiguous tensor, which it keeps alive."""
    if spec.dtype is torch.bfloat16:
        # NumPy has no bfloat16: the bytes pass as float16, and OpenVINO gets the true type.
        return ov.Tensor(tensor.view(torch.float16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _from_ov(tensor: ov.Tensor, spec: ValueSpec) -> torch.Tensor:
    """A torch tensor with its own copy of an ov.Tensor's content."""
    if spec.dtype is torch.bfloat16:
        raw = np.frombuffer(np.ascontiguousarray(tensor.data).tobytes(), dtype=np.uint16).copy()
        return torch.from_numpy(raw).view(torch.bfloat16).reshape(list(tensor.shape))
    return torch.from_numpy(np.array(tensor.data, copy=True))


def _infer(request: ov.InferRequest) -> None:
    """Infers without the copy of all outputs to NumPy arrays that OpenVINO makes otherwise, for nobody."""
    request.infer(share_outputs=True)


def _infer_elsewhere(request: ov.InferRequest) -> None:
    """The same by a thread of OpenVINO's, whose errors arrive."""
    request.start_async()
    request.wait()


def _loses_errors(compiled: ov.CompiledModel) -> bool:
    """Whether ``infer`` answers as if all were well where a kernel raised: the CPU plugin does so with one thread.

    tests/contract/test_openvino_memory.py pins it. Where the number of threads is unknown, it may be one.
    """
    try:
        return bool(compiled.get_property("INFERENCE_NUM_THREADS") == 1)
    except RuntimeError:
        return True


def as_traced(result: Any, spec: ValueSpec) -> Any:
    """What eager PyTorch computed, in the memory order of the trace, by which operators after it go.

    An operator of the lowered graph may lay out its result otherwise than the one that it was made of: ``2.0 ** x`` is
    contiguous, ``exp2(x)`` is laid out like ``x``.
    """
    return result if spec.is_scalar_int else in_order(result, spec.layout)


def _check_integers(tensor: torch.Tensor, bounds: Bounds, position: int) -> None:
    """Looks at an integer input of a call.

    Args:
        tensor: The input.
        bounds: Least and largest value that OpenVINO computes as torch does.
        position: Its place, for the message.

    Raises:
        InexactValueError: A value lies outside.
    """
    if not tensor.numel():
        return
    least, largest = (int(value) for value in torch.aminmax(tensor))
    low, high, op, *ends = bounds
    for place, value in zip((0, -1), ends, strict=True):
        if value is not None and int(tensor.flatten()[place]) != value:
            raise InexactValueError(f"integer input {position} must {'end' if place else 'start'} with {value}")
    if least < low or largest > high:
        why = (
            f"in which {op} is exact in OpenVINO; with `disabled_ops: [{op}]` only that operator runs in eager PyTorch"
            if op
            else "within which OpenVINO computes as torch does (int64 in 32 bits, indices within their tensor)"
        )
        raise InexactValueError(
            f"integer input {position} holds {least if least < low else largest}, outside {low} to {high}, {why}"
        )


def _check_values(answers: torch.Tensor, sentences: Sequence[str]) -> None:
    """Reads what the graph itself says of the call's values (`checks.py`).

    Raises:
        InexactValueError: OpenVINO computed something else than torch would.
    """
    # It is set to 0 beforehand: what no kernel wrote does not pass.
    wrong = [sentence for answer, sentence in zip(answers.tolist(), sentences, strict=True) if answer != 1]
    if wrong:
        raise InexactValueError("; ".join(dict.fromkeys(wrong)))


class CompiledPartition:
    """Runs one compiled subgraph.

    Args:
        compiled: The compiled model; it may be shared between threads.
        interface: What goes in and what comes out of it.
        keep_alive: Owners of memory that the compiled model shares.
        memory: Where answers are written to.
    """

    def __init__(self, compiled: ov.CompiledModel, interface: Interface, keep_alive: Any, memory: OutputMemory) -> None:
        self.compiled = compiled
        self._keep_alive = keep_alive
        self._inputs = tuple(enumerate(zip(interface.runtime, interface.inputs, strict=True)))
        self._outputs = (*interface.outputs, *checked_spec(interface.checks))
        self._checks = interface.checks
        self._size_limit = interface.size_limit
        self._order = None if interface.order == tuple(range(len(interface.outputs))) else interface.order
        self._bounds = interface.int_bounds
        self._memory = memory
        self._infer = _infer_elsewhere if _loses_errors(compiled) else _infer
        # Where the shape is known OpenVINO writes straight into torch memory; elsewhere its answer is copied.
        self._known_shapes = all(spec.is_static for spec in interface.outputs)
        # A sum over a symbolic size has a known shape, and is exact up to some size only.
        self._sized = not self._known_shapes or any(spec.symbols for spec in interface.inputs)
        computed = computed_outputs(compiled)
        self._computed = computed or [False] * len(self._outputs)
        self._direct = self._known_shapes and all(self._computed)
        # An output of unknown shape that is an input keeps the memory of the last call's input for itself, which is the
        # caller's: the next inference writes there. Such a request serves once.
        self._once = not self._known_shapes and computed is not None and not all(computed)
        self._requests: deque[Any] = deque([] if self._once else [compiled.create_infer_request()])

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Infers once.

        Args:
            args: All arguments of the subgraph, weights included, in its order.

        Returns:
            One tensor (or int, for a size) for each output, with memory of its own.

        Raises:
            InexactValueError: A value that OpenVINO does not compute as torch does.
            RuntimeError: OpenVINO's own error.
        """
        try:
            request = self._requests.pop()
        except IndexError:
            request = self.compiled.create_infer_request()
        sizes = Sizes(self._size_limit) if self._sized else None
        try:
            # Kept until infer() returns: the request holds plain pointers to the memory of contiguous copies.
            tensors = []
            for position, (source, spec) in self._inputs:
                tensor = _contiguous(args[source], spec)
                if (bounds := self._bounds[position]) is not None:
                    _check_integers(tensor, bounds, position)
                if sizes is not None and spec.symbols:
                    sizes.learn(spec, tensor)
                tensors.append(tensor)
                request.set_input_tensor(position, wrap(tensor, spec))
            results = self._infer_direct(request) if self._direct else self._infer_copied(request, sizes)
        finally:
            if not self._once:
                self._requests.append(request)
        if self._checks:
            _check_values(results.pop(), self._checks)
        for i, spec in enumerate(self._outputs[: len(results)]):
            if spec.is_scalar_int:
                results[i] = int(results[i])
            elif spec.layout is not None:
                results[i] = relaid(results[i], spec.layout)
        return results if self._order is None else [results[i] for i in self._order]

    def laid_out(self, results: Sequence[Any]) -> list[Any]:
        """Eager PyTorch's results of the same subgraph as `run` would lay them out."""
        order = self._order or range(len(results))
        return [as_traced(result, self._outputs[i]) for result, i in zip(results, order, strict=True)]

    def _infer_direct(self, request: Any) -> list[Any]:
        results: list[Any] = []
        for position, spec in enumerate(self._outputs):
            result = self._memory.new(spec)
            request.set_output_tensor(position, wrap(result, spec))
            results.append(result)
        if self._checks:
            results[-1].zero_()
        self._infer(request)
        return results

    def _infer_copied(self, request: Any, sizes: Sizes | None) -> list[Any]:
        if self._memory.poisoned and self._known_shapes:
            for position, computed in enumerate(self._computed):
                # The others may be the caller's own memory.
                if computed:
                    poison_array(request.get_output_tensor(position).data)
        if self._checks:
            request.get_output_tensor(len(self._outputs) - 1).data[...] = 0
        self._infer(request)
        results = []
        for position, spec in enumerate(self._outputs):
            answer = request.get_output_tensor(position)
            if sizes is not None:
                sizes.check(spec, answer.shape)
            elif tuple(answer.shape) != spec.shape:
                raise RuntimeError(f"OpenVINO answers with shape {list(answer.shape)}, torch with {list(spec.shape)}")
            results.append(_from_ov(answer, spec))
        return results


class EagerCopy:
    """PyTorch's own copy of the weights, which everything that falls back to eager needs.

    Attributes:
        released: Whether it was freed.
    """

    def __init__(self) -> None:
        self.released = False

    def run(self, fallback: Callable[..., Any], *args: Any) -> Any:
        """Runs a fallback.

        Raises:
            WeightsReleasedError: There is nothing left to run it with.
        """
        if self.released:
            raise WeightsReleasedError(
                "OpenVINO failed, and PyTorch's copy of the weights was released (handler.openvino.release_weights)"
            )
        return fallback(*args)


def count_runtime_failure(tracker: Tracker, name: str, error: Exception) -> None:
    """Counts a call of a partition that ran in eager PyTorch."""
    by_request = isinstance(error, InexactValueError)
    if tracker.add_fallback("runtime_failed", name, reason=str(error), caused_by_request=by_request):
        logger.warning("Fallback: a call of %s ran in eager PyTorch: %s", name, error)


class GuardedPartition:
    """A partition as the outer graph calls it: OpenVINO, or the fallback for this call, counted.

    Args:
        compiled: What runs on OpenVINO; None where that was given up.
        fallback: The same subgraph in PyTorch.
        on_failure: Called with the error of a failed inference.
        unpack: Whether the outer graph expects a tuple.
    """

    def __init__(
        self,
        compiled: CompiledPartition | None,
        fallback: Callable[..., Any],
        on_failure: Callable[[Exception], None],
        unpack: bool,
    ) -> None:
        self.compiled = compiled
        self._fallback = fallback
        self._on_failure = on_failure
        self._tuple = unpack

    def __call__(self, *args: Any) -> Any:
        """Calls it as a node of the outer graph: a tuple, or the only value."""
        results = self.results(args)
        return results if self._tuple else results[0]

    def results(self, args: Sequence[Any]) -> Sequence[Any]:
        """All outputs, in order."""
        if self.compiled is None:
            return self._eager(args)
        try:
            return self.compiled.run(args)
        except Exception as error:
            # The subgraph is functional, so that eager can run it again from the same inputs. Where eager refuses them
            # as well (an index beyond the end), the caller gets its error, and nothing fell back.
            try:
                results = self._eager(args)
            except WeightsReleasedError:
                raise error from None
            self._on_failure(error)
            return results

    def _eager(self, args: Sequence[Any]) -> Sequence[Any]:
        results = self._fallback(*args)
        results = results if self._tuple else (results,)
        return self.compiled.laid_out(results) if self.compiled is not None else results
