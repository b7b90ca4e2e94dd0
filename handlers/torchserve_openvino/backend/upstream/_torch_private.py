"""Wraps parts of torch's private modules, like the other `_torch_` files; tests/contract pins what is used.

torch 2.13: `torch._dynamo.backends.common.aot_autograd` is the documented way to write a backend; the compile id,
AOTAutograd's metadata, the conversion of frames, graph break reasons and compilation metrics have no public name.
"""

import dataclasses
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import set_eval_frame_isolate_recompiles_id
from torch._dynamo import exc
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.code_context import code_context
from torch._dynamo.convert_frame import compile_lock, get_compiled_code_side_effects
from torch._dynamo.source import RandomValueSource
from torch._dynamo.types import ConvertFrameReturn
from torch._guards import CompileContext, TracingContext
from torch._library.custom_ops import _maybe_get_opdef
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.ops.names import is_stand_in, source_line

__all__ = [
    "FrameFact",
    "FrameObserver",
    "GraphBreakFact",
    "GraphFacts",
    "LostFrame",
    "aot_autograd",
    "changed_object",
    "compile_id",
    "compile_lock",
    "graph_break_of",
    "graph_facts",
    "is_traced",
    "python_implementation",
    "reads_values",
    "watch_frames",
]

# How Dynamo names an object that it reaches through a module.
_IMPORTED = re.compile(r"G\['__import_(\w+)'\]((?:\.\w+)+)")
# The file of the frame that wraps the model when a call is captured as one graph (whole.py).
STAND_IN_FILE = "torchserve_openvino/backend/capture/whole.py"


def compile_id() -> str:
    """Returns Dynamo's id of the current compilation, ``frame/recompilation``, e.g. ``0/1``."""
    current = CompileContext.current_compile_id()
    return str(current) if current is not None else "?"


@dataclass(frozen=True)
class GraphFacts:
    """AOTAutograd's metadata about a graph that it hands over.

    Attributes:
        static: Positions of inputs that are parameters, buffers or tensor attributes of modules.
        mutated: Positions of inputs that the graph mutates.
    """

    static: frozenset[int] = frozenset()
    mutated: frozenset[int] = frozenset()


def graph_facts() -> GraphFacts:
    """Returns the facts of the graph being compiled; empty if AOTAutograd left none."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return GraphFacts()
    mutated = (i for i, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)
    return GraphFacts(static=frozenset(metadata.static_input_indices), mutated=frozenset(mutated))


def is_traced(value: Any) -> bool:
    """Checks whether TorchScript's running tracer records a value (or one of a list) as more than a constant."""
    if isinstance(value, (list, tuple)):
        return any(map(is_traced, value))
    if not isinstance(value, torch.Tensor):
        return False
    trace_of: Any = torch._C._get_value_trace  # type: ignore[attr-defined]
    return str(trace_of(value).node().kind()) != "prim::Constant"


def _where(stack: Sequence[Any]) -> str:
    own = (frame for frame in reversed(stack) if "/torch/" not in frame.filename and not is_stand_in(frame.filename))
    frame = next(own, stack[-1] if stack else None)
    return source_line(frame.filename, frame.lineno) if frame is not None else ""


# --- what happened to each frame ---------------------------------------------------------------------------------


@dataclass
class GraphBreakFact:
    """A graph break: Dynamo's reason and the line in the user's code."""

    reason: str
    where: str


@dataclass
class FrameFact:
    """One frame that Dynamo compiled or recompiled.

    Attributes:
        ops: Number of calls in its graph; 0 if there was nothing to compile.
        recompile_reason: The guard that failed; None at the first compilation.
        side_effects: Existing Python objects that its code changes, as Dynamo names them.
    """

    compile_id: str
    where: str
    ops: int
    recompile_reason: str | None
    side_effects: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostFrame:
    """A frame that Dynamo gave up on, which runs in eager PyTorch each time it is called.

    Attributes:
        is_break: Whether Dynamo refused the code or reached the recompile limit; otherwise an error occurred.
        forget: Lets Dynamo try the frame again: a call that eager PyTorch rejects as well says nothing of others.
    """

    where: str
    reason: str
    is_break: bool
    forget: Callable[[], Any] = field(compare=False)


class FrameObserver(Protocol):
    """Called for each frame of one compiled model, in the thread that calls the model."""

    def compiled(self, fact: FrameFact) -> None:
        """A frame was compiled."""

    def broke(self, fact: GraphBreakFact) -> None:
        """Tracing stopped at a line, and continues after it."""

    def lost(self, frame: LostFrame, first: bool) -> None:
        """A frame is about to run in eager PyTorch, for the first time or again."""


def _claim(item: Any) -> bool:
    """Marks one of Dynamo's records as counted; returns whether it was not counted before."""
    if getattr(item, "_openvino_serving_claimed", False):
        return False
    item._openvino_serving_claimed = True
    return True


def graph_break_of(gm: torch.fx.GraphModule) -> GraphBreakFact | None:
    """Returns the graph break that ended a Dynamo graph; None if it ended by returning, or was already counted."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not _claim(reason):
        return None
    return GraphBreakFact(reason.reason, _where(reason.user_stack))


def watch_frames(
    compiled: Any,
    observer: FrameObserver,
    *,
    source: str = "",
    keeps_going: bool = True,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Installs an observer between Dynamo and its conversion of frames.

    Dynamo itself remembers a frame that it gave up on, and silently runs it in eager from then on. Here it calls the
    conversion each time, so that each such run is counted; the earlier answer is looked up, not computed again.

    Args:
        compiled: What ``torch.compile`` returned.
        observer: Called for each frame.
        source: Name for the outermost frame, if that is not the user's code.
        keeps_going: Whether a frame runs in eager PyTorch instead of raising if its compilation fails.
        around: Context manager that is entered while a frame is converted.
    """
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        context = inspect.getclosurevars(compiled).nonlocals["self"]
    callback = context.callback
    convert, region = callback._torchdynamo_orig_backend, context._isolate_recompiles_id
    callback._torchdynamo_orig_backend = _ObservedConversion(convert, observer, source, keeps_going, region, around)


