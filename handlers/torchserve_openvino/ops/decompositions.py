"""The decomposition table of the backend: the export path's, and the user's.

OpenVINO's torch.export path decomposes what torch's core table decomposes, but for the operators that its frontend
converts better whole (`ops_to_not_decompose`). The same is done here, with one difference: an operator stays whole only
where the support table really runs it; a disabled operator stays whole as well, so that it is seen and counted.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchserve_openvino.errors import ConfigError
from torchserve_openvino.ops.automatic import automatic
from torchserve_openvino.ops.casts import CASTS
from torchserve_openvino.ops.complex_pairs import COMPLEX, either
from torchserve_openvino.ops.conversions import CONVERSIONS
from torchserve_openvino.ops.division import DIVISION, with_eager_remainder
from torchserve_openvino.ops.fast_paths import FAST_PATHS
from torchserve_openvino.ops.layouts import LAYOUTS
from torchserve_openvino.ops.missing import MISSING
from torchserve_openvino.ops.names import op_name, packet_name, packets
from torchserve_openvino.ops.pooling import POOLING
from torchserve_openvino.ops.repairs import REPAIRS
from torchserve_openvino.ops.scalars import of_scalars
from torchserve_openvino.ops.scans import FOREIGN_SCANS, SCANS
from torchserve_openvino.ops.support import SupportTable

# Fused attention: torch's core table would take it apart into two matmuls and a softmax.
_KEEP_WHOLE = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)
# The kernel of the first refuses probabilities beyond 1, torch's decomposition does not. An alias in the place of the
# second is still a view of what it was taken from, and autograd gives it the gradient that it has to be without.
_NOT_TAKEN_APART = packets("binary_cross_entropy detach")


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads that a canonical name means: one, or all of a packet."""
    namespace, packet, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet)
    if overload:
        return [getattr(found, overload[0])]
    return [getattr(found, each) for each in found.overloads()]


def is_composite(name: str) -> bool:
    """Whether torch itself takes the operator apart before a backend of `torch.compile` sees a graph.

    Args:
        name: Canonical, of an overload or of all of a packet.
    """
    # An overload with an out argument may have a kernel of its own.
    pure = [op for op in overloads(name) if not op._schema.is_mutable]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(pure) and all(composite(op.name(), "CompositeImplicitAutograd") for op in pure)


def user_decompositions(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """Decompositions that the option ``decompositions`` asks for.

    Args:
        names: Canonical names, ``aten.addcdiv`` (all overloads) or ``aten.addcdiv.default``.

    Raises:
        ConfigError: torch has no decomposition for one of them.
    """
    table: dict[Any, Callable[..., Any]] = {}
    for name in names:
        found = torch._decomp.get_decompositions(overloads(name))
        if not found:
            raise ConfigError(f"torch has no decomposition for {name!r}; remove it.", key="decompositions")
        table.update(found)
    return table


@functools.lru_cache(maxsize=1)
def _core_table(registered: int) -> dict[Any, Callable[..., Any]]:
    """torch's core table, which it makes by asking every operator there is; the same while nobody registers another."""
    return dict(torch._decomp.core_aten_decompositions())


def decomposition_table(
    support: SupportTable, whole: Iterable[Any], user: Iterable[str] = ()
) -> dict[Any, Callable[..., Any]]:
    """Builds the table that AOTAutograd lowers with.

    Args:
        support: Decides which operators run on OpenVINO undecomposed.
        whole: OpenVINO's list of operators not to decompose.
        user: Canonical names from the option ``decompositions``; they win.
    """
    table = dict(_core_table(len(torch._C._dispatch_get_all_op_names())))
    keep = {str(op) for op in whole} | set(_KEEP_WHOLE)
    for op in list(table):
        name = op_name(op)
        whole_here = support.is_taught(name) or (name in keep | CONVERSIONS.keys() and support.knows(name))
        if support.is_disabled(name) or whole_here:
            del table[op]
    own = FAST_PATHS | MISSING | REPAIRS | CASTS | SCANS | POOLING | DIVISION
    if not support.own:
        own = with_eager_remainder(own) | FOREIGN_SCANS

    def ours(op: Any) -> bool:
        return not support.is_disabled(op_name(op)) and not support.is_taught(op_name(op))

    table |= {op: decomposition for op, decomposition in (own | of_scalars(own)).items() if ours(op)}
    table |= automatic(support, table)
    # Complex numbers, and what is not contiguous, come first where an operator takes others too.
    for special in (COMPLEX, LAYOUTS):
        for op, of_some in special.items():
            if ours(op):
                table[op] = either(of_some, table[op]) if op in table else of_some
    table = {op: found for op, found in table.items() if packet_name(op_name(op)) not in _NOT_TAKEN_APART}
    table.update(user_decompositions(user))
    return table
