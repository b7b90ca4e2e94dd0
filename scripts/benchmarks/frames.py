"""Counts the Python frames of a request to a shipped task, from the handler's `handle` to OpenVINO's `infer`.

    python scripts/benchmarks/frames.py
    python scripts/benchmarks/frames.py --show

The task is `tensor`, on a small network, in this process. `depth` is how many calls are open when inference starts, by
package; `calls` is how many Python functions the whole request enters.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.workers import context_for
from torchserve_openvino.entrypoints.tensor import OpenVINOTensorHandler

PACKAGE = "torchserve_openvino"
BODY = b'{"instances": [[0.1, 0.2, 0.3, 0.4]]}'


def started(folder: Path) -> OpenVINOTensorHandler:
    """Returns the handler, on a network that needs no file."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    settings = {
        "pt2": {"compile": {"backend": "openvino", "options": {"min_partition_us": 0}}},
        "handler": {"openvino": {"warmup": {"inputs": [{"shape": [4], "dtype": "float32"}]}}},
    }
    context = context_for(folder, settings)
    handler = OpenVINOTensorHandler()
    # On the object: a method of a class would be watched, as a user's own code is.
    vars(handler)["_load_pickled_model"] = lambda *_: network
    handler.initialize(context)
    handler.context = context
    return handler


def described(frame: FrameType) -> tuple[str, str]:
    """Returns a frame's room, and file, line and function."""
    path = Path(frame.f_code.co_filename)
    parts = path.parts
    if PACKAGE not in parts:
        return "other", f"{path.name}:{frame.f_lineno} {frame.f_code.co_qualname}"
    inner = parts[len(parts) - parts[::-1].index(PACKAGE) :]
    return inner[0], f"{'/'.join(inner)}:{frame.f_lineno} {frame.f_code.co_qualname}"


def traced(handler: OpenVINOTensorHandler) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Returns the frames that are open at the first inference, outermost first, and how many calls each room has."""
    open_frames: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[described(frame)[0]] += 1
        elif event == "c_call" and argument.__name__ == "infer" and not open_frames:
            outer: FrameType | None = frame
            while outer is not None and outer.f_code is not sys._getframe().f_code and outer is not base:
                open_frames.append(described(outer))
                outer = outer.f_back

    base = sys._getframe()
    rows = [{"body": BODY}]
    sys.setprofile(observe)
    try:
        handler.handle(rows, handler.context)
    finally:
        sys.setprofile(None)
    return open_frames[::-1], calls


def main(show: Annotated[bool, typer.Option(help="List the open frames.")] = False) -> None:
    """Counts the frames of one request."""
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as folder:
        handler = started(Path(folder))
        handler.handle([{"body": BODY}], handler.context)
        frames, calls = traced(handler)
    out = output.results()
    rooms = Counter(room for room, _ in frames)
    cells = [(room, str(rooms[room]), str(calls[room])) for room in sorted(rooms | calls)]
    cells.append(("all", str(len(frames)), str(calls.total())))
    out.print(output.table("One request to the task tensor", ("room", "depth", "calls"), cells))
    if show:
        for _, text in frames:
            out.print(text, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
