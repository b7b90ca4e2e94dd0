"""Runs a model and its compiled forms from the same state, so that only the compiler can make answers differ."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from torchserve_openvino.backend.capture.kept_state import unchanged
from torchserve_openvino.backend.runtime.compare import comparable, copied, reordered
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.verification.judge import Judge

logger = logging.getLogger(__name__)


class FixedState:
    """Runs a model from the same inputs, random numbers and state each time, and leaves its state as it was.

    Args:
        model: In evaluation mode, on the CPU.

    Attributes:
        model: The same.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    def run(self, model: Callable[..., Any], inputs: Inputs) -> Any:
        """Returns a copy of an answer.

        Args:
            model: The model, or a compiled form of it.
            inputs: Copied, since a model may write to them.
        """
        # Before inference mode: Dynamo compiles again for tensors that are made in it.
        args, kwargs = copied(tuple(inputs))
        with unchanged(self.model), torch.inference_mode():
            # An output may be a view of memory that a later run writes to, such as a buffer.
            return copied(model(*args, **kwargs))

    def eager_answers(self, call: Inputs, other: Inputs | None = None) -> list[tuple[Inputs, Any]]:
        """Returns a call and eager PyTorch's answer; then the same for other values, if eager takes those.

        Args:
            call: The call.
            other: Other values; by default those of the call in reverse.

        Raises:
            Exception: Whatever the model raises for the call itself.
        """
        first = (call[0], call[1])
        answers = [(first, self.run(self.model, first))]
        # A value wrongly treated as constant shows only with other values, which not every model accepts.
        other = reordered(first) if other is None else other
        if other is not None:
            try:
                answers.append((other, self.run(self.model, other)))
            except Exception as raised:
                logger.info("Compared on one set of values; eager refuses the other: %s", raised)
        return answers


def call_once(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Calls a model on copies of the inputs, and keeps its new state.

    A first call may make what later ones use, such as a table of positions; so one is made before answers are compared.
    """
    args, kwargs = copied(tuple(inputs))
    with torch.inference_mode():
        return model(*args, **kwargs)


def differences(judge: Judge, got: Any, expected: Any) -> str:
    """Describes how an answer differs from eager PyTorch's; empty if it does not."""
    problems = judge.judge(comparable(got), comparable(expected)).problems
    return "; ".join(text.lstrip(",: ") for text in problems)
