"""Computes the formulas of symbolic sizes, such as ``s0 + 3`` or ``(s0 - 1)//2``, as torch writes them."""

import ast
import functools
import operator
from collections.abc import Callable, Mapping

_Known = Mapping[str, int]
_Formula = Callable[[_Known], int | None]


def _exact(left: int, right: int) -> int | None:
    return left // right if right and left % right == 0 else None


def _power(left: int, right: int) -> int | None:
    return left**right if 0 <= right <= 4 else None


_BINARY: dict[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _exact,
    ast.FloorDiv: lambda left, right: left // right if right else None,
    ast.Mod: lambda left, right: left % right if right else None,
    ast.Pow: _power,
}
_CALLS: dict[str, Callable[..., int]] = {"Max": max, "Min": min}


def value_of_formula(text: str, known: _Known) -> int | None:
    """Returns the value of a formula; None if it has no size, one that is not known, or something else than numbers.

    Args:
        text: The formula; it is parsed and computed here, never run as Python.
        known: Sizes by their formulas; that of a symbol is its name.
    """
    # For some sizes that stay open, torch writes the example's number.
    return _parsed(text)(known) if any(letter.isalpha() for letter in text) else None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> _Formula:
    try:
        return _of(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        return _unknown


def _unknown(known: _Known) -> None:
    return None


def _of(node: ast.expr) -> _Formula:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
        return lambda known: number
    if isinstance(node, ast.Name):
        name = node.id
        return lambda known: known.get(name)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _applied(operator.neg, [_of(node.operand)])
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _applied(_BINARY[type(node.op)], [_of(node.left), _of(node.right)])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and node.args:
        return _applied(_CALLS[node.func.id], [_of(each) for each in node.args])
    return _unknown


def _applied(function: Callable[..., int | None], parts: list[_Formula]) -> _Formula:
    def value(known: _Known) -> int | None:
        values = [part(known) for part in parts]
        return None if None in values else function(*values)

    return value
