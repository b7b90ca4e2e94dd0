"""What is taken from torch's private modules, as in the other `_torch_` files; tests/contract pins it.

torch 2.13: `torch._dynamo.backends.common.aot_autograd` is the documented way to write a backend; the compile id,
AOTAutograd's metadata, the conversion of frames, graph break reasons and compilation metrics have no public name.
"""

import dataclasses
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

# How Dynamo names what it reaches through a module.
_IMPORTED = re.compile(r"G\['__import_(\w+)'\]((?:\.\w+)+)")
# The frame that stands in front of the model where a call is captured whole (whole.py).
STAND_IN_FILE = "torchserve_openvino/backend/routes/whole.py"


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
    own = (f for f in reversed(stack) if "/torch/" not in f.filename and not f.filename.endswith(STAND_IN_FILE))
    frame = next(own, stack[-1] if stack else None)
    return f"{frame.filename}:{frame.lineno}" if frame is not None else ""


# --- what became of each frame -----------------------------------------------------------------------------------


@dataclass
class GraphBreakFact:
    """A graph break: Dynamo's reason and the user's line."""

    reason: str
    where: str


@dataclass
class FrameFact:
    """One frame that Dynamo compiled, or compiled again.

    Attributes:
        ops: Calls in its graph, 0 where there was nothing to compile.
        recompile_reason: The guard that failed; None the first time.
        side_effects: What its code changes in Python objects that were there before, as Dynamo names it.
    """

    compile_id: str
    where: str
    ops: int
    recompile_reason: str | None
    side_effects: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostFrame:
    """A frame that Dynamo gave up, which runs in eager PyTorch each time it is called.

    Attributes:
        is_break: Whether Dynamo refused the code, or the limit of recompilations; otherwise something failed.
    """

    where: str
    reason: str
    is_break: bool


class FrameObserver(Protocol):
    """Called for each frame of one compiled model, in the thread that calls the model."""

    def compiled(self, fact: FrameFact) -> None:
        """A frame was compiled."""

    def broke(self, fact: GraphBreakFact) -> None:
        """Tracing stopped at a line, and goes on behind it."""

    def lost(self, frame: LostFrame, first: bool) -> None:
        """A frame is about to run in eager PyTorch, for the first time or again."""


def _claim(item: Any) -> bool:
    """Marks a record of Dynamo's as read, so that it is counted once."""
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


def watch_frames(
    compiled: Any,
    observer: FrameObserver,
    *,
    place: str = "",
    keeps_going: bool = True,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Puts an observer between Dynamo and its conversion of frames.

    Dynamo itself remembers a frame that it gave up and runs it in eager from then on without a word. Here it is asked
    each time, so that each such run is counted; the answer is looked up, not found anew.

    Args:
        compiled: What ``torch.compile`` returned.
        observer: Called for each frame.
        place: How to name the outermost frame, where that is no code of the user's.
        keeps_going: Whether a frame on whose way to a graph something failed runs in eager PyTorch instead of raising.
        around: Is entered while a frame is converted.
    """
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None:
        context = inspect.getclosurevars(compiled).nonlocals["self"]
    callback = context.callback
    convert, region = callback._torchdynamo_orig_backend, context._isolate_recompiles_id
    callback._torchdynamo_orig_backend = _Watch(convert, observer, place, keeps_going, region, around)


# Torch looks for the guard among what was compiled in a region, and has one variable for it in the whole process.
_NO_GUARD = "torch does not say which guard failed: another thread called a compiled model at the same time"


class _Watch:
    """Dynamo's conversion of one frame, and what it says of it; called under Dynamo's own lock."""

    # What is remembered stands in Dynamo's own notes on a code object, which ``torch.compiler.reset`` clears.
    _NOTE = "openvino_serving"

    def __init__(
        self,
        convert: Any,
        observer: FrameObserver,
        place: str,
        keeps_going: bool,
        region: int,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._convert = convert
        # By this name Dynamo looks for the backend.
        self._torchdynamo_orig_backend = convert
        self._observer = observer
        self._place = place
        self._keeps_going = keeps_going
        self._region = region
        self._around = around

    @property
    def _clone_with_backend(self) -> Any:
        return self._convert._clone_with_backend

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> ConvertFrameReturn:
        # Torch keeps the region of compiled code for the whole process: a call in another thread may have changed it.
        set_eval_frame_isolate_recompiles_id(self._region)
        # For each compiled model: whether it was compiled before (None), or what to answer.
        notes = code_context.get_context(frame.f_code).setdefault(self._NOTE, weakref.WeakKeyDictionary())
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
            # Nothing was tried: a frame without tensors, for example.
            return answer
        code = frame.f_code
        stands_in = code.co_filename.endswith(STAND_IN_FILE)
        where = self._place if stands_in else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"
        if answer.guarded_code is not None:
            effects = get_compiled_code_side_effects(answer.guarded_code.code) or ()
            # Another model of the same code is no earlier compilation of this one.
            guard = (entry.recompile_reason or _NO_GUARD) if self in notes else None
            notes[self] = None
            ops = int(entry.graph_op_count or 0)
            self._observer.compiled(FrameFact(str(entry.compile_id), where, ops, guard, tuple(effects)))
        elif entry.fail_type is not None:
            text = f"{entry.fail_type}: {entry.fail_reason}"
            lost = LostFrame(_failed_at(entry) or where, text, is_break=failure is None)
            answer = dataclasses.replace(answer, apply_to_code=False)
            notes[self] = lost, answer
            self._observer.lost(lost, first=True)
        set_eval_frame_isolate_recompiles_id(self._region)
        return answer


def changed_object(side_effect: str) -> Any:
    """The object that Dynamo's name of a side effect stands for, if it is one reached through a module; else None."""
    found = _IMPORTED.fullmatch(side_effect)
    value: Any = sys.modules.get(found[1].replace("_dot_", ".")) if found else None
    for name in found[2].split(".")[1:] if found else ():
        value = getattr(value, name, None)
    return value if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) else None


def _newest(metrics: Sequence[Any]) -> Any:
    return metrics[-1] if metrics else None


def _is_the_callers(error: Exception) -> bool:
    """Whether an error on the way to a graph is to be seen: the caller forbade graph breaks, or did something wrong."""
    inner = getattr(error, "inner_exception", error)
    return isinstance(error, (exc.Unsupported, exc.UserError, exc.ResumePrologueTracingError)) or isinstance(
        inner, TorchServeOpenVINOError
    )


def _failed_at(entry: Any) -> str:
    return f"{entry.fail_user_frame_filename}:{entry.fail_user_frame_lineno}" if entry.fail_user_frame_filename else ""


# --- what a graph rests on ---------------------------------------------------------------------------------------


def reads_values(gm: torch.fx.GraphModule) -> str:
    """Why what a graph computes is no function of its inputs alone that Python never looks into; empty if it is.

    Args:
        gm: Of Dynamo, or lowered.
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
    """The function that ``torch.library.custom_op`` made an operator of; None for operators made otherwise."""
    definition = _maybe_get_opdef(op)
    return definition._init_fn if definition is not None else None
