"""Writes the inlined graph of a TorchScript method as the source of a Python function.

Only names that are written here, numbers, and references to a table are in that source: no text of the archive is. The
table has operators, weights and constants. Each line of the function is one node, and ends with the line of the user's
code that it stands for.
"""

import collections
import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchserve_openvino.backend.torchscript.call_lines import PLAIN, CallLines
from torchserve_openvino.backend.torchscript.lines import PREFIX, Constant, PythonSource, UntranslatableError
from torchserve_openvino.backend.torchscript.scalar_ops import CHANGING, WITHOUT_EFFECT
from torchserve_openvino.backend.upstream._torch_script import inlined_graph, source_of

MAX_OPERATORS = 200_000
# How torch writes the type of a NamedTuple: its fields with their types.
_NAMED = "NamedTuple("
# They return a list or a dictionary that nothing else refers to.
_NEW_CONTAINERS = frozenset(
    {
        "prim::ListConstruct",
        "prim::DictConstruct",
        "aten::list",
        "aten::copy",
        "aten::keys",
        "aten::values",
        "aten::items",
    }
)


def write(method: Any, module: torch.nn.Module | None) -> PythonSource:
    """Writes a method as Python.

    Args:
        method: A ScriptMethod, or a ScriptFunction.
        module: The module that it belongs to; None for a function.

    Raises:
        UntranslatableError: It has an operator that has no form in Python.
    """
    written = PythonSource()
    try:
        _Writer(method, module, written)
    except UntranslatableError as error:
        error.ops = written.count
        raise
    return written


