"""Decompositions beyond torch's core table, used where all operators they call run on OpenVINO."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.ops.names import RENAMES, op_name, tensors_of
from torchserve_openvino.ops.support import SupportTable

# `ops.support` refuses these dtypes for every operator.
_NOT_COMPUTED = frozenset({torch.float64, torch.complex32, torch.complex64, torch.complex128})
Table = Mapping[Any, Callable[..., Any]]


class _Runs(TorchDispatchMode):
    """Dispatch mode that records whether every operator called runs on OpenVINO, or is decomposed in turn."""

    def __init__(self, support: SupportTable, table: Table) -> None:
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


def automatic(support: SupportTable, table: Table) -> dict[Any, Callable[..., Any]]:
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
    kept = random or constant or op._schema.is_mutable or support.is_disabled(name) or support.knows(name)
    return computes and not kept


def _if_all_runs(decomposition: Callable[..., Any], support: SupportTable, table: Table) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        seen = _Runs(support, table)
        with disable_proxy_modes_tracing(), seen:
            result = decomposition(*args, **kwargs)
        if not seen.all or result is NotImplemented:
            return NotImplemented
        return decomposition(*args, **kwargs)

    return checked
