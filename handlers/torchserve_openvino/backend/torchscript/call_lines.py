"""Writes operators: those of torch's dispatcher, and those that TorchScript's interpreter has by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchserve_openvino.backend.torchscript.lines import Constant, Lines, kind_of
from torchserve_openvino.backend.torchscript.scalar_ops import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    OF_TENSORS,
    OF_VALUES,
    power,
    single_or_double,
    truncated_quotient,
)
from torchserve_openvino.backend.upstream._torch_script import is_dispatched, parsed_schema, takes_file

PLAIN = (bool, int, float, str, type(None))
_NAMESPACES_REFUSED = frozenset({"quantized", "prepacked", "prim", "onednn", "mkldnn", "mkldnn_prepacked"})
_ENUMS: dict[str, dict[int, Any]] = {"ScalarType": DTYPES, "Layout": LAYOUTS, "MemoryFormat": MEMORY_FORMATS}
# Operators on tensors of sizes, which traced models compute with, as operators on numbers.
_ON_SIZES = {"aten::add": "+", "aten::sub": "-", "aten::mul": "*", "aten::floor_divide": "//", "aten::div": "//"}
_LAST = 2**63 - 1
_aten = torch.ops.aten
# Operators that round a float64 operand without dimensions to the other operand's type before they compute.
_ARITHMETIC = frozenset(
    {
        _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor,
        _aten.mul_.Tensor, _aten.div_.Tensor,
    }
)  # fmt: skip


class CallLines(Lines):
    """Writes the nodes that are calls of operators."""

    def _assign(self, node: Any, depth: int, expression: str) -> None:
        self._line(depth, f"{self._new(node.output())} = {expression}")

    def _call(self, node: Any, depth: int) -> None:
        schema = parsed_schema(node)
        kind, inputs = node.kind(), list(node.inputs())
        if schema is None:
            raise self._refuse(node, "it has no form in Python")
        if self._on_sizes(node, kind, inputs):
            return
        if kind in OF_TENSORS:
            self._property(node, depth, kind, inputs)
        elif kind in OF_VALUES and not any(_takes_tensors(value) for value in inputs):
            self._fold_or_call(node, depth, OF_VALUES[kind], inputs)
        elif kind == "aten::pow" and not any(_takes_tensors(value) for value in inputs):
            base, exponent = map(self._expression, inputs)
            of_floats = f"{self._operator(power)}({base}, {exponent})"
            self._assign(node, depth, of_floats if _is_float(node) else f"{base} ** {exponent}")
        else:
            self._dispatched(node, depth, schema, inputs)

    def _property(self, node: Any, depth: int, kind: str, inputs: Sequence[Any]) -> None:
        if kind in ("aten::Int", "aten::IntImplicit", "aten::ScalarImplicit"):
            size = self._sizes.get(inputs[0].debugName())
            if size is not None:
                self._names[node.output().debugName()] = size
                return
        if kind in ("aten::__is__", "aten::__isnot__") and (same := self._is_none(inputs)) is not None:
            self._constants[node.output().debugName()] = Constant(same == (kind == "aten::__is__"))
            return
        if kind == "aten::size" and len(inputs) == 2:
            kind = "aten::size.int"
        self._fold_or_call(node, depth, OF_TENSORS[kind], inputs)

    def _is_none(self, inputs: Sequence[Any]) -> bool | None:
        """Returns whether one value is None, where the other one is None and the types decide it."""
        for value, other in (inputs, inputs[::-1]):
            known = self._known(other)
            if known is not None and known.value is None:
                own = self._known(value)
                if own is not None:
                    return own.value is None
                kind = str(value.type())
                if not kind.startswith(("Optional", "Union", "NoneType", "Any")) and "?" not in kind:
                    return False
        return None

    def _fold_or_call(self, node: Any, depth: int, function: Callable[..., Any] | str, inputs: Sequence[Any]) -> None:
        if isinstance(function, str):
            self._assign(node, depth, function.format(*map(self._expression, inputs)))
            return
        known = [self._known(value) for value in inputs]
        # What takes no value asks for a mode of the call.
        plain = bool(known) and all(value is not None and isinstance(value.value, PLAIN) for value in known)
        if plain and node.outputsSize() == 1:
            try:
                result = function(*[value.value for value in known if value is not None])
            except Exception:
                # Left to the call, which raises as TorchScript would.
                result = object()
            if isinstance(result, (bool, int, float, type(None))):
                self._constants[node.output().debugName()] = Constant(result)
                return
        call = f"{self._operator(function)}({', '.join(map(self._expression, inputs))})"
        if node.outputsSize() == 1:
            self._assign(node, depth, call)
        else:
            self._line(depth, call)

    def _on_sizes(self, node: Any, kind: str, inputs: Sequence[Any]) -> bool:
        """Keeps the sum, product or quotient of sizes that a traced model holds as tensors a number."""
        if kind not in _ON_SIZES or not any(value.debugName() in self._sizes for value in inputs):
            return False
        terms = []
        for value in inputs[:2]:
            known = self._known(value)
            if value.debugName() in self._sizes:
                terms.append(self._sizes[value.debugName()])
            elif known is not None and (number := _as_int(known.value)) is not None:
                terms.append(f"({number})")
            elif str(value.type()) == "int":
                terms.append(self._expression(value))
            else:
                return False
        sign = _ON_SIZES[kind]
        if kind == "aten::div":
            # True division is one of floats.
            rounding = self._known(inputs[2]) if len(inputs) > 2 else None
            if rounding is None or rounding.value not in ("trunc", "floor"):
                return False
            if rounding.value == "trunc":
                call = f"{self._operator(truncated_quotient)}({', '.join(terms)})"
                self._sizes[node.output().debugName()] = call
                return True
        elif len(inputs) > 2 and ((alpha := self._known(inputs[2])) is None or alpha.value != 1):
            return False
        self._sizes[node.output().debugName()] = f"({terms[0]} {sign} {terms[1]})"
        return True

    def _dispatched(self, node: Any, depth: int, schema: Any, inputs: Sequence[Any]) -> None:
        """Writes the call of an operator of torch's dispatcher."""
        space, _, name = schema.name.partition("::")
        if space in _NAMESPACES_REFUSED or not is_dispatched(schema.name, schema.overload_name):
            raise self._refuse(node, "torch.compile has no such operator")
        packet = getattr(getattr(torch.ops, space), name)
        op = getattr(packet, schema.overload_name or "default")
        if op is torch.ops.aten.slice.Tensor and self._selects_all(inputs):
            self._assign(node, depth, f"{self._operator(torch.ops.aten.alias.default)}({self._expression(inputs[0])})")
            return
        arguments = op._schema.arguments
        if takes_file(arguments):
            raise self._refuse(node, "it opens a file")
        positional, named = [], []
        numbers = self._numbers(op, inputs)
        for argument, value in zip(arguments, inputs, strict=True):
            text = numbers.get(value.debugName()) or self._argument(node, argument, value)
            if argument.kwarg_only:
                named.append(f"{argument.name}={text}")
            else:
                positional.append(text)
        call = f"{self._operator(op)}({', '.join([*positional, *named])})"
        outputs = list(node.outputs())
        if len(outputs) == 1:
            self._assign(node, depth, call)
        else:
            names = [self._new(value) for value in outputs]
            self._line(depth, f"{', '.join(names)}, = {call}" if names else call)

    def _numbers(self, op: Any, inputs: Sequence[Any]) -> dict[str, str]:
        """Returns expressions for numbers that a trace holds as tensors, where the other operand decides their type."""
        if op not in _ARITHMETIC:
            return {}
        texts = {}
        for value, other in (inputs[:2], inputs[1::-1]):
            known = self._known(value)
            number = known.value if known is not None else None
            if isinstance(number, torch.Tensor) and number.dtype is torch.float64 and number.dim() == 0:
                double = self._expression(value)
                single = self._rounded.setdefault(double, number.to(torch.float32))
                operands = self._expression(other), self._weight(single, "constant"), double
                texts[value.debugName()] = f"{self._operator(single_or_double)}({', '.join(operands)})"
        return texts

    def _selects_all(self, inputs: Sequence[Any]) -> bool:
        """Returns True for a slice of a whole tensor, ``x[:]``, which is another name for it."""
        start, end, step = (
            None if (number := self._known(value)) is None else (number.value,) for value in inputs[2:5]
        )
        return start in ((None,), (0,)) and end in ((None,), (_LAST,)) and step == (1,)

    def _argument(self, node: Any, argument: Any, value: Any) -> str:
        known = self._known(value)
        if known is not None and isinstance(known.value, torch.ScriptObject):
            raise self._refuse(node, f"it takes packed parameters ({kind_of(known.value)})")
        table = next((table for kind, table in _ENUMS.items() if kind in str(argument.real_type)), None)
        if table is None:
            return self._expression(value)
        if known is None:
            return f"{self._in_table(table, 'c')}[{self._expression(value)}]"
        if known.value is None:
            return "None"
        if known.value not in table:
            raise self._refuse(node, f"{argument.name} is {known.value!r:.50}, which is not supported")
        return self._in_table(table[known.value], "c")


def _takes_tensors(value: Any) -> bool:
    return "Tensor" in str(value.type()) and "List" not in str(value.type()) and "Dict" not in str(value.type())


def _is_float(node: Any) -> bool:
    return str(node.output().type()) == "float"


def _as_int(value: Any) -> int | None:
    """Returns the number in an integer, or in an integer tensor of no dimensions; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype is torch.int64:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
