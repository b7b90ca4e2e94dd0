"""The alternative first stage: captures one graph for each input signature with torch.export instead of Dynamo.

A model is exported as a whole or not at all: there are no graph breaks and no guards. The graph is lowered with the
same decompositions as Dynamo's, and goes through the same partitioning, conversion, cache and checks.
`openvino.convert_model` would convert an exported program with the same FX decoder, but fixes the weights of the
export; here they are passed at each call and watched. What can't be exported runs in eager PyTorch, counted with
torch's reason.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.capture.graph import CompiledGraph, Lowered, SharedGraph
from torchserve_openvino.backend.capture.kept_state import StateKeeper
from torchserve_openvino.backend.capture.module_state import (
    AnswerShape,
    LiveTensors,
    ReachedState,
    UnboundedStateError,
    Watched,
    module_state,
)
from torchserve_openvino.backend.capture.whole import source_of
from torchserve_openvino.backend.partitioning.partition import input_shapes
from torchserve_openvino.backend.partitioning.views import base_of, is_view
from torchserve_openvino.backend.spec import is_plain, own_inputs
from torchserve_openvino.backend.upstream import _torch_kept
from torchserve_openvino.backend.upstream import _torch_private as private
from torchserve_openvino.backend.upstream._torch_private import GraphFacts
from torchserve_openvino.ops import where_of
from torchserve_openvino.ops.opaque_ops import OPAQUE_OPS
from torchserve_openvino.passes.lists import FX_PASSES
from torchserve_openvino.passes.manager import run_passes
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.report.records import GraphRecord, line_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# --- maps calls to an exported program: which tensor of the caller or the module is which input, and what is returned


@dataclass(frozen=True)
class ViewCall:
    """A call that makes a view of a tensor, or that selects one of several views."""

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass
class Binding:
    """How the inputs and outputs of an exported graph map to a call.

    Attributes:
        template: The graph's inputs; None for each that is a tensor of the module or of the caller.
        weights: Positions in ``template`` that ``live`` fills, in its order.
        leaves: Pairs of a position in ``template`` and the index of the caller's leaf that goes there.
        fixed: Positions of tensors that are no attribute of a module, such as ``torch.tensor([...])`` in the code.
        writes: Positions in ``template`` of the tensors that the first outputs are copied into.
        answer: Structure of the result, which the other outputs form.
        returned: Results that are mutated tensors, or views of them: position among the results, position in
            ``writes``, and the calls that make the view.
        repeated: Such results that are returned again: position, and position of the first one.
    """

    live: LiveTensors
    answer: AnswerShape
    template: list[Any] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    leaves: list[tuple[int, int]] = field(default_factory=list)
    fixed: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    returned: list[tuple[int, int, tuple[ViewCall, ...]]] = field(default_factory=list)
    repeated: list[tuple[int, int]] = field(default_factory=list)

    @property
    def facts(self) -> GraphFacts:
        """Which inputs are weights, and which are mutated."""
        return GraphFacts(static=frozenset((*self.weights, *self.fixed)), mutated=frozenset(self.writes))

    @property
    def records_gradients(self) -> bool:
        """Whether a tensor of the model requires gradients: a parameter, an attribute, a list item or a global."""
        tensors = (*self.live(), *(self.template[index] for index in self.fixed))
        return any(tensor.requires_grad for tensor in tensors)

    def run(self, graph: Callable[[list[Any]], Sequence[Any]], leaves: Sequence[Any]) -> Any:
        """Calls the graph with the caller's leaves, and assembles the result."""
        inputs = self.template.copy()
        for index, tensor in zip(self.weights, self.live(), strict=True):
            inputs[index] = tensor
        for index, leaf in self.leaves:
            inputs[index] = leaves[leaf]
        written = [inputs[index] for index in self.writes]
        results = graph(inputs)
        for tensor, value in zip(written, results[: len(written)], strict=True):
            tensor.copy_(value)
        answers = list(results[len(written) :])
        for position, which, calls in self.returned:
            view: Any = written[which]
            for call in calls:
                view = call.target(view, *call.arguments, **call.named)
            answers[position] = view
        for position, earlier in self.repeated:
            answers[position] = answers[earlier]
        return self.answer.build(answers)


