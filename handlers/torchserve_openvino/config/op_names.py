"""Normalizes operator names: to ``aten.relu.default`` (one overload) or ``aten.relu`` (all overloads)."""

import functools
import re
from collections.abc import Iterable
from typing import Any

from torchserve_openvino.config.problems import KeyPath, Problems
from torchserve_openvino.config.spelling import nearest, shown
from torchserve_openvino.errors import UnknownOperatorError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}")


def normalize(spelling: str) -> str:
    """Converts a spelling to dotted form; does not check whether the operator exists.

    Args:
        spelling: ``torch.ops.aten.relu.default``, ``aten.relu.default``, ``aten::relu``,
            ``aten::relu.default``, ``aten.relu``, ``torch.ops.aten.relu``, or the same in another namespace.
    """
    return spelling.strip().replace("::", ".").removeprefix("torch.ops.").removeprefix("ops.")


def spelled(op: Any) -> str | None:
    """Returns the name that an option's entry (a string or torch's operator object) spells; None for anything else."""
    if isinstance(op, str):
        return normalize(op)
    # OpOverload and OpOverloadPacket print as "aten.relu.default" and "aten.relu".
    if type(op).__name__ in {"OpOverload", "OpOverloadPacket"}:
        return str(op)
    return None


def _all_names() -> set[str]:
    import torch

    return {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}


def _suggest(name: str) -> str | None:
    names = _all_names()
    namespaces = {name.split(".")[0] for name in names}
    head, *rest = name.split(".")
    if not rest:
        return (
            f"aten.{name}"
            if f"aten.{name}" in {packet_name(name) for name in names}
            else nearest(f"aten.{name}", names)
        )
    # A typo is usually in one part of a name: only search the operators of that namespace.
    if head not in namespaces:
        near = nearest(head, namespaces)
        if near is None:
            return None
        head = near
    fitting = [name for name in names if name.startswith(f"{head}.")]
    if len(rest) == 1:
        return nearest(f"{head}.{rest[0]}", {packet_name(name) for name in fitting})
    fitting += [f"{name}.default" for name in fitting if name.count(".") == 1]
    return nearest(f"{head}.{'.'.join(rest)}", fitting)


@functools.lru_cache(maxsize=8192)
def packet_name(name: str) -> str:
    """Drops the overload: returns ``aten.relu`` for ``aten.relu.default``."""
    return ".".join(name.split(".")[:2])


def _exists(name: str) -> bool:
    import torch

    namespace, operator, *overload = name.split(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
    except (AttributeError, RuntimeError):
        return False
    overloads = getattr(packet, "overloads", None)
    # Attributes of torch.ops that are not operators (its own functions and modules) have no overloads.
    if overloads is None:
        return False
    return not overload or overload[0] in overloads()


def check_operators(ops: Any, problems: Problems, keys: KeyPath) -> tuple[str, ...]:
    """Returns the canonical names of the operators in an option.

    Args:
        ops: One entry or a list of them; an entry is a string or torch's operator object.
        problems: Collects an `UnknownOperatorError` for each name that torch does not know.
        keys: Path of the option.

    Returns:
        The names without duplicates, in the order given.
    """
    many = isinstance(ops, Iterable) and not isinstance(ops, (str, bytes)) and spelled(ops) is None
    entries: list[Any] = list(ops) if many else [ops]
    names: dict[str, None] = {}
    for index, entry in enumerate(entries):
        where = (*keys, index) if many else keys
        name = spelled(entry)
        if name is None:
            problems.add(where, f"must be an operator's name such as aten.relu.default, not {shown(entry)}.")
        elif not _NAME.fullmatch(name) or not _exists(name):
            problems.add(where, _unknown(entry, name), suggestion=_suggest(name), kind=UnknownOperatorError)
        else:
            names[name] = None
    return tuple(names)


def _unknown(entry: Any, name: str) -> str:
    if "." not in name:
        return f"{shown(entry)} has no namespace."
    namespace = name.split(".", maxsplit=1)[0]
    if namespace in {name.split(".")[0] for name in _all_names()}:
        return f"torch has no operator {shown(entry)}."
    return (
        f"torch has no operator {shown(entry)}: nothing is registered in the namespace {namespace!r}. If a "
        "library of yours registers it, import that library in the handler file, above the handler class."
    )


def check_decomposable(names: Iterable[str], problems: Problems) -> None:
    """Reports the operators of the option ``decompositions`` that torch has no decomposition for."""
    if not names:
        return
    import torch
    from torch._decomp import get_decompositions

    for name in names:
        namespace, operator, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operator)
        if not get_decompositions([getattr(packet, overload[0]) if overload else packet]):
            problems.add(("decompositions",), f"torch has no decomposition for {name!r}; remove it.")
