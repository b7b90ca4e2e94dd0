"""Hints on what to write instead of a line that breaks Dynamo's graph, or of values that OpenVINO does not compute."""

import re
from typing import NamedTuple

from torchserve_openvino.doctor.diagnosis import NextStep


class Rewrite(NamedTuple):
    """A hint for one kind of cause.

    Attributes:
        reason: Regular expression to search for in Dynamo's reason or ours, ignoring case.
        title: What to do, in a few words.
        text: What to write instead, and why.
    """

    reason: str
    title: str
    text: str


# The first match is given, so specific entries stand before general ones. The names are those that Dynamo gives its
# graph breaks in torch 2.13 (torch/_dynamo/graph_break_registry.json).
BREAKS = (
    Rewrite(
        r"builtin operator `print`|\blogging\.|logging\.Logger|(?<!_)warnings\.warn|debugging function",
        "remove print or logging calls from forward",
        "It runs in Python between two graphs on each request. Print only while debugging, or in the handler; "
        "`if not torch.compiler.is_compiling()` around it hides it from Dynamo.",
    ),
    Rewrite(
        r"tensor\.item\(\)|_local_scalar_dense|\btolist\b|nb_(int|float)_impl",
        "keep the value in a tensor",
        "`.item()`, `int(t)`, `float(t)` and `.tolist()` take a value out of the graph. Compute with the 0-d "
        "tensor; for a choice write torch.where(condition, a, b), for an index torch.gather or index_select.",
    ),
    Rewrite(
        r"data-dependent (branching|assertion)|generic_jump|data dependent operator|torch\.cond: improper predicate",
        "compute both branches, or let torch.cond choose",
        "`if` on a tensor's value cannot be traced. Write torch.where(condition, a, b) where both sides are cheap; "
        "torch.cond(condition, f, g, operands) keeps one of two functions. An assertion on values belongs in the "
        "handler, or under `if not torch.compiler.is_compiling()`.",
    ),
    Rewrite(
        r"dynamic shape operator|output[ -]shape|dynamic slicing with tensor|list with non-scalar tensor",
        "give the result a fixed shape",
        "The size of this result depends on values (nonzero, unique, masked_select, x[mask], bincount). Keep the full "
        "size and a mask: torch.where(mask, x, 0), one_hot(...).sum(0) for bincount with a known length, torch.topk "
        "with a fixed k.",
    ),
    Rewrite(
        r"_dynamo\.graph_break",
        "remove the graph_break() call",
        "torch._dynamo.graph_break() ends the graph on purpose. It is of use only while debugging.",
    ),
    Rewrite(
        r"torch\.compiler\.disable|torch\._dynamo\.disable|dynamo\.skip_frame",
        "remove torch.compiler.disable",
        "The function is excluded by torch.compiler.disable (or torch._dynamo.disable). Remove it if it is no "
        "longer needed; else call the function outside of forward, in the handler's preprocess or postprocess.",
    ),
    Rewrite(
        r"numpy|ndarray",
        "write it in torch",
        "NumPy in forward leaves the graph. Most functions have the same name in torch; what must stay NumPy belongs "
        "in the handler's preprocess or postprocess.",
    ),
    Rewrite(
        r"observed exception|exception_handler|except_handler|failed to raise exception|exception with|"
        r"non-exception|try block",
        "take try/except out of forward",
        "Dynamo leaves the graph where an exception may be caught. Check the condition before the call, outside of "
        "forward if it depends on values.",
    ),
    Rewrite(
        r"trace generator|call_method on generator|generator (detected|reconstruction|code)|infinite generator|"
        r"cleanup_throw",
        "make a list instead of a generator",
        "A generator that lives on between two lines cannot be traced: write a list, or a plain loop.",
    ),
    Rewrite(
        r"context ?manager|contextlib|graph break under genericcontext",
        "move the context manager out of forward",
        "Dynamo can't enter it. Autocast and no_grad belong around the call; locks, timers and profilers outside.",
    ),
    Rewrite(
        r"torch\.jit|scriptfunction|torchscript",
        "remove torch.jit",
        "A scripted function is a black box to Dynamo. Call the Python function that was scripted.",
    ),
    Rewrite(
        r"requires_grad|backward|autograd|grad_fn|retain_grad",
        "take gradients out of forward",
        "Serving needs none: remove requires_grad_(), backward() and custom autograd.Functions, or keep "
        "their forward only.",
    ),
    Rewrite(
        r"manual_seed|torch\.generator|random\.random\(|tensor\.(random|uniform)_",
        "draw random numbers outside of the model",
        "Make them in the handler and pass them as an input; this also makes the answer reproducible.",
    ),
    Rewrite(
        r"hasattr|setattr|getattr|side effect|mutation|user-defined|deepcopy",
        "keep state out of forward",
        "Dynamo can't follow how this object changes. Compute it in __init__, or pass it as an argument.",
    ),
    Rewrite(
        r"c/c\+\+|c extension|marked as skipped|builtin operator|not implemented in python",
        "replace the call by torch operators, or make it an operator",
        "The function is compiled code, or of a package that Dynamo skips. Use torch's equivalent; or wrap it in "
        "torch.library.custom_op with a register_fake, so that it stays in the graph as one operator, which "
        "can then be mapped (register_op).",
    ),
    Rewrite(
        r"graph break in loop|infinite loop|recompile limit",
        "bound the loop",
        "A loop over a tensor or an unknown range breaks the graph. Loop over a Python range, or write one tensor "
        "operation.",
    ),
)
_ANY_BREAK = Rewrite(
    "",
    "rewrite this line",
    "Dynamo's own reason above says what it can't trace. Express it in torch operators, move it to the handler, or "
    "wrap it in torch.library.custom_op with a register_fake, so that the graph stays in one piece.",
)

