"""The option ``verify: first``: compares the first call of each new graph with eager PyTorch.

Compared is the result of the whole call with that of the model itself, which covers everything in between: capture,
decompositions, conversion and OpenVINO. Where the model can't be run again on the same inputs (it writes to them, or
keeps state), the graph compares itself with the lowered graph in eager PyTorch instead (`CompiledGraph`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.capture.kept_state import StateKeeper
from torchserve_openvino.backend.routes.frozen import Unverified
from torchserve_openvino.backend.runners.guarded import TracedModel


class FirstCalls:
    """Compares calls of one model that run a new graph.

    Args:
        model: The model.
        settings: Settings of the model.
    """

    def __init__(self, model: Callable[..., Any], settings: BackendSettings) -> None:
        self._model = model
        self._recorder = settings.recorder
        self._comparison = settings.comparison

    def wrap(self, traced: TracedModel) -> TracedModel:
        """Returns a traced model whose calls are compared."""
        whole = None if traced.whole is None else self._compared(traced.whole)
        return TracedModel(self._compared(traced.call), traced.release_weights, traced.drop, whole)

    def _compared(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if recorder.unverified is not None:
                # A call inside one that is compared.
                return call(*args, **kwargs)
            before, generator = _versions((args, kwargs)), torch.get_rng_state()
            waiting: list[Unverified] = []
            recorder.unverified = waiting
            try:
                result = call(*args, **kwargs)
            finally:
                recorder.unverified = None
            if waiting:
                self._compare(waiting, result, (args, kwargs), before, generator)
            return result

        return run

    def _compare(
        self, waiting: Sequence[Unverified], result: Any, call: Any, before: Sequence[int], generator: torch.Tensor
    ) -> None:
        if _versions(call) != before:
            self._comparison.tracker.add_note(
                "verify: a call was not compared with eager PyTorch, because it writes to its inputs outside its graphs"
            )
            return
        if any(item.failed for item in waiting):
            # Part of the call ran in eager PyTorch, counted: its next call is compared.
            return
        keeper, after = StateKeeper(self._model, contents=True), torch.get_rng_state()
        torch.set_rng_state(generator)
        try:
            expected = self._model(*call[0], **call[1])
        finally:
            torch.set_rng_state(after)
            keeper.restore()
        self._comparison.compare(result, expected)
        for item in waiting:
            item.verified = True


def _versions(call: Any) -> list[int]:
    """Returns the version counters of a call's tensors, which writes in place increase; inference tensors have none."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
