"""Process-wide torch settings that tracing reads; they are part of each call's key."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

# Modules of torch.backends, of which every setting is read; and getters in torch for the other settings.
_MODULES = ("cudnn", "mkldnn", "nnpack", "opt_einsum", "quantized", "mha", "cuda", "mkl", "xnnpack")
_GETTERS = (
    "get_default_dtype", "get_default_device", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "is_autocast_cache_enabled",
    "backends.mha.get_fastpath_enabled", "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled", "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed", "_C._get_sdp_priority_order",
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, list, tuple)


def torch_state() -> dict[str, Any]:
    """Returns the settings by name, JSON-safe; those of Dynamo only where they differ from their defaults."""
    state = {name: _told(_found(torch, name)) for name in _GETTERS}
    for name in _MODULES:
        module = importlib.import_module(f"torch.backends.{name}")
        parts = {key: item for key, item in vars(module).items() if type(item).__module__.startswith("torch.backends")}
        for path, owner in ((f"backends.{name}", module), *((f"backends.{name}.{key}", parts[key]) for key in parts)):
            # Where torch replaced the module by an object, the attribute ``m`` is the module itself.
            for switch in sorted({*_switches(type(owner)), *_plain_names(owner), *_plain_names(vars(owner).get("m"))}):
                state[f"{path}.{switch}"] = _told(functools.partial(getattr, owner, switch))
    # Not imported here: if it has not been imported, nothing in it was changed.
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        state |= {f"dynamo.{key}": repr(value) for key, value in _changed(config).items()}
    return state


def _found(root: Any, name: str) -> Callable[[], Any]:
    for part in name.split("."):
        root = getattr(root, part, None)
    return root if callable(root) else lambda: None


def _told(get: Callable[[], Any]) -> str:
    try:
        return str(get())
    except (RuntimeError, AssertionError, AttributeError) as error:
        # A setting of hardware that this machine lacks.
        return type(error).__name__


def _switches(cls: type) -> list[str]:
    """Returns the settings of a module that torch replaced by an object with properties."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("torch.")]
    members = [(name, item) for base in own for name, item in vars(base).items()]
    return [name for name, item in members if isinstance(item, property) or hasattr(item, "getter")]


def _plain_names(module: Any) -> list[str]:
    values = getattr(module, "__dict__", {})
    return [name for name, value in values.items() if not name.startswith("__") and isinstance(value, _PLAIN)]


def _changed(config: Any) -> dict[str, Any]:
    """Returns what differs from the default; a value that was set and restored does not."""
    values: dict[str, Any] = {}
    for name, entry in sorted(getattr(config, "_config", {}).items()):
        # A deprecated setting has no effect, but warns when read. OpenVINO's own backend sets one when it is imported,
        # as TorchServe's base handler does, and only for the thread that imports it.
        if entry.deprecated:
            continue
        # Aliases of another setting have no default of their own.
        if entry.alias is None and getattr(config, name) != entry.default and not config._is_default(name):
            values[name] = getattr(config, name)
    return values