# Causes that lie in the values, where neither a mapping nor a decomposition helps.
VALUES = (
    Rewrite(
        r"on torch\.float64",
        "compute in float32",
        "OpenVINO computes float64 as float32. Cast the model (model.float()) and its inputs, and look for "
        "torch.tensor(..., dtype=torch.float64) and NumPy arrays, which are float64 by default.",
    ),
    Rewrite(
        r"on torch\.complex",
        "compute with real and imaginary parts",
        "OpenVINO has no complex type. torch.view_as_real(x) gives both parts; the absolute value is the "
        "root of the sum of their squares.",
    ),
    Rewrite(
        r"on torch\.",
        "use float32, float16, int64, int32 or bool",
        "OpenVINO does not compute this type as torch does. Cast first: x.to(torch.int32) or x.float().",
    ),
    Rewrite(
        r"draws random numbers",
        "remove the randomness",
        "Dropout needs model.eval(). Draw other random values in the handler and pass them as an input.",
    ),
    Rewrite(
        r"integers of 8 or 16 bits",
        "compute in int32 or float32",
        "Torch wraps around, OpenVINO saturates. Cast before the arithmetic: x.to(torch.int32).",
    ),
    Rewrite(
        r"may exceed (32 bits|2\^24)",
        "compute in float32",
        "OpenVINO computes integers in 32 bits, and most operators on them in float32, which is exact up to 2^24. "
        "If the values are small, cast them: x.float() before, .to(torch.int64) after.",
    ),
    Rewrite(
        r"rounds the quotient",
        "divide by a power of 2, or leave it",
        "An exact remainder of many values is a job for eager PyTorch. Where the last digit does not matter: "
        "torch.floor(x / y), and x - y * torch.floor(x / y).",
    ),
    Rewrite(
        r"size 0",
        "skip empty tensors",
        "There is nothing to compute: leave the operation out where the dimension is 0, e.g. an empty list to cat.",
    ),
    Rewrite(
        r"writes to its input",
        "write the functional form",
        "Use the operator without the trailing underscore, or index_put / scatter instead of their in-place forms.",
    ),
    Rewrite(
        r"log-sum-exp output",
        "run the model in inference mode",
        "Only training needs that output: call it under torch.inference_mode(), with requires_grad off for parameters.",
    ),
    Rewrite(
        r"sparse or quantized",
        "use dense tensors",
        "Use x.to_dense(); instead of quantizing the model in torch, compress it with NNCF, OpenVINO's own way.",
    ),
    Rewrite(
        r"tensor on \w+; inputs must be on the CPU", "move it to the CPU", "model.to('cpu') and inputs on the CPU."
    ),
    Rewrite(
        r"scalar that is computed in Python",
        "keep the size static",
        "Compile with dynamic: false, or compute with a tensor.",
    ),
)


def steps_for_break(reason: str, source: str) -> list[NextStep]:
    """Returns a hint for one graph break.

    Args:
        reason: Dynamo's reason.
        source: The user's source line.
    """
    advice = _find(BREAKS, _detail(reason)) or _find(BREAKS, source) or _ANY_BREAK
    return [NextStep("rewrite", advice.title, advice.text)]


def step_for_values(reason: str) -> NextStep | None:
    """Returns a hint if the values are the cause; None if it is the operator itself."""
    advice = _find(VALUES, reason)
    return NextStep("rewrite", advice.title, advice.text) if advice else None


def _detail(reason: str) -> str:
    """Strips Dynamo's hints, which name other things; keeps the kind of break, its explanation and its object."""
    return "\n".join(line for line in reason.splitlines() if not line.strip().startswith(("Hint:", "For more")))


def _find(table: tuple[Rewrite, ...], text: str) -> Rewrite | None:
    return next((rewrite for rewrite in table if re.search(rewrite.reason, text, re.IGNORECASE)), None)
