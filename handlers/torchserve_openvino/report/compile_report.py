"""The public view of the records: `CompileReport`, one JSON-safe schema for log, metrics, describe and CLI."""

import dataclasses
import functools
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torchserve_openvino.files.json_text import with_names
from torchserve_openvino.report import text
from torchserve_openvino.report.records import (
    CacheRecord,
    Fallback,
    Kernel,
    by_kind,
    kept_in_floats,
    precisions,
    quantizes,
)
from torchserve_openvino.report.tracker import Tracker

SCHEMA = 1


@dataclass(frozen=True)
class Summary:
    """The figures that fit on one line.

    Attributes:
        ops_total: Operators that do work: in all graphs, and in eager PyTorch outside any graph.
        ops_on_openvino: Those of them that run on OpenVINO.
        coverage: ``ops_on_openvino / ops_total``, 0..1; 1 if no operator does work; 0 before the first graph.
        fallbacks: Sum of the fallback counts.
        compile_seconds: Lowering, conversion and OpenVINO's compilation, without tracing.
    """

    ops_total: int
    ops_on_openvino: int
    coverage: float
    graphs: int
    partitions: int
    graph_breaks: int
    fallbacks: int
    recompiles: int
    compile_seconds: float
    device: str
    precision: str


class CompileReport:
    """A live view of one compiled model.

    Args:
        tracker: Records that the backend writes to.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def follow(self, other: "CompileReport") -> None:
        """Switches to another report's records, also for existing references to this report."""
        self._tracker = other._tracker

    @property
    def tracker(self) -> Tracker:
        """The records behind the report, to be written to by code that observes the model."""
        return self._tracker

    @property
    def revision(self) -> int:
        """A number that changes whenever the report does."""
        return self._tracker.revision

    @property
    def fallbacks(self) -> list[Fallback]:
        """Every reason why work did not run on OpenVINO."""
        return list(self._tracker.fallbacks)

    @property
    def cache(self) -> CacheRecord:
        """What the cache did."""
        return self._tracker.cache

    def fallback_counts(self) -> dict[str, int]:
        """Returns the fallback counts by kind."""
        return self._tracker.fallback_counts()

    @property
    def backend(self) -> str:
        """The backend that compiled the model; empty before it is known."""
        return str(self._tracker.config.get("backend", ""))

    @property
    def verified(self) -> bool:
        """Whether the outputs of the model and of all its parts were compared with eager PyTorch's, and matched."""
        return self._tracker.verify.passed

    @property
    def summary(self) -> Summary:
        """The current figures."""
        t = self._tracker
        total = sum(g.ops_total for g in t.graphs) + sum(t.outside.values()) + sum(t.uncompiled.values())
        on_openvino = sum(g.ops_on_openvino for g in t.graphs)
        coverage = on_openvino / total if total else float(bool(t.graphs))
        partitions = [p for g in t.graphs for p in g.partitions]
        seconds = sum(g.lower_seconds for g in t.graphs)
        seconds += sum(p.convert_seconds + p.compile_seconds for p in partitions)
        return Summary(
            ops_total=total,
            ops_on_openvino=on_openvino,
            coverage=round(coverage, 6),
            graphs=len(t.graphs),
            partitions=sum(p.runs_on == "openvino" for p in partitions),
            graph_breaks=sum(b.count for b in t.graph_breaks),
            fallbacks=sum(f.count for f in t.fallbacks),
            recompiles=sum(r.count for r in t.recompiles),
            compile_seconds=round(seconds, 4),
            device=str(t.config.get("effective_device", "")),
            precision=str(t.config.get("effective_precision", "")),
        )

    def kernels(self) -> list[Kernel]:
        """Returns all kernels, with the average time of each up to now."""
        t = self._tracker
        return [kernel for graph in t.graphs for part in graph.partitions for kernel in t.kernels(part)]

    def precisions(self) -> dict[str, float]:
        """Returns the share of time in each precision in which kernels really compute, largest first."""
        return precisions(self.kernels())

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole report, JSON-safe, as described in docs/report.md."""
        t = self._tracker
        graphs, kernels = [], []
        for graph in t.graphs:
            entry = dataclasses.asdict(graph)
            entry["ops_on_openvino"] = graph.ops_on_openvino
            for part, shown in zip(graph.partitions, entry["partitions"], strict=True):
                kernels_of_part = t.kernels(part)
                shown |= {"precisions": precisions(kernels_of_part), "kernels": by_kind(kernels_of_part)}
                if quantizes(part.op_counts):
                    shown["kept_in_floats"] = kept_in_floats(kernels_of_part, part.float_layers)
                kernels += kernels_of_part
            graphs.append(entry)
        plain = {
            "schema": SCHEMA,
            "environment": environment(),
            "config": t.config,
            "summary": {
                **dataclasses.asdict(self.summary),
                "precisions": precisions(kernels),
                **({"products": products} if (products := self._products()) else {}),
            },
            "graphs": graphs,
            "fallbacks": [_shown(f) for f in t.fallbacks],
            "graph_breaks": [dataclasses.asdict(b) for b in t.graph_breaks],
            "recompiles": [dataclasses.asdict(r) for r in t.recompiles],
            "outside": {**t.outside, **t.uncompiled},
            "cache": t.cache.to_dict(),
            "verify": t.verify.to_dict(),
            "timings": {name: round(seconds, 4) for name, seconds in dict(t.timings).items()},
            "notes": list(t.notes),
        }
        return json.loads(json.dumps(with_names(plain), default=str))

    def _products(self) -> dict[str, int]:
        """Returns the sums of `PartitionRecord.products`; empty in another precision than bf16x3."""
        counts = Counter[str]()
        for graph in self._tracker.graphs:
            for part in graph.partitions:
                counts.update(part.products)
        return dict(counts)

    def to_text(self) -> str:
        """Renders the report for a terminal or a log."""
        return text.render(self.to_dict())

    def summary_line(self) -> str:
        """Returns one line: coverage, partitions, fallbacks, breaks, recompiles, seconds, device, precision."""
        return text.summary_line(self.to_dict())


def _shown(fallback: Fallback) -> dict[str, Any]:
    """Returns a fallback's public keys, with `seconds` only where it is measured; `caused_by_request` is internal."""
    entry = dataclasses.asdict(fallback)
    del entry["caused_by_request"], entry["seconds"]
    return entry if fallback.kind != "outside_compiled" else {**entry, "seconds": round(fallback.seconds, 4)}


# --- versions and machine, for the report -------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


@functools.lru_cache(maxsize=1)
def _static() -> dict[str, str]:
    packages = ("torch", "openvino", "torchserve", "torchserve-openvino", "numpy")
    return {
        **{name: _version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
    }


def environment() -> dict[str, str | int]:
    """Returns the versions of what results depend on, the CPU's name, and this process's id."""
    return {**_static(), "pid": os.getpid()}
