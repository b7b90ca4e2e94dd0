"""Helpers shared by the fingerprint tests."""

import collections
from typing import Any

import torch
from torch import nn

from torchserve_openvino.cache.identity.fingerprint import Fingerprint, fingerprint


def code(model: Any) -> str:
    found = fingerprint(model)
    assert found.unknown == (), found.unknown
    return found.code


def holding(value: Any) -> nn.Module:
    model = net()
    model.extra = value
    return model


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        collections.OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 4), d=nn.Dropout(0.5))
    ).eval()


def tell_apart(found: list[Fingerprint]) -> bool:
    """Whether two models cannot be confused: their digests differ, or both are reported as incomplete."""
    first, second = found
    return first.code != second.code or first.weights != second.weights or bool(first.unknown and second.unknown)