def bind(program: "ExportedProgram", model: torch.nn.Module, structure: Any, answer: AnswerShape) -> Binding:
    """Reads the signature of an exported program.

    Args:
        program: The lowered program of a `Watched` module; it may be freed afterwards.
        model: The module itself.
        structure: Structure of ``(args, kwargs)`` as the caller passes them.
        answer: Structure of the result.

    Raises:
        ValueError: An input or output is of a kind that is not supported.
    """
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

    order = _leaf_order(structure, program.call_spec.in_spec)
    binding = Binding(LiveTensors(model), answer)
    place_of: dict[str, int] = {}
    users = 0
    for index, item in enumerate(program.graph_signature.input_specs):
        value: Any = None
        if item.kind is InputKind.USER_INPUT:
            place_of[item.arg.name] = index
            if isinstance(item.arg, ConstantArgument):
                value = item.arg.value
            else:
                binding.leaves.append((index, order[users]))
            users += 1
        elif item.target is None or not isinstance(item.arg, TensorArgument):
            raise ValueError(f"an input of kind {item.kind.name}: {item.arg}")
        elif item.kind is not InputKind.CONSTANT_TENSOR or _is_attribute(model, _own_name(item.target)):
            place_of[item.target] = index
            binding.weights.append(index)
            binding.live.add(_own_name(item.target))
        else:
            binding.fixed.append(index)
            value = program.constants[item.target]
        binding.template.append(value)
    written = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)
    writes: dict[str, int] = {}
    answers, first = 0, dict[str, int]()
    nodes = {node.name: node for node in program.graph.nodes}
    for output in program.graph_signature.output_specs:
        name = getattr(output.arg, "name", "")
        if output.kind in written and output.target is not None:
            writes[name] = len(binding.writes)
            binding.writes.append(place_of[output.target])
        elif output.kind is OutputKind.USER_OUTPUT:
            if isinstance(output.arg, TensorArgument):
                base = base_of(nodes[name])
                if base.name in writes and name in first:
                    binding.repeated.append((answers, first[name]))
                elif base.name in writes:
                    first[name] = answers
                    binding.returned.append((answers, writes[base.name], _way_to(nodes[name])))
                elif any(base_of(nodes[name]) is base for name in writes):
                    raise ValueError("returns a view of what it writes to through another view")
            answers += 1
        else:
            raise ValueError(f"an output of kind {output.kind.name}: {output.arg}")
    return binding


def _way_to(node: Node) -> tuple[ViewCall, ...]:
    """Returns the calls that make a view from its base.

    Raises:
        ValueError: A size is known only when the graph runs.
    """
    calls: list[ViewCall] = []
    while is_view(node):
        base, *rest = node.args
        if any(source is not base for source in node.all_input_nodes):
            raise ValueError(f"returns a view of what it writes to, of a size that varies: {node.format_node()}")
        calls.append(ViewCall(node.target, tuple(rest), dict(node.kwargs)))  # type: ignore[arg-type]
        node = base  # type: ignore[assignment]
    return tuple(reversed(calls))


def _own_name(target: str) -> str:
    return target.removeprefix(Watched.PREFIX)


def _is_attribute(model: torch.nn.Module, name: str) -> bool:
    """Checks whether a constant is an attribute of a module; items of lists and literals have generated names."""
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, torch.Tensor)


def _leaf_order(structure: Any, exported: Any) -> list[int]:
    """Maps each leaf of the exported program to its position among the caller's, because torch sorts keywords."""
    args, kwargs = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    names = exported.child(1).context
    return pytree.tree_leaves((args, {name: kwargs[name] for name in names}))


