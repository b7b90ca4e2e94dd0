"""Skeleton files for the user to complete: a mapping with its test, and a translator for OpenVINO's frontend."""

import functools
import itertools
import keyword
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.doctor.diagnosis import MappingDraft
from torchserve_openvino.doctor.mapping.formula import Formula, bind
from torchserve_openvino.doctor.target import SampleCall
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.ops import op_name

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
_CPP_TYPES = {"float": "float", "int": "int64_t", "bool": "bool", "Scalar": "float", "number": "float"}


@functools.lru_cache(maxsize=1)
def environment() -> "Environment":
    """Returns the jinja2 environment for the doctor's templates.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
    except ImportError as error:
        raise ConfigError("jinja2 is missing: pip install 'torchserve-openvino[doctor]'.") from error
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def identifier(op: torch._ops.OpOverload) -> str:
    """Returns an identifier: ``softplus`` for ``aten.softplus.default``, ``mylib_op`` for ``mylib.op.default``."""
    namespace, packet, overload = op_name(op).split(".")
    parts = [] if namespace == "aten" else [namespace]
    parts += [packet.strip("_")] + ([] if overload == "default" else [overload])
    return "_".join(parts)


def parameters(op: torch._ops.OpOverload) -> list[str]:
    """Returns the schema's arguments as Python parameter names: ``self`` and Python's keywords are renamed."""
    names = [argument.name for argument in op._schema.arguments]
    free = "x" if "x" not in names else "input"
    return [free if name == "self" else f"{name}_" if keyword.iskeyword(name) else name for name in names]


def signature(op: torch._ops.OpOverload) -> str:
    """Returns the parameters with the schema's defaults, as written in a ``def``."""
    parts: list[str] = []
    star = False
    for argument, name in zip(op._schema.arguments, parameters(op), strict=True):
        if argument.kwarg_only and not star:
            star = True
            parts.append("*")
        # The schema has None or a number for defaults without a Python literal (dtypes, layouts).
        parts.append(f"{name}={argument.default_value!r}" if argument.has_default_value() else name)
    return ", ".join(parts)


def draft(
    op: torch._ops.OpOverload,
    seen: SampleCall,
    formula: Formula | None,
    outputs: Sequence[str],
    source: str,
    describe: Callable[[Any], str],
) -> MappingDraft:
    """Collects what the templates need for one operator.

    Args:
        op: The operator.
        seen: A call of it that was recorded.
        formula: The body, where one was found.
        outputs: Types and shapes that it returned.
        source: File that registers a custom operator; empty for torch's own.
        describe: Describes a value as text.
    """
    own = op.namespace not in {"aten", "prims"}
    return MappingDraft(
        op=op_name(op),
        function=identifier(op),
        signature=signature(op),
        schema=str(op._schema),
        inputs=[f"{name}={describe(value)}" for name, value in bind(op, seen).items()],
        outputs=list(outputs),
        body=formula.lines if formula is not None else [],
        origin=formula.origin if formula is not None else "",
        max_abs=formula.max_abs if formula is not None else None,
        test_args=", ".join(map(as_code, seen.args)) + ("," if len(seen.args) == 1 else ""),
        test_kwargs=", ".join(f"{name!r}: {as_code(value)}" for name, value in seen.kwargs.items()),
        registered_in=source if own else "",
    )


def as_code(value: Any) -> str:
    """Returns Python code that makes a value like this one: for a tensor, the same shape, dtype and range."""
    if isinstance(value, torch.Tensor):
        return _tensor_code(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_code, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{as_code(item)}, ' for item in value)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _tensor_code(value: torch.Tensor) -> str:
    shape = list(value.shape)
    if value.dtype is torch.bool:
        return f"torch.rand({shape}) > 0.5"
    if value.is_complex() or not value.numel():
        return f"torch.zeros({shape}, dtype={value.dtype})"
    wide = value.double().nan_to_num(0.0, 0.0, 0.0)
    low, high = float(wide.min()), float(wide.max())
    if not value.is_floating_point():
        return f"torch.randint({int(low)}, {int(high) + 1}, {shape}, dtype={value.dtype})"
    code = f"torch.empty({shape}).uniform_({low:.6g}, {max(high, low):.6g})"
    return code if value.dtype is torch.float32 else f"{code}.to({value.dtype})"


def _passed(seen: SampleCall) -> str:
    """Returns a call's arguments as code, with its tensors named ``tensors[0]``, ``tensors[1]`` and so on."""
    count = itertools.count()

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"tensors[{next(count)}]"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return as_code(value)

    return ", ".join([*map(text, seen.args), *(f"{name}={text(value)}" for name, value in seen.kwargs.items())])


# --- files ----------------------------------------------------------------------------------------------------------


def mapping_file(drafts: Sequence[MappingDraft], name: str) -> str:
    """Returns a Python file with one mapping for each draft."""
    modules = [path.stem for path in _sources(drafts)]
    return environment().get_template("mapping.py.jinja").render(drafts=drafts, name=name, modules=modules)


def mapping_test(drafts: Sequence[MappingDraft], name: str) -> str:
    """Returns the test of `mapping_file`, which belongs in the same folder."""
    folders = sorted({str(path.parent) for path in _sources(drafts) if path.is_absolute()})
    return environment().get_template("test_mapping.py.jinja").render(drafts=drafts, name=name, folders=folders)


def _sources(drafts: Sequence[MappingDraft]) -> list[Path]:
    """Returns the files that register the user's own operators."""
    return sorted({Path(draft.registered_in) for draft in drafts if draft.registered_in})


def upstream_files(op: torch._ops.OpOverload, draft: MappingDraft, seen: SampleCall) -> dict[str, str]:
    """Returns the files of a translator for OpenVINO's own PyTorch frontend: table entry, translator, layer test.

    Follows its guides (docs/articles_en/documentation/openvino-extensibility/frontend-extensions.rst and the frontend's
    README): the translator reads the schema's arguments by position.
    """
    arguments = [
        {
            "index": i,
            "name": name,
            "cpp": _CPP_TYPES.get(str(argument.type), ""),
            "tensor": "Tensor" in str(argument.type),
            "optional": str(argument.type).startswith("Optional"),
        }
        for i, (argument, name) in enumerate(zip(op._schema.arguments, parameters(op), strict=True))
    ]
    required = sum(not argument.has_default_value() for argument in op._schema.arguments)
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", draft.function).lower().replace("__", "_")
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(seen)) if isinstance(leaf, torch.Tensor)]
    facts = {
        "draft": draft,
        "tensors": [as_code(tensor) for tensor in tensors],
        "passed": _passed(seen),
        "snake": snake,
        "camel": "".join(part.title() for part in snake.split("_")),
        "call": op_name(op),
        "aten": f"{op.namespace}::{op_name(op).split('.')[1]}",
        "arguments": arguments,
        "required": required,
    }
    make = environment().get_template
    root = "src/frontends/pytorch/src"
    return {
        f"{root}/op_table.cpp": make("op_table.cpp.jinja").render(facts),
        f"{root}/op/{snake}.cpp": make("translator.cpp.jinja").render(facts),
        f"tests/layer_tests/pytorch_tests/test_{snake}.py": make("layer_test.py.jinja").render(facts),
    }
