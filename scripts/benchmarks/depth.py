"""Times conversion by model depth: this package against OpenVINO's own FX decoder.

Networks of linear, ReLU and layer norm layers are lowered as for serving; both contenders convert each graph,
interleaved. OpenVINO's decoder looks up nodes with ``list.index``, so its time eventually grows with the square of the
graph; ours should be linear. The exponent is the slope of log(seconds) over log(depth), for the whole range and for its
second half.

    python scripts/benchmarks/depth.py
    python scripts/benchmarks/depth.py --depths 10,20,40,80 --rounds 3 --json depth.json
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.instrumentation import Instrumentation, Observation
from torchserve_openvino.backend.upstream._openvino_private import fx_to_model

OURS, UPSTREAM = "this package", "OpenVINO's decoder"
WIDTH = 16
Convert = Callable[[torch.fx.GraphModule, list[list[int]], list[torch.dtype]], Any]


def network(depth: int) -> nn.Module:
    layers = ((nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)) for _ in range(depth))
    return nn.Sequential(*(module for layer in layers for module in layer)).eval()


def lowered(depth: int) -> torch.fx.GraphModule:
    """The lowered graph of a network as partitions get it, with weights as inputs."""
    seen: list[Observation] = []
    torch.compiler.reset()
    compiled = compile_with(network(depth), CompileSpec(instrumentation=Instrumentation(observe=seen.append)))
    with torch.inference_mode():
        compiled(torch.zeros(2, WIDTH))
    (observation,) = seen
    (part,) = observation.partitioned.parts
    return part.graph


def upstream(gm: torch.fx.GraphModule, shapes: list[list[int]], dtypes: list[torch.dtype]) -> Any:
    decoder = TorchFXPythonDecoder(gm, input_shapes=shapes, input_types=dtypes)
    frontend = FrontEndManager().load_by_framework("pytorch")
    return frontend.convert(frontend.load(decoder)), decoder


CONTENDERS: dict[str, Convert] = {OURS: fx_to_model, UPSTREAM: upstream}


def calls(gm: torch.fx.GraphModule) -> dict[str, Call]:
    """Each contender's conversion of a graph."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    shapes, dtypes = [list(value.shape) for value in values], [value.dtype for value in values]
    return {name: functools.partial(convert, gm, shapes, dtypes) for name, convert in CONTENDERS.items()}


def slope(depths: Sequence[int], times: Sequence[float]) -> float:
    """Least squares on a log-log scale."""
    fit = statistics.linear_regression([math.log(depth) for depth in depths], [math.log(value) for value in times])
    return fit.slope


def measure(depths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Medians, in seconds, and exponents."""
    medians: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    nodes = []
    for depth in depths:
        gm = lowered(depth)
        nodes.append(len(gm.graph.nodes))
        # The first turn loads libraries.
        times = interleave(calls(gm), rounds, warmup=1)
        for name in CONTENDERS:
            medians[name].append(times.median(name) / 1e3)
        output.progress.print(f"depth {depth}: " + ", ".join(f"{n} {m[-1] * 1e3:.1f} ms" for n, m in medians.items()))
    half = len(depths) // 2
    exponents = {
        name: {"all": slope(depths, values), "second_half": slope(depths[half:], values[half:])}
        for name, values in medians.items()
    }
    return {"depths": list(depths), "nodes": nodes, "rounds": rounds, "seconds": medians, "exponent": exponents}


def show(result: dict[str, Any]) -> None:
    cells = []
    for i, depth in enumerate(result["depths"]):
        ours, theirs = (result["seconds"][name][i] for name in (OURS, UPSTREAM))
        both = (f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{theirs / ours:.2f}")
        cells.append((str(depth), str(result["nodes"][i]), *both))
    out = output.results()
    out.print(output.table("", ("depth", "nodes", *(f"{name}, ms" for name in CONTENDERS), "ratio"), cells, left=0))
    for name, exponent in result["exponent"].items():
        out.print(f"{name}: exponent {exponent['all']:.2f}, in the second half {exponent['second_half']:.2f}")


def main(
    depths: Annotated[str, typer.Option(help="Numbers of layers, at least four, growing.")] = "10,20,40,80,160,320",
    rounds: Annotated[int, typer.Option(help="Conversions of each graph by each contender.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Prints medians for each depth, and how they grow."""
    counts = [int(depth) for depth in depths.split(",")]
    if len(counts) < 4 or sorted(set(counts)) != counts:
        raise typer.BadParameter("at least four growing numbers are needed for two slopes", param_hint="--depths")
    result = measure(counts, rounds)
    show(result)
    output.write_json(json_path, result)


if __name__ == "__main__":
    typer.run(main)
