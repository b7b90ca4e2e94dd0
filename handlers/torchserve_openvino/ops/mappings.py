"""Operators and modules that the user teaches OpenVINO: in Python by `register_op`, natively by an extension library.

A mapping builds OpenVINO operations from an operator's own arguments; no rebuild of OpenVINO is needed. The registry
belongs to the process, as torch's registry of operators does; a compiled model keeps what was registered when it was
made.
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
from torchserve_openvino.ops.registry import rule_of

Convert = Callable[..., Any]
# Namespace of the operators that stand for mapped modules.
MODULES = "openvino_module"
_F = TypeVar("_F", bound=Convert)


@dataclass(frozen=True)
class ModuleMapping:
    """How a class of modules is converted as one operation.

    Attributes:
        convert: Called with the module and its inputs.
        outputs: How many tensors its ``forward`` returns: 1 a tensor, more a tuple.
    """

    convert: Convert
    outputs: int = 1


@dataclass(frozen=True)
class Mappings:
    """What was registered at one moment.

    Attributes:
        ops: Canonical name (``mylib.myop`` for all overloads, ``aten.relu.default`` for one) to what converts it.
        modules: Class, exactly, to what converts its instances.
        libraries: Extension libraries, absolute.
    """

    ops: Mapping[str, Convert] = field(default_factory=dict)
    modules: Mapping[type, ModuleMapping] = field(default_factory=dict)
    libraries: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ops or self.modules or self.libraries)

    def find(self, name: str) -> Convert | None:
        """What converts an overload (``aten.relu.default``), registered by its own name or by its packet's."""
        return self.ops.get(name) or self.ops.get(packet_name(name))

    def converts(self, name: str) -> Convert | None:
        """As `find`, with this package's own conversions after the user's."""
        return self.find(name) or rule_of(name).convert

    def facts(self, node: Any) -> dict[str, Any]:
        """What this package's own conversion of a node wants to know beside the operator's arguments."""
        name = op_name(node.target)
        facts = rule_of(name).facts
        return facts(node) if facts is not None and self.find(name) is None else {}

    def covers(self, name: str) -> bool:
        """Whether a function of the user's converts an operator, or the module that it stands for."""
        return self.find(name) is not None or name.startswith(f"{MODULES}.")


class _Registry:
    def __init__(self) -> None:
        self.ops: dict[str, Convert] = {}
        self.modules: dict[type, ModuleMapping] = {}
        self.libraries: dict[Path, None] = {}


_REGISTRY = _Registry()


def registered() -> Mappings:
    """What is registered now."""
    return Mappings(dict(_REGISTRY.ops), dict(_REGISTRY.modules), tuple(_REGISTRY.libraries))


def forget_mappings() -> None:
    """Takes every registration back; models that were compiled keep theirs. A loaded library stays loaded."""
    for table in (_REGISTRY.ops, _REGISTRY.modules, _REGISTRY.libraries):
        table.clear()


def register_op(target: Any, *, outputs: int = 1) -> Callable[[_F], _F]:
    """Registers how an operator, or a class of modules, is built of OpenVINO operations.

    For an operator the function takes the arguments of its schema, by position and keyword as the schema has them:
    tensors (and symbolic sizes) as ``openvino.Output``, lists of tensors as lists of those, anything else as the Python
    value. It returns a node or an output of OpenVINO, or a tuple of them where the operator has several outputs. For
    a class of modules it takes the module and then the tensors and plain values that the module is called with.

        import openvino.opset13 as ops

        @tov.register_op("mylib::scaled_tanh")
        def scaled_tanh(x, scale=1.0):
            return ops.multiply(ops.tanh(x), ops.constant(scale, dtype=x.get_element_type()))

    A registered operator counts as supported, stays undecomposed, and wins over OpenVINO's own conversion;
    ``disabled_ops`` wins over it.

    Args:
        target: ``mylib::myop`` (all overloads), ``aten.relu.default``, torch's operator object, or a subclass of
            ``torch.nn.Module``.
        outputs: Of a module: how many tensors its ``forward`` returns (1: a tensor, more: a tuple).

    Raises:
        UnknownOperatorError: torch has no such operator.
        ConfigError: torch takes the operator apart itself, so that no backend ever sees it; or it is no target.
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
    """An operator that torch lowers before any backend sees it can't be mapped."""
    namespace, operator, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), operator)
    for each in overload or found.overloads():
        if is_made_of_others(getattr(found, each)):
            raise ConfigError(
                f"torch itself takes {name}.{each} apart before a backend sees it (it is CompositeImplicitAutograd). "
                "Map what it becomes (torchserve-openvino doctor lists it), or define your own operator by "
                "torch.library.custom_op.",
                key="register_op",
            )


def load_mappings(path: str | Path) -> None:
    """Loads a file of mappings: Python that calls `register_op`, or an extension library of OpenVINO (.so).

    Args:
        path: The file; Python is executed as an import would, under a name of its own.

    Raises:
        OpMappingError: The file is missing, fails, registers nothing, or is neither.
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
        # The model's own file imported it: to run it again would define its operators twice.
        return
    if known is not None:
        name = f"torchserve_openvino_mappings_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = (dict(_REGISTRY.ops), dict(_REGISTRY.modules))
    # The model may import it as well, and a class of the file finds its module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        _REGISTRY.ops, _REGISTRY.modules = before
        raise OpMappingError(f"op_mappings: {file.name} fails: {type(error).__name__}: {error}") from error
    if (_REGISTRY.ops, _REGISTRY.modules) == before:
        raise OpMappingError(f"op_mappings: {file.name} registers nothing; decorate a function with @register_op.")
