"""Notes which sizes reach a model, while it answers requests in eager PyTorch."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.serving.shapes.input_spec import declared_specs, parameter_names
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs
from torchserve_openvino.tasks.audio.audio_handler import AudioHandler
from torchserve_openvino.tasks.text.text_handler import TextHandler


class SizeObserver:
    """Hooks into a handler's eager model; it notes nothing where that is compiled.

    Args:
        handler: The loaded handler.
        worker: What serves its model.
    """

    def __init__(self, handler: Any, worker: Any) -> None:
        self._handler, self._batching = handler, worker.config.openvino.batching
        self._rows: list[int] = []
        self._lengths: dict[str, list[int]] = {name: [] for name in self._batching.dims}
        self._inputs: DeclaredInputs | None = None
        # A hook would be part of what Dynamo compiles.
        is_eager = worker.served is None and isinstance(worker.eager_model, torch.nn.Module)
        if is_eager and (declared := worker.warmup_inputs()):
            names = parameter_names(worker.eager_model)
            specs = declared_specs(declared, names)
            self._inputs = DeclaredInputs(specs, names, self._batching.dims, pads=False)
            worker.eager_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def begin_request(self) -> None:
        """Says that the calls that follow belong to another request."""
        self._rows.append(0)

    def to_plain(self) -> dict[str, Any]:
        """Returns what was seen; JSON-safe."""
        lengths = []
        for name, seen in self._lengths.items():
            key, unit = self._key(name)
            if seen:
                compiled = [round(length / unit, 3) for length in self._batching.dims[name]]
                lengths.append(
                    {"key": key, "seen": [math.ceil(length / unit) for length in seen], "compiled": compiled}
                )
        rows = [row for row in self._rows if row]
        return {"lengths": lengths, "rows": rows, "mode": self._batching.mode, "buckets": self._batching.buckets}

    def _key(self, name: str) -> tuple[str, int]:
        """Returns the key of a dimension's compiled lengths, and how many of its elements are one unit of the key."""
        if isinstance(self._handler, TextHandler):
            return "text.lengths", 1
        if isinstance(self._handler, AudioHandler):
            return "audio.lengths", self._handler.rate
        return f"batching.dims.{name}", 1

    def _note(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert self._inputs is not None
        try:
            fitted = self._inputs.fit(args, kwargs)
        except TorchServeOpenVINOError:
            # A call that a compiled model would refuse says nothing about sizes.
            return
        if self._rows:
            self._rows[-1] += fitted.rows
        masks = {
            spec.shape[0]: fitted.kwargs[spec.name]
            for spec in self._inputs.specs
            if spec.mask and len(spec.shape) == 1 and spec.name in fitted.kwargs
        }
        for name, length in fitted.lengths.items():
            # Rows of one call were padded to the longest of them.
            own = masks[name].count_nonzero(1).tolist() if name in masks else [length] * fitted.rows
            self._lengths[name] += [max(1, int(length)) for length in own]
