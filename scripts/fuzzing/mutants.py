"""Deliberate faults of this package: each is put in place for one program, to see that the fuzzer finds it.

To add one, name the attributes that it replaces and what stands there instead; the table's order is that of the report.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

_BACKEND = "torchserve_openvino.backend"
# Gets what stood there before, and gives what stands there now.
Replacement = Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        says: What is wrong then.
        changes: Pairs of an attribute, by its module below the backend and its path in it, and its replacement.
        mode: Of the programs that can show it, as ``--mode`` takes it; others are not run.
    """

    says: str
    changes: tuple[tuple[str, Replacement], ...]
    mode: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The package with this fault."""
        with ExitStack() as stack:
            for path, replacement in self.changes:
                module_name, *parts = path.split(".")
                owner: Any = importlib.import_module(f"{_BACKEND}.{module_name}")
                for part in parts[:-1]:
                    owner = getattr(owner, part)
                new = replacement(getattr(owner, parts[-1]))
                stack.enter_context(mock.patch.object(owner, parts[-1], new))
            yield


def _does(answer: Any) -> Replacement:
    """A function that does nothing but answer this."""
    return lambda _: lambda *args, **kwargs: answer


def _same_memory(new: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    kept: dict[Any, torch.Tensor] = {}

    def reuse(self: Any, spec: Any) -> torch.Tensor:
        return kept.setdefault((id(self), spec), new(self, spec))

    return reuse


def _confirmed_at_once(record: Callable[..., None]) -> Callable[..., None]:
    def keep(self: Any, key: Any, leaves: Any, calls: Any, output: Any) -> None:
        record(self, key, leaves, calls, output)
        if (route := self._recorded.get(key)) is not None:
            route.confirmed = True

    return keep


MUTANTS: dict[str, Mutant] = {
    "output_is_input": Mutant(
        "an output that is an input is written to directly: nobody writes it",
        (("execute.writes_all_outputs", _does(True)),),
    ),
    "closed_rows": Mutant(
        "attention rows whose mask forbids everything are NaN", (("rewrite._zero_closed_rows", _does(None)),)
    ),
    "negative_second_index": Mutant(
        "a negative value in the second index tensor is taken as it is", (("rewrite._count_from_start", _does(None)),)
    ),
    "views_contiguous": Mutant(
        "a strided view that is returned is taken for contiguous", (("partition.hand_out_views", _does(None)),)
    ),
    "dynamic_shape": Mutant(
        "a wrong shape of a dynamic answer is neither avoided nor noticed",
        (("rewrite._keep_reduced_dimensions", _does(None)), ("spec.Sizes.check", _does(None))),
        mode="dynamic",
    ),
    "shared_output_memory": Mutant(
        "an answer is overwritten by the next call", (("memory.OutputMemory.new", _same_memory),), mode="static"
    ),
    "weights_unwatched": Mutant("a changed weight is not noticed", (("graph._holds", _does(True)),), mode="guarded"),
    "freeze_unproven": Mutant(
        "a frozen call is repeated without a second call that confirms it",
        (("frozen.FrozenCalls.record", _confirmed_at_once), ("frozen.Route.agrees", _does(True))),
        mode="frozen",
    ),
    "integers_unchecked": Mutant(
        "integer inputs beyond what OpenVINO computes exactly are let through",
        (("execute._check_integers", _does(None)),),
    ),
    "checks_unread": Mutant(
        "what the graph says of its computed values is not read", (("execute._check_values", _does(None)),)
    ),
    "layout_lost": Mutant(
        "answers are contiguous where eager's are not",
        (("execute._relayout", lambda _: lambda tensor, layout: tensor),),
    ),
    "eager_uncounted": Mutant(
        "a call that ran in eager as a whole is not counted",
        (("compiled.CompiledModule._count_eager_call", _does(None)),),
    ),
}
