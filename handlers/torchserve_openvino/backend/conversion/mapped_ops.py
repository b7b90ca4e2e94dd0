"""Replaces the nodes of a partition that a mapping converts, just before the partition is converted.

An OpenVINO extension receives a node's arguments as OpenVINO constants and sequences, and can't return several outputs
in an FX graph. So each mapped node is replaced by one node per used output, which takes only other nodes as arguments;
its translator calls the mapping with the arguments of the operator's schema.
"""

import ast
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openvino as ov
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from torchserve_openvino.backend.spec import spec_of
from torchserve_openvino.backend.upstream._openvino_private import Translator, call_translator
from torchserve_openvino.errors import OpMappingError
from torchserve_openvino.ops.mappings import MODULES, Convert, Mappings, ModuleMapping
from torchserve_openvino.ops.names import op_name, tensors_of, value_of


@dataclass
class Mapped:
    """Translators for the replaced nodes, and the error that one of them raised; the frontend keeps only its text.

    Attributes:
        failed_op: Name of the operator whose translator failed; empty if none did.
    """

    translators: list[tuple[str, Translator]] = field(default_factory=list)
    failed_op: str = ""
    error: Exception | None = None


def replace_mapped(graph: Graph, mappings: Mappings, constants: frozenset[str]) -> Mapped:
    """Replaces mapped nodes in place.

    Args:
        graph: The graph of a partition; its nodes have fake values.
        mappings: The registered mappings.
        constants: Names of the nodes that are constants. A mapped module is built with its own weights, which must be
            among them.

    Raises:
        OpMappingError: A module's weights are not constants.
    """
    mapped = Mapped()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        call = module_call(node, constants)
        bound = Bound(*call) if call is not None else _operator_call(node, mappings)
        if bound is not None:
            _replace(graph, node, bound, mapped)
    return mapped


@dataclass
class Bound:
    """A mapping with the arguments of one node.

    Attributes:
        convert: The mapping.
        args: Positional arguments; nodes stand for computed values.
        kwargs: Keyword arguments.
        own: Whether the mapping is this package's own.
    """

    convert: Convert
    args: Sequence[Any]
    kwargs: dict[str, Any]
    own: bool = False


def _operator_call(node: Node, mappings: Mappings) -> Bound | None:
    name = op_name(node.target)
    convert = mappings.converts(name)
    if convert is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
        plain = not isinstance(value, (Node, list, tuple))
        if plain and value == default and not _accepts(convert, argument.name, position):
            # A mapping need not have a parameter for an argument that stays at its default.
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Bound(convert, args, kwargs | mappings.facts(node), own=mappings.find(name) is None)


def _accepts(convert: Convert, name: str, position: int) -> bool:
    parameters = list(inspect.signature(convert).parameters.values())
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
        return True
    return any(p.name == name for p in parameters) or sum(p.kind is not p.KEYWORD_ONLY for p in parameters) > position


def _replace(graph: Graph, node: Node, bound: Bound, mapped: Mapped) -> None:
    inputs = list(dict.fromkeys(node.all_input_nodes))
    call = _MappedCall(op_name(node.target), bound, inputs, value_of(node), mapped)
    users = list(node.users)
    takes = [user for user in users if user.target is operator.getitem]
    several = isinstance(value_of(node), (list, tuple))
    if several and len(takes) != len(users):
        raise OpMappingError(f"op_mappings: {call.name} returns several tensors, which the graph uses as one.")
    taken: list[tuple[Node, Any]] = [(user, user.args[1]) for user in takes] if several else [(node, 0)]
    for old, index in taken:
        name = f"torchserve_openvino.mapped_{len(mapped.translators)}.default"
        with graph.inserting_before(old):
            new = call_translator(graph, name, inputs)
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        mapped.translators.append((name, call.output(index)))
    if several:
        graph.erase_node(node)


class _MappedCall:
    """One mapped node: calls the mapping once, and serves all its outputs from that call."""

    def __init__(self, name: str, bound: Bound, inputs: list[Node], value: Any, mapped: Mapped) -> None:
        self.name = name
        self._bound = bound
        self._inputs = inputs
        self._expected = tensors_of(value) or [value]
        self._mapped = mapped
        self._outputs: list[ov.Output | None] | None = None

    def output(self, index: int) -> Translator:
        def translate(context: Any) -> list[Any]:
            try:
                if self._outputs is None:
                    operands = dict(
                        zip(self._inputs, (context.get_input(i) for i in range(len(self._inputs))), strict=True)
                    )
                    self._outputs = self._convert(operands)
                output = self._outputs[index]
                if output is None:
                    raise OpMappingError(f"op_mappings: the mapping of {self.name} has no output {index}.")
                return [output]
            except Exception as error:
                self._mapped.failed_op, self._mapped.error = self.name, error
                raise

        return translate

    def _convert(self, operands: dict[Node, Any]) -> list[ov.Output | None]:
        args = torch.fx.node.map_arg(tuple(self._bound.args), operands.__getitem__)
        kwargs = torch.fx.node.map_arg(dict(self._bound.kwargs), operands.__getitem__)
        try:
            result = self._bound.convert(*args, **kwargs)
        except Exception as error:
            if self._bound.own and any(value.get_partial_shape().is_dynamic for value in operands.values()):
                raise OpMappingError(
                    f"{self.name} is converted only where its sizes are known while the graph compiles"
                ) from error
            raise OpMappingError(
                f"op_mappings: the mapping of {self.name} fails: {type(error).__name__}: {error}"
            ) from error
        several = result if isinstance(result, (tuple, list)) else [result]
        # None stands for an unused output.
        outputs = [None if output is None and len(several) > 1 else _output(self.name, output) for output in several]
        if len(outputs) != len(self._expected):
            raise OpMappingError(
                f"op_mappings: the mapping of {self.name} returns {len(outputs)} output(s), but the operator "
                f"has {len(self._expected)}."
            )
        for i, (output, expected) in enumerate(zip(outputs, self._expected, strict=True)):
            if output is not None:
                _check(f"output {i} of the mapping of {self.name}", output, expected)
        return outputs


