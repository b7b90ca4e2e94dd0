"""Detects state that a model keeps between calls, by comparing it before and after a call, and restores it.

State is everything reachable from the modules: tables of weights, attributes, containers and plain objects in them, at
any depth, and class attributes of the user's classes. State elsewhere (a global, a closure) is not detected.
"""

import collections
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchserve_openvino.cache.identity.weights_digest import tensor_digest

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Types that hold nothing that a call changes, or nothing that can be restored.
_SKIPPED = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Parameter,
    torch._C.ScriptObject,
)  # fmt: skip
# Further lists of the parameters of recurrent layers, renewed when one is replaced, which torch.export does.
_FOLLOW_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
_LIBRARIES = ("torch", "builtins", "abc", "typing", "collections")


@dataclass
class _Held:
    """A snapshot of a container: its items by identity, in order.

    Attributes:
        name: Its dotted path for messages; empty for the tables of the model itself.
        refill: Puts the given items back into the container.
    """

    name: str
    container: Any
    items: list[Any]
    refill: Callable[[list[Any]], None]


@dataclass
class _Content:
    """A snapshot of a tensor.

    Attributes:
        alias: A tensor on the same memory, in case the original's ``data`` is replaced.
        copy: Copy of its content; None for a weight, of which only the digest is kept.
    """

    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    copy: torch.Tensor | None
    digest: str


