"""Maps calls to an exported program: which tensor of the caller or the module is which input, and what is returned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.capture.module_state import AnswerShape, LiveTensors, Watched
from torchserve_openvino.backend.partitioning.views import base_of, is_view
from torchserve_openvino.backend.upstream._torch_private import GraphFacts

if TYPE_CHECKING:
    from torch.export import ExportedProgram


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
        tensors = (*self.live(), *(self.template[place] for place in self.fixed))
        return any(tensor.requires_grad for tensor in tensors)

    def run(self, graph: Callable[[list[Any]], Sequence[Any]], leaves: Sequence[Any]) -> Any:
        """Calls the graph with the caller's leaves, and assembles the result."""
        inputs = self.template.copy()
        for place, tensor in zip(self.weights, self.live(), strict=True):
            inputs[place] = tensor
        for place, leaf in self.leaves:
            inputs[place] = leaves[leaf]
        written = [inputs[place] for place in self.writes]
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
    for place, item in enumerate(program.graph_signature.input_specs):
        value: Any = None
        if item.kind is InputKind.USER_INPUT:
            place_of[item.arg.name] = place
            if isinstance(item.arg, ConstantArgument):
                value = item.arg.value
            else:
                binding.leaves.append((place, order[users]))
            users += 1
        elif item.target is None or not isinstance(item.arg, TensorArgument):
            raise ValueError(f"an input of kind {item.kind.name}: {item.arg}")
        elif item.kind is not InputKind.CONSTANT_TENSOR or _is_attribute(model, _own_name(item.target)):
            place_of[item.target] = place
            binding.weights.append(place)
            binding.live.add(_own_name(item.target))
        else:
            binding.fixed.append(place)
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
                elif any(base_of(nodes[each]) is base for each in writes):
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
