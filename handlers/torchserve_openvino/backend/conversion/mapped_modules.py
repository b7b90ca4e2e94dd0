"""Modules that a mapping converts as a whole: tracing sees each as one operator.

The model itself is not changed. A twin is traced instead, which shares parameters, buffers and attributes with the
model. In place of each mapped module it has a stand-in that calls a custom operator; in eager PyTorch that operator
runs the original module.
"""

import ast
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.ops.mappings import MODULES, Convert, Mappings, ModuleMapping
from torchserve_openvino.ops.names import op_name

_TENSOR = "tensor"


@dataclass
class _Leaf:
    """A mapped module, and the names of its weights in the order in which the operator takes them."""

    module: "weakref.ref[nn.Module]"
    mapping: ModuleMapping
    weights: list[str]

    def alive(self) -> nn.Module:
        module = self.module()
        if module is None:
            raise OpMappingError("op_mappings: the mapped module no longer exists")
        return module


_LIBRARY = torch.library.Library(MODULES, "FRAGMENT")
# torch can't unregister operators: each belongs to its module, and is reused for the next module of the same name once
# that is gone.
_LEAVES: dict[str, _Leaf] = {}


def _operator(path: str, leaf: _Leaf) -> str:
    """Returns the operator for a module, named by its path in the model, so that each process chooses the same name."""
    stem = "".join(c if c.isalnum() else "_" for c in f"{type(leaf.alive()).__name__}_{path}")
    for number in itertools.count():
        name = f"{stem}_{number}"
        known = _LEAVES.get(name)
        if known is None:
            _define(name)
        elif known.module() not in (None, leaf.module()):
            continue
        _LEAVES[name] = leaf
        return name
    raise AssertionError


def _define(name: str) -> None:
    _LIBRARY.define(f"{name}(Tensor[] inputs, Tensor[] weights, str call) -> Tensor[]")

    def run(inputs: list[Tensor], weights: list[Tensor], call: str) -> list[Tensor]:
        leaf = _LEAVES[name]
        args, kwargs = _arguments(call, inputs)
        values = dict(zip(leaf.weights, weights, strict=True))
        result = torch.func.functional_call(leaf.alive(), values, args, kwargs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(outputs) != leaf.mapping.outputs or not all(isinstance(each, Tensor) for each in outputs):
            raise OpMappingError(
                f"op_mappings: {type(leaf.alive()).__name__} returns {len(outputs)} value(s); register it with "
                f"outputs={len(outputs)}, and tensors only."
            )
        # A custom operator must not return an input, nor a view of one.
        return [each.clone() for each in outputs]

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{MODULES}::{name}", run, lib=_LIBRARY)


def _layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the arguments of a call, without its tensors, as text for `_arguments`; to Dynamo it is a constant."""
    parts = ["tensor" if isinstance(a, Tensor) else f"{a!r}" for a in args]
    parts += [f"{name}=tensor" if isinstance(a, Tensor) else f"{name}={a!r}" for name, a in kwargs.items()]
    return ", ".join(parts)


def _arguments(call: str, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    left = iter(tensors)

    def value(node: ast.expr) -> Any:
        return next(left) if isinstance(node, ast.Name) and node.id == _TENSOR else ast.literal_eval(node)

    try:
        parsed = ast.parse(f"f({call})", mode="eval").body
        assert isinstance(parsed, ast.Call)
        args = tuple(value(node) for node in parsed.args)
        return args, {str(each.arg): value(each.value) for each in parsed.keywords}
    except (SyntaxError, ValueError) as error:
        raise OpMappingError(
            f"op_mappings: a mapped module is called with ({call}); it can take tensors, numbers, strings, None, "
            "and lists and tuples of these that hold no tensors."
        ) from error


class _StandIn(nn.Module):
    """The module that the twin has in place of a mapped module."""

    def __init__(self, source: nn.Module, mapping: ModuleMapping, path: str) -> None:
        super().__init__()
        self.source = source
        weights = [name for name, _ in (*source.named_parameters(), *source.named_buffers())]
        leaf = _Leaf(weakref.ref(source), mapping, weights)
        self.call = getattr(getattr(torch.ops, MODULES), _operator(path, leaf)).default
        self.single = mapping.outputs == 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # The operator has no gradient.
            return self.source(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        weights = [*self.source.parameters(), *self.source.buffers()]
        result = self.call(tensors, weights, _layout(args, kwargs))
        return result[0] if self.single else tuple(result)


class Twin:
    """A copy of a model to be traced in its place.

    Args:
        model: The model.
        mappings: Holds the classes of modules that are converted as a whole.

    Attributes:
        model: The twin.
    """

    def __init__(self, model: nn.Module, mappings: Mappings) -> None:
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._mappings = mappings
        self.model = self._copy(model, "")

    @staticmethod
    def needed(model: Any, mappings: Mappings) -> bool:
        """Checks whether a model has a mapped module."""
        return isinstance(model, nn.Module) and any(type(each) in mappings.modules for each in model.modules())

    def _copy(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) in self._pairs:
            return self._pairs[id(module)][1]
        if (mapping := self._mappings.modules.get(type(module))) is not None:
            twin: nn.Module = _StandIn(module, mapping, path)
            self._pairs[id(module)] = (twin, twin)
            return twin
        twin = module.__new__(type(module))
        self._pairs[id(module)] = (module, twin)
        twin.__dict__.update(module.__dict__)
        # The dictionaries of parameters and buffers stay shared: an assignment to one shows in the other.
        children = {name: child and self._copy(child, f"{path}.{name}" if path else name)
                    for name, child in module._modules.items()}  # fmt: skip
        twin.__dict__["_modules"] = children
        return twin

    def call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the compiled twin so that calls use and update the model's own attributes: mode, counters, settings."""

        def synchronised(*args: Any, **kwargs: Any) -> Any:
            for source, twin in self._pairs.values():
                _update(twin, source)
            try:
                return compiled(*args, **kwargs)
            finally:
                for source, twin in self._pairs.values():
                    _update(source, twin)

        return synchronised


def _update(target: nn.Module, source: nn.Module) -> None:
    if target is not source:
        target.__dict__.update({name: value for name, value in source.__dict__.items() if name != "_modules"})


def module_of(name: str) -> nn.Module:
    """Returns the module that an operator stands for, by the operator's name.

    Raises:
        OpMappingError: The module no longer exists.
    """
    return _LEAVES[name.split(".")[1]].alive()


def module_call(node: Any, constants: frozenset[str]) -> tuple[Convert, tuple[Any, ...], dict[str, Any]] | None:
    """Returns the mapping of a node that stands for a module, and the arguments to call it with; else None.

    Raises:
        OpMappingError: Its weights are not constants, so that what the mapping builds from them would become stale.
    """
    name = op_name(node.target)
    if not name.startswith(f"{MODULES}."):
        return None
    inputs, weights, call = node.args
    if any(each.name not in constants for each in weights):
        raise OpMappingError(f"op_mappings: the weights of {name} are passed at each call, so it cannot be converted.")
    leaf = _LEAVES[name.split(".")[1]]
    args, kwargs = _arguments(call, inputs)
    return leaf.mapping.convert, (leaf.alive(), *args), kwargs
