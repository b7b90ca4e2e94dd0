"""Process-wide changes to torch are part of a call's key: replaced functions, hooks, settings."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fingerprint_helpers import tell_apart
from torch import nn

from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.torch_state import torch_state


class Net(nn.Module):
    """Calls functions directly, through torch's modules, and as tensor methods."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.clip, self.act = nn.Linear(4, 4), nn.Hardtanh(), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.clip(self.linear(F.relu(x)))).tanh() + torch.sin(x)


REPLACED: list[tuple[Any, str]] = [
    (F, "relu"), (F, "hardtanh"), (F, "gelu"), (F, "scaled_dot_product_attention"), (torch, "sin"), (torch, "softmax"),
    (torch.Tensor, "tanh"), (torch.Tensor, "__add__"), (torch.nn.Module, "__call__"), (nn.GELU, "forward"),
    (torch._C._nn, "gelu"),
]  # fmt: skip
WAYS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda old: lambda *args, **kwargs: args[0],
    "named alike": lambda old: functools.wraps(old)(lambda *args, **kwargs: args[0]),
    "partial": lambda old: functools.partial(lambda *args, **kwargs: args[0]),
    "decorated by torch": lambda old: torch.no_grad()(lambda *args, **kwargs: args[0]),
    "another of torch's": lambda old: F.elu,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("owner", "name"), REPLACED, ids=[name for _, name in REPLACED])
def test_a_replaced_function_of_torch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, way: str) -> None:
    if isinstance(owner, type) and way in {"another of torch's", "partial"}:
        pytest.skip("no method")
    before = fingerprint(Net())
    assert before.unknown == ()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, WAYS[way](getattr(owner, name)))
        assert tell_apart([before, fingerprint(Net())])
    assert fingerprint(Net()) == before


def test_two_replacements_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (1.0, 2.0):
        monkeypatch.setattr(F, "hardtanh", lambda x, *rest, limit=limit: x.clamp(-limit, limit))
        found.append(fingerprint(Net()))
    assert tell_apart(found)


def test_a_hook_of_all_modules() -> None:
    before = fingerprint(Net())
    assert before.unknown == ()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        assert tell_apart([before, fingerprint(Net())])
    finally:
        handle.remove()
    assert fingerprint(Net()) == before


def test_tracing_changes_nothing() -> None:
    import torchserve_openvino as tov

    before, state = fingerprint(Net()), torch_state()
    with torch.no_grad():
        tov.compile(Net().eval())(torch.ones(1, 4))
    assert fingerprint(Net()) == before and torch_state() == state


@contextmanager
def flag(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    old = get()
    put(value)
    try:
        yield
    finally:
        put(old)


def attribute(owner: Any, name: str, value: Any) -> Any:
    return flag(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


B = torch.backends
SWITCHES: dict[str, Callable[[], Any]] = {
    "mha": lambda: flag(B.mha.get_fastpath_enabled, B.mha.set_fastpath_enabled, False),
    "flash": lambda: flag(B.cuda.flash_sdp_enabled, B.cuda.enable_flash_sdp, False),
    "efficient": lambda: flag(B.cuda.mem_efficient_sdp_enabled, B.cuda.enable_mem_efficient_sdp, False),
    "math": lambda: flag(B.cuda.math_sdp_enabled, B.cuda.enable_math_sdp, False),
    "mkldnn": lambda: B.mkldnn.flags(enabled=False),
    "mkldnn matmul": lambda: attribute(B.mkldnn.matmul, "fp32_precision", "bf16"),
    "opt_einsum": lambda: attribute(B.opt_einsum, "enabled", not B.opt_einsum.enabled),
    "deterministic": lambda: flag(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "default type": lambda: flag(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "dynamo": lambda: torch._dynamo.config.patch(capture_scalar_outputs=True),
}


def test_a_deprecated_setting_is_neither_read_nor_part_of_the_key() -> None:
    """OpenVINO's own backend sets this one at import, for the importing thread only."""
    before = torch_state()
    config: Any = torch._dynamo.config
    with config.patch(inline_inbuilt_nn_modules=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        for entry in config._config.values():
            entry._deprecation_warned = False
        assert torch_state() == before


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_the_process(name: str) -> None:
    before = torch_state()
    with SWITCHES[name]():
        assert torch_state() != before
    assert torch_state() == before
