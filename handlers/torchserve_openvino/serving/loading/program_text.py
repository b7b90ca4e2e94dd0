"""Finds text in an exported program that torch would run as Python code.

A serialized program is JSON, but torch makes code of it: `sympify` evaluates its sizes, `exec` defines its guards, the
operators of its nodes are any function below ``torch``, ``operator`` or ``math``, and its names become the names and
attributes of a generated `forward`. So each text has to look like what `torch.export.save` writes there.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.files.json_text import JsonError, parse_json

# Without brackets, quotes, commas, backslashes and line breaks, no text calls anything, wherever it is put.
_NAME = re.compile(r"[\w.:<>=+\-*/|!?~^%& ]*")
_EXPRESSION_CHARACTERS = 100_000
# The graph of a large model, with notes on where each operator comes from.
_PROGRAM_BYTES = 2**30

_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(\.\w+)?|#\w+:[\w.]+")
# What torch calls on sizes, and what it puts around parts of a graph for autograd, autocast and vmap.
_FUNCTION = re.compile(
    r"torch\._?sym_\w+|math\.[a-z]\w*"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|xor|not_|abs|invert"
    r"|lshift|rshift|getitem)"
    r"|torch\._functorch\.predispatch\.\w+|torch\._C\._functorch\.\w+|torch\._C\._set_grad_enabled"
    r"|torch\.amp\.autocast_mode\._(enter|exit)_autocast"
)
# Operators that take graphs; of all others, some load compiled code, or run Python.
_HIGHER_ORDER = frozenset(
    {
        "associative_scan", "auto_functionalized", "auto_functionalized_v2", "autograd_function_apply", "cond",
        "flex_attention", "foreach_map", "hints_wrapper", "invoke_quant", "invoke_quant_packed", "invoke_subgraph",
        "map", "map_impl", "out_dtype", "scan", "strict_mode", "tag_activation_checkpoint", "while_loop",
        "while_loop_stack_output", "with_effects", "wrap", "wrap_activation_checkpoint", "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)  # fmt: skip

_SYMPY = frozenset(
    {
        "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "ExprCondPair", "Float", "FloatPow",
        "FloatTrueDiv", "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "ITE", "Identity", "IntTrueDiv", "Integer",
        "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing",
        "Mul", "Ne", "Not", "Or", "Piecewise", "Pow", "PowByNatural", "PythonMod", "RShift", "Rational", "RoundDecimal",
        "RoundToInt", "StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat", "TruncToFloat", "TruncToInt", "Tuple",
        "Unequality", "Where", "acos", "asin", "atan", "ceiling", "cos", "cosh", "exp", "floor", "log", "sin", "sinh",
        "sqrt", "tan", "tanh", "true", "false", "oo", "int_oo", "nan",
    }
)  # fmt: skip
_OPAQUE = re.compile(r"(OpaqueUnaryFn|BitwiseFn)_\w+")
_SYMBOL = re.compile(r"[A-Za-z]\w{0,99}")
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|[-+]?(inf|nan|oo)")
_TEXTS = {"Symbol": _SYMBOL, "Float": _NUMBER, "Integer": _NUMBER, "Rational": _NUMBER}

_GUARD_FUNCTIONS = frozenset(
    {"IsNonOverlappingAndDenseIndicator", "cast_symbool_to_symint_guardless", "abs", "bool", "float", "int", "max",
     "min", "round"}
)  # fmt: skip
_GUARD_NAMES = frozenset({"L", "inf", "math", "torch"}) | _GUARD_FUNCTIONS
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset", "shape"})
_PLAIN_NODES = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Load, ast.boolop, ast.operator, ast.unaryop,
    ast.cmpop,
)  # fmt: skip


def check_program(text: bytes) -> None:
    """Checks a serialized program.

    Args:
        text: The JSON of one program, ``models/NAME.json``.

    Raises:
        ModelLoadError: A text in it is not what torch.export writes.
    """
    # Several nodes have the same text.
    seen: set[tuple[str, str]] = set()
    for key, value in _texts(_parsed(text), ""):
        if (key, value) not in seen:
            seen.add((key, value))
            _check(key, value)


def check_name(name: str) -> None:
    """Raises ModelLoadError for the name of a weight, or of another part, that could be code."""
    hidden = any(part.startswith("__") and part.endswith("__") for part in name.split(".") if part)
    if not _NAME.fullmatch(name) or hidden:
        raise _refused("name", name)


def _parsed(text: bytes | str) -> Any:
    try:
        # torch writes constants of NaN as such.
        return parse_json(text, allow_nan=True, most=_PROGRAM_BYTES)
    except JsonError as error:
        raise ModelLoadError(f"the program is not valid JSON: {error}.") from error


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields all texts below a value, each with its key; those of constants as ``constant``."""
    rest: list[tuple[Any, str, bool]] = [(value, key, False)]
    while rest:
        value, key, in_node = rest.pop()
        if isinstance(value, str):
            # A node's constants, such as the equation of einsum, are written as literals.
            if not (in_node and key in ("as_string", "as_strings")):
                yield key, value
        elif isinstance(value, list):
            rest += [(item, key, in_node) for item in value]
        elif isinstance(value, dict):
            for name, item in value.items():
                yield "name", name
                # Notes for people, which are not used as code.
                if name != "metadata":
                    rest.append((item, name, name == "nodes" or (in_node and name != "graph")))