def _output(name: str, value: Any) -> ov.Output:
    if isinstance(value, ov.Output):
        return value
    if isinstance(value, ov.Node) and value.get_output_size() == 1:
        return value.output(0)
    raise OpMappingError(
        f"op_mappings: the mapping of {name} returns a value of type {type(value).__name__}; it must return OpenVINO "
        "nodes or outputs."
    )


def _check(what: str, output: ov.Output, expected: Any) -> None:
    spec = spec_of(expected)
    if output.get_element_type() not in {spec.ov_type, ov.Type.dynamic}:
        raise OpMappingError(
            f"op_mappings: {what} is {output.get_element_type().get_type_name()}, torch has {spec.dtype}; convert it."
        )
    if not output.get_partial_shape().compatible(ov.PartialShape(list(spec.shape))):
        raise OpMappingError(
            f"op_mappings: {what} has shape {output.get_partial_shape()}, torch has {list(spec.shape)}."
        )


# --- modules that a mapping converts as a whole: tracing sees each as one operator --------------------------------
# The model itself is not changed. A twin is traced instead, which shares parameters, buffers and attributes with the
# model. In place of each mapped module it has a stand-in that calls a custom operator; in eager PyTorch that operator
# runs the original module.


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
        if len(outputs) != leaf.mapping.outputs or not all(isinstance(output, Tensor) for output in outputs):
            raise OpMappingError(
                f"op_mappings: {type(leaf.alive()).__name__} returns {len(outputs)} value(s); register it with "
                f"outputs={len(outputs)}, and tensors only."
            )
        # A custom operator must not return an input, nor a view of one.
        return [output.clone() for output in outputs]

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
        return args, {str(keyword.arg): value(keyword.value) for keyword in parsed.keywords}
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
        # The submodules of each module that the twin has, and the module's path.
        self._children: dict[int, tuple[dict[str, nn.Module | None], str]] = {}
        self._mappings = mappings
        self.model = self._copy(model, "")

    @staticmethod
    def needed(model: Any, mappings: Mappings) -> bool:
        """Checks whether a model has a mapped module."""
        return isinstance(model, nn.Module) and any(type(module) in mappings.modules for module in model.modules())

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
        self._adopt(module, twin, path)
        return twin

    def _adopt(self, module: nn.Module, twin: nn.Module, path: str) -> None:
        self._children[id(module)] = dict(module._modules), path
        twin.__dict__["_modules"] = {
            name: child and self._copy(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }

    def call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the compiled twin so that calls use and update the model's own attributes: mode, counters, settings."""

        def synchronized(*args: Any, **kwargs: Any) -> Any:
            for source, twin in list(self._pairs.values()):
                if source is not twin:
                    children, path = self._children[id(source)]
                    if source._modules != children:
                        self._adopt(source, twin, path)
            pairs = [(source, twin) for source, twin in list(self._pairs.values()) if source is not twin]
            for source, twin in pairs:
                _assign(twin, source.__dict__, twin.__dict__)
            before = [dict(twin.__dict__) for _, twin in pairs]
            try:
                return compiled(*args, **kwargs)
            finally:
                # What else has changed the model meanwhile stays.
                for (source, twin), known in zip(pairs, before, strict=True):
                    _assign(source, twin.__dict__, known)

        return synchronized


def _assign(module: nn.Module, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Changes a module's attributes, but for its submodules, as others have changed."""
    for name in (now.keys() | before.keys()) - {"_modules"}:
        if name not in now:
            module.__dict__.pop(name, None)
        elif name not in before or before[name] is not now[name]:
            module.__dict__[name] = now[name]


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
    if any(weight.name not in constants for weight in weights):
        raise OpMappingError(f"op_mappings: the weights of {name} are passed at each call, so it cannot be converted.")
    leaf = _LEAVES[name.split(".")[1]]
    args, kwargs = _arguments(call, inputs)
    return leaf.mapping.convert, (leaf.alive(), *args), kwargs
