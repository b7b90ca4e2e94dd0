"""Computes only the rows of a sequence that are selected: the first token of an encoder's last layer, for example.

Classifiers take the vector of one token, ``hidden[:, 0]`` or ``hidden[arange(batch), last]``, and OpenVINO computes the
last layer for all of them. Here the selection moves up, through operators that treat rows alike (norms, products with
weights, activations, sums), as far as nothing else needs the other rows: to the result of attention. Of a model with 6
layers this saves a ninth, and almost all logits of a model that fills in single words.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchserve_openvino.ops.names import arguments_of, value_of
from torchserve_openvino.passes.fx.nodes import add_call, replace
from torchserve_openvino.passes.pass_context import PassContext

aten = torch.ops.aten

_SELECTIONS = frozenset({aten.select.int, aten.slice.Tensor})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_COPIES = frozenset({aten.clone.default, aten.alias.default, aten._to_copy.default})
_NORM = aten.native_layer_norm.default
# The operand whose rows are those of the product.
_PRODUCTS = {
    aten.mm.default: "self",
    aten.bmm.default: "self",
    aten.addmm.default: "mat1",
    aten.linear.default: "input",
}
_END = torch.iinfo(torch.int64).max
# Others are masks, or may round numbers.
_INDICES = frozenset({torch.int32, torch.int64})
# A number, or a sympy expression: these compare without a guard.
Size = Any


@dataclass(frozen=True)
class Chosen:
    """Rows that a tensor of indices names, for each group its own.

    Attributes:
        selection: ``tensor[numbers, indices]``.
        numbers: The numbers of the groups.
        indices: Indices of the rows, ``[groups]`` or ``[groups, count]``.
        count: How many of each group.
    """

    selection: Node
    numbers: Node
    indices: Node
    count: int


@dataclass(frozen=True)
class SelectedRow:
    """The selected rows of a tensor, by numbers that no reshape changes.

    A tensor of ``[2, 16, 128]`` and its view as ``[32, 128]`` have the same row: of 2 groups of 16 rows.

    Attributes:
        groups: Product of the sizes before the rows.
        size: Number of rows in each group.
        index: The row; -1 is the last one.
    """

    groups: Size
    size: Size
    index: int | Chosen

    @property
    def count(self) -> int:
        """How many rows of each group are selected."""
        return self.index.count if isinstance(self.index, Chosen) else 1


@dataclass(frozen=True)
class Axis:
    """Where a tensor has the rows.

    Attributes:
        dim: The dimension.
        outer: Groups within this dimension; 1 if it begins with the rows.
        inner: How many elements of the dimension each row has; 1 if it ends with the rows.
    """

    dim: int
    outer: Size
    inner: Size

    @property
    def is_plain(self) -> bool:
        """Whether the dimension has the rows and nothing else."""
        return bool(self.outer == 1 and self.inner == 1)


# For each node that is computed for one row alone: those of its operands that are needed for one row.
Plan = dict[Node, dict[Node, SelectedRow]]


def compute_selected_rows(graph: Graph, _: PassContext) -> None:
    """Moves selections of one row up to where the other rows are needed, in place."""
    selections = {node: row for node in graph.nodes if (row := _selected(node)) is not None}
    if selections:
        _share_sizes(graph)
    excluded: set[Node] = set()
    while selections:
        plan = _plan(graph, selections, excluded)
        # Rows that share a dimension with something else can't be sliced off it, nor those of a norm's three results.
        inseparable = {
            user
            for user, operands in plan.items()
            for operand, row in operands.items()
            if (operand not in plan or operand in selections) and not _can_be_sliced(operand, row)
        }
        if inseparable:
            excluded |= inseparable
            continue
        idle = [selection for selection in selections if not any(map(_is_product, _above(selection, plan, selections)))]
        if not idle:
            _apply(graph, selections, plan)
            return
        for node in idle:
            del selections[node]


def _can_be_sliced(node: Node, row: SelectedRow) -> bool:
    if not isinstance(value_of(node), torch.Tensor):
        return False
    axis = _axis(node, row)
    return axis.is_plain and (isinstance(row.index, int) or axis.dim == 1)


def _share_sizes(graph: Graph) -> None:
    """Reads each symbolic size of the first tensor that has it: for its size alone, no tensor needs all rows."""
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or not isinstance(size := value_of(node), torch.SymInt):
            continue
        if (known := first.setdefault(size.node.expr, node)) is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _plan(graph: Graph, selections: Mapping[Node, SelectedRow], excluded: set[Node]) -> Plan:
    """Returns what can be computed for one row: what nothing needs for others, by operators that treat rows alike."""
    plan: Plan = {}
    for node in reversed(graph.nodes):
        if node in selections:
            plan[node] = {node.all_input_nodes[0]: selections[node]}
            continue
        needed = {plan[user].get(node) if user in plan else None for user in node.users}
        if len(needed) != 1 or node in excluded or (row := needed.pop()) is None:
            continue
        if (operands := _operands(node, row)) is not None:
            plan[node] = operands
    return plan


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS


def _above(node: Node, plan: Plan, selections: Collection[Node]) -> Iterator[Node]:
    """Yields the nodes that are computed for one row because of a selection."""
    waiting, seen = list(plan[node]), set()
    while waiting:
        user = waiting.pop()
        if user in plan and user not in selections and user not in seen:
            seen.add(user)
            yield user
            waiting.extend(plan[user])


def _apply(graph: Graph, selections: Mapping[Node, SelectedRow], plan: Plan) -> None:
    """Adds each planned node for one row, and erases it for all."""
    one: dict[tuple[Node, SelectedRow], Node] = {}
    selected: dict[Node, Node] = {}
    planned = [node for node in graph.nodes if node in plan]
    for node in planned:
        for operand, row in plan[node].items():
            if (operand, row) not in one:
                with graph.inserting_after(operand) if isinstance(row.index, int) else _before(graph, row):
                    one[operand, row] = _slice(graph, operand, row)
        operands = {operand: one[operand, row] for operand, row in plan[node].items()}
        args, kwargs = _with(node, operands)
        with _before(graph, next(iter(plan[node].values())), node):
            if node in selections:
                selected[node] = _first(graph, node, selections[node], args)
                continue
            (row,) = {needed for user in node.users if (needed := plan.get(user, {}).get(node)) is not None}
            if node.target in _VIEWS:
                # One row of a dense tensor has gaps, over which a view may not reach.
                dense = add_call(graph, aten.clone.default, args[0], memory_format=torch.contiguous_format)
                args = (dense, _sizes(node, row))
            new = add_call(graph, node.target, *args, **kwargs)
            new.meta = {**node.meta, "val": value_of(new)}
            one[node, row] = new
    # Only now, since a selection may be an operand of what another one needs.
    for node in reversed(planned):
        if node in selections:
            replace(node, selected[node])
        else:
            graph.erase_node(node)


def _with(node: Node, operands: Mapping[Node, Node]) -> tuple[Any, Any]:
    """Returns a node's arguments with some of them replaced."""
    return map_arg((node.args, node.kwargs), lambda operand: operands.get(operand, operand))