def _check(key: str, text: str) -> None:
    if key in ("target", "as_operator"):
        _check_operator(text)
    elif key == "expr_str":
        _check_size(text)
    elif key == "guards_code":
        _check_guard(text)
    elif key in ("in_spec", "out_spec"):
        for inner, value in _texts(_parsed(text), key):
            _check_structure(inner, value)
    else:
        check_name(text)


def _check_operator(text: str) -> None:
    match = _OPERATOR.fullmatch(text)
    if match is None:
        right = _FUNCTION.fullmatch(text) is not None
    elif match[1] == "higher_order":
        right = match[2] in _HIGHER_ORDER and match[3] is None
    else:
        # Operators that users register by a prefix of their own are theirs.
        right = match[1] is None or (match[1] != "prim" and _is_safe(match[1], match[2], match[3]))
    if not right:
        raise _refused("operator", text)


def _is_safe(namespace: str, name: str, overload: str | None) -> bool:
    """Returns False for what is no operator, and for one that opens a file by name, such as aten.from_file."""
    import torch

    from torchserve_openvino.backend.upstream._torch_script import takes_file

    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        # Of a library that is not imported; torch's own message says so.
        return True
    if not hasattr(packet, "overloads") or (overload is not None and overload[1:] not in packet.overloads()):
        return False
    return not any(takes_file(getattr(packet, known)._schema.arguments) for known in packet.overloads())


def _check_structure(key: str, text: str) -> None:
    """Checks a text in the structure of inputs or outputs: pytree imports the modules that two of its types name."""
    if key == "context" and text[:1] in ("[", "{", '"'):
        texts = [inner for _, inner in _texts(_parsed(text), key)]
    else:
        texts = [text]
    for code in texts:
        check_name(code)
        if code == "__enum__" or code.startswith("default_factory"):
            raise _refused("structure", code)


def _check_size(text: str) -> None:
    """Checks the formula of a size, as sympy's `srepr` or its printer write it."""
    tree = _expression("size", text)
    # A text is allowed in these calls only.
    literals = {
        id(argument): _TEXTS[call.func.id]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _TEXTS
        for argument in call.args
    }
    called = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            known = node.id in _SYMPY or _OPAQUE.fullmatch(node.id)
            right = bool(known or (id(node) not in called and _SYMBOL.fullmatch(node.id)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            right = id(node) in literals and bool(literals[id(node)].fullmatch(node.value))
        else:
            right = isinstance(node, (*_PLAIN_NODES, ast.Call, ast.keyword, ast.Constant, ast.Tuple))
        if not right:
            raise _refused("size", text)


def _check_guard(text: str) -> None:
    """Checks a condition on inputs, as in ``L['x'].size()[0] <= 64``."""
    for node in ast.walk(_expression("guard", text)):
        if isinstance(node, ast.Name):
            right = node.id in _GUARD_NAMES
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            sizes = base == "torch" and node.attr.lstrip("_").startswith("sym_")
            right = sizes or (base == "math" and node.attr[:1] != "_") or node.attr in _GUARD_METHODS
        elif isinstance(node, ast.Call):
            plain = not isinstance(node.func, ast.Name) or node.func.id in _GUARD_FUNCTIONS
            right = isinstance(node.func, (ast.Name, ast.Attribute)) and plain
        elif isinstance(node, ast.Constant):
            right = not isinstance(node.value, str) or bool(_NAME.fullmatch(node.value))
        else:
            right = isinstance(node, (*_PLAIN_NODES, ast.Subscript, ast.IfExp))
        if not right:
            raise _refused("guard", text)


def _expression(kind: str, text: str) -> ast.Expression:
    if len(text) > _EXPRESSION_CHARACTERS:
        raise _refused(kind, text)
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(kind, text) from error


def _refused(kind: str, text: str) -> ModelLoadError:
    return ModelLoadError(
        f"the program holds the {kind} {text[:200]!r}, which torch.export does not write, or which reaches outside the "
        "model. It could run code, so it is not loaded."
    )
