"""Calls without guards, for serving: once the model no longer changes, a call is a look-up and an inference.

Dynamo checks at each call that no module, weight or global changed, which costs a millisecond where an inference takes
eight. With `CompiledModule.freeze` the caller promises that they do not. Only the input is still checked: its
structure, shapes, types and plain values are the key of a recorded call; any other call goes through Dynamo.

A recorded call must meet two conditions. It is *proven* that no Python code ran outside its graph: it was captured as
one graph (`whole.py`), without side effects, and its result holds only the graph's tensors and constants. And it ran
*twice* as the same graph on the same weights, which reveals what the capture does not show: tensors that other code
replaces between calls. If either fails, calls stay guarded, with the reason in `FrozenCalls.refused`.
"""

import enum
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.routes.serialized_graph import tree_to_text
from torchserve_openvino.backend.runtime.compare import output_tensors
from torchserve_openvino.backend.spec import is_plain, plain_leaves

if TYPE_CHECKING:
    from torchserve_openvino.backend.routes.serialized_graph import Blueprint

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
# An object that code around a graph changes: its name, itself, and its attributes before the first call.
Touched = tuple[str, Any, dict[str, Any]]
# Most signatures that are kept; calls with any further one stay guarded.
MAX_RECORDED = 1024
# Types that a result may hold besides tensors. Anything else may change from call to call, or hold tensors.
_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


class NotWholeError(Exception):
    """A call can't be captured as one graph; none of it has run."""


@dataclass
class GraphCall:
    """One call of a graph, with its arguments and results, as `CompiledGraph` recorded it.

    Attributes:
        run: The assembled graph, which maps all inputs, weights included, to a sequence of outputs.
        mutates: Whether AOTAutograd writes results back into inputs after the graph.
        blueprint: How to build ``run`` again from the cache; None if that is not possible.
        unproven: Why it must not be called without the Python code around it; empty if it may be.
        touched: Objects that this Python code changes.
    """

    run: Callable[..., Sequence[Any]]
    args: tuple[Any, ...]
    results: Sequence[Any]
    mutates: bool
    blueprint: "Blueprint | None" = None
    unproven: str = ""
    touched: "Sequence[Touched]" = ()


class Route:
    """How a call of one signature runs without Dynamo: from the caller's leaves through the graph to the result.

    Args:
        run: The assembled graph.
        template: The graph's inputs; None for each that is one of the caller's leaves.
        places: Pairs of a position in ``template`` and the index of the leaf that goes there.
        out: For each leaf of the result ``(True, position among the graph's outputs)`` or ``(False, plain value)``.
        out_spec: Structure of the result; None if it is a single tensor.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        template: list[Any],
        places: list[tuple[int, int]],
        out: list[tuple[bool, Any]],
        out_spec: Any,
    ) -> None:
        self.run = run
        self.template = template
        self.places = places
        self.out = out
        self.out_spec = out_spec
        self.confirmed = False
        self._single = out[0][1] if out_spec is None else None

    @classmethod
    def of_call(cls, call: GraphCall, leaves: Sequence[Any], output: Any) -> "Route":
        """Derives the route from a call that just ran.

        Raises:
            ValueError: The call can't be repeated without Dynamo, for the reason in the message.
        """
        position = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        # Weights stay in the template; the caller's tensors are filled in at each call.
        template = [None if id(arg) in position else arg for arg in call.args]
        places = [(i, position[id(arg)]) for i, arg in enumerate(call.args) if id(arg) in position]
        results = {id(result): i for i, result in enumerate(call.results) if isinstance(result, torch.Tensor)}
        # A `torch.Size` is a constant; if it were flattened, it would come back as a plain tuple.
        out_leaves, out_spec = pytree.tree_flatten(output, is_leaf=lambda value: isinstance(value, torch.Size))
        if results.keys() - {id(leaf) for leaf in out_leaves}:
            raise ValueError("the graph computes more than the model returns: the model keeps state")
        out: list[tuple[bool, Any]] = []
        for leaf in out_leaves:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in results:
                    raise ValueError("an output is not what the graph returned (a view, or an input)")
                out.append((True, results[id(leaf)]))
            elif type(leaf) in _CONSTANTS or isinstance(leaf, enum.Enum):
                out.append((False, leaf))
            else:
                raise ValueError(f"an output of type {type(leaf).__name__} may hold values of this call")
        single = len(out) == 1 and out[0][0] and out_leaves[0] is output
        return cls(call.run, template, places, out, None if single else out_spec)

    def agrees(self, other: "Route") -> bool:
        """Checks whether a second call took the same route: same graph, same weights and integers, same outputs."""
        return (
            self.run is other.run
            and self.places == other.places
            and self.out == other.out
            and len(self.template) == len(other.template)
            and all(a is b or (type(a) is int and a == b) for a, b in zip(self.template, other.template, strict=True))
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Runs the graph on the caller's leaves, and returns the result of the call."""
        args = self.template.copy()
        for index, leaf in self.places:
            args[index] = leaves[leaf]
        if torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
            # The graph has the casts of autocast already, also those that are left to PyTorch; and as AOTAutograd runs
            # it, nothing in it has gradients.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                results = self.run(*args)
        else:
            results = self.run(*args)
        if self._single is not None:
            return results[self._single]
        values = [results[value] if is_result else value for is_result, value in self.out]
        return pytree.tree_unflatten(values, self.out_spec)