def _before(graph: Graph, row: SelectedRow, node: Node | None = None) -> Any:
    """Returns the context in which nodes are added in front of a node, or where the indices of its rows are known."""
    return graph.inserting_before(row.index.selection if isinstance(row.index, Chosen) else node)


def _slice(graph: Graph, source: Node, row: SelectedRow) -> Node:
    """Adds the selected rows of a tensor, in the dimension that has all of them."""
    if isinstance(row.index, int):
        dim, end = _axis(source, row).dim, row.index + 1 if row.index >= 0 else _END
        return add_call(graph, aten.slice.Tensor, source, dim, row.index, end)
    chosen = [row.index.numbers, row.index.indices]
    if value_of(row.index.indices).dim() == 1:
        chosen = [add_call(graph, aten.unsqueeze.default, row, 1) for row in chosen]
    return add_call(graph, aten.index.Tensor, source, chosen)


def _first(graph: Graph, node: Node, row: SelectedRow, args: Any) -> Node:
    """Adds what a selection takes of the selected rows, which are the first and only ones now."""
    if isinstance(row.index, Chosen):
        single = value_of(row.index.indices).dim() == 1
        # The same rows, as a node of their own.
        return (
            add_call(graph, aten.select.int, args[0], 1, 0) if single else add_call(graph, aten.alias.default, args[0])
        )
    behind = (1,) if node.target is aten.slice.Tensor else ()
    return add_call(graph, node.target, args[0], args[1], 0, *behind)


# --- which rows an operator needs ---------------------------------------------------------------------------------


