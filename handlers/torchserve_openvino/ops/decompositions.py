"""The decomposition table of the backend: that of OpenVINO's torch.export path, and the user's decompositions.

OpenVINO's torch.export path uses torch's core table, except for the operators that its frontend converts better whole
(`ops_to_not_decompose`). This table does the same, with one difference: an operator stays whole only where the support
table lets it run on OpenVINO. A disabled operator stays whole as well, so that it stays visible and is counted.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.ops.memory_order import laid_out_as_whole
from torchserve_openvino.ops.names import RENAMES, is_made_of_others, op_name, tensors_of
from torchserve_openvino.ops.rule_registry import Decomposition, Lifted, Rule, rule_of, rules_that, stays_whole
from torchserve_openvino.ops.support import SupportTable

Table = dict[Any, Decomposition]


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Returns the overloads that a canonical name denotes: one, or all of a packet."""
    namespace, packet, *overload = name.split(".")
    packet_of_ops = getattr(getattr(torch.ops, namespace), packet)
    if overload:
        return [getattr(packet_of_ops, overload[0])]
    return [getattr(packet_of_ops, overload) for overload in packet_of_ops.overloads()]


def is_composite(name: str) -> bool:
    """Returns whether torch itself decomposes the operator before a backend of `torch.compile` sees a graph.

    Args:
        name: Canonical name of an overload, or of a packet for all its overloads.
    """
    # An overload with an out argument may have a kernel of its own.
    pure = [op for op in overloads(name) if not op._schema.is_mutable]
    return bool(pure) and all(map(is_made_of_others, pure))


