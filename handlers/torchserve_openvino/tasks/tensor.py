"""Any model on tensors: JSON, .npy or KServe v2 in, the same out."""

import inspect
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.tasks.items import ItemHandler, body
from torchserve_openvino.tasks.tensors import TensorRequest, parse, render

Outputs = dict[str, torch.Tensor]


class TensorHandler(ItemHandler):
    """Calls the model with the tensors of a request; each tensor includes its batch dimension."""

    def decode(self, item: dict[str, Any]) -> TensorRequest:
        """A request's tensors, by position or by the name of the model's argument."""
        request = parse(body(item), self.config.openvino.tensor.max_bytes)
        known = self._parameters()
        unknown = [name for name in request.named if known is not None and name not in known]
        if unknown and request.format == "kserve":
            # KServe names every tensor, also for models whose arguments are not called so: the order counts then.
            request.positional, request.named = list(request.named.values()), {}
        elif unknown:
            raise InvalidInputError(f"the model has no input {unknown[0]!r}; it takes {', '.join(sorted(known or ()))}")
        return request

    def predict(self, values: list[TensorRequest]) -> list[Any]:
        """Runs requests of one signature together, where ``tensor.concatenate`` allows, and answers each."""
        groups: dict[Any, list[int]] = {}
        for position, request in enumerate(values):
            joins = self.config.openvino.tensor.concatenate and all(t.dim() for t in request.tensors())
            groups.setdefault(request.signature() if joins else position, []).append(position)
        answers: list[Any] = [None] * len(values)
        for positions in groups.values():
            for position, outputs in zip(positions, self._run_group([values[p] for p in positions]), strict=True):
                if isinstance(outputs, InvalidInputError):
                    answers[position] = outputs
                else:
                    answers[position] = render(outputs, values[position], self.context.model_name)
        return answers

    def _run_group(self, requests: list[TensorRequest]) -> list[Outputs | InvalidInputError]:
        if len(requests) == 1:
            return [self._run(requests[0])]
        sizes = [request.tensors()[0].shape[0] for request in requests]
        uniform = all(
            t.shape[0] == size for request, size in zip(requests, sizes, strict=True) for t in request.tensors()
        )
        if uniform:
            first = requests[0]
            joined = TensorRequest(
                first.format,
                positional=[torch.cat(column) for column in zip(*(r.positional for r in requests), strict=True)],
                named={name: torch.cat([r.named[name] for r in requests]) for name in first.named},
            )
            outputs = self._run(joined)
            if not isinstance(outputs, InvalidInputError) and all(
                tensor.dim() and tensor.shape[0] == sum(sizes) for tensor in outputs.values()
            ):
                pieces = {name: tensor.split(sizes) for name, tensor in outputs.items()}
                return [{name: pieces[name][i] for name in pieces} for i in range(len(requests))]
        return [self._run(request) for request in requests]

    def _run(self, request: TensorRequest) -> Outputs | InvalidInputError:
        with torch.inference_mode():
            try:
                return _named(self.model(*request.positional, **request.named))
            except Exception:
                return self._blame(request)

    def _blame(self, request: TensorRequest) -> InvalidInputError:
        """Whether eager refuses the input as well: then it is the request's fault, and its message says why.

        Raises:
            Exception: The error under way, where eager takes the input.
        """
        try:
            self.eager_model(*request.positional, **request.named)
        except Exception as error:
            shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in request.tensors())
            return InvalidInputError(f"the model does not take {shapes}: {str(error).strip().splitlines()[0]}")
        raise  # noqa: PLE0704  re-raises what `_run` is handling

    def _parameters(self) -> set[str] | None:
        """Names of the model's arguments; None where it takes any, or (TorchScript) does not say."""
        forward = getattr(self.eager_model, "forward", self.eager_model)
        try:
            parameters = inspect.signature(forward).parameters.values()
        except ValueError:
            return None
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return {p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}}


def _named(output: Any) -> Outputs:
    """Output tensors by name: the model's own, ``output`` for a single one, else ``output_0`` and so on."""
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
