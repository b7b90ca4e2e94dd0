"""Digests of tensors and of all weights of a model, by content."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3


def weights_digest(model: Any) -> str:
    """Returns the digest of all parameters and buffers of a module, including non-persistent buffers."""
    digest = blake3(max_threads=blake3.AUTO)
    if isinstance(model, torch.nn.Module):
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in named_weights(model):
            _tensor_into(digest, name, tensor, seen)
    return digest.hexdigest()


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers with their full names; a tensor with two names is yielded twice."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the digest of one tensor: dtype, shape, strides, layout, device and content."""
    digest = blake3(max_threads=blake3.AUTO)
    _tensor_into(digest, "", tensor, {})
    return digest.hexdigest()


def _tensor_into(digest: Any, name: str, tensor: torch.Tensor, seen: dict[tuple[Any, ...], str]) -> None:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    signs = (tensor.is_conj(), tensor.is_neg())
    facts = (str(tensor.dtype), tuple(tensor.shape), stride, str(tensor.layout), str(tensor.device), signs)
    digest.update(f"{name}|{facts}|{tensor.requires_grad}|".encode())
    memory_key = (tensor.data_ptr(), *facts)
    if memory_key in seen:
        digest.update(f"is {seen[memory_key]}".encode())
        return
    seen[memory_key] = name
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        raise TypeError(f"{name or 'a tensor'} is {kind} on {tensor.device}: its content has no plain bytes")
    if tensor.numel():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # Not by `Tensor.numpy`, after which the model could never resize the tensor.
        memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
        digest.update(memoryview(memory).cast("B"))