# --- the alternative first stage: captures one graph for each input signature with torch.export instead of Dynamo


logger = logging.getLogger(__name__)

# Each signature is one compilation, whose result is kept.
MAX_SIGNATURES = 64
_REASON_LINES = 3
_PLAIN = (bool, int, float, str, type(None))
# An exported graph returns no other subclass.
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_RECORDS_GRADIENTS = "gradients are recorded, which exported graphs do not support: call under torch.inference_mode()"


@dataclass
class ExportedGraph:
    """The graph of one signature, and how a call's inputs and outputs map to it."""

    graph: CompiledGraph
    binding: Binding


class ExportedModel:
    """A model captured with torch.export; call it like the model itself.

    Args:
        model: The model.
        settings: Settings of the model.
        dynamic: As in ``torch.compile``, but has no effect: each shape is exported separately.
    """

    def __init__(self, model: Callable[..., Any], settings: BackendSettings, dynamic: bool | None) -> None:
        self._model = model
        self._settings = settings
        self._lock = threading.RLock()
        # Maps each signature to its graph, or to the reason why there is none.
        self._found: dict[Any, ExportedGraph | str] = {}
        self._state: list[Any] = []
        self._reached = ReachedState(torch.nn.Module())
        self._keeps_state = ""
        _torch_kept.keep_undecomposed(OPAQUE_OPS)
        if dynamic:
            settings.tracker.add_note("dynamic: true has no effect: torch.export makes one graph for each shape")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; exports it for each new signature, and again after the module itself has changed."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        outcome = self._why_eager(leaves) or self._exported(leaves, spec, args, kwargs)
        if isinstance(outcome, ExportedGraph) and torch.is_grad_enabled() and outcome.binding.records_gradients:
            outcome = _RECORDS_GRADIENTS
        if isinstance(outcome, ExportedGraph) and outcome.binding.writes and _share_memory(leaves):
            outcome = "it writes to its inputs, and two of these share memory"
        if isinstance(outcome, ExportedGraph):
            # The graph already contains the casts of an autocast region.
            with torch.autocast("cpu", enabled=False):
                return outcome.binding.run(outcome.graph, leaves)
        # Counted once eager PyTorch has answered: a call that it rejects as well is no fallback.
        answer = self._settings.eager_copy.run(functools.partial(self._model, *args, **kwargs))
        source = source_of(self._model)
        where = line_of(source) if ":" in source else ""
        if self._settings.tracker.add_fallback("conversion_failed", "whole model", reason=outcome, where=where):
            logger.warning("Fallback: the whole model runs in eager PyTorch: %s", outcome)
        return answer

    def release_weights(self) -> None:
        """See `CompiledGraph.release_weights`."""
        for outcome in self._found.values():
            if isinstance(outcome, ExportedGraph):
                outcome.graph.release_weights()

    def drop(self) -> None:
        """See `CompiledGraph.drop`."""
        self._found.clear()

    def _why_eager(self, leaves: Sequence[Any]) -> str:
        """Returns why no exported graph can serve this call; empty if one can."""
        if self._keeps_state:
            return self._keeps_state
        if not isinstance(self._model, torch.nn.Module):
            return "torch.export takes modules, not functions"
        if self._model.training:
            return "the model is in training mode: call eval() first"
        if torch.is_grad_enabled():
            tensors = (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *self._model.parameters())
            if any(tensor.requires_grad for tensor in tensors):
                return _RECORDS_GRADIENTS
        unknown = [type(leaf).__name__ for leaf in leaves if not (type(leaf) in _TENSORS or isinstance(leaf, _PLAIN))]
        if unknown:
            return f"an input of type {unknown[0]} cannot be part of a signature"
        plain = all(is_plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return "" if plain else "an input is a sparse, nested or quantized tensor, whose content no signature describes"

    def _exported(
        self, leaves: Sequence[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedGraph | str:
        assert isinstance(self._model, torch.nn.Module)
        key = (*_key(leaves, spec), *own_inputs(self._model, leaves))
        with self._lock:
            state = module_state(self._model)
            if state != self._state or next(self._reached.changed(), None) is not None:
                if self._found:
                    self._settings.tracker.add_note("the module itself was changed, and exported again")
                self._found.clear()
                try:
                    self._state, self._reached = state, ReachedState(self._model)
                except UnboundedStateError as error:
                    # Not searched again: a call would take as long as this search.
                    self._keeps_state = str(error)
                    return self._keeps_state
            if key not in self._found:
                if len(self._found) >= MAX_SIGNATURES:
                    return f"more than {MAX_SIGNATURES} input signatures: each would be a graph of its own"
                self._found[key] = self._export(self._model, spec, args, kwargs)
            return self._found[key]

    def _export(
        self, model: torch.nn.Module, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedGraph | str:
        start = time.perf_counter()
        tracker = self._settings.tracker
        tracker.cache.traces += 1
        changes: list[str] = []
        answers: list[AnswerShape] = []
        try:
            # Tensors that are created while tracing become constants and are watched like weights, which is impossible
            # for inference tensors.
            # Only one thread may trace at a time, for the reason given in `convert`.
            with private.compile_lock, torch.inference_mode(False), torch.no_grad(), _torch_kept.kept_whole():
                keeper = StateKeeper(model, contents=False)
                try:
                    program = torch.export.export(Watched(model, changes, answers), args, kwargs, strict=False)
                finally:
                    # torch.export leaves copies of containers in the model; this puts the original ones back.
                    keeper.restore()
                if changes:
                    which = ", ".join(sorted(set(changes)))
                    self._keeps_state = f"the model changes Python state ({which}), which no graph can express"
                    return self._keeps_state
                lowered = program.run_decompositions(self._settings.decompositions)
            binding = bind(lowered, model, spec, answers[-1])
            gm = _copied(lowered.graph_module)
            facts = binding.facts
            run_passes(FX_PASSES, "graph", gm.graph, PassContext(static=facts.static - facts.mutated))
        except Exception as error:
            # torch.export raises errors of many classes for what it can't express, including the model's own errors.
            return _first_lines(error)
        where = next((line for node in gm.graph.nodes if (line := where_of(node))), "")
        shapes = input_shapes(gm, binding.facts.static)
        record = GraphRecord(f"export/{len(tracker.graphs)}", where, "inference", ops_total=0, inputs=shapes)
        graph = SharedGraph(Lowered(gm, facts, record)).compiled(self._settings)
        graph.record.lower_seconds = time.perf_counter() - start
        return ExportedGraph(graph, binding)


def _copied(gm: GraphModule) -> GraphModule:
    """Returns a copy in which all nodes have their final names."""
    # Nodes are looked up by name, and torch.export names inputs as the model does, and FX renames
    # those that are Python builtins (``input``) in every copy.
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"torch.export: {type(error).__name__}: {' '.join(lines[:_REASON_LINES])}"


def _share_memory(leaves: Sequence[Any]) -> bool:
    """Returns True if two different tensors have the same storage."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided}
    return len({leaf.untyped_storage().data_ptr() for leaf in tensors.values()}) < len(tensors)


def _key(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Returns the signature of a call: what must be equal for a graph to be reused."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    parts: list[Any] = [spec, autocast]
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            layout = leaf.stride() if leaf.layout is torch.strided and not leaf.is_contiguous() else leaf.layout
            # The last item identifies a tensor that is passed twice, since a graph may write to one of its inputs.
            same = first.setdefault(id(leaf), position)
            # Operators of the graph may see another tensor's memory than its numbers.
            bits = leaf.is_conj(), leaf.is_neg()
            parts.append((type(leaf), leaf.shape, leaf.dtype, leaf.device, layout, bits, same))
        else:
            # Compared as text, because 0.0 equals -0.0 and nan does not equal itself.
            parts.append((type(leaf), repr(leaf)))
    return tuple(parts)