class FrozenCalls:
    """The calls recorded so far."""

    def __init__(self) -> None:
        self._recorded: dict[Key, Route | None] = {}
        # Maps signatures without their sizes to the reason why Dynamo could not capture them as one graph.
        self._parted: dict[Key, str] = {}
        self.refused: dict[str, int] = {}

    @property
    def recorded(self) -> int:
        """Number of input signatures that run without guards."""
        return sum(entry is not None and entry.confirmed for entry in self._recorded.values())

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key | None, list[Any], "Route | None"]:
        """Returns the key of a call (None if it can't be recorded), its leaves, and its confirmed route, if any."""
        leaves, spec = _leaves(args, kwargs)
        key = _key(leaves, spec)
        entry = self._recorded.get(key) if key is not None else None
        return key, leaves, entry if entry is not None and entry.confirmed else None

    def known(self, key: Key) -> bool:
        """Checks whether a call with this key was seen before."""
        return key in self._recorded

    def settled(self, key: Key) -> bool:
        """Checks whether it is decided how calls with this key run: by a confirmed route, or guarded."""
        if key not in self._recorded:
            return len(self._recorded) >= MAX_RECORDED
        entry = self._recorded[key]
        return entry is None or entry.confirmed

    def parted(self, key: Key) -> bool:
        """Checks whether this call, or one that differs only in sizes, could not be captured as one graph."""
        reason = self._parted.get(_without_sizes(key))
        if reason is not None and key not in self._recorded:
            self._refuse(key, reason)
        return reason is not None

    def part(self, key: Key, reason: str) -> None:
        """Keeps a call guarded that is not one graph, and all calls that differ from it only in sizes."""
        self._parted[_without_sizes(key)] = reason
        self._refuse(key, reason)

    def candidate(self, key: Key) -> Route | None:
        """Returns the route of a call with this key, confirmed or not; None if it can't be repeated."""
        return self._recorded.get(key)

    def put(self, key: Key, route: Route) -> None:
        """Adds a route that was loaded from the cache."""
        route.confirmed = True
        self._recorded[key] = route

    def record(self, key: Key, leaves: list[Any], calls: Sequence[GraphCall], output: Any) -> None:
        """Records a call that just ran, if it can be repeated without Dynamo.

        The second call with a key confirms the first: a model that counts its calls takes another route each time.
        """
        if key in self._recorded:
            first = self._recorded[key]
            if first is None:
                return
        elif len(self._recorded) >= MAX_RECORDED:
            return
        else:
            first = None
        self._recorded[key] = None
        try:
            if len(calls) != 1:
                raise ValueError(f"the call ran {len(calls)} graphs")
            if any(tensor.requires_grad for tensor in output_tensors(output)):
                raise ValueError("gradients are recorded, which only guarded calls support: call under torch.no_grad()")
            if calls[0].mutates:
                raise ValueError("the model writes to an input or a buffer")
            if calls[0].unproven:
                raise ValueError(calls[0].unproven)
            if left := [name for name, changed, before in calls[0].touched if not _same_attributes(changed, before)]:
                raise ValueError(f"the model keeps state: it leaves {', '.join(left)} changed")
            entry = Route.of_call(calls[0], leaves, output)
            if first is not None:
                if not first.agrees(entry):
                    raise ValueError("a second call took another route: the model keeps state")
                entry.confirmed = True
            self._recorded[key] = entry
        except ValueError as error:
            self._refuse(key, str(error))

    def _refuse(self, key: Key, reason: str) -> None:
        if len(self._recorded) < MAX_RECORDED:
            self._recorded[key] = None
        self.refused[reason] = self.refused.get(reason, 0) + 1
        logger.info("A call stays guarded after freeze(): %s", reason)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """Returns what a call has in common with others of its shapes and modes; None for inputs of other kinds."""
    return _key(*_leaves(args, kwargs))


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    leaves = plain_leaves(args, kwargs)
    if leaves is None:
        return pytree.tree_flatten((args, kwargs))
    return leaves, None if len(args) == 1 and not kwargs else _spec_of_tensors(len(args), tuple(kwargs))


