"""Times the precision bf16x3 against f32 and bf16 of raw OpenVINO, and says how far each is from float64.

    python scripts/benchmarks/bf16x3.py
    python scripts/benchmarks/bf16x3.py --only minilm,vit --turns 60 --threads 1 --json bf16x3.json

Needs a CPU with AMX, and the extra `hf`; MiniLM has its real weights, the others random ones. All three run the same
exported model, interleaved, in one process. A ratio is the median over the turns of f32's time divided by that of the
same turn; `fastest` divides the shortest times, which other load on the machine disturbs least. Measure on an idle
machine: AMX units and caches are shared between hyper-threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import openvino as ov
import torch
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.models import BenchModel, minilm, resnet50, tensors
from torchserve_openvino.backend.runtime.build import build
from torchserve_openvino.config.openvino.precisions import no_bf16x3

HINT = "INFERENCE_PRECISION_HINT"


def minilm_4x64() -> BenchModel:
    ids = torch.randint(1000, 20000, (4, 64))
    return BenchModel("MiniLM 4 x 64", minilm().module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def bert_base() -> BenchModel:
    from transformers import BertConfig, BertModel

    ids = torch.randint(1000, 20000, (8, 128))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return BenchModel("BERT-base 8 x 128", BertModel(BertConfig()).eval(), inputs)


def vit_base() -> BenchModel:
    from transformers import ViTConfig, ViTModel

    return BenchModel("ViT-B/16", ViTModel(ViTConfig()).eval(), {"pixel_values": torch.randn(1, 3, 224, 224)})


MODELS: dict[str, Callable[[], BenchModel]] = {
    "minilm": minilm_4x64,
    "bert": bert_base,
    "vit": vit_base,
    "resnet50": resnet50,
}


@dataclass
class Row:
    """One model in one precision.

    Attributes:
        milliseconds: Median.
        ratio: Median of f32's time divided by this one's, turn by turn.
        fastest: Shortest time of f32, divided by this one's shortest.
        error: Largest difference from float64, by its largest value.
        share: Of the multiplications by weights that are in bf16x3.
    """

    model: str
    precision: str
    milliseconds: float
    ratio: float
    fastest: float
    error: float
    share: float | None = None


def measure(name: str, turns: int, threads: int) -> list[Row]:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        exported = ov.convert_model(torch.export.export(model.module, (), model.kwargs))
    shapes = {position: list(tensor.shape) for position, tensor in enumerate(model.kwargs.values())}
    exported.reshape(shapes)
    calls: dict[str, Call] = {}
    answers: dict[str, np.ndarray] = {}
    share = None
    for precision in ("f32", "bf16x3", "bf16"):
        config = {HINT: precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": False}
        built = build(exported, "CPU", config)
        if products := built.products:
            share = products["multiplications_bf16x3"] / products["multiplications"]
        calls[precision] = caller(built.compiled, list(model.kwargs.values()))
        answers[precision] = np.array(calls[precision]())  # type: ignore[call-overload]
    exact = in_float64(model)
    times = interleave(calls, turns, warmup=3)
    scale = float(np.abs(exact).max())
    return [
        Row(
            model.name,
            precision,
            times.median(precision),
            times.ratio("f32", precision) or 0.0,
            min(times.milliseconds["f32"]) / min(times.milliseconds[precision]),
            float(np.abs(answers[precision] - exact).max()) / scale,
            share if precision == "bf16x3" else None,
        )
        for precision in calls
    ]


def caller(compiled: ov.CompiledModel, inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """Returns a call without copies, whose result is the first output."""
    request, values = compiled.create_infer_request(), [tensor.numpy() for tensor in inputs]

    def call() -> Any:
        return request.infer(values, share_inputs=True, share_outputs=True)[compiled.outputs[0]]

    return call


def in_float64(model: BenchModel) -> np.ndarray:
    wide = model.cast(torch.float64)
    with torch.no_grad():
        return tensors(wide.module(**wide.kwargs))[0].numpy()


def main(
    only: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    turns: Annotated[int, typer.Option(help="Turns of each model.")] = 40,
    threads: Annotated[int, typer.Option(help="Of each contender.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    """Times f32, bf16x3 and bf16 on the same exported models, interleaved."""
    if why := no_bf16x3("CPU"):
        raise typer.BadParameter(f"bf16x3 {why}", param_hint="this machine")
    names = output.chosen(only, MODELS, "--only")
    rows = [row for name in track(names, console=output.progress) for row in measure(name, turns, threads)]
    cells = [
        (
            row.model, row.precision, f"{row.milliseconds:.2f}", f"{row.ratio:.2f}", f"{row.fastest:.2f}",
            f"{row.error:.1e}", "" if row.share is None else f"{row.share:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("model", "precision", "ms", "times faster", "fastest", "error", "in bf16x3")
    output.results().print(output.table("", columns, cells, left=2))
    output.write_json(json_path, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    typer.run(main)
