"""What `nn.TransformerEncoder` answers at padded positions: zeros.

In evaluation it packs its input to a nested tensor where each item's padding is at its end, so that nothing is computed
for the padding; what comes back is filled with zeros (torch/nn/modules/transformer.py). While torch traces, the module
takes no nested tensors, and computes something for the padding as well: the zeros are put in here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

_KEY_PADDING = 1


def last_layers(model: Any) -> frozenset[str]:
    """The last layers of a model's encoders that use nested tensors, as `nn_module_stack` names modules."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    encoders = [each for each in modules if isinstance(each, nn.TransformerEncoder)]
    return frozenset(str(id(each.layers[-1])) for each in encoders if getattr(each, "use_nested_tensor", False))


def zero_padding(graph: Graph, last: frozenset[str]) -> None:
    """Fills the answers of encoders as eager PyTorch does, in Dynamo's graph.

    Args:
        graph: Is changed.
        last: Of `last_layers`.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch._transformer_encoder_layer_fwd:
            continue
        mask, mask_type = node.args[-2:]
        # A module that is called again has a number behind its name.
        modules = {str(name).partition("@")[0] for name in node.meta.get("nn_module_stack") or {}}
        if not last & modules or mask_type != _KEY_PADDING or not isinstance(mask, Node):
            continue
        with graph.inserting_after(node):
            filled = graph.call_function(_filled, (node, mask))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled, delete_user_cb=lambda user, filled=filled: user is not filled)


def _filled(y: Tensor, mask: Tensor) -> Tensor:
    """Zeros where the mask is not 0, if that is at the end of each item.

    Args:
        y: ``[batch, length, features]``.
        mask: ``[batch, length]``.
    """
    padded = mask.ne(0)
    if mask.shape[1] == 1:
        return torch.where(padded.unsqueeze(-1), 0.0, y)
    at_the_end = ~torch.any(padded[:, :-1] & ~padded[:, 1:])
    return torch.where((padded & at_the_end).unsqueeze(-1), 0.0, y)