class _Writer(CallLines):
    def __init__(self, method: Any, module: torch.nn.Module | None, written: PythonSource) -> None:
        super().__init__(written)
        # Attributes that the code assigns, with the line of the first assignment.
        self._assigned: dict[str, str] = {}
        # Types of lists and dictionaries that the code changes, and did not create on the spot.
        self._changed: set[str] = set()
        self._defaults: list[str] = []
        graph = inlined_graph(method)
        self._check(graph)
        inputs = list(graph.inputs())
        if module is not None:
            self._constants[inputs.pop(0).debugName()] = Constant(module)
        arguments = list(method.schema.arguments)[module is not None :]
        self._line(0, f"def forward({', '.join(['self', *self._parameters(arguments, inputs)])}):")
        for default in self._defaults:
            self._line(1, default)
        self._block(graph, 1)
        outputs = [self._expression(value) for value in graph.outputs()]
        self._line(1, f"return {outputs[0] if len(outputs) == 1 else '(' + ', '.join(outputs) + ',)'}")

    def _parameters(self, arguments: Sequence[Any], inputs: Sequence[Any]) -> Iterator[str]:
        for argument, value in zip(arguments, inputs, strict=True):
            name = argument.name
            if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name.startswith("_"):
                raise UntranslatableError("forward", "", f"an argument is named {name!r:.100}")
            self._names[value.debugName()] = name
            default = argument.default_value if argument.has_default_value() else None
            if isinstance(default, torch.Tensor):
                self._defaults.append(f"{name} = {self._weight(default, name)} if {name} is None else {name}")
                yield f"{name}=None"
            else:
                yield f"{name}={self._literal(default)}" if argument.has_default_value() else name

    def _check(self, graph: Any) -> None:
        """Counts the operators, and notes which attributes the code assigns."""
        where = ""
        for node in _nodes(graph):
            where = source_of(node) or where
            self.written.count += node.kind().partition("::")[0] != "prim"
            if self.written.count > MAX_OPERATORS:
                raise UntranslatableError("forward", "", f"the graph has more than {MAX_OPERATORS} operators")
            if node.kind() in CHANGING and (receiver := next(node.inputs())).node().kind() not in _NEW_CONTAINERS:
                self._changed.add(str(receiver.type()))
            if node.kind() == "prim::SetAttr":
                self._assigned.setdefault(node.s("name"), where)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _block(self, block: Any, depth: int) -> None:
        for node in block.nodes():
            # Some nodes have no line of their own.
            self._where = source_of(node) or self._where
            write = _WRITERS.get(node.kind())
            if write is not None:
                write(self, node, depth)
            elif node.kind() not in WITHOUT_EFFECT:
                self._call(node, depth)

    def _constant(self, node: Any, depth: int) -> None:
        self._constants[node.output().debugName()] = Constant(node.output().toIValue())

    def _attribute(self, node: Any, depth: int) -> None:
        owner, name = self._known(next(node.inputs())), node.s("name")
        if owner is None or not isinstance(owner.value, torch.nn.Module):
            raise self._refuse(node, "it reads an attribute of an object that is no module")
        if name in self._assigned:
            raise _keeps_state(name, self._assigned[name])
        value = getattr(owner.value, name)
        result = node.output().debugName()
        if isinstance(value, torch.Tensor):
            self._names[result] = self._weight(value, name)
            self.written.read.append((owner.value, name, value))
            return
        if not isinstance(value, (torch.nn.Module, torch.ScriptObject)):
            if not _is_plain(value):
                raise self._refuse(node, f"the attribute {name!r:.100} of the module is a {type(value).__name__}")
            if isinstance(value, (list, dict, tuple)) and not self._changed.isdisjoint(_kinds(node.output().type())):
                raise self._refuse(
                    node, f"the module may change its attribute {name!r:.100}, which it keeps between calls"
                )
            self.written.read.append((owner.value, name, value))
        self._constants[result] = Constant(value)

    def _set_attribute(self, node: Any, depth: int) -> None:
        raise _keeps_state(node.s("name"), self._where)

    def _alias(self, node: Any, depth: int) -> None:
        self._rename(node.output(), next(node.inputs()))

    def _list(self, node: Any, depth: int) -> None:
        # Not written as a literal, since TorchScript may append to it.
        self._assign(node, depth, f"[{', '.join(map(self._expression, node.inputs()))}]")

    def _tuple(self, node: Any, depth: int) -> None:
        items = [self._expression(value) for value in node.inputs()]
        if fields := _fields(node.output().type()):
            try:
                cls = collections.namedtuple("Result", fields)  # type: ignore[misc]
            except ValueError as error:
                raise self._refuse(node, f"a tuple has fields that Python does not allow: {error!s:.100}") from error
            self._assign(node, depth, f"{self._in_table(cls, 'c')}({', '.join(items)})")
        else:
            self._assign(node, depth, f"({''.join(f'{item}, ' for item in items)})")

    def _dict(self, node: Any, depth: int) -> None:
        items = [self._expression(value) for value in node.inputs()]
        pairs = ", ".join(f"{key}: {value}" for key, value in zip(items[::2], items[1::2], strict=True))
        self._assign(node, depth, f"{{{pairs}}}")

    def _unpack(self, node: Any, depth: int) -> None:
        source = self._expression(next(node.inputs()))
        names = [self._new(value) for value in node.outputs()]
        if names:
            self._line(depth, f"{', '.join(names)}, = {source}")

    def _index(self, node: Any, depth: int) -> None:
        values, index = node.inputs()
        self._assign(node, depth, f"{self._expression(values)}[{self._expression(index)}]")

    def _uninitialized(self, node: Any, depth: int) -> None:
        self._names[node.output().debugName()] = "None"

    def _raise(self, node: Any, depth: int) -> None:
        message = next(node.inputs())
        self._line(depth, f"raise {self._operator(RuntimeError)}({self._expression(message)})")

    def _number(self, node: Any, depth: int) -> None:
        value = next(node.inputs())
        if str(value.type()) == "int":
            self._sizes[node.output().debugName()] = self._expression(value)
        else:
            self._assign(node, depth, f"{self._operator(torch.tensor)}({self._expression(value)})")

    # --- control flow ---------------------------------------------------------------------------------------------

    def _if(self, node: Any, depth: int) -> None:
        condition = next(node.inputs())
        blocks, outputs = list(node.blocks()), list(node.outputs())
        known = self._known(condition)
        if known is not None:
            chosen = blocks[0] if known.value else blocks[1]
            self._block(chosen, depth)
            for output, value in zip(outputs, chosen.outputs(), strict=True):
                self._rename(output, value)
            return
        where, test = self._where, self._expression(condition)
        names = [self._new(value) for value in outputs]
        for head, block in ((f"if {test}:", blocks[0]), ("else:", blocks[1])):
            self._where = where
            self._line(depth, head)
            self._block(block, depth + 1)
            values = [self._expression(value) for value in block.outputs()]
            for name, value in zip(names, values, strict=True):
                self._line(depth + 1, f"{name} = {value}")
            self._line(depth + 1, "pass")

    def _rename(self, result: Any, source: Any) -> None:
        tables: tuple[dict[str, Any], ...] = (self._sizes, self._names, self._constants)
        for table in tables:
            if source.debugName() in table:
                table[result.debugName()] = table[source.debugName()]
                return
        raise UntranslatableError("forward", self._where, "a value has no origin")

    def _loop(self, node: Any, depth: int) -> None:
        most, start, *initial = [self._expression(value) for value in node.inputs()]
        (body,) = node.blocks()
        counter, *carried = list(body.inputs())
        index, names = self._new(counter), [self._new(value) for value in carried]
        going = f"{PREFIX}g{len(self._names)}"
        self._line(depth, f"{going} = {start}")
        for name, value in zip(names, initial, strict=True):
            self._line(depth, f"{name} = {value}")
        self._line(depth, f"for {index} in {self._operator(range)}({most}):")
        self._line(depth + 1, f"if not {going}: break")
        self._block(body, depth + 1)
        again, *values = [self._expression(value) for value in body.outputs()]
        self._line(depth + 1, f"{', '.join([going, *names])}, = {', '.join([again, *values])},")
        for output, name in zip(node.outputs(), names, strict=True):
            self._names[output.debugName()] = name