@functools.lru_cache(maxsize=MAX_RECORDED)
def _spec_of_tensors(positional: int, names: tuple[str, ...]) -> Any:
    """Returns pytree's spec of a call with so many positional tensors, and one for each name."""
    return pytree.tree_structure(((0,) * positional, dict.fromkeys(names, 0)))


def _same_attributes(changed: Any, before: dict[str, Any]) -> bool:
    now = vars(changed)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


def _without_sizes(key: Key) -> Key:
    return tuple((len(part[0]), part[1]) if _is_tensor(part) else part for part in key)


def _is_tensor(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], torch.Size)


def signature(key: Key) -> dict[str, Any]:
    """Returns a key as JSON-safe data, which is the same in every process.

    Raises:
        ValueError: The structure of the inputs has no text form.
    """
    spec, grad, autocast, *leaves = key
    tensors = [[str(leaf[1]), list(leaf[0])] if len(leaf) == 2 and isinstance(leaf[0], torch.Size) else
               [leaf[0].__name__, leaf[1]] for leaf in leaves]  # fmt: skip
    structure = "one tensor" if spec is None else tree_to_text(spec)
    return {"structure": structure, "leaves": tensors, "grad": grad, "autocast": str(autocast)}


def _key(leaves: list[Any], spec: Any) -> Key | None:
    """Returns what must be equal for a recorded call to be reused; None if the call can't be recorded."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    parts: list[Any] = [spec, torch.is_grad_enabled(), autocast]
    for leaf in leaves:
        if type(leaf) is torch.Tensor:
            if not is_plain(leaf) or leaf.requires_grad or not leaf.is_contiguous() or not leaf.is_cpu:
                return None
            if leaf.is_conj() or leaf.is_neg():
                return None
            parts.append((leaf.shape, leaf.dtype))
        elif leaf is None or type(leaf) in {bool, int, float, str}:
            # Compared as text, because 0.0 equals -0.0 and nan does not equal itself.
            parts.append((type(leaf), repr(leaf)))
        else:
            return None
    if len(leaves) > 1 and len({id(leaf) for leaf in leaves if type(leaf) is torch.Tensor}) != sum(
        type(leaf) is torch.Tensor for leaf in leaves
    ):
        return None
    return tuple(parts)


# --- the state of one model's calls in the calling thread: for recording calls, and for the report ----------------


@dataclass
class Unverified:
    """A graph for one set of weights, whose results are yet to be compared with eager PyTorch (``verify: first``).

    Attributes:
        verified: Whether they were compared, and match.
        failed: Whether OpenVINO failed in the call that runs, which shows nothing about the graph then.
    """

    verified: bool = False
    failed: bool = False


class CallRecorder(threading.local):
    """Shared by everything that runs or counts a model's calls; each thread has its own values.

    Attributes:
        graph_calls: Number of compiled graphs that the thread ran.
        lost_frames: Number of frames that it ran in eager because Dynamo gave up on them.
        in_graph: Number of compiled graphs that it is currently inside of.
        recorded: Calls of graphs, while a call of the model is recorded; else None.
        newest: The graph that was compiled last.
        unverified: The graphs that ran in the current call and were never compared with eager PyTorch, if the call's
            result is compared; else None.
    """

    graph_calls = 0
    lost_frames = 0
    in_graph = 0
    recorded: list[GraphCall] | None = None
    newest: Any = None
    unverified: list[Unverified] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[GraphCall]]:
        """Records calls of graphs in the list that it yields, while the context lasts."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None
