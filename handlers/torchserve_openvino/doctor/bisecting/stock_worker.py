"""Runs OpenVINO's own torch.compile backend on one model and instruments its stages; in a separate process.

The process is separate because importing that backend changes Dynamo's configuration. The backend logs failures at
DEBUG level at most, so this file uses its private modules (tests/unit/doctor/test_stock.py pins which).
"""

import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.kept_state import unchanged
from torchserve_openvino.backend.runtime.compare import copied, largest_difference
from torchserve_openvino.doctor.bisecting.experiments import first_line
from torchserve_openvino.doctor.bisecting.stock import given_options
from torchserve_openvino.doctor.fixed_state import FixedState
from torchserve_openvino.doctor.target import SampleCall, TargetSpec, load_target
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.ops import does_work, op_name
from torchserve_openvino.serving.shapes.input_spec import Inputs

_LATER_CALLS = 5
_STAGES = ("backend", "execute", "partition", "compile")


@dataclass
class _Watched:
    """What OpenVINO's backend did.

    Attributes:
        ops: Operators in the graphs that it partitioned.
        lacking: Those of them that its support table lacks, by name.
        created: Partitions that it compiled.
        ran: Partition number to its number of operators, for each partition that gave an answer.
        failures: The failures that it logged.
        inductor: Graphs that it passed to Inductor instead.
    """

    ops: int = 0
    lacking: Counter[str] = field(default_factory=Counter)
    created: int = 0
    ran: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    inductor: int = 0

    def counts(self) -> dict[str, int]:
        """Returns the counts so far."""
        return {"ops_total": self.ops, "ops_offloaded": sum(self.ran.values()), "partitions": self.created}

    def outcome(self) -> str:
        """Returns what ran the model, given that it gave an answer."""
        if not self.ran:
            return "inductor" if self.inductor else "eager"
        whole = sum(self.ran.values()) == self.ops and not self.inductor and not self.failures
        return "openvino" if whole else "partial"


class _Failures(logging.Handler):
    """Collects the log lines that report a failure."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__(logging.DEBUG)
        self._watched = watched

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the first line of each distinct failure."""
        text = record.getMessage()
        line = first_line(text)[:500]
        if "failed" in text.lower() and line not in self._watched.failures:
            self._watched.failures.append(line)


def run_stock(
    model: Callable[..., Any], call: SampleCall, options: Mapping[str, Any] | None, *, dynamic: bool | None = None
) -> dict[str, Any]:
    """Runs a model as ``torch.compile(model, backend="openvino", options=options)`` would, and reports the outcome.

    Changes Dynamo's configuration for the rest of the process.

    Args:
        model: In evaluation mode, on the CPU.
        call: Its inputs: ``args`` and ``kwargs``.
        options: As in the YAML, unchecked; None for none.
        dynamic: As for ``torch.compile``; None leaves it out.

    Returns:
        A JSON-safe dictionary with the fields of `stock.StockRun`.
    """
    other: Inputs = pytree.tree_map_only(torch.Tensor, _other, (call.args, call.kwargs))
    arguments: dict[str, Any] = {} if options is None else {"options": dict(options)}
    arguments |= {} if dynamic is None else {"dynamic": dynamic}
    state = FixedState(model)
    with _watch() as watched:
        checks = state.eager_answers((call.args, call.kwargs), other)
        result: dict[str, Any] = {"outcome": "refused", "error": ""}
        try:
            compiled = torch.compile(model, backend="openvino", **arguments)
            first = _call(state, compiled, checks[0][0])
            result["first_call_seconds"] = first.seconds
            result |= watched.counts()
            result |= _answers(state, compiled, checks, first)
            result["outcome"] = watched.outcome()
        except Exception as raised:
            # The exception is the finding: a worker answers each request with it.
            result |= watched.counts()
            result["error"] = class_and_line(raised)
    return {**result, "failures": watched.failures, "unsupported": dict(watched.lacking)}


class _Call(NamedTuple):
    """One call of a model.

    Attributes:
        answer: The answer itself, which a later call may overwrite.
        copy: A copy of it.
        seconds: How long it took.
    """

    answer: Any
    copy: Any
    seconds: float


def _call(state: FixedState, model: Callable[..., Any], inputs: Inputs) -> _Call:
    # Copied outside of inference mode, as handlers create their inputs: Dynamo recompiles for inference tensors.
    args, kwargs = copied(tuple(inputs))
    with unchanged(state.model), torch.inference_mode():
        start = time.perf_counter()
        answer = model(*args, **kwargs)
        seconds = time.perf_counter() - start
        return _Call(answer, copied(answer), seconds)