_WRITERS: dict[str, Callable[[_Writer, Any, int], None]] = {
    "prim::Constant": _Writer._constant,
    "prim::GetAttr": _Writer._attribute,
    "prim::SetAttr": _Writer._set_attribute,
    "prim::ListConstruct": _Writer._list,
    "prim::TupleConstruct": _Writer._tuple,
    "prim::DictConstruct": _Writer._dict,
    "prim::ListUnpack": _Writer._unpack,
    "prim::TupleUnpack": _Writer._unpack,
    "prim::TupleIndex": _Writer._index,
    "prim::Uninitialized": _Writer._uninitialized,
    "prim::unchecked_cast": _Writer._alias,
    "prim::RaiseException": _Writer._raise,
    "prim::NumToTensor": _Writer._number,
    "prim::If": _Writer._if,
    "prim::Loop": _Writer._loop,
}


def _keeps_state(name: str, where: str) -> UntranslatableError:
    reason = f"the module changes its attribute {name!r:.100}: it keeps state between calls"
    return UntranslatableError("prim::SetAttr", where, reason)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _kinds(kind: Any) -> Iterator[str]:
    """Yields a type, and all that it contains."""
    yield str(kind)
    for inner in kind.containedTypes():
        yield from _kinds(inner)


def _fields(kind: Any) -> list[str]:
    """Returns the names of a NamedTuple's fields; none for another tuple."""
    text = kind.str()
    if not text.startswith(_NAMED):
        return []
    names, depth, begin = [], 0, len(_NAMED)
    for index in range(begin, len(text)):
        depth += (text[index] in "([") - (text[index] in ")]")
        if (text[index] == "," and depth == 0) or depth < 0:
            names.append(text[begin:index].partition(":")[0].strip())
            begin = index + 1
    return [name for name in names if name]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return isinstance(value, (*PLAIN, torch.device, torch.Tensor))
