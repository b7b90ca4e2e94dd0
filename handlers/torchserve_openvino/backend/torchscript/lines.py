"""What a method's source in Python consists of: its lines, the names in them, and the objects that these mean."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from torchserve_openvino.backend.upstream._torch_script import source_of

PREFIX = "_ts_"


class UntranslatableError(Exception):
    """TorchScript that has no form in Python that torch.compile could trace.

    Attributes:
        op: The operator that is the reason, as TorchScript names it.
        where: ``file:line`` in the code that was scripted; empty if unknown.
        reason: What is wrong with it.
        ops: Number of operators in the inlined graph.
    """

    ops = 0

    def __init__(self, op: str, where: str, reason: str) -> None:
        self.op, self.where, self.reason = op, where, reason
        super().__init__(f"{op}{f' ({where})' if where else ''}: {reason}")


@dataclass
class PythonSource:
    """A method of a module as the source of a Python function.

    Attributes:
        lines: The source.
        table: The objects that it refers to, by name.
        weights: Tensors of the module, by the name of the attribute that they become.
        read: Attributes of the module that were taken for constants: their owner, name and value.
        count: Number of operators.
    """

    lines: list[str] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    read: list[tuple[Any, str, Any]] = field(default_factory=list)
    count: int = 0


@dataclass(frozen=True)
class Constant:
    """A value that is known before the model runs."""

    value: Any


class Lines:
    """Writes lines of Python, and remembers under which name each value of the graph is known.

    Args:
        written: Receives the lines, and the objects that they mean.
    """

    def __init__(self, written: PythonSource) -> None:
        self.written = written
        self._constants: dict[str, Constant] = {}
        # Expressions of values, by the name of the value.
        self._names: dict[str, str] = {}
        # Sizes that a traced model holds as tensors.
        self._sizes: dict[str, str] = {}
        self._operators: dict[Any, str] = {}
        # Constants of float64 in float32, by their expression.
        self._rounded: dict[str, torch.Tensor] = {}
        self._where = ""

    def _line(self, depth: int, text: str) -> None:
        where = "".join(character if " " <= character <= "~" else "?" for character in self._where)
        self.written.lines.append(f"{'    ' * depth}{text}{f'  # {where}' if where else ''}")

    def _refuse(self, node: Any, reason: str) -> UntranslatableError:
        return UntranslatableError(node.kind(), self._where or source_of(node), reason)

    def _new(self, value: Any) -> str:
        """Returns a new variable for a value."""
        name = f"{PREFIX}v{len(self._names)}"
        self._names[value.debugName()] = name
        return name

    def _in_table(self, value: Any, kind: str) -> str:
        name = f"{PREFIX}{kind}{len(self.written.table)}"
        self.written.table[name] = value
        return name

    def _operator(self, function: Any) -> str:
        if function not in self._operators:
            self._operators[function] = self._in_table(function, "op")
        return self._operators[function]

    def _literal(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return f"({value!r})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._literal(key)}: {self._literal(item)}' for key, item in value.items())}}}"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._literal(item)}, ' for item in value)})"
        if isinstance(value, torch.Tensor):
            return self._weight(value, "constant")
        if isinstance(value, (float, complex, str, torch.device)):
            return self._in_table(value, "c")
        raise UntranslatableError("prim::Constant", self._where, f"a constant is a {type(value).__name__}")

    def _weight(self, tensor: torch.Tensor, name: str) -> str:
        for known, other in self.written.weights.items():
            if other is tensor:
                return f"self.{known}"
        if tensor.is_quantized or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise UntranslatableError("prim::GetAttr", self._where, f"{name} is a quantized or sparse tensor")
        attribute = f"{PREFIX}w{len(self.written.weights)}"
        self.written.weights[attribute] = tensor
        return f"self.{attribute}"

    def _expression(self, value: Any) -> str:
        name = value.debugName()
        if name in self._sizes:
            # Used as a tensor after all.
            return f"{self._operator(torch.tensor)}({self._sizes[name]})"
        if name in self._names:
            return self._names[name]
        if name in self._constants:
            constant = self._constants[name].value
            if isinstance(constant, (torch.nn.Module, torch.ScriptObject)):
                raise UntranslatableError("prim::GetAttr", self._where, f"a {kind_of(constant)} is used as a value")
            return self._literal(constant)
        raise UntranslatableError("forward", self._where, f"the value {name!r:.50} has no origin")

    def _known(self, value: Any) -> Constant | None:
        return self._constants.get(value.debugName())


def kind_of(value: Any) -> str:
    """Returns the name of a value's type."""
    if isinstance(value, torch.ScriptObject):
        return str(value._type().qualified_name())
    return type(value).__name__