def _selected(node: Node) -> SelectedRow | None:
    """Returns the rows that a node takes of a tensor; None if it is no such node."""
    if node.target is aten.index.Tensor:
        return _chosen(node)
    if node.op != "call_function" or node.target not in _SELECTIONS:
        return None
    arguments = arguments_of(node)
    value, dim = value_of(node.all_input_nodes[0]), arguments.get("dim", 0)
    if node.target is aten.slice.Tensor:
        index = arguments.get("start")
        if not isinstance(index, int) or index < 0 or arguments.get("end") != index + 1:
            return None
    else:
        index = arguments["index"]
    if not isinstance(value, torch.Tensor) or not isinstance(index, int) or index < -1:
        return None
    shape = _shape(value)
    dim %= len(shape)
    # Rows are of at least one more dimension.
    if dim == len(shape) - 1 or (isinstance(shape[dim], int) and shape[dim] < max(2, index + 1)):
        return None
    return SelectedRow(_product(shape[:dim]), shape[dim], index)


def _chosen(node: Node) -> SelectedRow | None:
    """Returns the rows of ``tensor[arange(groups), indices]``; None for any other indices."""
    source, places = arguments_of(node)["self"], arguments_of(node)["indices"]
    if len(places) != 2 or None in places:
        return None
    (numbers, indices), shape = places, _shape(value_of(source))
    shapes = [_shape(value_of(tensor)) for tensor in places]
    if len(shape) < 3 or value_of(indices).dtype not in _INDICES:
        return None
    groups, size = shape[:2]
    count = shapes[1][1] if len(shapes[1]) == 2 else 1
    if shapes not in ([[groups], [groups]], [[groups, 1], [groups, count]]) or not _counts(numbers, groups):
        return None
    # As many as there are would save nothing.
    if not isinstance(count, int) or (isinstance(size, int) and count >= size):
        return None
    return SelectedRow(groups, size, Chosen(node, numbers, indices, count))


def _counts(node: Node, end: Size) -> bool:
    """Returns True if a node has the numbers from 0 to ``end``, in any shape."""
    moves = {aten.unsqueeze.default, *_VIEWS, *_COPIES}
    while value_of(node).dtype in _INDICES and (node.target in moves or _is_whole(node)):
        node = node.all_input_nodes[0]
    is_range = node.target in {aten.arange.default, aten.arange.start, aten.arange.start_step}
    if not is_range or value_of(node).dtype not in _INDICES:
        return False
    arguments = arguments_of(node)
    last = arguments["end"]
    last = _plain(value_of(last).node.expr) if isinstance(last, Node) else last
    return bool(arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1 and last == end)


def _is_whole(node: Node) -> bool:
    """Returns True if a slice leaves nothing out."""
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    return (
        arguments.get("start") in {None, 0}
        and arguments.get("end") in {None, _END}
        and not arguments.get("step", 1) > 1
    )


def _operands(node: Node, row: SelectedRow) -> dict[Node, SelectedRow] | None:
    """Returns those operands of which an operator needs one row for one row of its result.

    Returns:
        None if it needs more rows, or is none of the operators that are known here.
    """
    op: Any = node.target
    if node.op != "call_function":
        return None
    if _is_first_of_norm(node):
        return {node.all_input_nodes[0]: row}
    if not isinstance(op, torch._ops.OpOverload):
        return None
    value = _tensor(node)
    # Integers are checked where they are computed, in each row.
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if (axis := _find(_shape(value), row)) is None:
        return None
    if op in _VIEWS:
        source = node.all_input_nodes[0]
        written = _sizes(node, row) is not None and _find(_shape(_tensor(source)), row) is not None
        return {source: row} if written else None
    if op in _PRODUCTS:
        return _of_product(node, axis, row)
    if op is _NORM:
        normalized = len(arguments_of(node)["normalized_shape"])
        return {node.all_input_nodes[0]: row} if axis.dim < value.dim() - normalized else None
    if op in {aten.permute.default, aten.transpose.int, aten.slice.Tensor}:
        return _of_moved(node, axis, row)
    if op in _COPIES or (torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags):
        return _of_elementwise(node, axis, row)
    return None


def _is_first_of_norm(node: Node) -> bool:
    """Whether a node is the result of a norm whose other results, mean and deviation, nothing takes."""
    return bool(
        getattr(node.target, "__name__", "") == "getitem"
        and node.all_input_nodes[0].target is _NORM
        and node.args[1] == 0
        and len(node.all_input_nodes[0].users) == 1
    )