def _answers(
    state: FixedState, compiled: Callable[..., Any], checks: Sequence[tuple[Inputs, Any]], first: _Call
) -> dict[str, Any]:
    """Measures differences and latency, and checks whether an answer survives the next call."""
    (call, expected), *others = checks
    result: dict[str, Any] = {
        "values_compared": len(checks),
        "max_abs": _finite(largest_difference(first.copy, expected)),
    }
    # Another copy: the answer may be a buffer, which has been restored since.
    before = copied(first.answer)
    for other, expected_other in others:
        answer = _call(state, compiled, other).copy
        result["max_abs_other_input"] = _finite(largest_difference(answer, expected_other))
        # Only other values show it.
        result["first_answer_overwritten"] = largest_difference(first.answer, before) > 0
    seconds = [_call(state, compiled, call).seconds for _ in range(_LATER_CALLS)]
    return {**result, "later_call_seconds": statistics.median(seconds)}


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Returns another input of the same kind: integers are only put in reverse order, so that indices stay valid."""
    turned = tensor.flip(list(range(tensor.dim())))
    return turned * 0.75 if tensor.is_floating_point() else turned


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


@contextmanager
def _watch() -> Iterator[_Watched]:
    """Imports OpenVINO's backend, which registers it, and wraps its stages."""
    import openvino.torch  # noqa: F401
    from openvino.frontend.pytorch.torchdynamo import backend, execute, partition

    watched = _Watched()
    real_partition = partition.Partitioner.make_partitions
    real_compile, real_execute, real_inductor = execute.openvino_compile, execute.openvino_execute, backend.compile_fx

    def make_partitions(self: Any, gm: GraphModule, options: Any) -> Any:
        for node in filter(does_work, gm.graph.nodes):
            watched.ops += 1
            if not self.supported_ops.is_node_supported({}, node):
                watched.lacking[op_name(node.target)] += 1
        return real_partition(self, gm, options)

    def openvino_compile(*args: Any, **kwargs: Any) -> Any:
        result = real_compile(*args, **kwargs)
        watched.created += 1
        return result

    def openvino_execute(gm: GraphModule, *args: Any, partition_id: int = 0, **kwargs: Any) -> Any:
        result = real_execute(gm, *args, partition_id=partition_id, **kwargs)
        watched.ran[partition_id] = sum(does_work(node) for node in gm.graph.nodes)
        return result

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        watched.inductor += 1
        return real_inductor(*args, **kwargs)

    for stage in _STAGES:
        upstream = logging.getLogger(f"{backend.__package__}.{stage}")
        # The module sets WARNING, which hides every failure.
        upstream.setLevel(logging.DEBUG)
        upstream.propagate = False
        upstream.addHandler(_Failures(watched))
    with (
        mock.patch.object(partition.Partitioner, "make_partitions", make_partitions),
        mock.patch.object(execute, "openvino_compile", openvino_compile),
        mock.patch.object(execute, "openvino_execute", openvino_execute),
        mock.patch.object(backend, "compile_fx", compile_fx),
    ):
        yield watched


def _with_own_caches(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the options with every cache that they enable moved to ``folder``."""
    config = options.get("config")
    if isinstance(config, Mapping) and "CACHE_DIR" in config:
        options = {**options, "config": {**config, "CACHE_DIR": folder}}
    return {**options, "cache_dir": folder} if options.get("model_caching") else options


def main(argument: str) -> None:
    """Loads the model and runs it.

    Args:
        argument: JSON: ``spec`` (the fields of a `TargetSpec`), ``extra`` (options beside those of the YAML),
            ``caches`` (a folder for caches, instead of the user's), and ``answer`` (the file for the
            result, since the model may print anything).
    """
    request = json.loads(argument)
    stated = request["spec"]
    spec = TargetSpec(stated["path"], stated["config"], tuple(stated["inputs"]), tuple(stated["mappings"]))
    target = load_target(spec)
    options, dynamic = given_options(Path(spec.path), Path(spec.config) if spec.config is not None else None)
    options = _with_own_caches({**(options or {}), **request["extra"]}, request["caches"]) or None
    result = run_stock(target.model, target.call, options, dynamic=dynamic)
    Path(request["answer"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
