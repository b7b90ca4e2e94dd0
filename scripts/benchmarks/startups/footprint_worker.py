"""One worker of `footprint.py`: loads an archive step by step and prints its figures as JSON. Imports little itself.

python -m benchmarks.startups.footprint_worker ARCHIVE [REQUEST]      (in scripts/)
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.startups.clock import Clock

# Modules that trace, which a warm worker does without.
TRACING = ("torch._dynamo", "torch._inductor", "sympy", "networkx")


def memory() -> dict[str, float]:
    """Returns resident, unshared and proportional memory in MB, and the number of imported modules."""
    info = psutil.Process().memory_full_info()
    return {"rss": info.rss / 1e6, "uss": info.uss / 1e6, "pss": info.pss / 1e6, "modules": len(sys.modules)}


def owners() -> dict[str, float]:
    """Returns resident MB by what a mapping holds."""
    counts: Counter[str] = Counter()
    kind = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        head, *rest = line.split(maxsplit=5)
        if not head.endswith(":"):
            path = rest[4] if len(rest) > 4 else ""
            if not path.startswith("/"):
                kind = "malloc's heap" if path == "[heap]" else "other anonymous memory"
            else:
                kind = "libraries" if ".so" in Path(path).name or "/bin/" in path else "mapped files"
        elif head == "Rss:":
            counts[kind] += int(rest[0]) * 1024 / 1e6
    return dict(counts)


def watch(clock: Clock) -> None:
    """Makes phases of the steps before READY; what OpenVINO does inside them is a phase of its own."""
    import openvino as ov

    from torchserve_openvino.serving import models, prepare, slower
    from torchserve_openvino.serving.compilation import Compilation
    from torchserve_openvino.serving.loading import hub
    from torchserve_openvino.serving.shapes import one_graph
    from torchserve_openvino.serving.torchserve.base import BaseHandler
    from torchserve_openvino.serving.verification.admission import Admission

    for owner, method, phase in (
        (BaseHandler, "initialize", "weights"),
        (hub, "load_model", "weights"),
        (models, "probe_shapes", "probes in eager PyTorch"),
        (one_graph, "choose", "choice of graphs"),
        (Compilation, "make", "trace and lower, or read the cache"),
        (Admission, "compare", "eager reference and comparison"),
        (slower, "fall_back_to_eager", "slower"),
        (prepare, "tidy", "memory given back"),
        (ov.frontend.FrontEnd, "convert", "convert"),
        (ov.Core, "compile_model", "compile"),
        (ov.Core, "import_model", "compiled models from the cache"),
        (ov.InferRequest, "infer", "inference"),
    ):
        clock.watch(owner, method, phase)


def worker(archive: Path, request: Path | None) -> None:
    """Loads the archive in this process and prints figures as JSON; holds still until a line comes on stdin."""
    steps: dict[str, dict[str, float]] = {}
    # The interpreter's own start counts as its first phase.
    clock = Clock(0.0, time.process_time)

    def step(name: str) -> None:
        steps[name] = {**memory(), "cpu": time.process_time()}

    step("interpreter")
    with clock.phase("import torch and OpenVINO"):
        import torch  # noqa: F401

        step("+ torch")
        import openvino  # noqa: F401
    # OpenVINO's telemetry forks a process for a moment, with which all memory is shared.
    time.sleep(0.5)
    step("+ OpenVINO")
    with clock.phase("import this package"):
        from torchserve_openvino.hosts.archive_service import ArchiveService, row_of
        from torchserve_openvino.serving.requests.messages import Request
    step("+ this package")
    watch(clock)
    with clock.phase("everything else"):
        service = ArchiveService(archive, lambda *_: None)
    step("READY")
    report = service.describe()
    facts: dict[str, Any] = {"phases": dict(clock.phases), "cache": report["cache"]}
    if request is not None:
        before = set(sys.modules)
        message = Request(id="1", row=row_of(request.read_bytes(), "application/octet-stream", {}), headers={})
        (answer,) = service.answer([message])
        assert answer.status == 200, answer
        step("first request")
        facts["imported by the first request"] = sorted(set(sys.modules) - before)
    facts["tracing modules"] = [name for name in TRACING if name in sys.modules]
    print("READY", flush=True)
    sys.stdin.readline()
    # The other workers are READY by now.
    step("all workers READY")
    print(json.dumps({"steps": steps, "owners": owners(), **facts}), flush=True)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