def _of_product(node: Node, axis: Axis, row: SelectedRow) -> dict[Node, SelectedRow] | None:
    op: Any = node.target
    arguments = arguments_of(node)
    source = arguments[_PRODUCTS[op]]
    rows = 1 if op is aten.bmm.default else axis.dim
    if axis.dim != rows or axis.dim == _tensor(node).dim() - 1:
        return None
    # Another operand may have the rows as well: the same tensor, or a bias for each row.
    others = [argument for name, argument in arguments.items() if name != _PRODUCTS[op] and isinstance(argument, Node)]
    has_bias_of_rows = op is aten.addmm.default and _tensor(arguments["self"]).dim() > 1
    return None if source in others or has_bias_of_rows else {source: row}


def _of_moved(node: Node, axis: Axis, row: SelectedRow) -> dict[Node, SelectedRow] | None:
    """Returns the source of an operator that moves dimensions, or cuts another one."""
    if not axis.is_plain:
        return None
    arguments, source, dims = arguments_of(node), node.all_input_nodes[0], _tensor(node).dim()
    order, before = list(range(dims)), _shape(_tensor(source))
    if node.target is aten.permute.default:
        order = [dim % dims for dim in arguments["dims"]]
    elif node.target is aten.transpose.int:
        first, second = arguments["dim0"] % dims, arguments["dim1"] % dims
        order[first], order[second] = second, first
    elif before[axis.dim] != row.size:
        return None
    if isinstance(row.index, Chosen) and order[: axis.dim] != list(range(axis.dim)):
        # As many groups, but in another order.
        return None
    dim = order[axis.dim]
    return _same_groups({source: SelectedRow(_product(before[:dim]), row.size, row.index)}, row)


def _of_elementwise(node: Node, axis: Axis, row: SelectedRow) -> dict[Node, SelectedRow] | None:
    """Returns the operands that have the rows; the others are the same for all rows."""
    shape, operands = _shape(_tensor(node)), {}
    for operand in node.all_input_nodes:
        if not isinstance(value_of(operand), torch.Tensor):
            return None
        own = _shape(_tensor(operand))
        dim = axis.dim - (len(shape) - len(own))
        if dim < 0 or own[dim] == 1:
            continue
        if own[dim] != shape[axis.dim]:
            return None
        operands[operand] = SelectedRow(_product([*own[:dim], axis.outer]), row.size, row.index)
    return _same_groups(operands, row) if operands else None


def _same_groups(operands: dict[Node, SelectedRow], row: SelectedRow) -> dict[Node, SelectedRow] | None:
    """Returns operands of which the same rows are needed; None if indices would be those of other groups."""
    moved = isinstance(row.index, Chosen) and any(operand.groups != row.groups for operand in operands.values())
    return None if moved else operands


# --- sizes --------------------------------------------------------------------------------------------------------


def _tensor(node: Node) -> torch.Tensor:
    """Returns the fake value of a node; of a norm, its result."""
    value: Any = value_of(node)
    return value[0] if node.target is _NORM else value


def _axis(node: Node, row: SelectedRow) -> Axis:
    axis = _find(_shape(_tensor(node)), row)
    assert axis is not None
    return axis


def _find(shape: list[Size], row: SelectedRow) -> Axis | None:
    """Returns where a tensor of a shape has the rows; None if no dimension has all of them."""
    for dim, size in enumerate(shape):
        outer = _quotient(row.groups, _product(shape[:dim]))
        inner = None if outer is None else _quotient(size, _product([outer, row.size]))
        if inner is not None:
            return Axis(dim, outer, inner)
    return None


def _sizes(node: Node, row: SelectedRow) -> list[Any] | None:
    """Returns the arguments of a view for one row; None if they would leave two sizes open."""
    axis, shape = _axis(node, row), _shape(_tensor(node))
    sizes = list(arguments_of(node)["size"])
    sizes = [shape[dim] if size == -1 and isinstance(shape[dim], int) else size for dim, size in enumerate(sizes)]
    sizes[axis.dim] = row.count if axis.is_plain else -1
    return sizes if sizes.count(-1) <= 1 else None


def _shape(value: torch.Tensor) -> list[Size]:
    return [_plain(size if isinstance(size, int) else size.node.expr) for size in value.shape]


def _product(sizes: list[Size]) -> Size:
    return _plain(math.prod(sizes))


def _quotient(first: Size, second: Size) -> Size | None:
    """Returns a quotient; None if there is a remainder, or it is not known."""
    if isinstance(first, int) and isinstance(second, int):
        return first // second if second and first % second == 0 else None
    above, below = (first / second).as_numer_denom()
    return _plain(above) if below == 1 else None


def _plain(size: Size) -> Size:
    return int(size) if isinstance(size, int) or size.is_Integer else size