class StateKeeper:
    """A snapshot of a model's state.

    Args:
        model: A module; the snapshot of any other callable is empty.
        contents: Whether tensors other than weights are compared by content, not by identity alone, and put back.
        weights: Whether weights are compared by content, which takes 0.3 s for each GB.
    """

    def __init__(self, model: Any, *, contents: bool, weights: bool = False) -> None:
        self._seen: set[int] = set()
        self._held: list[_Held] = []
        self._tensors: list[_Content] = []
        self._contents = contents
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._scripted: list[tuple[str, Any, str, torch.Tensor]] = []
        if isinstance(model, torch.nn.Module):
            self._visit(model, "")
            if weights:
                for name, weight in model.named_parameters():
                    self._tensors.append(_Content(name, weight, weight.detach(), None, tensor_digest(weight)))

    def changed(self) -> list[str]:
        """Returns the names of everything that has changed, sorted."""
        names = {name for member in self._held for name in _differences(member)}
        names |= {tensor.name for tensor in self._tensors if _is_other(tensor)}
        names |= {name for name, module, key, buffer in self._scripted if getattr(module, key) is not buffer}
        for cls, before in self._classes:
            now = _class_values(cls)
            names |= {f"{cls.__name__}.{name}" for name in before if not same(before[name], now.get(name))}
        return sorted(name for name in names if name.rpartition(".")[2] not in _FOLLOW_WEIGHTS)

    def restore(self) -> None:
        """Restores everything except the content of weights."""
        for member in self._held:
            if next(_differences(member), None) is not None:
                member.refill(member.items)
        for cls, before in self._classes:
            for name, value in before.items():
                if not same(value, cls.__dict__.get(name)):
                    setattr(cls, name, value)
        for _, module, key, buffer in self._scripted:
            if getattr(module, key) is not buffer:
                setattr(module, key, buffer)
        for tensor in self._tensors:
            # An unchanged tensor must keep its version counter, by which weights are watched.
            if tensor.copy is None or not _is_other(tensor):
                continue
            if tensor.tensor.data_ptr() != tensor.alias.data_ptr() or tensor.tensor.shape != tensor.alias.shape:
                tensor.tensor.data = tensor.alias
            # What was made in inference mode can be changed only there.
            with torch.no_grad(), torch.inference_mode(tensor.tensor.is_inference()):
                tensor.tensor.copy_(tensor.copy)

    def unrestorable(self) -> list[str]:
        """Returns the names of the weights that have changed, sorted."""
        return sorted(tensor.name for tensor in self._tensors if tensor.copy is None and _is_other(tensor))

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (*PLAIN, *_SKIPPED)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if self._contents and value.layout is torch.strided:
                self._tensors.append(_Content(name, value, value.detach(), value.detach().clone(), ""))
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._visit(item, name)
        elif isinstance(value, dict):
            self._hold(value, name, [entry for pair in value.items() for entry in pair], _refill_dict)
            for key, item in list(value.items()):
                self._visit(item, _joined(name, key))
        elif isinstance(value, (list, collections.deque, set)):
            self._hold(value, name, list(value), _refill_set if isinstance(value, set) else _refill_sequence)
            for item in list(value):
                self._visit(item, name)
        if not isinstance(value, torch.Tensor) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            if isinstance(value, torch.nn.Module):
                self._visit_class(type(value))
            if isinstance(value, torch.jit.ScriptModule) and self._contents:
                # Python does not see the tensors of TorchScript among its attributes.
                for key, buffer in value.named_buffers(recurse=False):
                    self._scripted.append((_joined(name, key), value, key, buffer))
                    self._visit(buffer, _joined(name, key))
            self._visit(attributes, name)

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and base.__module__.partition(".")[0] not in _LIBRARIES:
                self._seen.add(id(base))
                self._classes.append((base, _class_values(base)))

    def _hold(self, container: Any, name: str, items: list[Any], refill: Callable[[Any, list[Any]], None]) -> None:
        self._held.append(_Held(name, container, items, lambda old: refill(container, old)))


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Draws the same random numbers each time, and restores them and a model's state afterwards.

    Args:
        model: A module; of any other callable, state is unknown.
    """
    keeper = StateKeeper(model, contents=True)
    with same_random_numbers():
        try:
            yield
        finally:
            keeper.restore()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Draws the same random numbers each time, and restores the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        yield


def _class_values(cls: type) -> dict[str, Any]:
    kinds = (*PLAIN, torch.Tensor)
    return {name: value for name, value in vars(cls).items() if isinstance(value, kinds) and not name.startswith("__")}


def _joined(name: str, key: Any) -> str:
    # The internal tables of a module are not part of its attributes' names.
    if key in ("_parameters", "_buffers", "_modules"):
        return name
    return f"{name}.{key}" if name else str(key)


def same(before: Any, now: Any) -> bool:
    """Returns True if two values are the same object, or equal plain values."""
    # Compared as text, because 0.0 equals -0.0 and nan does not equal itself.
    return before is now or (type(before) is type(now) and isinstance(before, PLAIN) and repr(before) == repr(now))


def _differences(member: _Held) -> Iterator[str]:
    before, container = member.items, member.container
    if isinstance(container, dict):
        now = [entry for pair in container.items() for entry in pair]
        if len(before) == len(now) and all(map(same, before, now)):
            return
        old, new = dict(zip(before[::2], before[1::2], strict=True)), container
        for key in {**old, **new}:
            if key not in old or key not in new or not same(old[key], new[key]):
                yield _joined(member.name, key)
        if old.keys() == new.keys() and list(old) != list(new):
            yield member.name
    elif isinstance(container, set):
        if set(before) != container:
            yield member.name
    elif len(before) != len(container) or not all(map(same, before, container)):
        yield member.name


def _is_other(content: _Content) -> bool:
    tensor, alias = content.tensor, content.alias
    if tensor.shape != alias.shape or tensor.dtype != alias.dtype or tensor.data_ptr() != alias.data_ptr():
        return True
    if content.copy is None:
        return tensor_digest(tensor) != content.digest
    # Compared as bytes, so that nan equals nan.
    return not torch.equal(_bytes(tensor), _bytes(content.copy))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _refill_dict(container: dict[Any, Any], items: list[Any]) -> None:
    container.clear()
    container.update(zip(items[::2], items[1::2], strict=True))


def _refill_sequence(container: Any, items: list[Any]) -> None:
    container.clear()
    container.extend(items)


def _refill_set(container: set[Any], items: list[Any]) -> None:
    container.clear()
    container.update(items)
