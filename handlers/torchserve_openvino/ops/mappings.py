"""User-defined conversions of operators and modules: in Python by `register_op`, natively by an extension library.

A mapping builds OpenVINO operations from an operator's own arguments; no rebuild of OpenVINO is needed. The registry is
per process, like torch's registry of operators; a compiled model keeps the mappings that were registered when it was
created.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchserve_openvino.config.op_names import check_operators, packet_name
from torchserve_openvino.config.problems import Problems
from torchserve_openvino.errors import ConfigError, OpMappingError
from torchserve_openvino.ops.names import is_made_of_others, op_name
from torchserve_openvino.ops.rule_registry import rule_of

Convert = Callable[..., Any]
# Namespace of the operators that stand for mapped modules.
MODULES = "openvino_module"
_F = TypeVar("_F", bound=Convert)


@dataclass(frozen=True)
class ModuleMapping:
    """How modules of a class are converted, each as one operation.

    Attributes:
        convert: Called with the module and its inputs.
        outputs: How many tensors ``forward`` returns: with 1 a tensor, with more a tuple.
    """

    convert: Convert
    outputs: int = 1


@dataclass(frozen=True)
class Mappings:
    """A snapshot of the registry.

    Attributes:
        ops: Conversion function by canonical name (``mylib.myop`` for all overloads, ``aten.relu.default`` for one).
        modules: Mapping by class; instances of subclasses are not included.
        libraries: Absolute paths of extension libraries.
    """

    ops: Mapping[str, Convert] = field(default_factory=dict)
    modules: Mapping[type, ModuleMapping] = field(default_factory=dict)
    libraries: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ops or self.modules or self.libraries)

    def find(self, name: str) -> Convert | None:
        """Returns the conversion of an overload (``aten.relu.default``), registered by its name or its packet's."""
        return self.ops.get(name) or self.ops.get(packet_name(name))

    def converts(self, name: str) -> Convert | None:
        """Like `find`, but falls back to this package's own conversions."""
        return self.find(name) or rule_of(name).convert

    def facts(self, node: Any) -> dict[str, Any]:
        """Returns the keyword arguments that this package's own conversion of a node takes beside the operator's."""
        name = op_name(node.target)
        facts = rule_of(name).facts
        return facts(node) if facts is not None and self.find(name) is None else {}

    def covers(self, name: str) -> bool:
        """Returns whether a user's function converts an operator, or the module that it stands for."""
        return self.find(name) is not None or name.startswith(f"{MODULES}.")


class _Registry:
    def __init__(self) -> None:
        self.ops: dict[str, Convert] = {}
        self.modules: dict[type, ModuleMapping] = {}
        self.libraries: dict[Path, None] = {}


_REGISTRY = _Registry()


def registered() -> Mappings:
    """Returns a snapshot of the current registrations."""
    return Mappings(dict(_REGISTRY.ops), dict(_REGISTRY.modules), tuple(_REGISTRY.libraries))


def forget_mappings() -> None:
    """Removes all registrations; compiled models keep theirs, and a loaded library stays loaded."""
    for table in (_REGISTRY.ops, _REGISTRY.modules, _REGISTRY.libraries):
        table.clear()


def register_op(target: Any, *, outputs: int = 1) -> Callable[[_F], _F]:
    """Registers how an operator, or a class of modules, is built from OpenVINO operations.

    For an operator, the function takes the arguments of its schema, positional or by keyword as in the schema:
    tensors (and symbolic sizes) as ``openvino.Output``, lists of tensors as lists of those, anything else as the Python
    value. It returns a node or an output of OpenVINO, or a tuple of them if the operator has several outputs. For a
    class of modules, it takes the module, then the tensors and plain values that the module is called with.

        import openvino.opset13 as ops

        @tov.register_op("mylib::scaled_tanh")
        def scaled_tanh(x, scale=1.0):
            return ops.multiply(ops.tanh(x), ops.constant(scale, dtype=x.get_element_type()))

    A registered operator counts as supported, is not decomposed, and takes precedence over OpenVINO's own conversion;
    ``disabled_ops`` takes precedence over it.

    Args:
        target: ``mylib::myop`` (all overloads), ``aten.relu.default``, torch's operator object, or a subclass of
            ``torch.nn.Module``.
        outputs: For a module: how many tensors its ``forward`` returns (1: a tensor, more: a tuple).

    Raises:
        UnknownOperatorError: torch has no such operator.
        ConfigError: torch itself decomposes the operator, so that no backend ever sees it; or the target is invalid.
    """
    if inspect.isclass(target):
        return _register_module(target, outputs)
    problems = Problems(lambda _: "register_op")
    names = check_operators(target, problems, ())
    problems.raise_if_any()
    for name in names:
        _refuse_composite(name)

    def decorate(convert: _F) -> _F:
        for name in names:
            _REGISTRY.ops[name] = convert
        return convert

    return decorate


def _register_module(cls: type, outputs: int) -> Callable[[_F], _F]:
    if not issubclass(cls, torch.nn.Module):
        raise ConfigError(
            f"register_op takes an operator or a subclass of torch.nn.Module, not {cls.__name__}.", key="register_op"
        )
    if outputs < 1:
        raise ConfigError(f"outputs must be at least 1, not {outputs}.", key="register_op")

    def decorate(convert: _F) -> _F:
        _REGISTRY.modules[cls] = ModuleMapping(convert, outputs)
        return convert

    return decorate


def _refuse_composite(name: str) -> None:
    """Rejects operators that torch itself decomposes before any backend sees them."""
    namespace, operator, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    for overload_name in overload or packet.overloads():
        if is_made_of_others(getattr(packet, overload_name)):
            raise ConfigError(
                f"torch itself decomposes {name}.{overload_name} before a backend sees it (it is "
                "CompositeImplicitAutograd). Map what it becomes (torchserve-openvino doctor lists it), or define your "
                "own operator with torch.library.custom_op.",
                key="register_op",
            )


def load_mappings(path: str | Path) -> None:
    """Loads a file of mappings: Python that calls `register_op`, or an extension library of OpenVINO (.so).

    Args:
        path: The file; Python is executed as by an import, as a module named after the file.

    Raises:
        OpMappingError: The file is missing, fails, registers nothing, or is neither Python nor an extension library.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise OpMappingError(f"op_mappings: file not found: {path}. Add it to the archive with --extra-files.")
    if file.suffix == ".py":
        _load_python(file)
    elif file.suffix in {".so", ".dll", ".dylib"}:
        _REGISTRY.libraries[file] = None
    else:
        raise OpMappingError(f"op_mappings: {file.name} is neither Python (.py) nor an extension library (.so).")


def _load_python(file: Path) -> None:
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        # The model's own file imported it: running it again would define its operators twice.
        return
    if known is not None:
        name = f"torchserve_openvino_mappings_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = (dict(_REGISTRY.ops), dict(_REGISTRY.modules))
    # The model may import it as well, and classes of the file look up their module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        _REGISTRY.ops, _REGISTRY.modules = before
        raise OpMappingError(f"op_mappings: {file.name} fails: {type(error).__name__}: {error}") from error
    if (_REGISTRY.ops, _REGISTRY.modules) == before:
        raise OpMappingError(f"op_mappings: {file.name} registers nothing; decorate a function with @register_op.")
