"""Runs one contender from the start of the process to its first answer. The last line of its output is JSON.

python -m benchmarks.startups.program ORDER      (in scripts/; ORDER is JSON, see `Order`)
"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from benchmarks.startups.clock import Clock
from benchmarks.startups.models import BLOB, INPUTS, IR, OV_CONFIG, SOURCES

if TYPE_CHECKING:
    import torch


# What OpenVINO's backend logs before it falls back to Inductor or eager PyTorch.
STOCK_FAILS = ("Failed in OpenVINO", "OpenVINO execution failed")


class Order(TypedDict):
    """What to do.

    Attributes:
        contender: Name of a program below.
        weights: The model's file or folder.
        folder: Where `prepare` wrote its files.
        cache: Folder of the contender's cache; empty for none.
        answer: File for the answer.
        started: `time.time()` of the parent.
    """

    contender: str
    model: str
    weights: str
    folder: str
    cache: str
    answer: str
    started: float


class Program:
    """What the contenders share."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.clock = Clock(order["started"])
        self.source = SOURCES[order["model"]]
        self.folder, self.weights = Path(order["folder"]), Path(order["weights"])
        self.facts: dict[str, Any] = {}
        self.kept: list[Any] = []

    def inputs(self) -> "dict[str, torch.Tensor]":
        """As `prepare` drew them."""
        import torch

        stored: dict[str, torch.Tensor] = torch.load(self.folder / INPUTS, weights_only=True)
        return stored

    def module(self) -> "tuple[torch.nn.Module, dict[str, torch.Tensor]]":
        """The eager model and its inputs; in two phases."""
        with self.clock.phase("imports"):
            cls = self.source.imports()
        with self.clock.phase("model"):
            return self.source.module(cls, self.weights), self.inputs()

    def first_call(self, call: Any, kwargs: "dict[str, torch.Tensor]") -> Any:
        """The answer, without gradients."""
        import torch

        with torch.inference_mode(), self.clock.phase("first call"):
            return call(**kwargs)

    # --- raw OpenVINO -------------------------------------------------------------------------------------------

    def bare_ir(self) -> Any:
        """A converted model that OpenVINO compiles."""
        return self._bare(lambda core: core.compile_model(self.folder / IR, "CPU", OV_CONFIG), "compile")

    def bare_blob(self) -> Any:
        """A compiled model that OpenVINO imports; memory-mapped, which is fastest."""

        def read(core: Any) -> Any:
            import numpy as np
            import openvino as ov

            mapped = ov.Tensor(np.memmap(self.folder / BLOB, dtype=np.uint8, mode="c"), shared_memory=True)
            self.kept.append(mapped)
            return core.import_model(mapped, "CPU", OV_CONFIG)

        return self._bare(read, "load")

    def _bare(self, ready: Any, phase: str) -> Any:
        with self.clock.phase("imports"):
            import openvino as ov
            import torch

            cls = self.source.imports() if self.source.class_for_weights else None
        with self.clock.phase("model"):
            # Kept: a server that can fall back to PyTorch holds the weights in memory too.
            self.kept.append(self.source.state(cls, self.weights))
            kwargs = self.inputs()
        with self.clock.phase(phase):
            compiled = ready(ov.Core())
        with self.clock.phase("first call"):
            result = compiled.create_infer_request().infer([tensor.numpy() for tensor in kwargs.values()])
            return [torch.from_numpy(result[port]) for port in compiled.outputs]

    # --- torch --------------------------------------------------------------------------------------------------

    def eager(self) -> Any:
        """PyTorch as it is."""
        with self.clock.phase("imports"):
            import torch  # noqa: F401
        module, kwargs = self.module()
        return self.first_call(module, kwargs)

    def inductor(self) -> Any:
        """PyTorch's own compiler; the environment decides whether its cache is warm."""
        with self.clock.phase("imports"):
            import torch
        module, kwargs = self.module()
        with self.clock.phase("first call"):
            # Imports Dynamo.
            compiled = torch.compile(module, dynamic=False)
        return self.first_call(compiled, kwargs)

    def stock(self) -> Any:
        """OpenVINO's own torch.compile backend; only a debug log shows that it fell back to PyTorch."""
        import logging

        with self.clock.phase("imports"):
            import openvino.torch  # noqa: F401
            import torch
        failures: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
        # Filters before formatting: some records hold whole graphs.
        handler.addFilter(lambda record: str(record.msg).startswith(STOCK_FAILS))
        for module_name in ("backend", "execute"):
            logger = logging.getLogger(f"openvino.frontend.pytorch.torchdynamo.{module_name}")
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
        options: dict[str, Any] = {"aot_autograd": True, "config": dict(OV_CONFIG)}
        if self.order["cache"]:
            options |= {"model_caching": True, "cache_dir": self.order["cache"]}
        module, kwargs = self.module()
        with self.clock.phase("first call"):
            compiled = torch.compile(module, backend="openvino", dynamic=False, options=options)
        answer = self.first_call(compiled, kwargs)
        if failures:
            self.facts |= {"stand_in": True, "note": f"PyTorch answered, not OpenVINO: {failures[0].splitlines()[0]}"}
        return answer

    # --- this package -------------------------------------------------------------------------------------------

    def ours(self) -> Any:
        """This package, frozen, with its cache."""
        with self.clock.phase("imports"):
            import torchserve_openvino as tov
        return self._ours(tov)

    def ours_handler(self) -> Any:
        """The same with the imports of a worker that serves photos."""
        with self.clock.phase("imports"):
            import torchserve_openvino as tov
            import torchserve_openvino.tasks.image_classifier
        return self._ours(tov)

    def _ours(self, tov: Any) -> Any:
        module, kwargs = self.module()
        with self.clock.phase("imports"):
            self._watch()
        with self.clock.phase("first call"):
            options = {"model_caching": True, "cache_dir": self.order["cache"], "config": OV_CONFIG}
            compiled = tov.compile(module, options=options).freeze()
        answer = self.first_call(compiled, kwargs)
        self._split(compiled.report.to_dict())
        return answer

    def _watch(self) -> None:
        """Times phases that the package's report lacks."""
        from torchserve_openvino.backend.routes import call_cache, frozen, partition_cache
        from torchserve_openvino.backend.runners import freezing

        for owner, method, phase in (
            (call_cache.CallCache, "fields", "key"),
            (partition_cache.PartitionCache, "fields", "key"),
            (call_cache.CallCache, "load", "load"),
            (partition_cache.PartitionCache, "load", "load"),
            (call_cache.CallCache, "save", "store"),
            (partition_cache.PartitionCache, "save", "store"),
            (freezing.FreezingRunner, "_proven", "proof"),
            # Inside the proof: OpenVINO's own first call.
            (frozen.Route, "__call__", "first call"),
        ):
            self.clock.watch(owner, method, phase)

    def _split(self, report: dict[str, Any]) -> None:
        """Splits the first call by the times in the report; the rest is tracing."""
        self.facts["cache"] = report["cache"]
        if not report["cache"]["traces"]:
            return
        for graph in report["graphs"]:
            self.clock.move("first call", "lower", graph["lower_seconds"])
            for part in graph["partitions"]:
                self.clock.move("first call", "convert", part["convert_seconds"])
                if not part["from_cache"]:
                    self.clock.move("first call", "compile", part["compile_seconds"])
        self.clock.move("first call", "trace", self.clock.phases["first call"])


PROGRAMS = {
    "bare-ir": Program.bare_ir,
    "bare-blob": Program.bare_blob,
    "eager": Program.eager,
    "inductor": Program.inductor,
    "stock": Program.stock,
    "ours": Program.ours,
    "ours-handler": Program.ours_handler,
}


def main() -> None:
    """Runs one order."""
    order: Order = json.loads(sys.argv[1])
    program = Program(order)
    answer = PROGRAMS[order["contender"]](program)
    total = program.clock.total
    import torch

    from benchmarks.models import tensors

    torch.save([tensor.clone() for tensor in tensors(answer)], order["answer"])
    phases = {name: seconds for name, seconds in program.clock.phases.items() if seconds}
    result = {"total": total, "phases": phases, "facts": program.facts, "answer": order["answer"]}
    print(json.dumps({**result, "ended": time.time()}), flush=True)


if __name__ == "__main__":
    main()
