"""Everything taken from torch's private modules, in one place; pinned by tests/contract/test_torch.py.

torch 2.13: `torch._dynamo.backends.common.aot_autograd` is the documented way to write a backend; the compile id,
AOTAutograd's metadata, Dynamo's counters, graph break reasons and compilation metrics have no public name.
"""

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dynamo import config as dynamo_config
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext, TracingContext
from torch._library.custom_ops import _maybe_get_opdef
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.nn.modules import transformer

__all__ = [
    "FrameEvents",
    "GraphFacts",
    "Mark",
    "aot_autograd",
    "compile_id",
    "graph_break_of",
    "graph_facts",
    "is_traced",
    "keep_whole",
    "kept_whole",
    "python_implementation",
    "take_masks",
]


def compile_id() -> str:
    """Dynamo's name of the compilation under way, ``frame/recompilation``, e.g. ``0/1``."""
    current = CompileContext.current_compile_id()
    return str(current) if current is not None else "?"


@dataclass(frozen=True)
class GraphFacts:
    """What AOTAutograd knows of the graph that it hands over.

    Attributes:
        static: Positions of inputs that are parameters, buffers or tensor attributes of modules.
        mutated: Positions of inputs that the graph changes.
    """

    static: frozenset[int] = frozenset()
    mutated: frozenset[int] = frozenset()


def graph_facts() -> GraphFacts:
    """Facts of the graph being compiled; empty where AOTAutograd left none."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return GraphFacts()
    mutated = (i for i, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)
    return GraphFacts(static=frozenset(metadata.static_input_indices), mutated=frozenset(mutated))


def is_traced(value: Any) -> bool:
    """Whether TorchScript's tracer, while it runs, knows a value (or one of a list) as more than a constant."""
    if isinstance(value, (list, tuple)):
        return any(map(is_traced, value))
    if not isinstance(value, torch.Tensor):
        return False
    trace_of: Any = torch._C._get_value_trace  # type: ignore[attr-defined]
    return str(trace_of(value).node().kind()) != "prim::Constant"


def _where(stack: Sequence[Any]) -> str:
    frame = next((f for f in reversed(stack) if "/torch/" not in f.filename), stack[-1] if stack else None)
    return f"{frame.filename}:{frame.lineno}" if frame is not None else ""


@dataclass
class GraphBreakFact:
    """A graph break: Dynamo's reason and the user's line."""

    reason: str
    where: str


def _claim(item: Any) -> bool:
    """Marks a record of Dynamo's as read, so that no second model of this process counts it."""
    if getattr(item, "_openvino_serving_claimed", False):
        return False
    item._openvino_serving_claimed = True
    return True


def graph_break_of(gm: torch.fx.GraphModule) -> GraphBreakFact | None:
    """The graph break that ended a Dynamo graph; None where it ended by returning, or was counted already."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not _claim(reason):
        return None
    return GraphBreakFact(reason.reason, _where(reason.user_stack))


@dataclass
class FrameFact:
    """One frame that Dynamo compiled, recompiled or gave up on."""

    compile_id: str
    where: str
    ops: int
    recompile_reason: str | None
    failure: str | None


@dataclass
class Mark:
    """A position in Dynamo's records; `events` are those that came after it."""

    breaks: int
    frames: int


class FrameEvents:
    """Reads what Dynamo recorded since a position. Reading is cheap while nothing is compiled."""

    @staticmethod
    def frames_seen() -> int:
        """How many frames Dynamo ever tried to compile in this process."""
        return int(dynamo_utils.counters["frames"]["total"])

    @staticmethod
    def mark() -> Mark:
        """The position of now."""
        return Mark(breaks=len(dynamo_utils.graph_break_reasons), frames=FrameEvents.frames_seen())

    @staticmethod
    def breaks_since(mark: Mark) -> Iterator[GraphBreakFact]:
        """Graph breaks after ``mark`` that no graph carried to the backend."""
        for reason in itertools.islice(list(dynamo_utils.graph_break_reasons), mark.breaks, None):
            if _claim(reason):
                yield GraphBreakFact(reason.reason, _where(reason.user_stack))

    @staticmethod
    def frames_since(mark: Mark) -> Iterator[FrameFact]:
        """Frames after ``mark``, oldest first, with Dynamo's reason for a recompilation or failure."""
        new = FrameEvents.frames_seen() - mark.frames
        recorded = dynamo_utils.get_compilation_metrics()
        for entry in recorded[max(0, len(recorded) - new) :]:
            if not _claim(entry) or (entry.co_filename is None and entry.fail_type is None):
                continue
            code = f"{entry.co_filename}:{entry.co_firstlineno} ({entry.co_name})" if entry.co_filename else ""
            yield FrameFact(
                compile_id=str(entry.compile_id),
                where=code,
                ops=int(entry.graph_op_count or 0),
                recompile_reason=entry.recompile_reason,
                failure=f"{entry.fail_type}: {entry.fail_reason}" if entry.fail_type else None,
            )


def python_implementation(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The function that ``torch.library.custom_op`` made an operator of; None for operators made otherwise."""
    definition = _maybe_get_opdef(op)
    return definition._init_fn if definition is not None else None


_KEEPS_WHOLE: ContextVar[bool] = ContextVar("keeps_whole", default=False)
_KEEPING: set[torch._ops.OpOverload] = set()
_KEEPING_LOCK = threading.Lock()
# Called at each call of a model, so not `patch`, which takes ten times as long. A warning (torch warns of masks of two
# types) is given behind the graph instead of breaking it.
_take_more: Callable[[], Callable[[], None]] = dynamo_config._make_closure_patcher(
    allow_rnn=True, reorderable_logging_functions={warnings.warn}
)


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is said to be causal, without a look at its values: only a hint to eager's kernels hangs on it."""
    return is_causal is True


@functools.lru_cache(maxsize=1)
def take_masks() -> None:
    """Lets Dynamo trace `nn.TransformerEncoder` and `nn.TransformerDecoder` with a mask, whose values they look at."""
    torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)(_is_causal)


def keep_whole(stand_ins: Mapping[torch._ops.OpOverload, Callable[..., Any]]) -> None:
    """Prepares operators that torch takes apart while it traces, for `kept_whole`.

    Args:
        stand_ins: An operator to what is traced in its place; called with the same arguments.
    """
    with _KEEPING_LOCK:
        for op, stand_in in stand_ins.items():
            if op in _KEEPING:
                continue
            _KEEPING.add(op)
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                op.py_kernels[key] = _kernel(op, op.py_kernels[key], stand_in)
            op._dispatch_cache.clear()


def _kernel(op: torch._ops.OpOverload, apart: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        if not _KEEPS_WHOLE.get():
            return apart(*args, **kwargs)
        if torch.is_grad_enabled():
            # Dynamo makes a graph break of it. A stand-in has no gradient, and what torch takes apart has no dropout.
            raise UnsupportedOperatorException(op)
        return whole(*args, **kwargs)

    return choose


@contextmanager
def kept_whole() -> Iterator[None]:
    """While it lasts, Dynamo takes recurrent layers (`allow_rnn`), and this thread traces stand-ins.

    Where gradients are recorded, Dynamo breaks the graph at such an operator, and torch runs it.
    """
    revert = _take_more()
    token = _KEEPS_WHOLE.set(True)
    try:
        yield
    finally:
        _KEEPS_WHOLE.reset(token)
        revert()