def user_decompositions(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions that the option ``decompositions`` names.

    Args:
        names: Canonical names, ``aten.addcdiv`` (all overloads) or ``aten.addcdiv.default``.

    Raises:
        ConfigError: torch has no decomposition for one of them.
    """
    table: dict[Any, Callable[..., Any]] = {}
    for name in names:
        known = torch._decomp.get_decompositions(overloads(name))
        decompositions = {op: decomposition for op, decomposition in known.items() if not by_openvino(decomposition)}
        if not decompositions:
            raise ConfigError(f"torch has no decomposition for {name!r}; remove it.", key="decompositions")
        table.update(decompositions)
    return table


def decomposition_table(support: SupportTable, whole: Iterable[Any], user: Iterable[str] = ()) -> Table:
    """Builds the table that AOTAutograd lowers with.

    Args:
        support: Decides which operators run on OpenVINO undecomposed.
        whole: OpenVINO's list of operators not to decompose.
        user: Canonical names from the option ``decompositions``; they win.
    """
    table: Table = dict(_core_table(len(torch._C._dispatch_get_all_op_names())))
    # Each step changes the table in place: the decompositions that `automatic` adds look operators up in it later, in
    # its final state, to check whether all they call runs.
    for change in (
        functools.partial(_keep_whole, support, {str(op) for op in whole}),
        functools.partial(_add_own, support),
        functools.partial(_add_automatic, support),
        functools.partial(_add_special, support, lambda rule: rule.decompose_complex),
        functools.partial(_add_special, support, lambda rule: rule.decompose_narrow),
        _drop_never_decomposed,
        _lay_out,
        functools.partial(_add_special, support, lambda rule: rule.decompose_strided),
    ):
        change(table)
    return table | user_decompositions(user)


@functools.lru_cache(maxsize=1)
def _core_table(registered: int) -> Table:
    """Returns torch's core table; torch goes through all operators to build it, so it is cached until one is added."""
    return dict(torch._decomp.core_aten_decompositions())


def _keep_whole(support: SupportTable, upstream: set[str], table: Table) -> None:
    """Removes operators that run whole on OpenVINO, and disabled ones, so that these stay visible and are counted."""

    def runs_whole(name: str) -> bool:
        rule = rule_of(name)
        return (name in upstream or rule.kept_whole or rule.convert is not None) and support.knows(name)

    for op in list(table):
        name = op_name(op)
        if support.is_disabled(name) or support.is_mapped(name) or runs_whole(name):
            del table[op]


def own_decompositions() -> Table:
    """Returns the registry's decompositions for OpenVINO's torch.export frontend."""
    return {
        _overload(name): decompose
        for name in rules_that(lambda rule: rule.decompose is not None)
        if (decompose := _own(rule_of(name), traced=False)) is not None
    }


def _is_ours(support: SupportTable, name: str) -> bool:
    return not support.is_disabled(name) and not support.is_mapped(name)


def _add_own(support: SupportTable, table: Table) -> None:
    """Adds the registry's decompositions, which take precedence over torch's."""
    for name in rules_that(lambda rule: bool(rule.decompose or rule.decompose_traced or rule.scalars)):
        op, rule = _overload(name), rule_of(name)
        decompose = _own(rule, traced=not support.own)
        if rule.scalars is not None:
            decompose = _lifted(op, decompose, rule.scalars)
        if decompose is not None and _is_ours(support, name):
            table[op] = decompose


def _own(rule: Rule, traced: bool) -> Decomposition | None:
    decompose = rule.decompose_traced or rule.decompose if traced else rule.decompose
    return None if decompose is stays_whole else decompose


def _overload(name: str) -> torch._ops.OpOverload:
    (op,) = overloads(name)
    return op


def _lifted(op: torch._ops.OpOverload, otherwise: Decomposition | None, how: Lifted) -> Decomposition:
    """Runs the operator on one-element tensors instead of scalars, on which OpenVINO fails or crashes."""

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim():
            return otherwise(x, *args, **kwargs) if otherwise is not None else NotImplemented
        shape = list(args[how.shaped_by - 1].shape) if how.shaped_by is not None else []
        lifted = pytree.tree_map_only(Tensor, lambda t: t.reshape([-1]), (x, *args))
        named = pytree.tree_map_only(Tensor, lambda t: t.reshape([-1]), kwargs)
        return pytree.tree_map_only(Tensor, lambda t: t.reshape(shape), op(*lifted, **named))

    return decomposed


def _add_automatic(support: SupportTable, table: Table) -> None:
    """Adds torch's other decompositions, used where all operators they call run on OpenVINO."""
    table.update(automatic(support, table))


def _add_special(support: SupportTable, special: Callable[[Rule], Decomposition | None], table: Table) -> None:
    """Adds the decompositions for complex or non-contiguous tensors; they are tried before the existing ones."""
    for name, rule in rules_that(lambda rule: special(rule) is not None).items():
        op, decompose = _overload(name), special(rule)
        if decompose is not None and _is_ours(support, name):
            table[op] = _either(decompose, table[op]) if op in table else decompose


def _lay_out(table: Table) -> None:
    """Makes each decomposition keep the memory order of its operator.

    A composite operator has no kernel of its own to query; the operators it calls are laid out one by one.
    """
    for op, decompose in table.items():
        if not is_made_of_others(op):
            table[op] = laid_out_as_whole(op, decompose, rule_of(op_name(op)).ordered_as)


def _either(first: Decomposition, second: Decomposition) -> Decomposition:
    """Tries the first decomposition, and the second where the first declines the arguments."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return decomposed


def _drop_never_decomposed(table: Table) -> None:
    for op in [op for op in table if rule_of(op_name(op)).never_decomposed]:
        del table[op]


# --- decompositions beyond torch's core table, used where all operators they call run on OpenVINO -----------------


# `ops.support` refuses these dtypes for every operator.
_NOT_COMPUTED = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
_Known = Mapping[Any, Callable[..., Any]]


class _Runs(TorchDispatchMode):
    """Dispatch mode that records whether every operator called runs on OpenVINO, or is decomposed in turn."""

    def __init__(self, support: SupportTable, table: _Known) -> None:
        super().__init__()
        self.all = True
        self._support = support
        self._table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Queries of a device and the like, which compute nothing.
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        known = op_name(func) in RENAMES or func in self._table or self._support.knows(op_name(func))
        if not known:
            with self:
                # A composite operator does not reach the backend itself; the operators it calls do.
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = func(*args, **(kwargs or {}))
        computed = all(tensor.dtype not in _NOT_COMPUTED for tensor in tensors_of(result))
        self.all &= known and computed and not func._schema.is_mutable
        return result


def automatic(support: SupportTable, table: _Known) -> dict[Any, Callable[..., Any]]:
    """Returns decompositions of operators that neither the support table nor ``table`` has.

    Each first checks on fake tensors whether all operators it calls would run on OpenVINO. If not, the operator stays
    whole: one operator in eager PyTorch is better than many.

    Args:
        support: Decides which operators run on OpenVINO.
        table: The decompositions so far.
    """
    return {
        op: _if_all_runs(decomposition, support, table)
        for op, decomposition in torch._decomp.decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload)
        and op not in table
        and _wanted(op, support)
        and not by_openvino(decomposition)
    }


def by_openvino(decomposition: Callable[..., Any]) -> bool:
    """Tells whether ``import openvino.torch`` brought a decomposition: its gradients of convolutions are wrong."""
    return decomposition.__module__.partition(".")[0] == "openvino"


def _wanted(op: torch._ops.OpOverload, support: SupportTable) -> bool:
    name = op_name(op)
    random = torch.Tag.nondeterministic_seeded in op.tags
    computes = all(str(returned.type) == "Tensor" for returned in op._schema.returns)
    # The lift operators bring real tensors into a trace.
    constant = packet_name(name) in {"aten.lift", "aten.lift_fresh"}
    stays = random or constant or op._schema.is_mutable or support.is_disabled(name) or support.knows(name)
    return computes and not stays


def _if_all_runs(decomposition: Callable[..., Any], support: SupportTable, table: _Known) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        seen = _Runs(support, table)
        with disable_proxy_modes_tracing(), seen:
            result = decomposition(*args, **kwargs)
        if not seen.all or result is NotImplemented:
            return NotImplemented
        return decomposition(*args, **kwargs)

    return checked
