"""Zeros at padded positions in the output of `nn.TransformerEncoder`, as in eager PyTorch.

In evaluation the module packs its input into a nested tensor if each item's padding is at its end, so that nothing is
computed for the padding, and fills the result up with zeros (torch/nn/modules/transformer.py). While torch traces, the
module uses no nested tensors and computes values for the padding as well; this file overwrites them with zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

_KEY_PADDING = 1


def last_layers(model: Any) -> frozenset[str]:
    """Returns the last layers of the encoders that use nested tensors, by their names in `nn_module_stack`."""
    return frozenset(str(id(layer)) for layer in _last_layers(model))


def _last_layers(model: Any) -> list[nn.Module]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    encoders = [module for module in modules if isinstance(module, nn.TransformerEncoder)]
    return [encoder.layers[-1] for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]


@contextmanager
def zeroing_padding(model: nn.Module) -> Iterator[None]:
    """Makes encoders zero the padding in their outputs while a Python run of the model is recorded by torch.export.

    Unlike Dynamo, torch.export does not record a layer of an encoder as one operator, which `zero_padding` looks for.
    """
    handles = [layer.register_forward_hook(_zero, with_kwargs=True) for layer in _last_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zero(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Zeros the padding under the conditions of `nn.TransformerEncoder`, which calls its layers with these keywords."""
    if kwargs.keys() != {"src_mask", "is_causal", "src_key_padding_mask"} or kwargs["src_mask"] is not None:
        return None
    mask = kwargs["src_key_padding_mask"]
    packs = torch.backends.mha.get_fastpath_enabled() and not layer.training and not torch.is_autocast_enabled()
    return _filled(output, mask) if packs and mask is not None and output.dim() == 3 else None


def zero_padding(graph: Graph, last: frozenset[str]) -> None:
    """Zeros the padding in outputs of encoders, as eager PyTorch does, in Dynamo's graph.

    Args:
        graph: Changed in place.
        last: The result of `last_layers`.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch._transformer_encoder_layer_fwd:
            continue
        mask, mask_type = node.args[-2:]
        # A module that is called again has "@" and a number after its name.
        modules = {str(name).partition("@")[0] for name in node.meta.get("nn_module_stack") or {}}
        if not last & modules or mask_type != _KEY_PADDING or not isinstance(mask, Node):
            continue
        with graph.inserting_after(node):
            filled = graph.call_function(_filled, (node, mask))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled, delete_user_cb=lambda user, filled=filled: user is not filled)


def _filled(y: Tensor, mask: Tensor) -> Tensor:
    """Returns ``y`` with zeros where the mask is not 0, if that is only at the end of each item.

    Args:
        y: ``[batch, length, features]``.
        mask: ``[batch, length]``.
    """
    padded = mask.ne(0)
    if mask.shape[1] == 1:
        return torch.where(padded.unsqueeze(-1), 0.0, y)
    at_the_end = ~torch.any(padded[:, :-1] & ~padded[:, 1:])
    return torch.where((padded & at_the_end).unsqueeze(-1), 0.0, y)
