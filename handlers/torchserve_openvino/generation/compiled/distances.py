"""Attention that depends on distances (T5's): a table takes the place of their computation.

T5 sorts distances into buckets by their logarithm, and takes the logarithm of 0 where it does not use the result. That
is no integer which OpenVINO could compute. What the buckets give depends on the distance only, so it is computed here,
once for each distance, by the model itself.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.errors import ModelLoadError

_BIAS, _PAST = "compute_bias", "past_seen_tokens"


class _ByTable:
    """Takes the place of an attention's own `compute_bias`."""

    by_distance: Tensor

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:  # fmt: skip
        """Returns what is added to scores, ``[1, heads, queries, keys]``."""
        places = (len(self.by_distance) + 1) // 2
        queries = torch.arange(query_length)[:, None] + past_seen_tokens
        distances = torch.arange(key_length)[None] - queries + places - 1
        # Queries behind the last place are padding.
        biases = self.by_distance[distances.clamp(0, 2 * places - 2)]
        return biases.permute(2, 0, 1)[None]


def _tabled(kind: type) -> type:
    return type(f"{kind.__name__}ByTable", (_ByTable, kind), {"__module__": __name__})


def with_tables(model: nn.Module, places: int) -> nn.Module:
    """Returns the model, with tables in its decoder where it computes by distances; the original stays as it is.

    Args:
        model: A model of transformers.
        places: Most tokens of the decoder.

    Raises:
        ModelLoadError: It computes otherwise than tables can.
    """
    for path, module in list(model.named_modules()):
        if (
            hasattr(module, "relative_attention_bias")
            and hasattr(module, _BIAS)
            and getattr(module, "is_decoder", True)
        ):
            model = _replaced(model, path.split("."), _with_table(module, places))
    return model


def _with_table(attention: Any, places: int) -> nn.Module:
    name = type(attention).__name__
    if _PAST not in inspect.signature(attention.compute_bias).parameters:
        raise ModelLoadError(f"{name} computes its distances in a way that is not known here.")
    tabled = copy.copy(attention)
    tabled.__class__ = _tabled(type(attention))
    tabled._buffers = dict(attention._buffers)
    with torch.no_grad():
        # To all keys: from the last place, distances up to 0; from the first one, those from 0.
        before = attention.compute_bias(1, places, past_seen_tokens=places - 1)[0, :, 0]
        after = attention.compute_bias(1, places, past_seen_tokens=0)[0, :, 0]
        tabled.register_buffer("by_distance", torch.cat([before, after[:, 1:]], 1).t().contiguous(), persistent=False)
        middle = {"query_length": min(2, places), "key_length": places, _PAST: places // 2 if places > 2 else 0}
        if not torch.equal(tabled.compute_bias(**middle), attention.compute_bias(**middle)):
            raise ModelLoadError(f"{name} computes something else of a place than its distance.")
    return tabled


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """Returns a copy of a module with another one at a path; all else is shared."""
    if not path:
        return new
    replaced = copy.copy(module)
    replaced._modules = dict(module._modules)
    inner = replaced._modules[path[0]]
    assert inner is not None
    replaced._modules[path[0]] = _replaced(inner, path[1:], new)
    return replaced
