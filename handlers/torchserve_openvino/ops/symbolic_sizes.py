"""Conditions on sizes that may be symbolic.

torch's module for symbolic sizes imports sympy, 470 modules and 30 MB, which a worker that traces nothing does without.
"""

from collections.abc import Sequence

import torch


def is_always_true(condition: bool | torch.SymBool) -> bool:
    """Returns True if a condition on sizes holds whatever the symbolic ones are; adds no guard."""
    if isinstance(condition, bool):
        return condition
    # Imported here: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def depends_on_values(sizes: Sequence[int | torch.SymInt]) -> bool:
    """Returns True if a size is known only when the model runs, such as the number of elements that are not zero."""
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    # Imported here: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(sizes))


def is_undecided_size(error: Exception) -> bool:
    """Returns True if an error was raised because a condition depends on a size that only the run will show."""
    # Imported here: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)
