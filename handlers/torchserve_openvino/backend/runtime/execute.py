"""Fifth stage: tensors in, tensors out.

A call borrows an infer request from a pool, so that threads never share one, and OpenVINO writes the outputs into newly
allocated torch memory: nothing is copied, and no later call overwrites a result. Where OpenVINO might not write to that
memory, the result is copied from OpenVINO's own memory instead. Small tensors are copied to and from memory that a
request keeps: that takes less time than to tell OpenVINO where they are.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch

from torchserve_openvino.backend.runtime.output_memory import OutputMemory, array_over, computed_outputs, poison_array
from torchserve_openvino.backend.spec import Interface, SizeLimits, SymbolicSizes, ValueSpec, checked_spec
from torchserve_openvino.errors import InexactValueError, WeightsReleasedError
from torchserve_openvino.ops.memory_order import laid_out_copy, layout_of
from torchserve_openvino.passes.pass_context import Bounds
from torchserve_openvino.report.tracker import Tracker

logger = logging.getLogger(__name__)

# Up to this size, copying a tensor takes less time than the three objects around its memory and OpenVINO's checks.
_COPIED_BYTES = 16 << 10


def _contiguous(value: Any, spec: ValueSpec) -> torch.Tensor:
    """Returns the argument as a plain contiguous tensor; shares memory if it is one already."""
    if spec.is_scalar_int:
        return torch.tensor(int(value))
    return value.detach().resolve_neg().contiguous()


def wrap(tensor: torch.Tensor, spec: ValueSpec) -> ov.Tensor:
    """Wraps the memory of a contiguous tensor in an ov.Tensor, which keeps it alive."""
    array = array_over(tensor)
    if spec.dtype is torch.bfloat16:
        return ov.Tensor(array, list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _copied(values: "np.ndarray[Any, Any]", spec: ValueSpec) -> torch.Tensor:
    """Copies the content of an ov.Tensor into a new torch tensor."""
    result = torch.empty(values.shape, dtype=spec.dtype)
    array_over(result)[...] = values
    return result


def _infer(request: ov.InferRequest) -> None:
    """Infers without OpenVINO's default copy of all outputs to NumPy arrays, which nothing would use."""
    request.infer(share_outputs=True)


def _infer_elsewhere(request: ov.InferRequest) -> None:
    """Infers in one of OpenVINO's own threads, from which errors are raised."""
    request.start_async()
    request.wait()


def _loses_errors(compiled: ov.CompiledModel) -> bool:
    """Checks whether ``infer`` may hide the error of a kernel: the CPU plugin does so with one thread.

    tests/contract/test_openvino_memory.py pins it. An unknown number of threads may be one.
    """
    try:
        return bool(compiled.get_property("INFERENCE_NUM_THREADS") == 1)
    except RuntimeError:
        return True


def as_traced(result: Any, spec: ValueSpec) -> Any:
    """Returns eager PyTorch's result in the memory order that was traced, which later operators rely on.

    An operator of the lowered graph may lay out its result differently from the one it came from: ``2.0 ** x`` is
    contiguous, ``exp2(x)`` is laid out like ``x``.
    """
    if spec.is_scalar_int or layout_of(result) == spec.layout:
        return result
    return laid_out_copy(result, spec.layout)


def _check_limits(tensors: Sequence[torch.Tensor], limits: Sequence[SizeLimits], sizes: SymbolicSizes | None) -> None:
    """Checks the sizes of a call and the values of its integers.

    Raises:
        InexactValueError: A size is so large that integers computed from it may not be exact, or sums lose digits; or
            an integer is.
    """
    largest = 0 if sizes is None else sizes.largest
    bounds = next((bounds for size, bounds in limits if largest <= size), None)
    if bounds is None:
        raise InexactValueError(
            f"a dimension of {largest}: OpenVINO is exact up to {limits[-1].size} in sums over it and integers of it"
        )
    for position, bound in bounds:
        _check_integers(tensors[position], bound, position)