# torch looks for the failed guard in the code compiled in a region, and keeps the region in one process-wide variable.
_NO_GUARD = "torch does not say which guard failed: another thread called a compiled model at the same time"


class _ObservedConversion:
    """Wraps Dynamo's conversion of a frame and reports the outcome; called under Dynamo's own lock."""

    # Key of our records in Dynamo's own context of a code object, which ``torch.compiler.reset`` clears.
    _NOTE = "openvino_serving"

    def __init__(
        self,
        convert: Any,
        observer: FrameObserver,
        source: str,
        keeps_going: bool,
        region: int,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._convert = convert
        # Dynamo looks for the backend by this name.
        self._torchdynamo_orig_backend = convert
        self._observer = observer
        self._source = source
        self._keeps_going = keeps_going
        self._region = region
        self._around = around

    @property
    def _clone_with_backend(self) -> Any:
        return self._convert._clone_with_backend

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> ConvertFrameReturn:
        # torch keeps the current region in a process-wide variable, which a call in another thread may have changed.
        set_eval_frame_isolate_recompiles_id(self._region)
        # Maps each compiled model to None if it compiled this code before, or to what to report and return.
        # From torch 2.15 on, the annotation names torch's own keys alone.
        context: Any = code_context.get_context(frame.f_code)
        notes = context.setdefault(self._NOTE, weakref.WeakKeyDictionary())
        if (known := notes.get(self)) is not None:
            self._observer.lost(known[0], first=False)
            return known[1]
        breaks, newest = len(dynamo_utils.graph_break_reasons), _newest(dynamo_utils.get_compilation_metrics())
        try:
            with self._around():
                answer, failure = self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1), None
        except Exception as error:
            if not self._keeps_going or _is_the_callers(error):
                raise
            answer, failure = ConvertFrameReturn(skip_reason=str(error)), error
        for reason in dynamo_utils.graph_break_reasons[breaks:]:
            if _claim(reason):
                self._observer.broke(GraphBreakFact(reason.reason, _where(reason.user_stack)))
        entry = _newest(dynamo_utils.get_compilation_metrics())
        if entry is newest:
            # Dynamo did not try to compile the frame: it has no tensors, for example.
            return answer
        code = frame.f_code
        stands_in = code.co_filename.endswith(STAND_IN_FILE)
        where = self._source if stands_in else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
        if answer.guarded_code is not None:
            effects = get_compiled_code_side_effects(answer.guarded_code.code) or ()
            # A compilation of the same code for another model does not count as an earlier one of this model.
            guard = (entry.recompile_reason or _NO_GUARD) if self in notes else None
            notes[self] = None
            ops = int(entry.graph_op_count or 0)
            self._observer.compiled(FrameFact(str(entry.compile_id), where, ops, guard, tuple(effects)))
        elif entry.fail_type is not None:
            text = f"{entry.fail_type}: {entry.fail_reason}"
            forget = functools.partial(notes.pop, self, None)
            lost = LostFrame(_failed_at(entry) or where, text, failure is None, forget)
            answer = dataclasses.replace(answer, apply_to_code=False)
            notes[self] = lost, answer
            self._observer.lost(lost, first=True)
        set_eval_frame_isolate_recompiles_id(self._region)
        return answer


def changed_object(side_effect: str) -> Any:
    """Returns the object that Dynamo's name of a side effect means, if it is reached through a module; else None."""
    match = _IMPORTED.fullmatch(side_effect)
    value: Any = sys.modules.get(match[1].replace("_dot_", ".")) if match else None
    for name in match[2].split(".")[1:] if match else ():
        value = getattr(value, name, None)
    return value if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) else None


def _newest(metrics: Sequence[Any]) -> Any:
    return metrics[-1] if metrics else None


def _is_the_callers(error: Exception) -> bool:
    """Checks whether a compilation error must reach the caller, who forbade graph breaks or made a mistake."""
    inner = getattr(error, "inner_exception", error)
    return isinstance(error, (exc.Unsupported, exc.UserError, exc.ResumePrologueTracingError)) or isinstance(
        inner, TorchServeOpenVINOError
    )


def _failed_at(entry: Any) -> str:
    file = entry.fail_user_frame_filename
    return source_line(file, entry.fail_user_frame_lineno) if file else ""


# --- what a graph depends on -------------------------------------------------------------------------------------


def reads_values(gm: torch.fx.GraphModule) -> str:
    """Returns why a graph is no function of its inputs alone, or has values that Python reads; empty if neither holds.

    Args:
        gm: Dynamo's graph, or a lowered one.
    """
    for node in gm.graph.nodes:
        if isinstance(getattr(node.meta.get("grapharg"), "source", None), RandomValueSource):
            return "a random number is drawn in Python"
        if node.op == "call_method" and node.target in {"item", "tolist"}:
            return f"a tensor's value is read in Python ({node.target})"
        if node.op == "call_function" and node.target is torch.ops.aten._local_scalar_dense.default:
            return "a tensor's value is read in Python (item)"
        if free_unbacked_symbols(node.meta.get("example_value", node.meta.get("val"))):
            return "a size or number is known only when the model runs"
    return ""


def python_implementation(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Returns the function that ``torch.library.custom_op`` turned into an operator; None for other operators."""
    definition = _maybe_get_opdef(op)
    return definition._init_fn if definition is not None else None
