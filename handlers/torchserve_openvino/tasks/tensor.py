"""Serves any model on tensors: JSON, .npy or KServe v2 in, the same out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.requests.batch_answer import finish
from torchserve_openvino.serving.requests.messages import Request, Response
from torchserve_openvino.serving.shapes.input_spec import Inputs, parameter_names
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs, Fitted
from torchserve_openvino.tasks.items import ItemHandler, body
from torchserve_openvino.tasks.tensors import TensorRequest, convert, parse, render

Outputs = dict[str, torch.Tensor]


@dataclass
class TensorCall:
    """One request and its call of the model; ``fitted`` is None if it runs alone, with the inputs as they came."""

    request: TensorRequest
    fitted: Fitted | None


class TensorHandler(ItemHandler):
    """Calls the model with the tensors of a request; each tensor includes its batch dimension."""

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for a request body in any of the formats."""
        request = self._parse(body)
        return tuple(request.positional), request.named

    def decode(self, item: Any) -> TensorCall:
        """Parses a request's tensors and fits them to a compiled shape."""
        served = self._openvino.served
        if served is None:
            return TensorCall(self._parse(body(item)), None)
        floats = _guess(served.inputs)
        request = self._parse(body(item), floats)
        guess = convert if request.guessed_types else None
        fitted = served.fit(request.positional, request.named, guess)
        if fitted is None and guess is not None and floats is not torch.float32:
            request = self._parse(body(item))
        return TensorCall(request, fitted)

    def _parse(self, value: Any, floats: torch.dtype = torch.float32) -> TensorRequest:
        request = parse(value, self._openvino.config.openvino.tensor.max_bytes, floats)
        known = self._input_names
        unknown = [name for name in request.named if known and name not in known]
        if len(unknown) == len(request.named) and unknown and request.format == "kserve":
            # KServe names every tensor. If the model has none of these names, the tensors are passed in order.
            request.positional, request.named = list(request.named.values()), {}
        elif unknown:
            raise InvalidInputError(f"the model has no input {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        return request

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(parameter_names(self._openvino.eager_model))

    def _responses(self, requests: Sequence[Request]) -> list[Response]:
        """Answers enveloped requests without unpacking them: `decode` itself reads the bodies of all envelopes."""
        worker = self._openvino
        answers = self._answered([request.row for request in requests], requests)
        if requests[0].envelope in {"json", "kserve"}:
            answers = [a if isinstance(a, (ItemError, bytes)) else {"predictions": a} for a in answers]
        return finish(answers, requests, worker.counters, worker.most_bytes)

    def predict(self, values: list[TensorCall]) -> list[Any]:
        """Runs requests of one shape together, if ``tensor.concatenate`` allows it, and answers each."""
        answers: list[Any] = [None] * len(values)
        for positions in self._groups(values):
            group = [values[position] for position in positions]
            for position, call, outputs in zip(positions, group, self._run_group(group), strict=True):
                try:
                    self.check_finite(list(outputs.values()))
                    most = self._openvino.most_bytes
                    answers[position] = render(outputs, call.request, self._openvino.model_name, most)
                except ItemError as error:
                    answers[position] = error
        return answers

    def _groups(self, values: list[TensorCall]) -> list[list[int]]:
        joins = (
            self._openvino.config.openvino.tensor.concatenate
            and self._openvino.served is not None
            and self._openvino.served.joins
        )
        groups: dict[Any, list[int]] = {}
        for position, call in enumerate(values):
            key = call.fitted.shapes() if joins and call.fitted is not None else position
            groups.setdefault(key, []).append(position)
        return list(groups.values())

    def _run_group(self, calls: list[TensorCall]) -> list[Outputs]:
        fitted = [call.fitted for call in calls if call.fitted is not None]
        served = self._openvino.served
        if served is not None and fitted:
            outputs = served.run_joined(fitted) if len(fitted) > 1 else [served.run(fitted[0])]
            return [named_outputs(output) for output in outputs]
        (call,) = calls
        # `run_once`, because fitting the call again would refuse or count it a second time.
        run = self.model if served is None else served.run_once
        with torch.inference_mode():
            return [named_outputs(run(*call.request.positional, **call.request.named))]

    def run_eager(self, value: TensorCall) -> Any:
        """Runs the eager model on the request's own tensors, in the declared dtypes."""
        args: Sequence[torch.Tensor] = value.request.positional
        kwargs = value.request.named
        if value.fitted is not None and self._openvino.served is not None:
            args, kwargs = self._openvino.served.unpadded(value.fitted)
        return self._openvino.eager_model(*args, **kwargs)


def _guess(inputs: DeclaredInputs | None) -> torch.dtype:
    """Returns the dtype in which JSON numbers keep what the declared dtypes can hold of them."""
    wide = {torch.float64, torch.int32, torch.int64}
    return torch.float64 if inputs is not None and wide & {spec.dtype for spec in inputs.specs} else torch.float32


def named_outputs(output: Any) -> Outputs:
    """Returns output tensors by name: the model's own, ``output`` for a single one, else ``output_0`` and so on."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    if hasattr(output, "items"):
        flat = {str(key): pytree.tree_leaves(value) for key, value in output.items()}
        named = {key: leaves[0] for key, leaves in flat.items() if len(leaves) == 1}
        named |= {
            f"{key}_{i}": leaf for key, leaves in flat.items() if len(leaves) > 1 for i, leaf in enumerate(leaves)
        }
        return {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return {f"output_{i}": leaf for i, leaf in enumerate(leaves)}