def _check_integers(tensor: torch.Tensor, bounds: Bounds, position: int) -> None:
    """Checks the values of an integer input.

    Args:
        tensor: The input.
        bounds: Smallest and largest value for which OpenVINO computes what torch does.
        position: Position of the input, for the message.

    Raises:
        InexactValueError: A value is out of bounds.
    """
    if not tensor.numel():
        return
    least, largest = (int(value) for value in torch.aminmax(tensor))
    low, high, op, *ends = bounds
    for index, value in zip((0, -1), ends, strict=True):
        if value is not None and int(tensor.flatten()[index]) != value:
            raise InexactValueError(f"integer input {position} must {'end' if index else 'start'} with {value}")
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
    """Reads the graph's own checks of the call's values (`checks.py`).

    Raises:
        InexactValueError: A check failed: OpenVINO's result differs from torch's.
    """
    # The answers are set to 0 before the inference: one that no kernel wrote counts as failed.
    wrong = [sentence for answer, sentence in zip(answers.tolist(), sentences, strict=True) if answer != 1]
    if wrong:
        raise InexactValueError("; ".join(dict.fromkeys(wrong)))


class ResultLayout:
    """Lays out eager PyTorch's results of a subgraph as OpenVINO's are.

    Args:
        outputs: Specs of the outputs in OpenVINO's order.
        order: For each result its position among them; None if they are in the same order.
    """

    def __init__(self, outputs: Sequence[ValueSpec], order: tuple[int, ...] | None) -> None:
        self._specs = tuple(outputs[i] for i in (order or range(len(outputs))))

    def __call__(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results in the memory order that was traced."""
        return [as_traced(result, spec) for result, spec in zip(results, self._specs, strict=True)]


class _Request:
    """An infer request, and the memory that it keeps for small tensors.

    Attributes:
        own: OpenVINO's object.
        inputs: By position, the memory of small inputs; None for others. Empty before `keep`.
        outputs: The same of outputs.
    """

    __slots__ = ("inputs", "outputs", "own")

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.own = compiled.create_infer_request()
        self.inputs: list[torch.Tensor | None] = []
        self.outputs: list[torch.Tensor | None] = []

    def keep(self, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec]) -> None:
        """Allocates the memory, at the first call: one that fails shows that a cached model is not what it should be.

        Raises:
            RuntimeError: The model has other shapes or types.
        """
        put_input, put_output = self.own.set_input_tensor, self.own.set_output_tensor
        self.outputs = [_kept(spec, position, put_output) for position, spec in enumerate(outputs)]
        self.inputs = [_kept(spec, position, put_input) for position, spec in enumerate(inputs)]


def _kept(spec: ValueSpec, position: int, put: Callable[[int, ov.Tensor], None]) -> torch.Tensor | None:
    """Returns memory for a small tensor, which the request has from now on; None for a large one."""
    if not spec.is_static or spec.is_scalar_int or math.prod(spec.shape) * spec.dtype.itemsize > _COPIED_BYTES:
        return None
    # The first call may be in inference mode, outside of which its tensors can't be written to.
    with torch.inference_mode(False):
        memory = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    put(position, wrap(memory, spec))
    return memory


def _copy(value: Any, spec: ValueSpec, memory: torch.Tensor) -> None:
    """Copies an argument to the memory that a request keeps for it.

    Raises:
        RuntimeError: It has another shape or type, which copying would convert.
    """
    if value.shape != memory.shape or value.dtype is not memory.dtype:
        raise RuntimeError(
            f"an input is {list(value.shape)} {value.dtype} where the graph takes {list(memory.shape)} {memory.dtype}"
        )
    if type(value) is torch.Tensor:
        memory.copy_(value.detach())
    else:
        # A subclass may run anything for an operator.
        array_over(memory)[...] = array_over(_contiguous(value, spec))


class CompiledPartition:
    """Runs one compiled subgraph.

    Args:
        compiled: The compiled model; it may be shared between threads.
        interface: Its inputs and outputs.
        keep_alive: Owners of memory that the compiled model shares.
        memory: Allocates the memory for results.
    """

    def __init__(self, compiled: ov.CompiledModel, interface: Interface, keep_alive: Any, memory: OutputMemory) -> None:
        self.compiled = compiled
        self._keep_alive = keep_alive
        self._inputs = tuple(enumerate(zip(interface.runtime, interface.inputs, strict=True)))
        self._outputs = (*interface.outputs, *checked_spec(interface.checks))
        self._checks = interface.checks
        self._limits = interface.limits
        self._bounded = any(limits.bounds for limits in interface.limits)
        self._order = None if interface.order == tuple(range(len(interface.outputs))) else interface.order
        self.layout = ResultLayout(interface.outputs, self._order)
        self._memory = memory
        self._infer = _infer_elsewhere if _loses_errors(compiled) else _infer
        # If all shapes are known, OpenVINO writes directly into torch memory; otherwise its results are copied.
        self._known_shapes = all(spec.is_static for spec in interface.outputs)
        # A sum over a symbolic size has a known shape, but is exact only up to some size.
        self._sized = not self._known_shapes or any(spec.symbols for spec in interface.inputs)
        computed = computed_outputs(compiled)
        self._computed = computed or [False] * len(self._outputs)
        self._direct = self._known_shapes and all(self._computed)
        # If an output of unknown shape is an input, the request keeps using the memory of the last call's input for it,
        # which is the caller's: the next inference would write there. Such a request is used only once.
        self._once = not self._known_shapes and computed is not None and not all(computed)
        # Only where OpenVINO computes each output is no input's memory used for one.
        self._kept_specs = (interface.inputs, self._outputs) if self._direct else None
        self._requests: deque[_Request] = deque([] if self._once else [_Request(compiled)])

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Infers once.

        Args:
            args: All arguments of the subgraph, weights included, in its order.

        Returns:
            One tensor (or int, for a size) per output, each with its own memory.

        Raises:
            InexactValueError: OpenVINO does not compute what torch does for a value.
            RuntimeError: OpenVINO's own error.
        """
        try:
            request = self._requests.pop()
        except IndexError:
            request = _Request(self.compiled)
        sizes = SymbolicSizes() if self._sized else None
        try:
            # Kept alive until infer() returns: the request holds raw pointers to the memory of contiguous copies.
            tensors = []
            if self._kept_specs is not None and not request.outputs:
                request.keep(*self._kept_specs)
            for position, (source, spec) in self._inputs:
                if request.inputs and (tensor := request.inputs[position]) is not None:
                    _copy(args[source], spec, tensor)
                else:
                    tensor = _contiguous(args[source], spec)
                    request.own.set_input_tensor(position, wrap(tensor, spec))
                if sizes is not None and spec.symbols:
                    sizes.learn(spec, tensor)
                tensors.append(tensor)
            if sizes is not None or self._bounded:
                _check_limits(tensors, self._limits, sizes)
            results = self._infer_direct(request) if self._direct else self._infer_copied(request.own, sizes)
        finally:
            if not self._once:
                self._requests.append(request)
        if self._checks:
            _check_values(results.pop(), self._checks)
        for i, spec in enumerate(self._outputs[: len(results)]):
            if spec.is_scalar_int:
                results[i] = int(results[i])
            elif spec.layout is not None:
                results[i] = laid_out_copy(results[i], spec.layout)
        return results if self._order is None else [results[i] for i in self._order]

    def _infer_direct(self, request: _Request) -> list[Any]:
        results: list[Any] = []
        for position, (spec, memory) in enumerate(zip(self._outputs, request.outputs, strict=True)):
            if memory is None:
                result = self._memory.new(spec)
                request.own.set_output_tensor(position, wrap(result, spec))
            else:
                result = self._memory.prepared(memory)
            results.append(result)
        if self._checks:
            results[-1].zero_()
        self._infer(request.own)
        kept_outputs = zip(results, request.outputs, strict=True)
        return [result if memory is None else memory.clone() for result, memory in kept_outputs]

    def _infer_copied(self, request: Any, sizes: SymbolicSizes | None) -> list[Any]:
        if self._memory.poisoned and self._known_shapes:
            for position, computed in enumerate(self._computed):
                # Other outputs may be the caller's own memory.
                if computed:
                    poison_array(request.get_output_tensor(position).data)
        if self._checks:
            request.get_output_tensor(len(self._outputs) - 1).data[...] = 0
        self._infer(request)
        results = []
        for position, spec in enumerate(self._outputs):
            # The array's shape, because it takes 90 us to iterate over the ov.Tensor's.
            values = request.get_output_tensor(position).data
            if sizes is not None:
                sizes.check(spec, values.shape)
            elif values.shape != spec.shape:
                raise RuntimeError(f"OpenVINO returned the shape {values.shape} where torch returns {spec.shape}")
            results.append(_copied(values, spec))
        return results


class EagerCopy:
    """PyTorch's copy of the weights, which every fallback to eager needs.

    Attributes:
        released: Whether the copy was freed.
    """

    def __init__(self) -> None:
        self.released = False

    def run(self, fallback: Callable[..., Any], *args: Any) -> Any:
        """Runs a fallback.

        Raises:
            WeightsReleasedError: The weights that it needs were freed.
        """
        if self.released:
            raise WeightsReleasedError(
                "OpenVINO failed, and PyTorch's copy of the weights was released (handler.openvino.release_weights)"
            )
        return fallback(*args)


def count_runtime_failure(tracker: Tracker, name: str, where: str, error: Exception) -> None:
    """Counts a call of a partition that ran in eager PyTorch; ``where`` is its ``file:line``."""
    by_request = isinstance(error, InexactValueError)
    if tracker.add_fallback("runtime_failed", name, reason=str(error), where=where, caused_by_request=by_request):
        logger.warning("Fallback: a call of %s ran in eager PyTorch: %s", name, error)


class FallbackPartition:
    """A partition as the outer graph calls it: runs on OpenVINO, or falls back for this call, counted.

    Args:
        compiled: The partition on OpenVINO; None if it could not be converted or compiled.
        fallback: The same subgraph in PyTorch.
        on_failure: Called with the error of a failed inference that the fallback replaced.
        unpack: Whether the outer graph expects a tuple.

    Attributes:
        compiled: As above; None as well once it has stepped aside.
        calls: Where the arguments of each call are recorded; None to record none.
    """

    def __init__(
        self,
        compiled: CompiledPartition | None,
        fallback: Callable[..., Any],
        on_failure: Callable[[Exception], None],
        unpack: bool,
    ) -> None:
        self.compiled = compiled
        self.calls: list[tuple[FallbackPartition, tuple[Any, ...]]] | None = None
        self._layout = compiled.layout if compiled is not None else None
        self._fallback = fallback
        self._on_failure = on_failure
        self._tuple = unpack

    def __call__(self, *args: Any) -> Any:
        """Runs the partition as a node of the outer graph: returns a tuple, or the only value."""
        results = self.results(args)
        return results if self._tuple else results[0]

    def results(self, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the partition and returns all outputs, in order."""
        if self.calls is not None:
            self.calls.append((self, tuple(args)))
        compiled = self.compiled
        if compiled is None:
            return self.eagerly(args)
        try:
            return compiled.run(args)
        except Exception as error:
            # The subgraph is functional, so eager can run it again from the same inputs. If eager raises for them too
            # (an index out of range), the caller gets eager's error, and no fallback is counted.
            try:
                results = self.eagerly(args)
            except WeightsReleasedError:
                raise error from None
            self._on_failure(error)
            return results

    def eagerly(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns what `results` does, computed in eager PyTorch."""
        results = self._fallback(*args)
        results = results if self._tuple else (results,)
        return self._layout(results) if self._layout is not None else results

    def fall_back_to_eager(self) -> None:
        """Lets eager PyTorch run all later calls, and frees what OpenVINO compiled."""
        self.compiled = None
